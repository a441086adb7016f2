//! Runs the cases: between threads, between processes, under `mpirun`.

use super::{Place, cases, random, speed};
use crate::texts;
use gpu_pool::{Error, GpuPool, Result};
#[cfg(feature = "mpi")]
use gpu_pool_cluster::extend::mpi::{Mpi, PIECE};
use gpu_pool_cluster::extend::{
    HostTransport,
    shm::{RING, Shm},
};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::{
    collections::HashMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Bytes of a ring, and of a piece: small, so that messages have many.
const EDGE: usize = 4096;
const DEADLINE: Duration = Duration::from_secs(60);
const TASK: &str = "GPU_POOL_TEST_TRANSPORT";
/// The test that a process of the others runs.
const CHILD: &str = concat!(module_path!(), "::child");

/// A table between threads.
#[derive(Default)]
struct Table(Mutex<HashMap<String, Vec<u8>>>);

impl Table {
    fn get(&self, key: &str) -> Result<Vec<u8>> {
        wait_for(|| self.0.lock().get(key).cloned())
    }
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if start.elapsed() > DEADLINE {
            return Err(Error::Cluster { op: "test", why: "a key is missing".to_owned() });
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn pool() -> GpuPool {
    GpuPool::builder().host(1).build().unwrap()
}

/// Each "process" is a thread of this one, with mappings of its own.
fn between_threads(size: usize, case: impl Fn(&Place<'_>) + Sync) {
    let (table, pool) = (Table::default(), pool());
    thread::scope(|s| {
        for rank in 0..size {
            let (table, pool, case) = (&table, &pool, &case);
            s.spawn(move || {
                let set = |key: &str, value: &[u8]| {
                    assert_eq!(table.0.lock().insert(key.to_owned(), value.to_vec()), None);
                    Ok(())
                };
                let get = |key: &str| table.get(key);
                let transport = Shm::connect(EDGE, "test", (rank, size), set, get, &|| None, DEADLINE).unwrap();
                case(&Place { transport: &transport, pool, rank, size, edge: EDGE });
            });
        }
    });
}

#[test]
fn shared_memory_between_threads() {
    (1..=3).for_each(|size| between_threads(size, cases::all));
    between_threads(2, cases::loss);
}

#[test]
fn who_does_not_come_is_named() {
    let (set, get) = (|_: &str, _: &[u8]| Ok(()), |_: &str| Ok(vec![0; 7]));
    let short = Duration::from_millis(20);
    assert!(matches!(
        Shm::connect(RING, "test", (0, 2), set, get, &|| None, short),
        Err(Error::Transport { op: "connect", .. })
    ));
    let table = Table::default();
    let set = |key: &str, value: &[u8]| {
        table.0.lock().insert(key.to_owned(), value.to_vec());
        Ok(())
    };
    // The third process is there, but visits nobody: its key leads to this process.
    let get = |_: &str| table.get("shm/test/0");
    match Shm::connect(RING, "test", (0, 3), set, get, &|| None, short) {
        Err(Error::HostTimeout { missing, .. }) => assert_eq!(missing, [1, 2]),
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(texts::cases(30))]

    #[test]
    fn random_sets_over_shared_memory(set in random::sets(EDGE)) {
        between_threads(3, |place| set.carry_out(place));
    }
}

/// Starts this binary for one of the processes.
fn this_binary(task: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    arguments(&mut command, task);
    command
}

fn arguments<'a>(command: &'a mut Command, task: &str) -> &'a mut Command {
    let test = CHILD.split_once("::").unwrap().1;
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(TASK, task)
}

/// What a process prints, and whether it ended well, in time.
fn outcome(mut child: Child) -> (bool, String) {
    let start = Instant::now();
    let out = child.stdout.take().map(|mut out| thread::spawn(move || std::io::read_to_string(&mut out).unwrap()));
    let ended = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > 3 * DEADLINE {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = out.map(|out| out.join().unwrap()).unwrap_or_default();
    (ended.is_some_and(|status| status.success()), text)
}

fn folder(name: &str) -> PathBuf {
    let path = env::temp_dir().join(format!("gpu-pool-{}-{name}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    path
}

fn between_processes(size: usize, case: &str) -> Vec<(bool, String)> {
    let folder = folder(&format!("{case}{size}"));
    let task = |rank| format!("shm {case} {rank} {size} {}", folder.display());
    let start = |rank| this_binary(&task(rank)).stdout(Stdio::piped()).spawn().unwrap();
    let children: Vec<_> = (0..size).map(start).collect();
    let outcomes = children.into_iter().map(outcome).collect();
    fs::remove_dir_all(&folder).unwrap();
    outcomes
}

#[test]
fn shared_memory_between_processes() {
    for size in [2, 3] {
        for (ok, text) in between_processes(size, "all") {
            assert!(ok, "{text}");
        }
    }
}

/// One of them dies in mid-message. The other one is told, and its error is that one.
#[test]
fn shared_memory_of_a_process_that_dies() {
    let outcomes = between_processes(2, "death");
    assert!(outcomes[0].0, "{}", outcomes[0].1);
    assert!(!outcomes[1].0, "it should have died");
}

/// Runs `size` processes under `mpirun`. None where there is none.
#[cfg(feature = "mpi")]
fn under_mpirun(size: usize, task: &str) -> Option<(bool, String)> {
    let mut command = Command::new("mpirun");
    command.args(["-np", &size.to_string()]).arg(env::current_exe().unwrap());
    // What Open MPI 4 and 5 want to be told where there are fewer cores than processes, and of root. MPICH does not.
    let settings = [
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("PRTE_ALLOW_RUN_AS_ROOT", "1"),
        ("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
        ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    ];
    arguments(&mut command, task).envs(settings).stdout(Stdio::piped());
    match command.spawn() {
        Ok(child) => Some(outcome(child)),
        Err(_) => {
            println!("skipped: no mpirun");
            None
        }
    }
}

#[cfg(feature = "mpi")]
#[test]
fn mpi() {
    for size in [2, 3] {
        for task in ["mpi all", "mpi one_thread"] {
            let Some((ok, text)) = under_mpirun(size, task) else { return };
            assert!(ok, "{task}: {text}");
            match text.find("skipped: ") {
                Some(at) => return println!("{}", text[at..].lines().next().unwrap_or_default()),
                None => assert_eq!(text.matches("all cases passed").count(), size, "{task}: {text}"),
            }
            text.find("library: ")
                .into_iter()
                .for_each(|at| println!("{}", text[at..].lines().next().unwrap_or_default()));
        }
    }
}

/// Collectives over memory of devices that MPI moves by itself: software GPUs', which is the host's.
#[cfg(feature = "mpi")]
#[test]
fn mpi_between_devices() {
    for size in [2, 3] {
        let Some((ok, text)) = under_mpirun(size, "mpi_devices") else { return };
        assert!(ok, "{text}");
        if let Some(at) = text.find("skipped: ") {
            return println!("{}", text[at..].lines().next().unwrap_or_default());
        }
        assert_eq!(text.matches("devices passed").count(), size, "{text}");
    }
}

/// They end without `MPI_Finalize`, so `mpirun` may call it a failure.
#[cfg(feature = "mpi")]
#[test]
fn mpi_of_a_process_that_is_lost() {
    for case in ["loss", "one_thread_loss"] {
        let folder = folder(case);
        let Some((_, text)) = under_mpirun(2, &format!("mpi {case} {}", folder.display())) else { return };
        let told = fs::read_dir(&folder).unwrap().count();
        fs::remove_dir_all(&folder).unwrap();
        assert!(told == 2 || text.contains("skipped: "), "{case}: {told} of 2 have the error. {text}");
    }
}

/// `MPI_Init` waits for all processes, and has no limit of its own.
#[cfg(feature = "mpi")]
#[test]
fn mpi_without_one_of_its_processes() {
    let folder = folder("alone");
    let Some((_, text)) = under_mpirun(2, &format!("mpi_alone {}", folder.display())) else { return };
    let told = fs::read_to_string(folder.join("told")).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert!(
        told.contains("no MPI library was found") || told.contains("MPI_Init_thread still waits"),
        "{told}\n{text}"
    );
}

/// The first of the two processes that comes begins MPI, the other one never does.
#[cfg(feature = "mpi")]
fn message_passing_alone(folder: &Path) {
    if fs::create_dir(folder.join("first")).is_ok() {
        let begin = || Mpi::load(Duration::from_secs(1)).map(|mpi| mpi.rank()).unwrap_err().to_string();
        let (told, again) = (begin(), begin());
        assert!(again.contains("no MPI library was found") || again.contains("start all processes anew"), "{again}");
        fs::write(folder.join("told"), told).unwrap();
    } else {
        wait_for(|| fs::read(folder.join("told")).ok()).unwrap();
    }
}

/// Whether times are to be printed.
fn times() -> bool {
    let long = env::var("GPU_POOL_LONG").is_ok_and(|long| long == "1");
    if !long {
        println!("skipped: times are printed with GPU_POOL_LONG=1");
    }
    long
}

#[test]
fn speed_of_shared_memory() {
    if !times() {
        return;
    }
    println!("{}", between_processes(2, "speed")[0].1);
}

#[cfg(feature = "mpi")]
#[test]
fn speed_of_mpi() {
    if !times() {
        return;
    }
    for task in ["mpi speed", "mpi one_thread_speed"] {
        let Some((_, text)) = under_mpirun(2, task) else { return };
        println!("{task}\n{text}");
    }
}

/// A process of the tests above.
#[test]
fn child() {
    let Ok(task) = env::var(TASK) else { return };
    let words: Vec<_> = task.split(' ').collect();
    match words[..] {
        ["shm", case, rank, size, folder] => {
            shared_memory(case, (rank.parse().unwrap(), size.parse().unwrap()), folder.as_ref());
        }
        #[cfg(feature = "mpi")]
        ["mpi_devices"] => super::devices::of_a_process(),
        #[cfg(feature = "mpi")]
        ["mpi_alone", folder] => message_passing_alone(folder.as_ref()),
        #[cfg(feature = "mpi")]
        ["mpi", case] => message_passing(case, None),
        #[cfg(feature = "mpi")]
        ["mpi", case, folder] => message_passing(case, Some(folder.as_ref())),
        _ => panic!("{task}"),
    }
}

fn shared_memory(case: &str, (rank, size): (usize, usize), folder: &Path) {
    let file = |key: &str| folder.join(key.replace('/', "-"));
    let set = |key: &str, value: &[u8]| {
        // Whole, or not there.
        fs::write(file(key).with_extension("new"), value).unwrap();
        fs::rename(file(key).with_extension("new"), file(key)).unwrap();
        Ok(())
    };
    let get = |key: &str| wait_for(|| fs::read(file(key)).ok());
    let ring = if case == "speed" { RING } else { EDGE };
    let transport = Shm::connect(ring, "test", (rank, size), set, get, &|| None, DEADLINE).unwrap();
    let pool = pool();
    let place = Place { transport: &transport, pool: &pool, rank, size, edge: EDGE };
    match case {
        "all" => cases::all(&place),
        "speed" => speed::measure(&place),
        "death" if rank == 1 => {
            place.meet(1);
            // Into the ring goes a part of a message; then this process is gone.
            let message = place.send(0, super::tag(2, 0, 0), 10 * EDGE);
            let soon = || Some(Error::Cluster { op: "test", why: "enough".to_owned() });
            drop(transport.exchange(vec![message], &soon));
            set("dead", &[]).unwrap();
            std::process::abort();
        }
        "death" => {
            place.meet(1);
            // Until then nobody empties the ring, so the message has no end.
            get("dead").unwrap();
            let start = Instant::now();
            let lost = || {
                let why = "closed connection".to_owned();
                let known = start.elapsed() > Duration::from_millis(100);
                known.then_some(Error::HostLost { host: 1, op: "test", why })
            };
            let done = transport.exchange(vec![place.receive(1, super::tag(2, 0, 0), 10 * EDGE)], &lost);
            assert!(matches!(done, Err(Error::HostLost { host: 1, .. })));
        }
        _ => panic!("{case}"),
    }
}

#[cfg(feature = "mpi")]
fn message_passing(case: &str, folder: Option<&Path>) {
    let (one_thread, speed) = (case.starts_with("one_thread"), case.ends_with("speed"));
    let mpi = match Mpi::load_with(one_thread, if speed { PIECE } else { EDGE }, DEADLINE) {
        Ok(mpi) => mpi,
        Err(error @ Error::Cluster { .. }) if error.to_string().contains("no MPI library was found") => {
            return println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    };
    println!("library: {}, CUDA-aware: {}", mpi.version(), mpi.is_cuda_aware());
    let pool = pool();
    let (rank, size) = (mpi.rank(), mpi.size());
    let place = Place { transport: &mpi, pool: &pool, rank, size, edge: EDGE };
    if speed {
        speed::measure(&place);
        return mpi.close(DEADLINE).unwrap();
    }
    if let Some(folder) = folder {
        cases::loss(&place);
        fs::write(folder.join(rank.to_string()), "").unwrap();
        // `mpirun` stops the others when one ends.
        wait_for(|| (fs::read_dir(folder).unwrap().count() == size).then_some(())).unwrap();
        return mpi.close(DEADLINE).unwrap();
    }
    for len in [0, 1, 100, 3 * EDGE] {
        let mut bytes: Vec<u8> = (0..len).map(|i| if rank == 0 { i as u8 ^ 0x5a } else { 0 }).collect();
        mpi.broadcast(&mut bytes, DEADLINE).unwrap();
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == i as u8 ^ 0x5a), "a broadcast of {len} bytes");
    }
    cases::all(&place);
    mpi.close(DEADLINE).unwrap();
    println!("all cases passed");
    // MPI began and ended: it is refused, not begun again.
    assert!(matches!(Mpi::load(DEADLINE), Err(Error::Cluster { .. })));
}
