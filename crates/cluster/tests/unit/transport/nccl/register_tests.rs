//! Registered memory, over the fake library of [`fake_tests`](super::fake_tests): the order of its calls, and who keeps
//! the memory.

use super::{
    fake_tests::{LONG, lost, made, start},
    *,
};
use crate::runtime::{BufferInternals, DeviceInternals, memory::Access};
use gpu_pool::{Device, DeviceBuffer, GpuPool};
use std::sync::mpsc;

/// Runs `f` on a device with a chunk of its own, and a connected transport whose rail 0 has the fake with this number.
fn with_chunk(id: u8, f: impl Fn(&Device, DeviceBuffer<u8>, Nccl) -> Result<()> + Sync) {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let done = pool.run(|dev, _| {
        let (nccl, _, connected) = start([id, 0], LONG);
        assert!(connected.iter().all(Result::is_ok));
        made(id).iter().for_each(|fake| fake.plan.lock().calls.clear());
        f(dev, dev.zeros_dedicated(100)?, nccl)
    });
    done.unwrap();
}

/// Of both rails: they connect in any order.
fn calls(id: u8) -> Vec<&'static str> {
    made(id).iter().flat_map(|fake| fake.plan.lock().calls.clone()).collect()
}

#[test]
fn a_chunk_is_registered_once_and_until_the_last_user() {
    with_chunk(21, |_, chunk, nccl| {
        let at = chunk.address();
        assert_eq!(nccl.registered(0, at), None);
        let first = nccl.register(0, chunk.block())?.unwrap();
        let second = nccl.register(0, chunk.block())?.unwrap();
        assert_eq!((nccl.registered(0, at), nccl.registered(0, at + 99)), (Some(0), Some(99)));
        assert_eq!((nccl.registered(1, at), nccl.registered(0, at + (1 << 40))), (None, None));
        drop(first);
        assert_eq!((nccl.registered(0, at), calls(21)), (Some(0), vec!["register"]));
        // The buffer may go first.
        drop(chunk);
        drop(second);
        assert_eq!((nccl.registered(0, at), calls(21)), (None, vec!["register", "deregister"]));
        nccl.close()
    });
    assert_eq!(calls(21).iter().filter(|call| **call == "deregister").count(), 1);
}

#[test]
fn a_refusal_is_typed_and_ends_nothing() {
    with_chunk(22, |_, chunk, nccl| {
        made(22).iter().for_each(|fake| fake.plan.lock().fails = 4);
        let error = nccl.register(0, chunk.block()).err().unwrap();
        assert!(matches!(error, Error::Transport { op: "ncclCommRegister", code: 4, .. }), "{error:?}");
        assert_eq!((nccl.registered(0, chunk.address()), nccl.failed(0).is_none()), (None, true));
        let error = nccl.register(5, chunk.block()).err().unwrap();
        assert!(matches!(error, Error::Transport { op: "ncclCommRegister", .. }), "{error:?}");
        // A user may tell NCCL to register nothing.
        made(22).iter().for_each(|fake| fake.plan.lock().registers_nothing = true);
        made(22).iter().for_each(|fake| fake.plan.lock().fails = 0);
        assert!(nccl.register(0, chunk.block())?.is_none() && nccl.registered(0, chunk.address()).is_none());
        assert!(!calls(22).contains(&"deregister"));
        nccl.close()
    });
}

/// The communicator's end is the end of its registrations; before it nobody gets the memory.
#[test]
fn what_outlives_the_communicator_calls_nothing() {
    with_chunk(23, |_, chunk, nccl| {
        let registered = nccl.register(0, chunk.block())?.unwrap();
        nccl.close()?;
        assert_eq!(nccl.registered(0, chunk.address()), None);
        drop(registered);
        assert!(matches!(nccl.register(0, chunk.block()), Err(Error::Transport { .. })));
        Ok(())
    });
    assert!(calls(23).contains(&"destroy") && !calls(23).contains(&"deregister"));
    with_chunk(24, |_, chunk, nccl| {
        let registered = nccl.register(0, chunk.block())?.unwrap();
        let hang = Arc::new(Mutex::new(()));
        let guard = hang.lock();
        made(24).iter().for_each(|fake| fake.plan.lock().hang = Some(hang.clone()));
        nccl.rails.fail(&lost());
        let start = Instant::now();
        while !nccl.rails.rails[0].get().unwrap().has_ended() {
            assert!(start.elapsed() < LONG);
            thread::sleep(Duration::from_millis(1));
        }
        // NCCL may still use it.
        drop(registered);
        assert_eq!(nccl.registered(0, chunk.address()), Some(0));
        assert!(matches!(nccl.register(0, chunk.block()), Err(Error::HostLost { .. })));
        drop(guard);
        assert!(nccl.rails.wait_until_over(LONG));
        assert_eq!(nccl.registered(0, chunk.address()), None);
        Ok(())
    });
    assert!(!calls(24).contains(&"deregister"));
}

/// A use of the buffer that ends when the sender is dropped.
fn use_it(dev: &Device, chunk: &DeviceBuffer<u8>) -> Result<mpsc::Sender<()>> {
    let (end, ended) = mpsc::channel::<()>();
    let mut op = dev.op("test")?;
    op.touch(chunk.block(), 0..8, Access::Write, false)?;
    op.submit(|driver, stream| driver.launch_host(stream, Box::new(move || _ = ended.recv())))?;
    Ok(end)
}

#[test]
fn memory_in_use_stays_registered() {
    with_chunk(25, |dev, chunk, nccl| {
        let registered = nccl.register(0, chunk.block())?.unwrap();
        let end = use_it(dev, &chunk)?;
        thread::scope(|scope| {
            let dropped = scope.spawn(move || drop(registered));
            thread::sleep(Duration::from_millis(60));
            assert!(!dropped.is_finished() && calls(25) == ["register"], "{:?}", calls(25));
            drop(end);
        });
        assert_eq!(calls(25), ["register", "deregister"]);
        // A communicator that ends meanwhile ends the wait.
        let registered = nccl.register(0, chunk.block())?.unwrap();
        let end = use_it(dev, &chunk)?;
        assert!(nccl.abort(&lost()));
        drop(registered);
        drop(end);
        Ok(())
    });
    assert_eq!(calls(25).iter().filter(|call| **call == "deregister").count(), 1);
}
