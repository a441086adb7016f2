//! The situations of PyTorch's CUDA sanitizer, `test/test_cuda_sanitizer.py`, each under its name there.
//!
//! PyTorch feeds its event handler by hand; here the same calls are made on a software GPU, so that each case also
//! shows that a refused launch does not run and that the program goes on. A tensor is a buffer, `read_only` a read-only
//! kernel argument, `read_write` one that is written.
//!
//! All of `TestEventHandler` is here. Where we say something else:
//!
//! * `test_deleted_record`: PyTorch takes the wait for a deleted or new event as no order at all, and reports the
//!   launch after it. Here the wait itself is reported where the event was made anew (`UnrecordedEvent`), or refused by
//!   the driver where it is gone; the launch is reported as well.
//! * `test_multiple_errors`: PyTorch lists one error for each tensor. Here the launch is refused with the first; the
//!   others come one by one, as the one before is mended.
//!
//! Not here, since there is nothing of the kind:
//!
//! * `TestArgumentHandler` (`test_add`, `test_cat`, `test_split`, `test_inplace`, `test_out`, `test_nonzero`,
//!   `test_tensor_names`) reads from ATen's schemas which arguments an operator writes. A kernel's signature says that
//!   here: `checker::races::kernels_by_their_declared_arguments`.
//! * `TestMessages`: `test_ensure_exists` and `test_ensure_does_not_exist` are about a trace that began late; here
//!   every call goes through the checker from the start. `test_error_message` is `driver::check::report`'s unit tests
//!   and `checker::reports::a_report_names_the_places_of_its_user`. `test_subclass` is about Python.

use gpu_pool::extend::driver::{
    Address, DriverRef, DriverResult, FaultKind, HostArg, KernelArg, Launch, LaunchDims, RawEvent, RawFunction,
    RawStream,
    host::{self, HostConfig},
};
use gpu_pool_lab::check::{self, Kind};
use std::{collections::HashMap, ops::Range, time::Duration};

const BYTES: usize = 256;

/// A GPU whose streams, events and tensors are made when they are first named, as the handler's are.
struct Handler {
    gpu: DriverRef,
    streams: HashMap<usize, RawStream>,
    events: HashMap<usize, RawEvent>,
    tensors: HashMap<usize, Address>,
}

/// # Safety
/// None needed.
unsafe fn kernel(_: LaunchDims, _: &[HostArg]) {}

impl Handler {
    /// Tensors are written, and that is over, before a case begins: the handler does not ask what wrote them.
    fn new() -> Self {
        let gpu = check::wrap(host::machine(&[HostConfig::default()])).remove(0);
        let s = gpu.stream_create(0).unwrap();
        let tensors = (0..12).map(|i| (i, gpu.mem_alloc(BYTES).unwrap())).collect::<HashMap<_, _>>();
        for at in tensors.values() {
            // SAFETY: live memory.
            unsafe { gpu.fill_u8(*at, 0, BYTES, s) }.unwrap();
        }
        assert!(gpu.stream_wait_idle(s, Duration::MAX).unwrap());
        Handler { gpu, streams: HashMap::new(), events: HashMap::new(), tensors }
    }

    fn stream(&mut self, i: usize) -> RawStream {
        *self.streams.entry(i).or_insert_with(|| self.gpu.stream_create(0).unwrap())
    }

    fn event(&mut self, i: usize) -> RawEvent {
        *self.events.entry(i).or_insert_with(|| self.gpu.event_create(false).unwrap())
    }

    fn launch(&mut self, stream: usize, read_only: &[usize], read_write: &[usize]) -> DriverResult {
        let s = self.stream(stream);
        let slice = |write| move |at: &Address| KernelArg::Slice { address: *at, bytes: BYTES, write };
        let of = |tensors: &[usize]| tensors.iter().map(|i| self.tensors[i]).collect::<Vec<_>>();
        let args: Vec<KernelArg> =
            of(read_only).iter().map(slice(false)).chain(of(read_write).iter().map(slice(true))).collect();
        let (dims, function) = (LaunchDims::cover(1), RawFunction(0));
        // SAFETY: the kernel does nothing with its arguments, which are live.
        unsafe {
            self.gpu
                .launch(&Launch { name: "kernel", function, host: Some(kernel), dims, args: &args, early: false }, s)
        }
    }

    #[track_caller]
    fn good(&mut self, stream: usize, read_only: &[usize], read_write: &[usize]) {
        self.launch(stream, read_only, read_write).unwrap();
    }

    #[track_caller]
    fn bad(&mut self, stream: usize, read_only: &[usize], read_write: &[usize]) {
        let report = self.launch(stream, read_only, read_write).unwrap_err().report.unwrap();
        assert_eq!(report.kind, Kind::Race, "{report}");
    }

    fn record(&mut self, event: usize, stream: usize) {
        let (e, s) = (self.event(event), self.stream(stream));
        self.gpu.event_record(e, s).unwrap();
    }

    fn wait(&mut self, event: usize, stream: usize) {
        let (e, s) = (self.event(event), self.stream(stream));
        self.gpu.stream_wait_event(s, e).unwrap();
    }

    /// An event of stream `first`, for which the streams `then` wait.
    fn order(&mut self, event: usize, first: usize, then: &[usize]) {
        self.record(event, first);
        then.iter().for_each(|&stream| self.wait(event, stream));
    }

    /// Each of the streams `readers` reads tensor 1; then stream `then` waits for all of them.
    fn reads_before(&mut self, then: usize, readers: Range<usize>) {
        for i in readers.clone() {
            self.good(i, &[1], &[]);
            self.record(i, i);
        }
        readers.for_each(|i| self.wait(i, then));
    }

    fn stream_synchronization(&mut self, stream: usize) {
        let s = self.stream(stream);
        assert!(self.gpu.stream_wait_idle(s, Duration::MAX).unwrap());
    }

    fn device_synchronization(&mut self) {
        self.streams.values().for_each(|s| assert!(self.gpu.stream_wait_idle(*s, Duration::MAX).unwrap()));
    }

    fn event_synchronization(&mut self, event: usize) {
        let e = self.event(event);
        assert!(self.gpu.event_wait(e, Duration::MAX).unwrap());
    }
}

#[test]
fn test_empty_kernel_launch() {
    Handler::new().good(0, &[], &[]);
}

#[test]
fn test_simple_passing() {
    let mut h = Handler::new();
    h.good(1, &[1], &[]);
    h.good(2, &[1], &[]);
}

#[test]
fn test_simple_error() {
    let mut h = Handler::new();
    h.good(1, &[1], &[]);
    h.bad(2, &[], &[1]);
}

#[test]
fn test_simple_sync() {
    let mut h = Handler::new();
    h.good(1, &[1], &[]);
    h.order(0, 1, &[2]);
    h.good(2, &[], &[1]);
}

#[test]
fn test_reads_check_last_write() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.order(0, 1, &[2]);
    h.good(2, &[1], &[]);
    h.bad(3, &[1], &[]);
}

#[test]
fn test_branch_sync() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.order(0, 1, &[2, 3]);
    h.good(2, &[1], &[]);
    h.good(3, &[1], &[]);
    h.bad(2, &[], &[1]);
}

#[test]
fn test_chain_sync() {
    let (mut h, iterations) = (Handler::new(), 10);
    h.good(0, &[1], &[]);
    for i in 0..iterations {
        h.order(i, i, &[i + 1]);
    }
    h.good(iterations, &[], &[1]);
}

#[test]
fn test_expired_record() {
    let mut h = Handler::new();
    h.good(1, &[1], &[]);
    h.record(0, 1);
    h.good(1, &[1], &[]);
    h.wait(0, 2);
    h.bad(2, &[], &[1]);
}

#[test]
fn test_deleted_record() {
    for (delete, create) in [(true, true), (true, false), (false, true)] {
        let mut h = Handler::new();
        h.good(1, &[1], &[]);
        h.record(0, 1);
        let (old, s) = (h.event(0), h.stream(2));
        if delete {
            // SAFETY: named once more below, to see that it is gone.
            unsafe { h.gpu.event_destroy(old) }.unwrap();
        }
        let waited = if create {
            h.events.remove(&0);
            let new = h.event(0);
            h.gpu.stream_wait_event(s, new)
        } else {
            h.gpu.stream_wait_event(s, old)
        };
        let fault = waited.unwrap_err();
        match create {
            true => assert_eq!(fault.report.unwrap().kind, Kind::UnrecordedEvent),
            false => assert_eq!((fault.kind, fault.report), (FaultKind::InvalidArgument, None)),
        }
        h.bad(2, &[], &[1]);
    }
}

#[test]
fn test_all_reads_checked_failing() {
    let (mut h, iterations) = (Handler::new(), 10);
    h.reads_before(0, 1..iterations);
    h.good(iterations, &[1], &[]);
    h.record(iterations, iterations - 1);
    // It has not waited for the last read.
    h.bad(0, &[], &[1]);
}

#[test]
fn test_all_reads_checked_passing() {
    let (mut h, iterations) = (Handler::new(), 10);
    h.reads_before(0, 1..iterations);
    h.good(0, &[], &[1]);
}

#[test]
fn test_multiple_errors() {
    let mut h = Handler::new();
    let tensors: Vec<usize> = (0..10).collect();
    // On one stream each, so that they can be mended one by one.
    for tensor in &tensors {
        h.good(10 + tensor, &[], &[*tensor]);
    }
    for tensor in &tensors {
        let report = h.launch(1, &[], &tensors).unwrap_err().report.unwrap();
        let culprit = report.before.as_ref().unwrap().stream.unwrap();
        assert_eq!((report.kind, culprit), (Kind::Race, tensor + 1), "stream 0 has set the tensors up");
        h.order(0, 10 + tensor, &[1]);
    }
    h.good(1, &[], &tensors);
}

#[test]
fn test_correct_state_merging() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.good(2, &[], &[2]);
    h.record(1, 1);
    h.record(2, 2);
    h.good(1, &[], &[1]);
    h.good(2, &[], &[2]);
    h.wait(1, 2);
    h.wait(2, 1);
    h.order(3, 2, &[1]);
    h.good(1, &[], &[1, 2]);
}

#[test]
fn test_record_override() {
    let mut h = Handler::new();
    h.good(1, &[1], &[]);
    h.good(2, &[2], &[]);
    h.record(1, 1);
    h.order(1, 2, &[3]);
    h.bad(3, &[], &[1]);
}

#[test]
fn test_multiple_wait() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.order(1, 1, &[2, 3]);
    h.good(2, &[1], &[]);
    h.good(3, &[1], &[]);
}

#[test]
fn test_device_synchronize() {
    let (mut h, iterations) = (Handler::new(), 10);
    for i in 1..iterations {
        h.good(i, &[], &[i]);
    }
    h.device_synchronization();
    h.good(0, &[], &(1..iterations).collect::<Vec<_>>());
}

#[test]
fn test_device_synchronization_expired() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.device_synchronization();
    h.good(1, &[], &[1]);
    h.bad(2, &[], &[1]);
}

#[test]
fn test_new_stream_is_synchronized() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.device_synchronization();
    assert!(!h.streams.contains_key(&2), "made after the wait");
    h.good(2, &[], &[1]);
}

#[test]
fn test_stream_synchronize() {
    let mut h = Handler::new();
    h.good(0, &[], &[1]);
    h.good(1, &[], &[2]);
    h.stream_synchronization(0);
    h.good(2, &[1], &[]);
    h.good(3, &[1], &[]);
    h.bad(4, &[2], &[]);
}

#[test]
fn test_event_synchronize() {
    let mut h = Handler::new();
    h.good(1, &[], &[1]);
    h.record(1, 1);
    h.good(1, &[], &[2]);
    h.event_synchronization(1);
    h.good(2, &[], &[1]);
    h.bad(2, &[], &[2]);
}
