//! The transport over a library of our own, on software GPUs: what it does while calls are in progress, when they fail,
//! and when the library hangs.

#[path = "direct_tests.rs"]
mod direct_tests;
#[path = "peer_tests.rs"]
mod peer_tests;

use super::{
    library::{Comm, Config, Functions, Stream, code},
    *,
};
use gpu_pool::extend::driver::host;
use std::{
    ffi::{c_char, c_int, c_void},
    ptr::{null, null_mut},
};

/// What a communicator of the fake library does; its address is the handle. All are leaked.
#[derive(Default)]
pub(super) struct Fake {
    pub(super) plan: Mutex<Plan>,
}

#[derive(Default)]
pub(super) struct Plan {
    /// A call returns only when the communicator is aborted.
    stuck: bool,
    /// A call waits for the end of this, and notes that it returns.
    slow: Option<Arc<Mutex<()>>>,
    aborted: bool,
    /// An error of the network.
    broken: c_int,
    /// What the next collective returns.
    pub(super) fails: c_int,
    /// An abort waits for the end of this.
    pub(super) hang: Option<Arc<Mutex<()>>>,
    /// As with `NCCL_LOCAL_REGISTER=0`.
    pub(super) registers_nothing: bool,
    pub(super) calls: Vec<&'static str>,
    /// Source, destination and elements of each collective.
    memory: Vec<(usize, usize, usize)>,
}

impl Fake {
    fn called(&self, name: &'static str) -> c_int {
        let code = {
            let mut plan = self.plan.lock();
            plan.calls.push(name);
            std::mem::take(&mut plan.fails)
        };
        while self.plan.lock().stuck {
            if self.plan.lock().aborted {
                return ABORTED;
            }
            thread::sleep(Duration::from_millis(1));
        }
        let slow = self.plan.lock().slow.clone();
        if let Some(slow) = slow {
            drop(slow.lock());
            self.plan.lock().calls.push("returned");
        }
        code
    }
}

/// What a call returns that an abort has ended.
const ABORTED: c_int = 3;

/// The communicators that were made for an id.
static MADE: Mutex<Vec<(u8, &'static Fake)>> = Mutex::new(Vec::new());

pub(super) fn made(id: u8) -> Vec<&'static Fake> {
    MADE.lock().iter().filter(|(of, _)| *of == id).map(|(_, fake)| *fake).collect()
}

/// # Safety
/// The handle is one of the fake library's.
unsafe fn fake(comm: Comm) -> &'static Fake {
    // SAFETY: it is leaked, so it lives.
    unsafe { &*comm.cast::<Fake>() }
}

/// An id whose communicators are not made before this is unlocked.
static LATE: Mutex<()> = Mutex::new(());

/// An id's second byte, by which hosts do not come; by the other one, the first communicator fails as well.
const LATE_HOSTS: u8 = 1;
const FIRST_FAILS: u8 = 2;

/// The bytes of an id are its test's number, and what happens.
unsafe extern "C" fn init_rank(comm: *mut Comm, _: c_int, id: UniqueId, _: c_int, _: *mut Config) -> c_int {
    let made: &'static Fake = Box::leak(Box::default());
    let first = {
        let mut all = MADE.lock();
        all.push((id.0[0], made));
        all.iter().filter(|(of, _)| *of == id.0[0]).count() == 1
    };
    match id.0[1] {
        FIRST_FAILS if first => return 4,
        LATE_HOSTS | FIRST_FAILS => drop(LATE.lock()),
        _ => {}
    }
    // SAFETY: the caller's place.
    unsafe { *comm = std::ptr::from_ref(made).cast_mut().cast() };
    code::SUCCESS
}

unsafe extern "C" fn async_error(comm: Comm, state: *mut c_int) -> c_int {
    // SAFETY: a handle of this library.
    let plan = unsafe { fake(comm) }.plan.lock();
    // SAFETY: the caller's place.
    unsafe { *state = if plan.stuck { code::IN_PROGRESS } else { plan.broken } };
    code::SUCCESS
}

unsafe extern "C" fn abort(comm: Comm) -> c_int {
    // SAFETY: a handle of this library.
    let fake = unsafe { fake(comm) };
    let hang = fake.plan.lock().hang.clone();
    if let Some(hang) = hang {
        drop(hang.lock());
    }
    let mut plan = fake.plan.lock();
    plan.calls.push("abort");
    plan.aborted = true;
    code::SUCCESS
}

macro_rules! fakes {
    ($($name:ident ($($before:ty),*; $($after:ty),*);)*) => {$(
        unsafe extern "C" fn $name($(_: $before,)* comm: Comm $(, _: $after)*) -> c_int {
            // SAFETY: a handle of this library.
            unsafe { fake(comm) }.called(stringify!($name))
        }
    )*};
}
fakes! {
    finalize (;);
    destroy (;);
    send (*const c_void, usize, c_int, c_int; Stream);
    recv (*mut c_void, usize, c_int, c_int; Stream);
    scaled_create (*mut c_int, *mut c_void, c_int, c_int;);
    scaled_destroy (c_int;);
    deregister (;*mut c_void);
}

macro_rules! collectives {
    ($($name:ident ($($rest:ty),*);)*) => {$(
        unsafe extern "C" fn $name(
            source: *const c_void, destination: *mut c_void, len: usize, $(_: $rest,)* comm: Comm, _: Stream,
        ) -> c_int {
            // SAFETY: a handle of this library.
            let fake = unsafe { fake(comm) };
            fake.plan.lock().memory.push((source.addr(), destination.addr(), len));
            fake.called(stringify!($name))
        }
    )*};
}
collectives! {
    all_reduce (c_int, c_int);
    reduce_scatter (c_int, c_int);
    all_gather (c_int);
    broadcast (c_int, c_int);
    reduce (c_int, c_int, c_int);
}

unsafe extern "C" fn register(comm: Comm, at: *mut c_void, _: usize, handle: *mut *mut c_void) -> c_int {
    // SAFETY: a handle of this library.
    let fake = unsafe { fake(comm) };
    let code = fake.called("register");
    // SAFETY: the caller's place.
    unsafe { *handle = if fake.plan.lock().registers_nothing { null_mut() } else { at } };
    code
}
/// Of [`direct_tests`], the only ones with a host 0.
unsafe extern "C" fn new_id(id: *mut UniqueId) -> c_int {
    // SAFETY: the caller's place.
    unsafe { (*id).0[0] = direct_tests::ID };
    code::SUCCESS
}
unsafe extern "C" fn no_version(_: *mut c_int) -> c_int {
    code::SUCCESS
}
unsafe extern "C" fn group() -> c_int {
    code::SUCCESS
}
unsafe extern "C" fn error_string(_: c_int) -> *const c_char {
    c"a fake error".as_ptr()
}
unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
    null()
}

#[rustfmt::skip]
static LIBRARY: Library = Library {
    f: Functions {
        version: no_version, unique_id: new_id, init_rank, async_error, finalize, destroy, abort,
        group_start: group, group_end: group, all_reduce, reduce_scatter, all_gather, broadcast, reduce, send, recv,
        register, deregister, scaled_create, scaled_destroy, error_string, last_error,
    },
    version: 22809,
};

pub(super) type Flagged = Arc<Mutex<Option<Error>>>;

/// Host 1 of two hosts, with two software GPUs. `id` begins with the test's number.
pub(super) fn start(id: [u8; 2], connect_timeout: Duration) -> (Nccl, Flagged, Vec<Result<()>>) {
    let flag = Flagged::default();
    let (nccl, connected) = start_with(id, connect_timeout, &flag);
    (nccl, flag, connected)
}

/// [`start`] of a cluster that is lost with this flag.
fn start_with(id: [u8; 2], connect_timeout: Duration, flag: &Flagged) -> (Nccl, Vec<Result<()>>) {
    let lost = flag.clone();
    let nccl = Nccl::with(&LIBRARY, 1, &[3, 2], Arc::new(move || lost.lock().clone()), connect_timeout).unwrap();
    let drivers = host::machine(&vec![host::HostConfig::default(); 2]);
    let mut bytes = [0; UniqueId::BYTES];
    bytes[..2].copy_from_slice(&id);
    let keys = Keys { set: &|_, _| unreachable!("host 0 has the ids"), get: &|_| Ok(bytes.to_vec()) };
    let connected = thread::scope(|scope| {
        let (nccl, keys, drivers) = (&nccl, &keys, &drivers);
        let threads: Vec<_> =
            (0..2).map(|device| scope.spawn(move || nccl.connect_rail(device, &drivers[device], keys))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (nccl, connected)
}

fn submit(nccl: &Nccl, device: usize) -> Result<()> {
    let call =
        RailCall::AllReduce { source: 0, destination: 0, len: 1, dtype: DType::F32, reduce: ReduceOp::Scaled(2.0) };
    // SAFETY: the fake library looks at no memory.
    unsafe { nccl.submit(device, RawStream(0), &call) }
}

pub(super) fn lost() -> Error {
    Error::HostLost { host: 0, op: "hub", why: "silence".into() }
}

pub(super) const LONG: Duration = Duration::from_secs(60);

#[test]
fn calls_are_made_in_order_and_the_end_is_orderly() {
    let (nccl, _, connected) = start([1, 0], LONG);
    assert!(connected.iter().all(Result::is_ok), "{connected:?}");
    for device in 0..2 {
        submit(&nccl, device).unwrap();
        assert!(nccl.failed(device).is_none());
    }
    for fake in made(1) {
        let plan = fake.plan.lock();
        assert!(plan.calls.ends_with(&["scaled_create", "all_reduce", "scaled_destroy"]));
        for name in ["reduce_scatter", "all_gather", "broadcast", "send", "recv"] {
            assert!(plan.calls.contains(&name), "{name} is not warm");
        }
    }
    nccl.close().unwrap();
    assert!(made(1).iter().all(|fake| fake.plan.lock().calls.ends_with(&["finalize", "destroy"])));
    assert!(submit(&nccl, 0).unwrap_err().to_string().contains("has ended"));
    drop(nccl);
    assert!(made(1).iter().all(|fake| !fake.plan.lock().calls.contains(&"abort")));
}

#[test]
fn a_sum_of_any_size_is_one_call_with_the_callers_memory() {
    let (nccl, _, _) = start([40, 0], LONG);
    let with = |use_plan: &mut dyn FnMut(&mut Plan)| made(40).iter().for_each(|fake| use_plan(&mut fake.plan.lock()));
    with(&mut |plan| (plan.calls, plan.memory) = Default::default());
    for (source, destination, len) in [(4096, 4096, 1), (4096, 8192, 1000), (1 << 40, 1 << 41, 1 << 30)] {
        let call = RailCall::AllReduce { source, destination, len, dtype: DType::F32, reduce: ReduceOp::Sum };
        // SAFETY: the fake library looks at no memory.
        unsafe { nccl.submit(1, RawStream(0), &call) }.unwrap();
        let mut sums = Vec::new();
        with(&mut |plan| {
            assert!(plan.calls.is_empty() || plan.calls == ["all_reduce"], "{:?}", plan.calls);
            plan.calls.clear();
            sums.append(&mut plan.memory);
        });
        assert_eq!(sums, [(source as usize, destination as usize, len)]);
    }
}

#[test]
fn wrong_calls_are_errors_that_abort_nothing() {
    let (nccl, _, _) = start([2, 0], LONG);
    let call = RailCall::AllReduce { source: 0, destination: 0, len: 1, dtype: DType::F32, reduce: ReduceOp::Min };
    // SAFETY: nothing is submitted.
    let error = unsafe { nccl.submit(0, RawStream(0), &call) }.unwrap_err();
    assert!(!nccl.can(DType::F32, ReduceOp::Min) && error.to_string().contains("NCCL has no Min of F32"), "{error}");
    assert!(submit(&nccl, 2).unwrap_err().to_string().contains("device 2 of host 1 has no rail"));
    assert!(
        nccl.connect_rail(
            2,
            &host::machine(&vec![host::HostConfig::default(); 1])[0],
            &Keys { set: &|_, _| Ok(()), get: &|_| Ok(vec![]) }
        )
        .is_err()
    );
}

/// Calls that wait for a host that is gone: both rails end, and the first cause stays.
#[test]
fn a_lost_host_ends_calls_that_wait_for_it() {
    let (nccl, flag, _) = start([3, 0], LONG);
    made(3).iter().for_each(|fake| fake.plan.lock().stuck = true);
    thread::scope(|scope| {
        let calls = [0, 1].map(|device| {
            scope.spawn({
                let nccl = &nccl;
                move || submit(nccl, device)
            })
        });
        until_all(|| made(3).iter().all(|fake| fake.plan.lock().calls.ends_with(&["scaled_create"])));
        assert!(!nccl.rails.wait_until_over(Duration::ZERO));
        *flag.lock() = Some(lost());
        for call in calls {
            let error = call.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::HostLost { host: 0, .. }), "{error:?}");
        }
    });
    assert!(nccl.abort(&lost()));
    assert!(made(3).iter().all(|fake| fake.plan.lock().calls.ends_with(&["abort"])));
    assert!(matches!(nccl.failed(1), Some(Error::HostLost { .. })));
    assert!(matches!(nccl.close(), Err(Error::HostLost { .. })));
}

#[track_caller]
fn until_all(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG);
        thread::sleep(Duration::from_millis(1));
    }
}

/// No host is lost, and a call does not return: the limit ends it, with its name; the other rail ends, too.
#[test]
fn a_call_that_does_not_return_has_a_limit() {
    let (nccl, _, connected) = start([10, 0], Duration::from_secs(2));
    assert!(connected.iter().all(Result::is_ok), "{connected:?}");
    made(10)[0].plan.lock().stuck = true;
    let [first, second] = thread::scope(|scope| {
        let nccl = &nccl;
        [0, 1].map(|device| scope.spawn(move || submit(nccl, device))).map(|call| call.join().unwrap())
    });
    let stuck = first.err().or(second.err()).unwrap();
    let Error::Transport { op: "ncclRedOpCreatePreMulSum", code: code::IN_PROGRESS, why, .. } = &stuck else {
        panic!("{stuck:?}")
    };
    assert!(why.contains("in progress for 2s"), "{why}");
    assert!(nccl.rails.wait_until_over(LONG));
    assert!(made(10).iter().all(|fake| fake.plan.lock().calls.ends_with(&["abort"])));
    assert!((0..2).all(|device| submit(&nccl, device).is_err()));
}

/// The orderly end waits for the other hosts: a lost one, and the limit, end that.
#[test]
fn an_end_that_waits_for_a_lost_host_is_an_abort() {
    for by_limit in [false, true] {
        let id = 11 + u8::from(by_limit);
        let (nccl, flag, _) = start([id, 0], if by_limit { Duration::from_secs(2) } else { LONG });
        made(id).iter().for_each(|fake| fake.plan.lock().stuck = true);
        let error = thread::scope(|scope| {
            let closing = scope.spawn(|| nccl.close().unwrap_err());
            if !by_limit {
                until_all(|| made(id).iter().any(|fake| fake.plan.lock().calls.ends_with(&["finalize"])));
                *flag.lock() = Some(lost());
            }
            closing.join().unwrap()
        });
        match by_limit {
            true => assert!(matches!(error, Error::Transport { op: "ncclCommFinalize", .. }), "{error:?}"),
            false => assert!(matches!(error, Error::HostLost { host: 0, .. }), "{error:?}"),
        }
        assert!(nccl.rails.wait_until_over(LONG));
        assert!(made(id).iter().all(|fake| fake.plan.lock().calls.ends_with(&["abort"])));
        assert!(made(id).iter().any(|fake| fake.plan.lock().calls.ends_with(&["finalize", "abort"])));
    }
}

/// The watching thread finds what breaks while nobody calls.
#[test]
fn a_broken_network_ends_all_rails() {
    let (nccl, _, _) = start([4, 0], LONG);
    let (told, heard) = std::sync::mpsc::channel();
    let listener = || -> Arc<Tell> {
        let told = told.clone();
        let aborted = || made(4).iter().any(|fake| fake.plan.lock().calls.contains(&"abort"));
        Arc::new(move |error| told.send((error, aborted())).unwrap())
    };
    let tell = listener();
    nccl.when_failed(&tell);
    nccl.when_failed(&listener());
    made(4)[1].plan.lock().broken = 6;
    // Before streams go on; a listener that was dropped hears nothing.
    assert!(matches!(heard.recv().unwrap(), (Error::Transport { code: 6, .. }, false)));
    assert!(nccl.rails.wait_until_over(LONG));
    for device in 0..2 {
        assert!(matches!(nccl.failed(device), Some(Error::Transport { library: "nccl", code: 6, .. })));
        assert!(matches!(submit(&nccl, device), Err(Error::Transport { code: 6, .. })));
    }
    assert!(heard.try_recv().is_err());
    nccl.when_failed(&tell);
    assert!(matches!(heard.recv().unwrap(), (Error::Transport { code: 6, .. }, _)));
}

/// NCCL sees a dead host before the hub tells of it: the hub's word is the error.
#[test]
fn the_cause_of_a_broken_network_is_the_host_that_is_lost() {
    let (nccl, flag, _) = start([9, 0], LONG);
    // Rails connect in any order.
    made(9).iter().for_each(|fake| fake.plan.lock().broken = 6);
    let told = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        *flag.lock() = Some(lost());
    });
    assert!(matches!(nccl.failed(1), Some(Error::HostLost { host: 0, .. })));
    told.join().unwrap();
    // The aborts run on threads of their own.
    assert!(nccl.rails.wait_until_over(LONG));
    assert!(matches!(submit(&nccl, 0), Err(Error::HostLost { host: 0, .. })));
}

#[test]
fn a_call_that_fails_ends_all_rails() {
    let (nccl, _, _) = start([5, 0], LONG);
    made(5)[0].plan.lock().fails = 4;
    let failed = (0..2).map(|device| submit(&nccl, device)).filter(Result::is_err).count();
    assert!(failed >= 1);
    assert!(nccl.rails.wait_until_over(LONG));
    assert!(matches!(nccl.failed(1), Some(Error::Transport { code: 4, .. })));
}

/// Hosts that do not come: an error after the limit, on every rail. What NCCL makes after all is aborted.
#[test]
fn a_connection_has_a_limit() {
    let late = LATE.lock();
    let (nccl, _, connected) = start([6, LATE_HOSTS], Duration::from_millis(50));
    for result in connected {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Transport { op: "ncclCommInitRankConfig", .. }), "{error:?}");
    }
    assert!(nccl.rails.wait_until_over(Duration::ZERO));
    drop(nccl);
    assert!(made(6).iter().all(|fake| fake.plan.lock().calls.is_empty()));
    drop(late);
    until_all(|| made(6).iter().all(|fake| fake.plan.lock().calls == ["abort"]));
}

/// Hosts do not come, and long before the limit one is lost, or the other rail fails: that ends both rails.
#[test]
fn a_loss_ends_a_connection() {
    for (id, plan) in [(13, LATE_HOSTS), (14, FIRST_FAILS)] {
        let (late, flag) = (LATE.lock(), Flagged::default());
        let (nccl, connected) = thread::scope(|scope| {
            let starting = scope.spawn(|| start_with([id, plan], LONG, &flag));
            until_all(|| made(id).len() == 2);
            if plan == LATE_HOSTS {
                *flag.lock() = Some(lost());
            }
            starting.join().unwrap()
        });
        for result in connected {
            match (plan, result.unwrap_err()) {
                (LATE_HOSTS, Error::HostLost { host: 0, .. }) | (FIRST_FAILS, Error::Transport { code: 4, .. }) => {}
                (_, error) => panic!("{error:?}"),
            }
        }
        drop((nccl, late));
        let late = made(id).into_iter().skip(usize::from(plan == FIRST_FAILS));
        until_all(|| late.clone().all(|fake| fake.plan.lock().calls == ["abort"]));
    }
}

/// The library frees the communicator in an abort, so a call that will return by itself does so first.
#[test]
fn an_abort_lets_a_call_return() {
    let (nccl, _, _) = start([15, 0], LONG);
    let slow = Arc::new(Mutex::new(()));
    let guard = slow.lock();
    made(15).iter().for_each(|fake| fake.plan.lock().slow = Some(slow.clone()));
    thread::scope(|scope| {
        let calls = [0, 1].map(|device| {
            let nccl = &nccl;
            scope.spawn(move || submit(nccl, device))
        });
        until_all(|| made(15).iter().all(|fake| fake.plan.lock().calls.ends_with(&["scaled_create"])));
        nccl.rails.fail(&lost());
        until_all(|| nccl.rails.all().all(|rail| rail.has_ended()));
        drop(guard);
        for call in calls {
            let error = call.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::HostLost { host: 0, .. }), "{error:?}");
        }
    });
    assert!(nccl.rails.wait_until_over(LONG));
    assert!(made(15).iter().all(|fake| fake.plan.lock().calls.ends_with(&["returned", "abort"])));
}

/// Also after calls and aborts that were stuck: each thread holds its rail, or all of them.
#[test]
fn no_thread_is_left() {
    let (nccl, flag, _) = start([16, 0], LONG);
    let rails: Vec<_> = nccl.rails.all().map(Arc::downgrade).collect();
    let all = Arc::downgrade(&nccl.rails);
    made(16).iter().for_each(|fake| fake.plan.lock().stuck = true);
    *flag.lock() = Some(lost());
    assert!((0..2).all(|device| submit(&nccl, device).is_err()));
    drop(nccl);
    assert_eq!(all.strong_count(), 0, "the watching thread has ended");
    until_all(|| rails.iter().all(|rail| rail.strong_count() == 0));
}

/// nccl#1777, nccl#1013: an abort that hangs holds up no other rail, and nobody waits for it for ever.
#[test]
fn an_abort_that_hangs_is_left_behind() {
    let (nccl, _, _) = start([7, 0], LONG);
    let hang = Arc::new(Mutex::new(()));
    let guard = hang.lock();
    made(7)[0].plan.lock().hang = Some(hang.clone());
    nccl.rails.fail(&lost());
    assert!(!nccl.rails.wait_until_over(Duration::from_millis(50)));
    let start = Instant::now();
    while made(7)[1].plan.lock().calls.last() != Some(&"abort") {
        assert!(start.elapsed() < LONG, "the other rail's abort waits");
        thread::sleep(Duration::from_millis(1));
    }
    assert!((0..2).all(|device| matches!(submit(&nccl, device), Err(Error::HostLost { .. }))));
    drop(guard);
    assert!(nccl.rails.wait_until_over(LONG));
}

#[test]
fn a_drop_aborts() {
    let (nccl, _, _) = start([8, 0], LONG);
    drop(nccl);
    assert!(made(8).iter().all(|fake| fake.plan.lock().calls.ends_with(&["abort"])));
}
