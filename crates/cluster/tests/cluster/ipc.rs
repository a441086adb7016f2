//! Memory of one process in another one's hands: data, lives, deaths and forgeries. CUDA.jl's page says that there is
//! no high-level face for this; PyTorch's `CudaIPCTypes` has a counter file for what a release is here (pytorch#13246:
//! a producer that frees early), and leaks when a consumer is killed.

use crate::support::{Gpus, again, builder, task, until};
use gpu_pool::{Device, DeviceBuffer, Error};
use gpu_pool_cluster::{Imported, IpcBuffer, prelude::*};
use gpu_pool_lab::prelude::*;
use proptest::prelude::*;
use std::{
    cell::RefCell,
    fs,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::Mutex,
    time::Duration,
};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(120);

/// The tests look at this process's mappings and at the one server thread: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|poison| poison.into_inner())
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

fn exported(dev: &Device, values: &[f32]) -> Result<DeviceBuffer<f32>, Error> {
    let mut x = dev.exportable(values.len())?;
    dev.upload_into(values, &mut x)?;
    Ok(x)
}

fn invalid<T: std::fmt::Debug>(result: Result<T, Error>, why: &str) {
    match result {
        Err(Error::InvalidArgument { why: said, .. }) if said.contains(why) => {}
        other => panic!("not InvalidArgument with `{why}`: {other:?}"),
    }
}

/// Mappings of this process that other processes may have: software GPUs' memory has this name.
fn mapped() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("/memfd:gpu-pool")).count()
}

/// Descriptors of such memory.
fn descriptors() -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    all.filter(|to| to.to_string_lossy().contains("memfd:gpu-pool")).count()
}

fn servers() -> usize {
    let all = fs::read_dir("/proc/self/task").unwrap();
    let names = all.filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "gpu-pool:ipc").count()
}

/// A process of this test program, which is spoken to by lines.
struct Other {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Other {
    fn new(task: &str) -> Other {
        let mut process = again(&["ipc::child"], task).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Other { process, to, from }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// Its next line for the test.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "it has ended");
            if let Some((_, said)) = line.trim_end().split_once("CHILD ") {
                return said.to_owned();
            }
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn say(what: &str) {
    println!("CHILD {what}");
}

fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// The other process. On a GPU if the test is.
#[test]
fn child() {
    let Some(task) = task() else { return };
    let (kind, task) = task.split_once(' ').unwrap();
    let builder = builder().timeout(LONG);
    let pool = if kind == "cuda" { builder.cuda().devices(&[0]) } else { builder.host(1) }.build().unwrap();
    let run = |dev: &Device| match task {
        "double" => {
            let mut x: Imported<f32> = dev.import(&serde_json::from_str(&listen()).unwrap())?;
            say(&format!("{:?}", &dev.download(&x)?[..3]));
            dev.scale(&mut x, 2.0)?;
            x.release(dev)?;
            say("released");
            listen();
            Ok(())
        }
        "hold" => {
            let x: Imported<f32> = dev.import(&serde_json::from_str(&listen()).unwrap())?;
            say("has it");
            listen();
            drop(x);
            Ok(())
        }
        "starve" => {
            let ipc = serde_json::from_str(&listen()).unwrap();
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a call of the system with a valid pointer.
            assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
            limit.rlim_cur = 64;
            // SAFETY: as above.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
            let mut open = Vec::from_iter(std::iter::from_fn(|| fs::File::open("/dev/null").ok()));
            let x = loop {
                match dev.import::<f32>(&ipc) {
                    Ok(x) => break x,
                    Err(error) => say(&format!("{error}")),
                }
                drop(open.pop().expect("a descriptor is enough"));
            };
            x.release(dev)?;
            say("released");
            Ok(())
        }
        "export" => {
            let x = exported(dev, &numbers(1000))?;
            say(&serde_json::to_string(&x.export()?).unwrap());
            listen();
            say(&format!("{:?}", dev.wait_released(&x, LONG)));
            listen();
            Ok(())
        }
        other => panic!("{other}"),
    };
    pool.run(|dev, _| run(dev)).unwrap();
}

fn kind(gpus: Gpus) -> &'static str {
    if gpus.is_cuda() { "cuda" } else { "host" }
}

on_both! {
    1: fn a_buffer_goes_to_another_process_and_comes_back(gpus) {
        let _alone = alone();
        let other = RefCell::new(Other::new(&format!("{} double", kind(gpus))));
        let other = Mutex::new(other);
        gpus.run(1, |dev| {
            let other = other.lock().unwrap();
            let mut other = other.borrow_mut();
            let mut x = exported(dev, &numbers(100_000))?;
            let ipc = x.export_mut()?;
            assert!((ipc.len(), ipc.pid()) == (100_000, std::process::id()));
            // It is the other one's now.
            assert!(matches!(dev.scale(&mut x, 3.0), Err(Error::Borrowed { device: 0, .. })));
            assert!(matches!(dev.download(&x), Err(Error::Borrowed { device: 0, .. })));
            assert!(matches!(x.export(), Err(Error::Borrowed { device: 0, .. })));
            other.tell(&serde_json::to_string(&ipc).unwrap());
            assert_eq!(other.hear(), "[0.0, 1.0, 2.0]");
            dev.wait_released(&x, LONG)?;
            let doubled: Vec<f32> = numbers(100_000).iter().map(|x| 2.0 * x).collect();
            assert!(dev.download(&x)? == doubled);
            // And again, since an export is good for one import.
            invalid(dev.import::<f32>(&ipc), "imported already");
            dev.scale(&mut x, 0.5)?;
            assert!(dev.download(&dev.import::<f32>(&x.export()?)?)? == numbers(100_000));
            Ok(())
        });
    }

    1: fn an_importer_that_is_killed_is_lost(gpus) {
        let _alone = alone();
        let other = Mutex::new(Other::new(&format!("{} hold", kind(gpus))));
        gpus.run(1, |dev| {
            let mut other = other.lock().unwrap();
            let mut x = exported(dev, &numbers(1000))?;
            other.tell(&serde_json::to_string(&x.export()?).unwrap());
            assert_eq!(other.hear(), "has it");
            let late = dev.wait_released(&x, Duration::from_millis(50));
            let pid = other.process.id() as usize;
            assert!(matches!(late, Err(Error::HostTimeout { ref missing, .. }) if *missing == [pid]), "{late:?}");
            let refused = dev.scale(&mut x, 2.0);
            assert!(matches!(refused, Err(Error::Borrowed { device: 0, .. })), "it only lends to readers");
            other.kill();
            let lost = dev.wait_released(&x, LONG);
            assert!(matches!(lost, Err(Error::HostLost { host, .. }) if host == pid), "{lost:?}");
            // Told once; the buffer is usable again.
            dev.wait_released(&x, LONG)?;
            dev.scale(&mut x, 2.0)?;
            assert_eq!(dev.download(&x)?[..3], [0.0, 2.0, 4.0]);
            Ok(())
        });
        // A new export does not hide it.
        let other = Mutex::new(Other::new(&format!("{} hold", kind(gpus))));
        gpus.run(1, |dev| {
            let mut other = other.lock().unwrap();
            let x = exported(dev, &numbers(1000))?;
            other.tell(&serde_json::to_string(&x.export()?).unwrap());
            assert_eq!(other.hear(), "has it");
            let pid = other.process.id() as usize;
            other.kill();
            std::thread::sleep(Duration::from_millis(300));
            let _again = x.export()?;
            let lost = dev.wait_released(&x, LONG);
            assert!(matches!(lost, Err(Error::HostLost { host, .. }) if host == pid), "{lost:?}");
            x.withdraw()
        });
    }

    1: fn an_exporter_that_is_killed_leaves_its_memory_to_the_importer(gpus) {
        let _alone = alone();
        let other = Mutex::new(Other::new(&format!("{} export", kind(gpus))));
        gpus.run(1, |dev| {
            let mut other = other.lock().unwrap();
            let ipc: IpcBuffer = serde_json::from_str(&other.hear()).unwrap();
            let x: Imported<f32> = dev.import(&ipc)?;
            other.kill();
            assert!(dev.download(&x)? == numbers(1000));
            let gone = dev.import::<f32>(&ipc);
            let pid = ipc.pid() as usize;
            assert!(matches!(gone, Err(Error::HostLost { host, .. }) if host == pid), "{gone:?}");
            x.release(dev)
        });
    }

    1: fn a_release_ends_the_wait_of_the_exporter(gpus) {
        let _alone = alone();
        let other = Mutex::new(Other::new(&format!("{} export", kind(gpus))));
        gpus.run(1, |dev| {
            let mut other = other.lock().unwrap();
            let ipc: IpcBuffer = serde_json::from_str(&other.hear()).unwrap();
            let mut x: Imported<f32> = dev.import(&ipc)?;
            assert!(!x.is_exclusive() && matches!(dev.scale(&mut x, 2.0), Err(Error::Borrowed { device: 0, .. })));
            other.tell("wait");
            // Dropped behind an operation that may still run.
            let mut y = dev.zeros::<f32>(1000)?;
            dev.copy(&x, &mut y)?;
            x.release(dev)?;
            assert_eq!(other.hear(), "Ok(())");
            assert!(dev.download(&y)? == numbers(1000));
            Ok(())
        });
    }

    1: fn only_exportable_memory_is_exported(gpus) {
        let _alone = alone();
        gpus.run(1, |dev| {
            let x = dev.zeros::<f32>(100)?;
            invalid(x.export(), "exportable");
            invalid(x.withdraw(), "exportable");
            invalid(dev.wait_released(&x, LONG), "exportable");
            let x = dev.exportable::<f32>(100)?;
            assert_eq!(dev.download(&x)?, [0.0; 100]);
            // Empty ones, and any size.
            for n in [0, 1, 1 << 19, (1 << 19) - 8, (1 << 19) - 7] {
                let x = dev.exportable::<f32>(n)?;
                let y = dev.import::<f32>(&x.export()?)?;
                assert!(y.len() == n && dev.download(&y)? == vec![0.0; n]);
            }
            assert!(dev.exportable::<f32>(usize::MAX / 8).is_err());
            Ok(())
        });
    }
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let _alone = alone();
    Gpus::software().run(1, |dev| {
        let mut x = exported(dev, &numbers(100))?;
        let all = [x.export()?, x.export()?, x.export()?].map(|ipc| dev.import::<f32>(&ipc).unwrap());
        assert!(matches!(x.export_mut(), Err(Error::Borrowed { device: 0, .. })));
        assert!(matches!(dev.scale(&mut x, 2.0), Err(Error::Borrowed { device: 0, .. })));
        assert_eq!(dev.download(&dev.sum(&x)?)?, [4950.0]);
        for y in all {
            assert_eq!(dev.download(&dev.sum(&y)?)?, [4950.0]);
            y.release(dev)?;
        }
        dev.wait_released(&x, LONG)?;
        let ipc = x.export_mut()?;
        // Nobody has imported it.
        assert!(matches!(dev.wait_released(&x, Duration::from_millis(30)), Err(Error::Cluster { .. })));
        x.withdraw()?;
        dev.wait_released(&x, LONG)?;
        invalid(dev.import::<f32>(&ipc), "withdrawn");
        dev.scale(&mut x, 2.0)?;
        let mut y = dev.import::<f32>(&x.export_mut()?)?;
        assert!(y.is_exclusive());
        dev.scale(&mut y, 2.0)?;
        y.release(dev)?;
        dev.wait_released(&x, LONG)?;
        assert_eq!(dev.download(&x)?[99], 396.0);
        Ok(())
    });
}

/// Work that is in flight when memory is exported or dropped: the other side sees all of it, and none comes later.
#[test]
fn exports_and_drops_wait_for_work() {
    let _alone = alone();
    Gpus::software().run(1, |dev| {
        let mut x = dev.exportable::<u32>(1000)?;
        for round in 1..=3 {
            crate::support::slow_add(dev, &mut x, 1, 20_000)?;
            let mut y = dev.import::<u32>(&x.export_mut()?)?;
            crate::support::slow_add(dev, &mut y, 10, 20_000)?;
            // Dropped with work in flight: told at the end of the scope, or when it is over and memory is asked for.
            match round {
                1 => y.release(dev)?,
                _ => {
                    dev.synchronize()?;
                    drop(y);
                }
            }
            dev.wait_released(&x, LONG)?;
            assert_eq!(dev.download(&x)?, vec![11 * round; 1000]);
        }
        Ok(())
    });
}

#[test]
fn memory_stays_until_all_have_let_go() {
    let _alone = alone();
    until("earlier tests' memory is gone", || mapped() + descriptors() + servers() == 0).unwrap();
    let pool = Gpus::software().pool(2);
    let found = pool.run(|dev, _| {
        if dev.index() == 1 {
            return Ok(None);
        }
        let x = exported(dev, &numbers(1000))?;
        let (ipc, stale) = (x.export()?, x.export()?);
        until("the server has its name", || servers() == 1)?;
        assert_eq!(mapped(), 1);
        let y = dev.import::<f32>(&ipc)?;
        assert_eq!(mapped(), 2);
        drop(x);
        assert_eq!(mapped(), 2, "an importer has it");
        assert!(dev.download(&y)? == numbers(1000));
        Ok(Some((y, stale)))
    });
    // A second importer may come as long as the memory is there. Then, dropped on a thread that is no device's.
    let (y, stale) = found.unwrap().swap_remove(0).unwrap();
    drop(y);
    until("the memory has gone", || {
        pool.run(|_, _| Ok(())).unwrap();
        mapped() + descriptors() + servers() == 0
    })
    .unwrap();
    let gone = pool.run(|dev, _| dev.import::<f32>(&stale).map(drop));
    invalid(gone, "dropped");
    // A new server, with another name; the old value is of no use there.
    pool.run(|dev, _| {
        let _x = exported(dev, &[1.0])?.export()?;
        invalid(dev.import::<f32>(&stale), "dropped");
        Ok(())
    })
    .unwrap();
    pool.close().unwrap();
    until("all has gone", || mapped() + descriptors() + servers() == 0).unwrap();
}

/// The pool ends first; also with an importer that still has the memory.
#[test]
fn buffers_outlive_their_pool() {
    let _alone = alone();
    until("earlier tests' memory is gone", || mapped() + descriptors() + servers() == 0).unwrap();
    let make = Gpus::software().pool(1);
    let x = make.run(|dev, _| exported(dev, &numbers(10))).unwrap().remove(0);
    let take = Gpus::software().pool(1);
    let ipc = x.export().unwrap();
    let y = take.run(|dev, _| dev.import::<f32>(&ipc)).unwrap().remove(0);
    make.close().unwrap();
    drop(x);
    assert!(take.run(|dev, _| dev.download(&y)).unwrap()[0] == numbers(10));
    drop(take);
    drop(y);
    until("all has gone", || mapped() + descriptors() + servers() == 0).unwrap();
}

#[test]
fn another_type_or_gpu_is_refused() {
    let _alone = alone();
    Gpus::software().run(1, |dev| {
        let x = exported(dev, &numbers(10))?;
        let ipc = x.export()?;
        invalid(dev.import::<u32>(&ipc), "of f32, not of u32");
        let forge = |from: &str, to: &str| -> IpcBuffer {
            let text = serde_json::to_string(&ipc).unwrap();
            assert!(text.contains(from), "{text}");
            serde_json::from_str(&text.replace(from, to)).unwrap()
        };
        invalid(dev.import::<u32>(&forge("\"f32\"", "\"u32\"")), "another type or length");
        // That was the one import.
        invalid(dev.import::<f32>(&ipc), "imported already");
        let ipc = x.export()?;
        let forge = |from: &str, to: &str| -> IpcBuffer {
            serde_json::from_str(&serde_json::to_string(&ipc).unwrap().replace(from, to)).unwrap()
        };
        let uuid = format!("{{\"Cuda\":{:?}}}", [7u8; 16]);
        invalid(dev.import::<f32>(&forge("\"Software\"", &uuid)), "is on GPU 0707");
        let dead = forge(&format!("\"pid\":{}", std::process::id()), "\"pid\":4194303");
        assert!(matches!(dev.import::<f32>(&dead), Err(Error::HostLost { host: 4_194_303, .. })));
        invalid(dev.import::<f32>(&forge("gpu-pool-ipc.", "other.")), "no exporter has such a socket");
        let nobody = dev.import::<f32>(&forge("gpu-pool-ipc.", "gpu-pool-ipc.0"));
        invalid(nobody, "has dropped");
        // None of these was an import.
        assert!(dev.download(&dev.import::<f32>(&ipc)?)? == numbers(10));
        Ok(())
    });
}

/// What is not what `export` has made is a typed error, whatever its bytes are; and harms no other import.
#[test]
fn forgeries_are_refused() {
    let _alone = alone();
    let pool = Gpus::software().pool(1);
    let x = pool.run(|dev, _| exported(dev, &numbers(10))).unwrap().remove(0);
    let import = |ipc: &IpcBuffer| pool.run(|dev, _| dev.download(&dev.import::<f32>(ipc)?));
    let config = ProptestConfig { cases: crate::support::cases(200, 5000), ..ProptestConfig::default() };
    let mutation = (any::<proptest::sample::Index>(), any::<u8>(), 0..3);
    proptest!(config, |(mutations in prop::collection::vec(mutation, 1..4))| {
        let ipc = x.export().unwrap();
        let mut bytes = serde_json::to_vec(&ipc).unwrap();
        for (at, byte, how) in mutations {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes[at] = b'0' + byte % 10,
                _ => bytes.truncate(at.max(1)),
            }
        }
        match serde_json::from_slice::<IpcBuffer>(&bytes) {
            Err(_) => {}
            Ok(same) if same == ipc => {}
            Ok(forged) => {
                let error = import(&forged).unwrap_err();
                let typed = matches!(
                    error,
                    Error::InvalidArgument { .. } | Error::HostLost { .. } | Error::Cluster { op: "import", .. }
                );
                prop_assert!(typed, "{error:?}");
            }
        }
        // A wrong length is found when the memory has come, so that this one is used up.
        match import(&ipc) {
            Ok(found) => prop_assert_eq!(&found[0], &numbers(10)),
            Err(Error::InvalidArgument { why, .. }) => prop_assert!(why.contains("imported already"), "{}", why),
            Err(error) => prop_assert!(false, "{error:?}"),
        }
    });
    x.withdraw().unwrap();
    pool.run(|dev, _| dev.wait_released(&x, LONG)).unwrap();
}

/// Silent and talkative strangers at the exporter's socket.
#[test]
fn strangers_do_not_block_the_server() {
    use std::os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    };
    let _alone = alone();
    let pool = Gpus::software().pool(1);
    let x = pool.run(|dev, _| exported(dev, &numbers(10))).unwrap().remove(0);
    let ipc = x.export().unwrap();
    let value: serde_json::Value = serde_json::from_str(&serde_json::to_string(&ipc).unwrap()).unwrap();
    let address = SocketAddr::from_abstract_name(value["socket"].as_str().unwrap()).unwrap();
    let stranger = |words: &[u8]| {
        let mut socket = UnixStream::connect_addr(&address).unwrap();
        let _ = socket.write_all(words);
        socket
    };
    let silent: Vec<UnixStream> = (0..200).map(|i| stranger(&[b'x'; 47][..i % 47])).collect();
    let loud: Vec<UnixStream> = (0..20).map(|_| stranger(&[b'x'; 5000])).collect();
    assert!(pool.run(|dev, _| dev.download(&dev.import::<f32>(&ipc)?)).unwrap()[0] == numbers(10));
    // The loud ones were sent away at once, the silent ones will be.
    for mut socket in loud.into_iter().chain(silent) {
        socket.set_read_timeout(Some(LONG)).unwrap();
        let ended = std::io::Read::read_to_end(&mut socket, &mut Vec::new());
        assert!(!ended.is_err_and(|why| why.kind() == std::io::ErrorKind::WouldBlock), "it is still waited for");
    }
}

/// Strangers that come and go without a pause.
#[test]
fn strangers_who_keep_coming_do_not_block_the_server() {
    use std::{
        os::{
            linux::net::SocketAddrExt,
            unix::net::{SocketAddr, UnixStream},
        },
        sync::atomic::{AtomicBool, Ordering::Relaxed},
    };
    let _alone = alone();
    let pool = Gpus::software().pool(1);
    let x = pool.run(|dev, _| exported(dev, &numbers(10))).unwrap().remove(0);
    let name: serde_json::Value = serde_json::to_value(x.export().unwrap()).unwrap();
    let address = SocketAddr::from_abstract_name(name["socket"].as_str().unwrap()).unwrap();
    x.withdraw().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    drop(UnixStream::connect_addr(&address));
                }
            });
        }
        for _ in 0..20 {
            let ipc = x.export().unwrap();
            let found = pool.run(|dev, _| dev.download(&dev.import::<f32>(&ipc)?));
            pool.run(|dev, _| dev.wait_released(&x, LONG)).unwrap();
            x.withdraw().unwrap();
            if found.as_ref().map_or(true, |found| found[0] != numbers(10)) {
                over.store(true, Relaxed);
            }
            assert_eq!(found.unwrap()[0], numbers(10));
        }
        over.store(true, Relaxed);
    });
}

/// An importer without a free descriptor says that; the exporter lives, and the export is good for a later try.
#[test]
fn an_importer_without_a_descriptor_says_so() {
    let _alone = alone();
    let pool = Gpus::software().pool(1);
    let x = pool.run(|dev, _| exported(dev, &numbers(10))).unwrap().remove(0);
    let mut other = Other::new("host starve");
    other.tell(&serde_json::to_string(&x.export().unwrap()).unwrap());
    let mut refusals = 0;
    loop {
        let said = other.hear();
        if said == "released" {
            break;
        }
        assert!(said.contains("descriptor") || said.contains("os error 24"), "{said}");
        assert!(!said.contains("has ended") && refusals < 20, "{said}");
        refusals += 1;
    }
    assert!(refusals > 0);
    pool.run(|dev, _| dev.wait_released(&x, LONG)).unwrap();
}

/// What the members of a failed gang drop is parked first.
#[test]
fn a_scope_that_fails_gives_memory_back() {
    let _alone = alone();
    until("earlier tests' memory is gone", || mapped() + descriptors() + servers() == 0).unwrap();
    let pool = Gpus::software().pool(2);
    let failed = pool.run(|dev, _| {
        let mut x = exported(dev, &numbers(10))?;
        let y = dev.import::<f32>(&x.export_mut()?)?;
        let _ = dev.scale(&mut x, 2.0);
        match dev.index() {
            0 => Err(Error::custom("one of them fails")),
            _ => dev.barrier().map(|()| drop((x, y))),
        }
    });
    assert!(matches!(failed, Err(Error::Custom(_))), "{failed:?}");
    pool.run(|_, _| Ok(())).unwrap();
    until("all has gone", || mapped() + descriptors() + servers() == 0).unwrap();
}

/// A driver that fails half way leaves nothing behind.
#[test]
fn a_driver_that_fails_leaves_nothing() {
    use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected};
    let _alone = alone();
    until("earlier tests' memory is gone", || mapped() + descriptors() + servers() == 0).unwrap();
    for op in [FaultOp::VmReserve, FaultOp::VmMap, FaultOp::VmExport, FaultOp::Fill, FaultOp::VmImport] {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(op)).paused();
        let pool = builder().host(1).faults(plan.clone()).build().unwrap();
        let failed = pool.run(|dev, _| {
            let x = exported(dev, &numbers(10));
            plan.resume();
            let x = if op == FaultOp::VmImport { x? } else { exported(dev, &numbers(10))? };
            dev.import::<f32>(&x.export()?).map(drop)
        });
        assert!(matches!(failed, Err(Error::Driver { .. })), "{op:?}: {failed:?}");
        pool.run(|_, _| Ok(())).unwrap();
        until("all has gone", || mapped() + descriptors() + servers() == 0).unwrap();
    }
}
