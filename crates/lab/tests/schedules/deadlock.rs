//! Deadlocks are reported when they are certain, with who waits for whom; slow programs are not.
//!
//! What users have instead of a report: a process that hangs, as in pytorch#8388 (two scopes each hold a device that
//! the other waits for) and nccl#744 (a launch behind a kernel that waits for it).

use crate::support::{TIMEOUT, guarded};
use gpu_pool::{
    Error, GpuPool, Kernel, LaunchDims, Module,
    extend::driver::{
        DriverRef, FaultKind,
        host::{self, Attendee, ExecutionOrder, HostConfig, MachineConfig},
    },
};
use std::{
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicU64, Ordering::*},
    },
    task::Poll,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

/// Much longer than a deadlock takes to be found: who comes to it has found none.
const LONG: Duration = TIMEOUT;

static MODULE: Module = Module::ptx("");

/// Spins on a word.
static AWAIT: Kernel<(&[u32], &mut [u32])> = Kernel::resumable(&MODULE, "await", await_word);

fn await_word(_: LaunchDims, word: &[u32], out: &mut [u32]) -> Poll<()> {
    out[0] = word[0];
    if word[0] == 0 { Poll::Pending } else { Poll::Ready(()) }
}

const SCHEDULES: [ExecutionOrder; 2] = [ExecutionOrder::Threaded, ExecutionOrder::Seeded(1)];

fn machine(n: usize, schedule: &ExecutionOrder) -> Vec<DriverRef> {
    let config = MachineConfig { schedule: schedule.clone(), ..MachineConfig::default() };
    host::machine_with(&vec![HostConfig::default(); n], &config).unwrap()
}

/// Words that streams wait for, as other libraries on the same GPU do it: past this crate's back.
struct Words {
    device: DriverRef,
    first: *mut u8,
}

// SAFETY: page-locked memory that is only used atomically.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn new(device: &DriverRef) -> Arc<Words> {
        Arc::new(Words { device: device.clone(), first: device.host_alloc(64).unwrap() })
    }

    fn at(&self, i: usize) -> u64 {
        self.first as u64 + 8 * i as u64
    }

    fn store(&self, i: usize, value: u64) {
        // SAFETY: an aligned word of live memory, only used atomically.
        unsafe { AtomicU64::from_ptr(self.at(i) as *mut u64) }.store(value, Release);
    }
}

#[test]
fn a_word_that_nobody_writes_is_reported_to_who_waits_for_it() {
    for schedule in SCHEDULES {
        let devices = machine(2, &schedule);
        let words = Words::new(&devices[0]);
        let streams: Vec<_> = devices.iter().map(|device| device.stream_create(0).unwrap()).collect();
        // Device 1 waits for device 0, which waits for the word.
        // SAFETY: the word lives as long as the machine.
        unsafe { devices[0].wait_value(words.at(0), 3, streams[0]) }.unwrap();
        let event = devices[0].event_create(false).unwrap();
        devices[0].event_record(event, streams[0]).unwrap();
        devices[1].stream_wait_event(streams[1], event).unwrap();
        let fault = devices[1].stream_wait_idle(streams[1], LONG).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Deadlock, "{fault}");
        for part in [
            "a host thread waits for stream 0 of device 1",
            "stream 0 of device 1 waits for operation 1 of stream 0 of device 0, which has completed 0",
            "stream 0 of device 0 waits until the word at",
            "is at least 3; it is 0",
        ] {
            assert!(fault.detail.contains(part), "no {part:?} in\n{}", fault.detail);
        }
        // Told once for each stream; then they work again.
        assert_eq!(devices[0].event_wait(event, LONG).unwrap_err().kind, FaultKind::Deadlock);
        assert_eq!(devices[0].stream_wait_idle(streams[0], LONG).unwrap_err().kind, FaultKind::Deadlock);
        for (device, stream) in devices.iter().zip(&streams) {
            let done = Arc::new(AtomicU64::new(0));
            let set = done.clone();
            device.launch_host(*stream, Box::new(move || set.store(1, Release))).unwrap();
            assert!(device.stream_wait_idle(*stream, LONG).unwrap());
            assert_eq!(done.load(Acquire), 1);
        }
    }
}

fn pool(n: usize, schedule: &ExecutionOrder) -> GpuPool {
    let builder = GpuPool::builder().host(n).schedule(schedule.clone()).module(&MODULE);
    builder.timeout(Duration::from_secs(600)).build().unwrap()
}

fn assert_works(pool: &GpuPool) {
    for _ in 0..3 {
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32])?;
            dev.all_reduce(&mut x, gpu_pool::ReduceOp::Sum)?;
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), vec![vec![pool.device_count() as f32]; pool.device_count()]);
    }
}

/// Runs a test of two devices under each schedule.
fn on_schedules(test: fn(&GpuPool)) {
    guarded(move || SCHEDULES.iter().for_each(|schedule| test(&pool(2, schedule))));
}

fn expect_deadlock<T: std::fmt::Debug>(result: Result<T, Error>, parts: &[&str]) {
    let Err(Error::Deadlock { who, .. }) = result else { panic!("{result:?}") };
    println!("{who}\n");
    for part in parts {
        assert!(who.contains(part), "no {part:?} in\n{who}");
    }
}

/// Two devices, each with a kernel that spins for a word which the other would write after its own kernel.
#[test]
fn kernels_that_spin_for_each_other_are_reported() {
    on_schedules(|pool| {
        let stuck = pool.run(|dev, _| {
            let word = dev.zeros::<u32>(1)?;
            let mut out = dev.zeros::<u32>(1)?;
            // SAFETY: the kernel is what its signature says. Nobody ever writes the word.
            unsafe { dev.launch(&AWAIT, LaunchDims::cover(1), (&word, &mut out))? };
            dev.download(&out)
        });
        expect_deadlock(stuck, &["its kernel `await`, which spins", "of device 0", "of device 1"]);
        assert_works(pool);
    });
}

/// Device 0 waits for device 1 in a meeting; device 1 waits for its stream, whose kernel spins for what device 0 would
/// do after the meeting.
#[test]
fn a_meeting_and_a_stream_that_wait_for_each_other_are_reported() {
    on_schedules(|pool| {
        let stuck = pool.run(|dev, _| {
            if dev.index() == 1 {
                let word = dev.zeros::<u32>(1)?;
                let mut out = dev.zeros::<u32>(1)?;
                // SAFETY: the kernel is what its signature says.
                unsafe { dev.launch(&AWAIT, LaunchDims::cover(1), (&word, &mut out))? };
                dev.synchronize()?;
            }
            dev.exchange(dev.index())
        });
        let parts = ["a host thread waits for stream", "device 0 waits in exchange for device 1", "`await`"];
        expect_deadlock(stuck, &parts);
        assert_works(pool);
    });
}

#[test]
fn slow_host_functions_and_late_writers_are_no_deadlock() {
    for schedule in SCHEDULES {
        let devices = machine(1, &schedule);
        let (device, words) = (&devices[0], Words::new(&devices[0]));
        let stream = device.stream_create(0).unwrap();
        device.launch_host(stream, Box::new(|| thread::sleep(Duration::from_secs(2)))).unwrap();
        assert!(device.stream_wait_idle(stream, LONG).unwrap());
        // SAFETY: the word lives as long as the machine.
        unsafe { device.wait_value(words.at(0), 1, stream) }.unwrap();
        let writer = words.clone();
        let writing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            writer.store(0, 1);
        });
        assert!(device.stream_wait_idle(stream, LONG).unwrap());
        writing.join().unwrap();
        assert_eq!(words.device.info().ordinal, 0);
    }
}

/// A host thread that says of itself that it waits.
struct Told {
    blocked: Option<u64>,
    report: Mutex<Option<String>>,
}

impl Attendee for Told {
    fn thread(&self) -> Option<ThreadId> {
        None
    }
    fn blocked(&self) -> Option<u64> {
        self.blocked
    }
    fn is_running(&self) -> bool {
        false
    }
    fn waits_for(&self) -> Option<String> {
        Some("Godot".to_owned())
    }
    fn progress(&self) -> u64 {
        0
    }
    fn deadlocked(&self, report: &str) {
        *self.report.lock().unwrap() = Some(report.to_owned());
    }
}

/// Nobody waits in the driver for longer than his limit; the attendees are told, but only if all of them are blocked.
#[test]
fn attendees_that_wait_for_each_other_are_told_once_all_are_blocked() {
    for (second, told) in [(Some(0), true), (None, false)] {
        let devices = machine(1, &ExecutionOrder::Threaded);
        let (device, words) = (&devices[0], Words::new(&devices[0]));
        let stream = device.stream_create(0).unwrap();
        // SAFETY: the word lives as long as the machine.
        unsafe { device.wait_value(words.at(0), 1, stream) }.unwrap();
        let attendees = [Some(0), second].map(|blocked| Arc::new(Told { blocked, report: Mutex::default() }));
        attendees.iter().for_each(|a| host::attend(&**device, &(a.clone() as Arc<dyn Attendee>)));
        let reports = || attendees.each_ref().map(|attendee| attendee.report.lock().unwrap().clone());
        // Each wait ends by itself: the thread could do something, so nothing is taken from it. On a loaded machine it
        // takes longer until everybody has been seen blocked for long enough; for who must not be told, two seconds are
        // twice that.
        let (start, limit) = (Instant::now(), if told { LONG } else { Duration::from_secs(2) });
        while reports().contains(&None) && start.elapsed() < limit {
            assert!(!device.stream_wait_idle(stream, Duration::from_millis(100)).unwrap());
        }
        for report in reports() {
            let is_right = |report: &String| report.contains("Godot") && report.contains("until the word");
            assert_eq!(report.as_ref().map(is_right), told.then_some(true), "{report:?}");
        }
        words.store(0, 1);
        assert!(device.stream_wait_idle(stream, LONG).unwrap());
    }
}

/// Members that compute, sleep or wait where the library cannot see it, while the others wait for them.
#[test]
fn members_that_are_late_are_no_deadlock() {
    guarded(|| {
        for schedule in SCHEDULES {
            let pool = pool(3, &schedule);
            let held = Mutex::new(());
            let holds = Barrier::new(2);
            thread::scope(|s| {
                s.spawn(|| {
                    let guard = held.lock().unwrap();
                    holds.wait();
                    thread::sleep(Duration::from_millis(1500));
                    drop(guard);
                });
                holds.wait();
                let ranks = pool.run(|dev, _| {
                    match dev.index() {
                        0 => thread::sleep(Duration::from_millis(1200)),
                        1 => drop(held.lock().unwrap()),
                        _ => {}
                    }
                    dev.barrier()?;
                    dev.exchange(dev.index())
                });
                assert_eq!(ranks.unwrap(), vec![vec![0, 1, 2]; 3]);
            });
            assert_works(&pool);
        }
    });
}
