//! Hangs of the host are reported, with the places of the devices' last calls: to the `tracing` subscriber, or without
//! one to stderr. pytorch#31871, nccl#2353: without a word a user has only a debugger.

use crate::{
    env::{lines_of_the_log, print_warnings, process_of},
    support::{guarded, task},
};
use gpu_pool::{Builder, Error, GpuPool};
use std::{
    process::Output,
    sync::{Mutex, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_millis(200);
/// Longer than the deadline of a scope, twice.
const STUCK: Duration = Duration::from_millis(1500);

/// The subprocess.
#[test]
fn child() {
    let Some(task) = task() else { return };
    guarded(move || match task.as_str() {
        "channel" => stuck_in_a_channel(GpuPool::builder().host(2)),
        "channel on GPUs" => stuck_in_a_channel(GpuPool::builder().cuda().devices(&[0, 1])),
        #[cfg(all(unix, feature = "signals", feature = "insight"))]
        "signal" => asked_by_a_signal(),
        "channel, subscriber" => print_warnings(|| stuck_in_a_channel(GpuPool::builder().host(2))),
        _ => stuck_in_a_drop(),
    });
}

/// Device 0 waits for the program's own channel, device 1 for device 0.
fn stuck_in_a_channel(builder: Builder) {
    let pool = builder.timeout(DEADLINE).build().unwrap();
    let ((release, released), (tell, told)) = (channel::<()>(), channel());
    let released = Mutex::new(released);
    let begun = Instant::now();
    let helper = thread::spawn(move || {
        let error: Error = told.recv().unwrap();
        let Error::Timeout { device: 1, op: "barrier", missing, last_calls, .. } = &error else { panic!("{error:?}") };
        assert_eq!(*missing, [0]);
        let lines: Vec<_> = last_calls.iter().map(|call| (call.device, call.op, call.site.line())).collect();
        println!("CALLS {lines:?} {error}");
        thread::sleep(STUCK.saturating_sub(begun.elapsed()));
        drop(release);
    });
    let result = pool.run(|dev, _| {
        if dev.rank() == 0 {
            println!("LINE {}", line!() + 1);
            let x = dev.upload(&[1.0f32; 4])?;
            let _ = released.lock().unwrap().recv();
            return dev.download(&x).map(drop);
        }
        println!("LINE {}", line!() + 1);
        let error = dev.barrier().unwrap_err();
        tell.send(error.clone()).unwrap();
        Err(error)
    });
    assert!(begun.elapsed() >= STUCK, "the scope has waited for the closure");
    assert!(matches!(result, Err(Error::Timeout { device: 1, .. })), "{result:?}");
    helper.join().unwrap();
    assert_eq!(pool.run(|dev, _| dev.exchange(dev.rank())).unwrap(), [[0, 1], [0, 1]]);
}

/// Both devices compute for long; nobody waits. `SIGUSR1` shows what they do.
#[cfg(all(unix, feature = "signals", feature = "insight"))]
fn asked_by_a_signal() {
    let folder = std::env::temp_dir().join(format!("gpu-pool-signal-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let builder = GpuPool::builder().host(2).flight_record(&folder).flight_record_on_signal(true);
    let (pool, other) = (builder.build().unwrap(), GpuPool::builder().host(1).build().unwrap());
    let file = folder.join(format!("gpu-pool-{}-0.txt", std::process::id()));
    let signalled = std::sync::Barrier::new(2);
    pool.run(|dev, _| {
        drop(dev.upload(&[1.0f32; 4])?);
        if signalled.wait().is_leader() {
            signal_hook::low_level::raise(signal_hook::consts::SIGUSR1).unwrap();
        }
        // The text is written before the JSON.
        let json = file.with_extension("json");
        crate::support::until("the record is written", || {
            std::fs::read_to_string(&json).is_ok_and(|text| text.ends_with('}'))
        })
    })
    .unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.starts_with(&format!("flight record of pid {}: SIGUSR1\n", std::process::id())), "{text}");
    assert_eq!(text.matches("its last call: upload, 16 bytes at tests/processes/hang.rs:").count(), 2, "{text}");
    std::fs::remove_dir_all(folder).unwrap();
    drop((pool, other));
}

/// A value of the user does not come to the end of its drop.
fn stuck_in_a_drop() {
    struct Slow;
    impl Drop for Slow {
        fn drop(&mut self) {
            thread::sleep(STUCK);
        }
    }
    let pool = GpuPool::builder().host(1).timeout(DEADLINE).build().unwrap();
    drop(pool.per_device(|_, _| Ok(Slow)).unwrap());
}

fn run(task: &str, variables: &[(&str, &str)]) -> Output {
    let output = process_of("hang::child", task, variables);
    assert!(output.status.success(), "{output:?}");
    output
}

/// The places that the child has printed as its own, in the order of devices.
fn places(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines: Vec<u32> = text.lines().filter_map(|line| line.split("LINE ").nth(1)?.parse().ok()).collect();
    lines.sort();
    let ops = ["upload", "barrier"];
    let calls: Vec<_> = (0..2).map(|device| (device, ops[device], lines[device])).collect();
    assert!(text.contains(&format!("CALLS {calls:?}")), "{text}");
    calls.iter().map(|(device, op, line)| format!("device {device}: {op} at {}:{line}:", file!())).collect()
}

#[track_caller]
fn assert_names(text: &str, output: &Output) {
    assert!(places(output).iter().all(|place| text.contains(place)), "{text}\n{:?}", places(output));
}

fn names_the_places_once_on_stderr(task: &str) {
    let output = run(task, &[]);
    let said = lines_of_the_log(&output);
    // First device 1 has given up: that is the flight record, in further lines.
    assert_eq!(said.len(), 2, "{output:?}");
    assert!(said[0].starts_with("gpu-pool: error: flight record of pid "), "{said:?}");
    let all = String::from_utf8_lossy(&output.stderr);
    assert!(all.contains("\ndevice 0 is MISSING: it runs the closure of ") && all.contains("; its last call: upload"));
    assert!(all.contains("\ndevice 1 waits for device 0 in barrier at "), "{all}");
    assert!(said[1].starts_with("gpu-pool: warn: a scope waits for closures that make no progress (missing=[0], "));
    assert_names(&said[1], &output);
    // So does the error, which came while the closure was stuck.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_names(text.lines().find(|line| line.contains("CALLS ")).unwrap(), &output);
}

#[test]
fn a_hang_without_a_subscriber_is_on_stderr() {
    names_the_places_once_on_stderr("channel");
}

#[cfg(feature = "cuda")]
#[test]
fn a_hang_without_a_subscriber_is_on_stderr_cuda() {
    match crate::support::cuda_devices() {
        0 | 1 => println!("skipped: needs 2 CUDA devices"),
        _ => names_the_places_once_on_stderr("channel on GPUs"),
    }
}

#[test]
fn a_subscriber_gets_the_hang_with_its_fields_and_stderr_no_warning() {
    let output = run("channel, subscriber", &[]);
    // The subscriber is of the caller's thread only. A device's thread has written the flight record.
    let said = lines_of_the_log(&output);
    assert!(said.iter().all(|line| line.starts_with("gpu-pool: error: flight record of pid ")), "{said:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said: Vec<_> = text.lines().filter(|line| line.contains("WARNING ")).collect();
    assert_eq!(said.len(), 1, "{text}");
    for field in ["message=a scope waits", "missing=[0]", "waited=", "started=tests/processes/hang.rs:", "last_calls="]
    {
        assert!(said[0].contains(field), "{field}: {}", said[0]);
    }
    assert_names(said[0], &output);
}

#[test]
fn a_log_that_is_off_is_silent() {
    assert_eq!(lines_of_the_log(&run("channel", &[("GPU_POOL_LOG", "off")])), Vec::<String>::new());
}

#[test]
fn a_pool_that_waits_for_a_drop_says_so() {
    let said = lines_of_the_log(&run("drop", &[]));
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("a pool that ends waits for the thread of a device (device=0, "), "{said:?}");
}

#[cfg(all(unix, feature = "signals", feature = "insight"))]
#[test]
fn a_signal_makes_a_record() {
    run("signal", &[]);
}

#[cfg(not(feature = "signals"))]
#[test]
fn a_signal_without_its_feature_is_refused() {
    let refused = GpuPool::builder().host(1).flight_record_on_signal(true).build().unwrap_err().to_string();
    assert!(refused.contains("the feature `signals`"), "{refused}");
}
