//! The checker on software GPUs, at the level of the driver: each mistake is caught, and its mended twin is silent.
//!
//! Knowledge of the pool's own hooks (blocks, host accesses) is tested beside them, in `src/driver/check/pool_tests.rs`;
//! the account as a whole against a graph search in `src/driver/check/model.rs`.

use gpu_pool::driver::{
    Address, DriverRef, DriverResult, FaultKind, HostArg, KernelArg, Launch, LaunchDims, RawEvent, RawFunction,
    RawStream,
    check::{self, Kind, Report, annotate},
    host::{self, HostConfig},
};
use std::{
    panic::Location,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

const BYTES: usize = 4096;

fn gpus(n: usize) -> Vec<DriverRef> {
    let gpus = check::wrap(host::machine(&vec![HostConfig::default(); n]));
    for (a, b) in gpus.iter().flat_map(|a| gpus.iter().map(move |b| (a, b))) {
        a.enable_peer(&**b).unwrap();
    }
    gpus
}

fn stream(gpu: &DriverRef) -> RawStream {
    gpu.stream_create(0).unwrap()
}

fn event(gpu: &DriverRef) -> RawEvent {
    gpu.event_create(false).unwrap()
}

fn memory(gpu: &DriverRef) -> Address {
    gpu.mem_alloc(BYTES).unwrap()
}

fn pinned(gpu: &DriverRef) -> Address {
    gpu.host_alloc(BYTES).unwrap() as Address
}

fn fill(gpu: &DriverRef, at: Address, value: u8, s: RawStream) -> DriverResult {
    // SAFETY: memory of the case, which is live unless the checker is to say that it is not.
    unsafe { gpu.fill_u8(at, value, BYTES, s) }
}

fn down(gpu: &DriverRef, to: Address, from: Address, s: RawStream) -> DriverResult {
    // SAFETY: as above; `to` is page-locked.
    unsafe { gpu.copy_to_host(to as *mut u8, from, BYTES, s) }
}

fn peer(gpu: &DriverRef, to: Address, owner: &DriverRef, from: Address, s: RawStream) -> DriverResult {
    // SAFETY: as above.
    unsafe { gpu.copy_peer(to, &**gpu, from, &**owner, BYTES, s) }
}

fn raise(gpu: &DriverRef, flag: Address, value: u64, s: RawStream) -> DriverResult {
    // SAFETY: an aligned word of the case.
    unsafe { gpu.write_value(flag, value, s) }
}

fn wait_flag(gpu: &DriverRef, flag: Address, value: u64, s: RawStream) {
    // SAFETY: as above.
    unsafe { gpu.wait_value(flag, value, s) }.unwrap();
}

fn idle(gpu: &DriverRef, s: RawStream) {
    assert!(gpu.stream_wait_idle(s, Duration::from_secs(30)).unwrap());
}

/// `waiter` waits for what `of` has by now.
fn order(first: &DriverRef, of: RawStream, then: &DriverRef, waiter: RawStream) {
    let e = event(first);
    first.event_record(e, of).unwrap();
    then.stream_wait_event(waiter, e).unwrap();
}

/// A byte of page-locked memory; nothing uses it.
fn look(at: Address) -> u8 {
    // SAFETY: live page-locked memory that no operation is using.
    unsafe { (at as *const u8).read() }
}

#[track_caller]
fn caught(result: DriverResult, kind: Kind) -> Arc<Report> {
    let fault = result.expect_err("the checker has missed it");
    assert_eq!((fault.kind, fault.code, fault.name.as_str()), (FaultKind::Misuse, 0, "GPU_POOL_MISUSE"), "{fault}");
    let report = fault.report.unwrap();
    assert_eq!(report.kind, kind, "{report}");
    report
}

#[track_caller]
fn line() -> u32 {
    Location::caller().line()
}

// ---- races ------------------------------------------------------------------------------------------------------------

#[test]
fn a_race_of_two_streams_and_its_mended_twin() {
    let gpu = &gpus(1)[0];
    let (x, to, s, t) = (memory(gpu), pinned(gpu), stream(gpu), stream(gpu));
    fill(gpu, x, 7, s).unwrap();
    let report = caught(down(gpu, to, x, t), Kind::Race);
    assert_eq!((report.bytes.clone(), report.now.write, report.now.stream), (0..BYTES, false, Some(1)));
    let before = report.before.as_ref().unwrap();
    assert_eq!((before.op, before.write, before.device, before.stream), ("fill_u8", true, Some(0), Some(0)));
    assert_eq!(report.allocation.as_ref().unwrap().bytes, BYTES);

    // It did not run, and left nothing behind: ordered, the same call is fine, and so is whatever else uses `to`.
    idle(gpu, t);
    assert_eq!(look(to), 0);
    fill(gpu, to, 1, s).unwrap();
    order(gpu, s, gpu, t);
    down(gpu, to, x, t).unwrap();
    idle(gpu, t);
    assert_eq!(look(to), 7);
}

#[test]
fn only_the_bytes_that_are_shared_count() {
    let gpu = &gpus(1)[0];
    let (x, s, t) = (memory(gpu), stream(gpu), stream(gpu));
    // SAFETY: in range; the streams are waited for.
    let part = |at: u64, n, s| unsafe { gpu.fill_u8(x + at, 1, n, s) };
    part(0, 100, s).unwrap();
    part(100, 100, t).unwrap();
    assert_eq!(caught(part(50, 100, t), Kind::Race).bytes, 50..100);
    assert_eq!(caught(part(99, 2, s), Kind::Race).bytes, 100..101);
    part(0, 0, t).unwrap();
    idle(gpu, s);
    idle(gpu, t);
}

#[test]
fn readers_do_not_race_and_a_writer_waits_for_all_of_them() {
    let gpu = &gpus(1)[0];
    let (x, s, readers) = (memory(gpu), stream(gpu), [stream(gpu), stream(gpu), stream(gpu)]);
    fill(gpu, x, 1, s).unwrap();
    idle(gpu, s);
    for reader in readers {
        down(gpu, pinned(gpu), x, reader).unwrap();
    }
    for (i, reader) in readers.into_iter().enumerate() {
        assert_eq!(caught(fill(gpu, x, 2, s), Kind::Race).before.as_ref().unwrap().stream, Some(i + 1));
        order(gpu, reader, gpu, s);
    }
    fill(gpu, x, 2, s).unwrap();
    idle(gpu, s);
}

/// What a kernel declares is what counts.
#[test]
fn kernels_by_their_declared_arguments() {
    /// # Safety
    /// None needed.
    unsafe fn nothing(_: LaunchDims, _: &[HostArg]) {}
    let gpu = &gpus(1)[0];
    let (x, y, s, t) = (memory(gpu), memory(gpu), stream(gpu), stream(gpu));
    let launch = |reads: Address, writes: Address, s| {
        let slice = |address, write| KernelArg::Slice { address, bytes: BYTES, write };
        let args = [slice(reads, false), slice(writes, true)];
        let (dims, function) = (LaunchDims::cover(1), RawFunction(0));
        // SAFETY: the kernel does nothing.
        unsafe { gpu.launch(&Launch { name: "saxpy", function, host: Some(nothing), dims, args: &args }, s) }
    };
    assert_eq!(caught(launch(x, y, s), Kind::UninitializedRead).now.detail, "`saxpy`");
    fill(gpu, x, 1, s).unwrap();
    launch(x, y, s).unwrap();
    let text = caught(launch(y, x, t), Kind::Race).to_string();
    assert!(text.contains("launch (`saxpy`, reads) on stream 1 of device 0"), "{text}");
    order(gpu, s, gpu, t);
    launch(y, x, t).unwrap();
    idle(gpu, t);
}

/// The source of a peer copy is written again before the copy has read it.
#[test]
fn a_peer_copys_source_is_kept_until_it_was_read() {
    let gpus = gpus(2);
    let [a, b] = &gpus[..] else { unreachable!() };
    let (xa, xb, sa, sb) = (memory(a), memory(b), stream(a), stream(b));
    fill(a, xa, 1, sa).unwrap();
    caught(peer(b, xb, a, xa, sb), Kind::Race);
    order(a, sa, b, sb);
    peer(b, xb, a, xa, sb).unwrap();
    let report = caught(fill(a, xa, 2, sa), Kind::Race);
    let before = report.before.as_ref().unwrap();
    assert_eq!((before.op, before.write, before.device, before.stream), ("copy_peer", false, Some(1), Some(0)));
    assert!(report.missing.starts_with("stream 0 of device 0 never waited for `copy_peer` on stream 0 of device 1"));
    order(b, sb, a, sa);
    fill(a, xa, 2, sa).unwrap();
    idle(a, sa);
}

#[cfg(feature = "blas")]
#[test]
fn a_product_reads_the_old_matrix_only_if_it_is_to_be_added() {
    use gpu_pool::driver::Gemm;
    let gpu = &gpus(1)[0];
    let (a, b, c, s) = (memory(gpu), memory(gpu), memory(gpu), stream(gpu));
    fill(gpu, a, 0, s).unwrap();
    fill(gpu, b, 0, s).unwrap();
    let product = |beta| {
        let (transpose_a, transpose_b) = (false, false);
        let gemm = Gemm { m: 8, n: 8, k: 8, alpha: 1.0, a, transpose_a, b, transpose_b, beta, c };
        // SAFETY: the matrices are within the memory.
        unsafe { gpu.gemm(&gemm, s) }
    };
    caught(product(1.0), Kind::UninitializedRead);
    product(0.0).unwrap();
    product(1.0).unwrap();
    idle(gpu, s);
}

// ---- events -----------------------------------------------------------------------------------------------------------

#[test]
fn a_chain_of_events_over_three_devices() {
    for cut in [None, Some(0), Some(1)] {
        let gpus = gpus(3);
        let (streams, x) = (gpus.iter().map(stream).collect::<Vec<_>>(), memory(&gpus[0]));
        fill(&gpus[0], x, 1, streams[0]).unwrap();
        for i in 0..2 {
            if cut != Some(i) {
                order(&gpus[i], streams[i], &gpus[i + 1], streams[i + 1]);
            }
        }
        let last = peer(&gpus[2], memory(&gpus[2]), &gpus[0], x, streams[2]);
        match cut {
            None => last.unwrap(),
            Some(_) => drop(caught(last, Kind::Race)),
        }
        gpus.iter().zip(streams).for_each(|(gpu, s)| idle(gpu, s));
    }
}

#[test]
fn a_wait_captures_the_latest_record_at_the_time_of_the_call() {
    let gpu = &gpus(1)[0];
    let (x, y, s, t, e) = (memory(gpu), memory(gpu), stream(gpu), stream(gpu), event(gpu));
    fill(gpu, x, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    fill(gpu, y, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    fill(gpu, x, 2, t).unwrap();
    caught(fill(gpu, y, 2, t), Kind::Race);
    gpu.stream_wait_event(t, e).unwrap();
    fill(gpu, y, 2, t).unwrap();
    // Recorded on another stream it says nothing of the first any more.
    let (z, u) = (memory(gpu), stream(gpu));
    fill(gpu, z, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    gpu.event_record(e, u).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    caught(fill(gpu, z, 2, t), Kind::Race);
    idle(gpu, s);
    idle(gpu, t);
}

#[test]
fn an_event_that_was_never_recorded_is_waited_for() {
    let gpu = &gpus(1)[0];
    let (s, e) = (stream(gpu), event(gpu));
    assert!(gpu.event_query(e).unwrap(), "to ask is no mistake");
    let report = caught(gpu.stream_wait_event(s, e), Kind::UnrecordedEvent);
    assert_eq!((report.now.op, report.now.stream), ("stream_wait_event", Some(0)));
    caught(gpu.event_wait(e, Duration::ZERO).map(drop), Kind::UnrecordedEvent);
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(s, e).unwrap();
    assert!(gpu.event_wait(e, Duration::from_secs(30)).unwrap());
}

// ---- the host -----------------------------------------------------------------------------------------------------------

/// Three ways to learn that something is over, and how much each tells.
#[test]
fn what_the_host_has_waited_for_is_over() {
    let wait_stream = |gpu: &DriverRef, s: RawStream, _: RawEvent| idle(gpu, s);
    let wait_event = |gpu: &DriverRef, _: RawStream, e: RawEvent| {
        assert!(gpu.event_wait(e, Duration::from_secs(30)).unwrap());
    };
    let ask_event = |gpu: &DriverRef, _: RawStream, e: RawEvent| {
        while !gpu.event_query(e).unwrap() {
            thread::yield_now();
        }
    };
    let ask_stream = |gpu: &DriverRef, s: RawStream, _: RawEvent| {
        while !gpu.stream_query(s).unwrap() {
            thread::yield_now();
        }
    };
    type Way = fn(&DriverRef, RawStream, RawEvent);
    let ways: [(Way, bool); 4] = [(wait_stream, true), (wait_event, false), (ask_event, false), (ask_stream, true)];
    for (wait, all) in ways {
        let gpu = &gpus(1)[0];
        let (x, y, s, t, e) = (memory(gpu), memory(gpu), stream(gpu), stream(gpu), event(gpu));
        fill(gpu, x, 1, s).unwrap();
        gpu.event_record(e, s).unwrap();
        fill(gpu, y, 1, s).unwrap();
        caught(fill(gpu, x, 2, t), Kind::Race);
        wait(gpu, s, e);
        fill(gpu, x, 2, t).unwrap();
        let later = fill(gpu, y, 2, t);
        if all {
            later.unwrap();
        } else {
            caught(later, Kind::Race);
        }
        idle(gpu, s);
        idle(gpu, t);
    }
}

/// A wait that ran out of time tells nothing.
#[test]
fn a_wait_in_vain_tells_nothing() {
    let gpu = &gpus(1)[0];
    let (x, s, t, e) = (memory(gpu), stream(gpu), stream(gpu), event(gpu));
    let (open, gate) = mpsc::channel::<()>();
    let hold = move || {
        let _ = gate.recv();
    };
    gpu.launch_host(s, Box::new(hold)).unwrap();
    fill(gpu, x, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    assert!(!gpu.stream_wait_idle(s, Duration::ZERO).unwrap() && !gpu.stream_query(s).unwrap());
    assert!(!gpu.event_wait(e, Duration::ZERO).unwrap() && !gpu.event_query(e).unwrap());
    caught(fill(gpu, x, 2, t), Kind::Race);
    drop(open);
    idle(gpu, s);
    fill(gpu, x, 2, t).unwrap();
    idle(gpu, t);
}

/// What one thread has waited for, another does not know until it is told.
#[test]
fn threads_know_what_they_have_waited_for() {
    let gpu = &gpus(1)[0];
    let checker = gpu.checker().unwrap().0;
    for told in [false, true] {
        let (x, s, t) = (memory(gpu), stream(gpu), stream(gpu));
        fill(gpu, x, 1, s).unwrap();
        let token = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                idle(gpu, s);
                fill(gpu, x, 2, stream(gpu)).unwrap();
                idle(gpu, s);
                checker.release()
            });
            waiter.join().unwrap()
        });
        if told {
            checker.acquire(&token);
            // The other thread's own operation is not among what it has waited for.
            assert_eq!(caught(fill(gpu, x, 3, t), Kind::Race).before.as_ref().unwrap().stream, Some(5));
        } else {
            assert_eq!(caught(fill(gpu, x, 3, t), Kind::Race).before.as_ref().unwrap().stream, Some(2));
        }
    }
}

/// A host function knows what comes before it, and may tell.
#[test]
fn a_host_function_comes_after_what_is_before_it() {
    let gpu = &gpus(1)[0];
    let checker = gpu.checker().unwrap().0.clone();
    let (x, s, t) = (memory(gpu), stream(gpu), stream(gpu));
    fill(gpu, x, 1, s).unwrap();
    let (tell, told) = mpsc::channel();
    let inside = checker.clone();
    gpu.launch_host(s, Box::new(move || tell.send(inside.release()).unwrap())).unwrap();
    let token = told.recv_timeout(Duration::from_secs(30)).unwrap();
    caught(fill(gpu, x, 2, t), Kind::Race);
    checker.acquire(&token);
    fill(gpu, x, 2, t).unwrap();
    idle(gpu, t);
    idle(gpu, s);
    // Its thread keeps nothing of that: a later function on another stream does not know of it.
    let (y, u) = (memory(gpu), stream(gpu));
    fill(gpu, y, 1, s).unwrap();
    let (tell, told) = mpsc::channel();
    for (stream, checker) in [(s, checker.clone()), (u, checker.clone())] {
        let (tell, done) = (tell.clone(), event(gpu));
        gpu.launch_host(stream, Box::new(move || tell.send(checker.release()).unwrap())).unwrap();
        gpu.event_record(done, stream).unwrap();
        while !thread::scope(|scope| scope.spawn(|| gpu.event_query(done).unwrap()).join().unwrap()) {
            thread::yield_now();
        }
    }
    let (_, of_another) = (told.recv().unwrap(), told.recv().unwrap());
    checker.acquire(&of_another);
    caught(fill(gpu, y, 2, t), Kind::Race);
}

// ---- memory -------------------------------------------------------------------------------------------------------------

#[test]
fn bytes_that_nobody_has_written_are_read() {
    let gpu = &gpus(1)[0];
    let (x, to, s) = (memory(gpu), pinned(gpu), stream(gpu));
    // SAFETY: in range; waited for below.
    unsafe { gpu.fill_u8(x, 1, 100, s) }.unwrap();
    assert_eq!(caught(down(gpu, to, x, s), Kind::UninitializedRead).bytes, 100..BYTES);
    fill(gpu, x, 1, s).unwrap();
    down(gpu, to, x, s).unwrap();
    // Page-locked and managed memory begins zeroed.
    // SAFETY: as above.
    unsafe { gpu.copy_to_device(x, pinned(gpu) as *const u8, BYTES, s) }.unwrap();
    let managed = gpu.managed_alloc(BYTES).unwrap() as Address;
    down(gpu, to, managed, s).unwrap();
    idle(gpu, s);
}

#[test]
fn memory_is_freed_while_it_is_in_use() {
    let gpus = gpus(2);
    let [a, b] = &gpus[..] else { unreachable!() };
    let (xa, xb, sa, sb) = (memory(a), memory(b), stream(a), stream(b));
    fill(a, xa, 1, sa).unwrap();
    order(a, sa, b, sb);
    peer(b, xb, a, xa, sb).unwrap();
    idle(a, sa);
    // SAFETY: the checker refuses it, and then it is out of use.
    let report = caught(unsafe { a.mem_free(xa) }, Kind::FreeInUse);
    assert_eq!((report.now.op, report.before.as_ref().unwrap().device), ("mem_free", Some(1)));
    fill(a, xa, 1, sb).unwrap_err();
    idle(b, sb);
    // SAFETY: as above.
    unsafe { a.mem_free(xa) }.unwrap();

    let (p, m) = (pinned(a), a.managed_alloc(BYTES).unwrap());
    down(b, p, xb, sb).unwrap();
    fill(b, m as Address, 1, sb).unwrap();
    // SAFETY: as above.
    unsafe {
        caught(a.host_free(p as *mut u8), Kind::FreeInUse);
        caught(a.managed_free(m), Kind::FreeInUse);
        idle(b, sb);
        a.host_free(p as *mut u8).unwrap();
        a.managed_free(m).unwrap();
    }
}

/// What was submitted to a lost device can never be waited for; its memory goes back all the same.
#[test]
fn a_lost_devices_memory_is_freed() {
    let gpu = &gpus(1)[0];
    let (x, p, s) = (memory(gpu), pinned(gpu), stream(gpu));
    fill(gpu, x, 1, s).unwrap();
    down(gpu, p, x, s).unwrap();
    gpu.launch_host(s, Box::new(|| panic!("a panic that loses the device"))).unwrap();
    assert_eq!(gpu.stream_wait_idle(s, Duration::from_secs(30)).unwrap_err().kind, FaultKind::DeviceLost);
    // SAFETY: nothing runs on the device any more.
    let freed = unsafe { [gpu.mem_free(x), gpu.host_free(p as *mut u8)] };
    assert_eq!(freed.map(|freed| freed.unwrap_err().kind), [FaultKind::DeviceLost; 2]);
    // SAFETY: it is gone already.
    caught(unsafe { gpu.mem_free(x) }, Kind::UseAfterFree);
}

#[test]
fn freed_memory_is_used() {
    let gpu = &gpus(1)[0];
    let (x, s) = (memory(gpu), stream(gpu));
    fill(gpu, x, 1, s).unwrap();
    idle(gpu, s);
    let freed = line() + 2;
    // SAFETY: waited for.
    annotate("let go", || unsafe { gpu.mem_free(x) }).unwrap();
    let report = caught(fill(gpu, x, 2, s), Kind::UseAfterFree);
    let by = report.allocation.as_ref().unwrap().freed.unwrap().unwrap();
    assert_eq!((by.0, by.1.line(), by.1.file()), ("let go", freed, file!()));
    // SAFETY: refused.
    caught(unsafe { gpu.mem_free(x) }, Kind::UseAfterFree);
    // What was never allocated is the driver's business.
    // SAFETY: as above.
    let unknown = unsafe { gpu.mem_free(x + (1 << 30)) }.unwrap_err();
    assert_eq!((unknown.kind, unknown.report), (FaultKind::InvalidArgument, None));
}

/// The same address, handed out again by the driver, is another buffer's.
#[test]
fn an_address_is_another_buffers_after_a_free() {
    let gpu = &gpus(1)[0];
    let (s, t) = (stream(gpu), stream(gpu));
    let mut seen = std::collections::HashMap::new();
    for round in 0..200 {
        let x = pinned(gpu);
        *seen.entry(x).or_insert(0) += 1;
        fill(gpu, x, 1, if round % 2 == 0 { s } else { t }).unwrap();
        idle(gpu, if round % 2 == 0 { s } else { t });
        // SAFETY: waited for.
        unsafe { gpu.host_free(x as *mut u8) }.unwrap();
    }
    assert!(seen.values().any(|&n| n > 1), "the allocator has given no address twice, so nothing was tested");
}

// ---- flags --------------------------------------------------------------------------------------------------------------

#[test]
fn a_flag_raised_before_the_wait() {
    for order in [true, false] {
        let gpu = &gpus(1)[0];
        let (x, flag, s, t) = (memory(gpu), pinned(gpu), stream(gpu), stream(gpu));
        if order {
            fill(gpu, x, 1, s).unwrap();
        }
        raise(gpu, flag, 1, s).unwrap();
        if !order {
            fill(gpu, x, 1, s).unwrap();
        }
        wait_flag(gpu, flag, 1, t);
        let then = fill(gpu, x, 2, t);
        if order {
            then.unwrap();
        } else {
            caught(then, Kind::Race);
        }
        idle(gpu, t);
        idle(gpu, s);
    }
}

/// The one who waits is submitted first, on another device; so are an event's and a third stream's share in that.
#[test]
fn a_flag_raised_after_the_wait() {
    for order_it in [true, false] {
        let gpus = gpus(2);
        let [a, b] = &gpus[..] else { unreachable!() };
        let (x, to, to2, flag) = (memory(a), pinned(a), pinned(a), pinned(a));
        let (s, t, u) = (stream(a), stream(b), stream(b));
        wait_flag(b, flag, 7, t);
        down(b, to, x, t).unwrap();
        order(b, t, b, u);
        down(b, to2, x, u).unwrap();
        raise(a, flag, 6, s).unwrap();
        if order_it {
            fill(a, x, 9, s).unwrap();
            raise(a, flag, 7, s).unwrap();
            caught(fill(a, x, 1, s), Kind::Race);
            idle(b, u);
            assert_eq!((look(to), look(to2)), (9, 9));
        } else {
            let report = caught(raise(a, flag, 7, s), Kind::UninitializedRead);
            assert_eq!((report.now.op, report.now.device), ("copy_to_host", Some(1)));
            // It did not run: nobody was let go.
            assert!(!b.stream_query(t).unwrap());
            fill(a, x, 9, s).unwrap();
            raise(a, flag, 7, s).unwrap();
            idle(b, u);
            assert_eq!(look(to), 9);
        }
        idle(a, s);
        idle(b, t);
    }
}

/// A conflict that a flag might have ordered, but does not, is found when the flag is raised.
#[test]
fn a_flag_that_does_not_order_what_it_was_hoped_to() {
    let gpu = &gpus(1)[0];
    let (x, flag, s, t, u) = (memory(gpu), pinned(gpu), stream(gpu), stream(gpu), stream(gpu));
    fill(gpu, x, 1, u).unwrap();
    wait_flag(gpu, flag, 1, t);
    fill(gpu, x, 2, t).unwrap();
    let report = caught(raise(gpu, flag, 1, s), Kind::Race);
    assert_eq!((report.now.stream, report.before.as_ref().unwrap().stream), (Some(1), Some(2)));
    order(gpu, u, gpu, s);
    raise(gpu, flag, 1, s).unwrap();
    idle(gpu, t);
    caught(fill(gpu, x, 3, stream(gpu)).and(fill(gpu, x, 4, s)), Kind::Race);
}

#[test]
fn flags_race_with_plain_accesses() {
    let gpu = &gpus(1)[0];
    let (flag, s, t) = (pinned(gpu), stream(gpu), stream(gpu));
    raise(gpu, flag, 1, s).unwrap();
    raise(gpu, flag, 2, t).unwrap();
    caught(fill(gpu, flag, 0, s), Kind::Race);
    idle(gpu, t);
    fill(gpu, flag, 0, s).unwrap();
    caught(raise(gpu, flag, 1, t), Kind::Race);
    idle(gpu, s);
}

/// Two streams hand one buffer back and forth by a counter, each round submitted in the "wrong" order.
#[test]
fn a_counter_that_goes_back_and_forth() {
    let gpus = gpus(2);
    let [a, b] = &gpus[..] else { unreachable!() };
    let (shared, flag, s, t) = (pinned(a), pinned(a), stream(a), stream(b));
    for round in 0..50 {
        wait_flag(b, flag, 2 * round + 1, t);
        fill(b, shared, 2, t).unwrap();
        raise(b, flag, 2 * round + 2, t).unwrap();
        if round > 0 {
            wait_flag(a, flag, 2 * round, s);
        }
        fill(a, shared, 1, s).unwrap();
        raise(a, flag, 2 * round + 1, s).unwrap();
    }
    idle(b, t);
    assert_eq!(look(shared), 2);
    idle(a, s);
}

// ---- reports --------------------------------------------------------------------------------------------------------------

#[test]
fn a_report_names_the_places_of_its_user() {
    let gpus = gpus(2);
    let [a, b] = &gpus[..] else { unreachable!() };
    let (s, _, t) = (stream(a), stream(b), stream(b));
    let first = line() + 1;
    let x = annotate("weights", || a.mem_alloc(8192)).unwrap();
    // SAFETY: in range; waited for below.
    annotate("init", || unsafe { a.fill_u8(x, 1, 8192, s) }).unwrap();
    let report = caught(annotate("pull", || peer(b, memory(b), a, x, t)), Kind::Race);
    let file = file!();
    let at = |below: u32, column: u32| format!("{file}:{}:{column}", first + below);
    let text = report.to_string();
    for part in [
        "race on bytes 0..4096 of a buffer of 8192 bytes on device 0\n".to_owned(),
        "\n  now:    pull (peer copy, reads) on stream 1 of device 1  at ".to_owned(),
        format!("\n  before: init (fill, writes) on stream 0 of device 0      at {}", at(2, 5)),
        format!("\n  buffer: allocated by weights at {}", at(0, 13)),
        "\n  missing: stream 1 of device 1 never waited for `init` on stream 0 of device 0: record an event on stream 0 of \
         device 0 after it, and make stream 1 of device 1 wait for it before the pull"
            .to_owned(),
    ] {
        assert!(text.contains(&part), "{part}\n---\n{text}");
    }
    assert_eq!(report.now.site.unwrap().line(), first + 3);
    idle(a, s);
}

/// Wrapping twice changes nothing, and what is not of the checker comes through.
#[test]
fn a_wrapped_driver_is_a_driver() {
    let once = gpus(2);
    let again = check::wrap(once.clone());
    assert!(once.iter().zip(&again).all(|(a, b)| Arc::ptr_eq(a, b)));
    assert!(once.iter().all(|gpu| gpu.as_any().is::<host::HostGpu>()));
    assert!(Arc::ptr_eq(once[0].checker().unwrap().0, once[1].checker().unwrap().0));
    assert!(host::machine(&[HostConfig::default()])[0].checker().is_none());
    let lost = once[0].stream_query(RawStream(77)).unwrap_err();
    assert_eq!((lost.kind, lost.report), (FaultKind::InvalidArgument, None));
    // A peer that is not wrapped will do, too.
    let plain = host::machine(&vec![HostConfig::default(); 2]);
    let checked = check::wrap(plain.clone());
    checked[0].enable_peer(&*plain[1]).unwrap();
    let (x, y, s) = (memory(&checked[0]), memory(&plain[1]), stream(&checked[0]));
    peer(&checked[0], x, &plain[1], y, s).unwrap();
    idle(&checked[0], s);
}
