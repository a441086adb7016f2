//! Streams of other code, which software GPUs have only by their drivers.

use crate::{
    Error, GpuPool,
    driver::{
        RawStream,
        host::{self, HostConfig},
    },
};
use std::{
    sync::mpsc::channel,
    time::{Duration, Instant},
};

#[test]
fn work_on_an_adopted_stream_comes_after_other_codes_and_before_the_scopes_end() {
    let gpus = host::machine(&[HostConfig::default()]);
    let (driver, foreign) = (gpus[0].clone(), gpus[0].stream_create(0).unwrap());
    let pool = GpuPool::builder().with_drivers(gpus).unwrap();
    let (release, held) = channel::<()>();
    driver.launch_host(foreign, Box::new(move || held.recv().unwrap_or(()))).unwrap();
    pool.run(|dev, _| {
        // SAFETY: the stream lives until the end of the test, after the pool.
        let (stream, again) = unsafe { (dev.adopt_stream(foreign.0)?, dev.adopt_stream(foreign.0)?) };
        assert_eq!(stream.core.id, again.core.id);
        // Only the adopted stream waits for the other code.
        let mut x = dev.zeros::<u32>(8)?;
        dev.synchronize()?;
        dev.on(&stream).fill(&mut x, 7)?;
        assert!(!driver.stream_query(foreign).unwrap());
        // Our stream waits for the adopted one by an event.
        let mut y = dev.zeros::<u32>(8)?;
        dev.copy(&x, &mut y)?;
        release.send(()).unwrap();
        assert_eq!(dev.download(&y)?, [7; 8]);
        // It is not handed out as a stream of the pool.
        drop((stream, again));
        let fresh = (0..40).map(|_| dev.stream()).collect::<Result<Vec<_>, _>>()?;
        assert!(fresh.iter().all(|stream| stream.core.raw != foreign));
        // The end of the scope waits for work that has no number.
        let begun = Instant::now();
        driver.launch_host(foreign, Box::new(|| std::thread::sleep(Duration::from_millis(50)))).unwrap();
        Ok(begun)
    })
    .map(|begun| assert!(begun[0].elapsed() >= Duration::from_millis(50)))
    .unwrap();
    pool.close().unwrap();
    // The pool has not destroyed it.
    assert!(driver.stream_query(foreign).unwrap());
    // SAFETY: nothing uses it any more.
    unsafe { driver.stream_destroy(foreign).unwrap() };
}

/// A read on the other code's stream carries that code's work along: further reads on other streams come after it, and
/// its own further work comes after reads that were before.
#[test]
fn reads_of_adopted_memory_on_its_stream_are_in_order_with_all() {
    let gpus = host::machine(&[HostConfig::default()]);
    let (driver, foreign) = (gpus[0].clone(), gpus[0].stream_create(0).unwrap());
    let pool = GpuPool::builder().with_drivers(gpus).unwrap();
    pool.run(|dev, _| {
        let words = vec![7u32; 8];
        let address = words.as_ptr().expose_provenance() as u64;
        // SAFETY: the vector's memory, which the buffer keeps; the stream lives longer than the pool.
        let (x, stream) = unsafe { (dev.adopt::<u32>(address, 8, words)?, dev.adopt_stream(foreign.0)?) };
        let (mut a, mut b) = (dev.zeros::<u32>(8)?, dev.zeros::<u32>(8)?);
        let (graph, ()) = dev.capture(|dev| dev.copy(&x, &mut a))?;
        dev.synchronize()?;
        for by_graph in [false, true] {
            let mut read_there = || match by_graph {
                true => dev.on(&stream).launch_graph(&graph),
                false => dev.on(&stream).copy(&x, &mut a),
            };
            let (release, held) = channel::<()>();
            // It stands for a kernel that writes the memory.
            driver.launch_host(foreign, Box::new(move || held.recv().unwrap_or(()))).unwrap();
            read_there()?;
            dev.copy(&x, &mut b)?;
            let own = dev.record()?;
            std::thread::sleep(Duration::from_millis(20));
            assert!(!own.is_complete()?, "it comes after the other code's work");
            release.send(()).unwrap();
            dev.synchronize()?;
            dev.on(&stream).synchronize()?;
            // The other way round: this read is before the last use on that stream, and so before what follows there.
            let (release, held) = channel::<()>();
            driver.launch_host(dev.stream.raw, Box::new(move || held.recv().unwrap_or(()))).unwrap();
            dev.copy(&x, &mut b)?;
            read_there()?;
            std::thread::sleep(Duration::from_millis(20));
            assert!(!driver.stream_query(foreign).unwrap(), "it waits for the read");
            release.send(()).unwrap();
            dev.synchronize()?;
            dev.on(&stream).synchronize()?;
        }
        Ok(())
    })
    .unwrap();
    pool.close().unwrap();
    // SAFETY: nothing uses it any more.
    unsafe { driver.stream_destroy(foreign).unwrap() };
}

/// The consumer may write the tensor, so no other process may read the memory.
#[cfg(all(feature = "dlpack", target_os = "linux"))]
#[test]
fn a_buffer_that_another_process_reads_is_not_exported() {
    use crate::memory::hazard::{Access, Lending};
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        let lending = std::sync::Arc::new(Lending::default());
        for lent in [false, true] {
            let (x, _memory) = dev.apart("test", 4096, &lending)?;
            assert!(!lent || lending.lend(Access::Read));
            let len = x.len();
            match dev.to_dlpack(x, &[len]) {
                Ok(_) => assert!(!lent),
                Err(error) => assert!(lent && matches!(error, Error::Borrowed { .. }), "{error}"),
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The consumer's stream waits for the producer's work, and the memory's next use for the consumer's.
#[cfg(feature = "dlpack")]
#[test]
fn an_exported_buffer_is_ordered_with_the_consumers_stream() {
    let gpus = host::machine(&[HostConfig::default()]);
    let (driver, foreign) = (gpus[0].clone(), gpus[0].stream_create(0).unwrap());
    let pool = GpuPool::builder().with_drivers(gpus).unwrap();
    pool.run(|dev, _| {
        let (release, held) = channel::<()>();
        let second = dev.stream()?;
        let mut x = dev.zeros::<u32>(8)?;
        driver.launch_host(second.core.raw, Box::new(move || held.recv().unwrap_or(()))).unwrap();
        dev.on(&second).fill(&mut x, 7)?;
        let address = x.address();
        // SAFETY: the stream lives until the end of the test, after the pool.
        let tensor = unsafe { dev.to_dlpack_on(x, &[2, 4], foreign.0)? };
        assert!(!driver.stream_query(foreign).unwrap(), "it waits for the fill");
        release.send(()).unwrap();
        // The consumer's work, which it does not wait for.
        let (release, held) = channel::<()>();
        driver.launch_host(foreign, Box::new(move || held.recv().unwrap_or(()))).unwrap();
        // SAFETY: eight words.
        unsafe { driver.fill_u32(address, 9, 8, foreign).unwrap() };
        drop(tensor);
        let mut y = dev.zeros::<u32>(8)?;
        if y.address() == address {
            dev.fill(&mut y, 1)?;
            release.send(()).unwrap();
            assert_eq!(dev.download(&y)?, [1; 8], "after the consumer's work");
        }
        drop(release);
        Ok(())
    })
    .unwrap();
    pool.close().unwrap();
}

#[test]
fn a_stream_of_no_or_of_another_device_is_refused() {
    let gpus = host::machine(&[HostConfig::default(), HostConfig::default()]);
    let streams = [0, 1].map(|device: usize| gpus[device].stream_create(0).unwrap());
    let pool = GpuPool::builder().with_drivers(gpus).unwrap();
    pool.run(|dev, shard| {
        for raw in [streams[1 - shard.index()], RawStream(u64::MAX)] {
            // SAFETY: it is refused.
            let error = unsafe { dev.adopt_stream(raw.0) }.map(drop).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { op: "adopt_stream", .. }), "{error}");
        }
        // SAFETY: a stream of this device, which lives as long as the machine.
        unsafe { dev.adopt_stream(streams[shard.index()].0).map(drop) }
    })
    .unwrap();
}
