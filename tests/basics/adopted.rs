//! Memory and streams of other code: used as one's own, never freed by the pool, and released after the last use.
//! (cudarc [#519](https://github.com/chelsea0x3b/cudarc/issues/519): no way in for foreign memory; kornia-rs PR#995: a
//! borrowed stream.)

use crate::{
    on_both,
    support::{Gpus, failure, slow_add},
};
use gpu_pool::{Device, DeviceBuffer, Error, ReduceOp, Result};
use std::{
    any::Any,
    sync::{Arc, Mutex},
};

/// The owner of foreign memory. Its drop frees the memory; `alive` then has one holder less.
struct Owner {
    _alive: Arc<()>,
    _memory: Box<dyn Any + Send>,
}

/// Memory of other code that holds `values`: its address, and its owner.
fn foreign(dev: &Device, values: &[u32], alive: &Arc<()>) -> Result<(u64, Owner)> {
    let (address, _memory) = memory(dev, values)?;
    Ok((address, Owner { _alive: alive.clone(), _memory }))
}

#[cfg(feature = "cuda")]
fn memory(dev: &Device, values: &[u32]) -> Result<(u64, Box<dyn Any + Send>)> {
    use cudarc::driver::DevicePtr;

    let Ok(cuda) = dev.cuda() else { return Ok(host_memory(values)) };
    let stream = cuda.context().default_stream();
    let slice = stream.clone_htod(values).map_err(Error::custom)?;
    stream.synchronize().map_err(Error::custom)?;
    let address = slice.device_ptr(&stream).0;
    Ok((address, Box::new(slice)))
}

#[cfg(not(feature = "cuda"))]
fn memory(_: &Device, values: &[u32]) -> Result<(u64, Box<dyn Any + Send>)> {
    Ok(host_memory(values))
}

fn host_memory(values: &[u32]) -> (u64, Box<dyn Any + Send>) {
    let values = values.to_vec();
    (values.as_ptr() as u64, Box::new(values))
}

/// A buffer of other code's memory with these values.
fn adopted(dev: &Device, values: &[u32], alive: &Arc<()>) -> Result<DeviceBuffer<u32>> {
    let (address, owner) = foreign(dev, values, alive)?;
    // SAFETY: the owner keeps so many values, which nothing else uses.
    unsafe { dev.adopt(address, values.len(), owner) }
}

fn is_released(alive: &Arc<()>) -> bool {
    Arc::strong_count(alive) == 1
}

on_both! {
    2: fn adopted_memory_is_used_as_any_other(gpus) {
        let alive = Arc::new(());
        let pool = gpus.run(2, |dev| {
            let mut x = adopted(dev, &[1, 2, 3, 4, 5], &alive)?;
            assert_eq!((dev.stats().adopted, x.len(), x.device()), (20, 5, dev.index()));
            slow_add(dev, &mut x, 10, 100)?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            // In part, on another stream, and in a copy to memory of the pool.
            let second = dev.stream()?;
            dev.on(&second).fill(&mut x.slice_mut(1..2), 7)?;
            let mut own = dev.zeros::<u32>(5)?;
            dev.copy(&x, &mut own)?;
            assert_eq!(dev.download(&own)?, [22, 7, 26, 28, 30]);
            // By a graph.
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 10))?;
            dev.launch_graph(&graph)?;
            dev.launch_graph(&graph)?;
            assert_eq!(dev.download(&x)?, [24, 9, 28, 30, 32]);
            Ok(())
        });
        pool.close().unwrap();
        assert!(is_released(&alive));
    }

    2: fn peers_read_and_write_adopted_memory(gpus) {
        let alive = Arc::new(());
        let pool = gpus.pool(2);
        let lent = Mutex::new(None);
        let seen = pool.run(|dev, shard| {
            let group = dev.group(&[0, 1])?;
            if shard.index() == 0 {
                *lent.lock().unwrap() = Some(adopted(dev, &[3; 1000], &alive)?);
            }
            group.barrier()?;
            if shard.index() == 0 {
                return Ok(vec![3; 1000]);
            }
            let far = lent.lock().unwrap().take().unwrap();
            let own = far.copy_to(dev)?;
            drop(far); // here, while the copy runs
            dev.download(&own)
        });
        assert!(seen.unwrap().iter().all(|part| part == &[3; 1000]));
        pool.run(|_, _| Ok(())).unwrap();
        assert!(is_released(&alive));
    }

    // The owner stays until the last use is over, and is dropped no later than the pool.
    1: fn the_owner_outlives_the_last_use(gpus) {
        let alive = Arc::new(());
        let pool = gpus.run(1, |dev| {
            let mut x = adopted(dev, &[0; 64], &alive)?;
            slow_add(dev, &mut x, 1, 100_000)?;
            drop(x);
            if !gpus.is_cuda() { // a GPU may be faster than this thread
                assert!(!is_released(&alive) && dev.stats().adopted == 0);
            }
            dev.synchronize()
        });
        assert!(is_released(&alive), "the scope's end has seen that the use is over");
        let kept = pool.run(|dev, _| adopted(dev, &[1; 8], &alive)).unwrap();
        pool.close().unwrap();
        assert!(!is_released(&alive));
        std::thread::spawn(move || drop(kept)).join().unwrap();
        assert!(is_released(&alive));
    }

    1: fn a_failed_scope_releases_what_it_dropped(gpus) {
        let alive = Arc::new(());
        let pool = gpus.pool(1);
        let failed = pool.run(|dev, _| -> Result<()> {
            let mut x = adopted(dev, &[0; 64], &alive)?;
            slow_add(dev, &mut x, 1, 1000)?;
            Err(Error::custom("so it goes"))
        });
        assert!(failed.is_err());
        pool.run(|dev, _| dev.synchronize()).unwrap();
        assert!(is_released(&alive));
    }

    1: fn nothing_is_adopted_that_cannot_be(gpus) {
        let alive = Arc::new(());
        gpus.run(1, |dev| {
            let refused = |address, len, text: &str| {
                let owner = Owner { _alive: alive.clone(), _memory: Box::new(()) };
                // SAFETY: it is refused.
                let error = failure(unsafe { dev.adopt::<u32>(address, len, owner) });
                assert!(matches!(error, Error::InvalidArgument { op: "adopt", .. }), "{error:?}");
                assert!(error.to_string().contains(text), "{error}");
                assert!(is_released(&alive));
            };
            refused(0, 4, "null");
            refused(4097, 4, "misaligned");
            refused(4096, usize::MAX / 2, "more than memory can hold");
            refused(u64::MAX - 3, 4, "more than memory can hold");
            if gpus.is_cuda() {
                let (address, _memory) = host_memory(&[0; 4]);
                refused(address, 4, "not device memory");
                let (address, _owner) = foreign(dev, &[0; 4], &Arc::new(()))?;
                refused(address, 64 << 20, "the allocation has");
            } else {
                refused(dev.zeros::<u32>(4)?.address(), 4, "an address of a software GPU");
            }
            // Empty tensors often have no address.
            let owner = Owner { _alive: alive.clone(), _memory: Box::new(()) };
            // SAFETY: no elements.
            let empty = unsafe { dev.adopt::<u32>(0, 0, owner)? };
            assert!(empty.is_empty() && is_released(&alive));
            Ok(())
        });
    }
}

/// What other code's drop does wrong stays its own.
#[test]
fn a_panic_of_the_owners_drop_is_contained() {
    struct Panics(Arc<()>);
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("{}", Arc::strong_count(&self.0));
        }
    }
    let alive = Arc::new(());
    let memory = [1u32; 16];
    let pool = Gpus::software().pool(1);
    for _ in 0..2 {
        let sum = pool.run(|dev, _| {
            // SAFETY: sixteen values, which outlive the pool and are only read.
            let x = unsafe { dev.adopt::<u32>(memory.as_ptr() as u64, 16, Panics(alive.clone()))? };
            dev.download(&x)
        });
        assert_eq!(sum.unwrap(), [[1; 16]]);
    }
    pool.close().unwrap();
    assert!(is_released(&alive));
}

/// Adopted memory is aligned for its elements; a fill of one word for each element needs more.
#[test]
fn a_fill_of_memory_that_is_not_aligned_for_words_is_refused() {
    fn fills<T: gpu_pool::DeviceCopy + PartialEq + std::fmt::Debug>(
        dev: &Device,
        address: u64,
        value: T,
    ) -> Result<()> {
        // SAFETY: memory of the caller, which is larger.
        let mut x = unsafe { dev.adopt::<T>(address, 3, ())? };
        dev.fill(&mut x, value)?;
        assert_eq!(dev.download(&x)?, [value; 3]);
        Ok(())
    }
    let mut memory = vec![0u64; 16];
    let at = memory.as_mut_ptr().expose_provenance() as u64;
    let pool = Gpus::software().pool(1);
    let done = pool.run(|dev, _| {
        fills(dev, at + 8, [1.0f32, 2.0])?;
        fills(dev, at + 4, [1u8, 2, 3, 4])?;
        fills(dev, at + 2, [1u8, 2])?;
        fills(dev, at + 1, 7u8)?;
        let refused =
            [fills(dev, at + 4, [1.0f32, 2.0]), fills(dev, at + 1, [1u8, 2, 3, 4]), fills(dev, at + 1, [1u8, 2])];
        let is_invalid = |done: &Result<()>| matches!(done, Err(Error::InvalidArgument { op: "fill", .. }));
        assert!(refused.iter().all(is_invalid), "{refused:?}");
        Ok(())
    });
    done.unwrap();
    pool.close().unwrap();
    drop(memory);
}

/// The race checker follows adopted memory: an unordered write beside a running one is a report.
#[test]
fn a_race_on_adopted_memory_is_found() {
    let racing = |ordered: bool| {
        let pool = Gpus::software().pool(1);
        pool.run(|dev, _| {
            let mut x = adopted(dev, &[0; 64], &Arc::new(()))?;
            let second = dev.stream()?;
            dev.fill(&mut x, 1)?;
            let other = dev.on(&second);
            if ordered {
                return other.fill(&mut x, 2);
            }
            // SAFETY: a race, which the checker refuses before it runs.
            unsafe { other.unordered() }.fill(&mut x, 2)
        })
    };
    assert!(racing(true).is_ok());
    assert!(matches!(failure(racing(false)), Error::Misuse { .. }));
}
