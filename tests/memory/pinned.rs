//! Page-locked host memory has a pool of its own, with the same order of reuse. (PyTorch `test_caching_pinned_memory`,
//! `test_caching_pinned_memory_multi_gpu`: "the memory is not used again while a copy from it is under way".)

use crate::{
    on_both,
    rig::{Gate, KIB, MIB},
    support::bytes,
};
use gpu_pool::Error;
use parking_lot::Mutex;
use std::thread;

on_both! {
    // Freed while a copy from it is queued; the next one has the memory, and the copy has the old contents.
    1: fn freed_in_flight_and_used_again(gpus) {
        gpus.run(1, |dev| {
            for round in 0..10u8 {
                let gate = Gate::new(gpus);
                let _busy = gate.hold_stream(dev)?;
                let mut a = dev.pinned::<u8>(300 * KIB)?;
                a.as_mut_slice()?.copy_from_slice(&bytes(300 * KIB, round));
                let x = dev.upload_pinned(&a)?;
                drop(a);
                thread::scope(|s| {
                    s.spawn(|| {
                        thread::sleep(std::time::Duration::from_millis(5));
                        gate.open();
                    });
                    // The same memory, most likely; writing to it waits for the copy.
                    let mut b = dev.pinned::<u8>(300 * KIB)?;
                    b.as_mut_slice()?.fill(255);
                    assert!(dev.download(&x)? == bytes(300 * KIB, round), "round {round}");
                    Ok::<_, Error>(())
                })?;
            }
            Ok(())
        });
    }

    // The same with the copy on another device than the thread that frees and allocates.
    2: fn freed_while_a_peer_copies_from_it(gpus) {
        let pool = gpus.pool(2);
        for round in 0..6u8 {
            let gate = Gate::new(gpus);
            let mut a = pool.pinned::<u8>(MIB).unwrap();
            a.as_mut_slice().unwrap().copy_from_slice(&bytes(MIB, round));
            let a = Mutex::new(Some(a));
            pool.run(|dev, _| {
                if dev.rank() == 1 {
                    let _busy = gate.hold_stream(dev)?;
                    let x = dev.upload_pinned(a.lock().as_ref().unwrap())?;
                    dev.barrier()?;
                    dev.barrier()?;
                    gate.open();
                    assert!(dev.download(&x)? == bytes(MIB, round), "round {round}");
                    return Ok(());
                }
                dev.barrier()?;
                drop(a.lock().take());
                let b = dev.pinned::<u8>(MIB)?;
                dev.barrier()?;
                // Zeros: whatever was under way has been waited for.
                assert!(b.as_slice()?.iter().all(|&x| x == 0));
                Ok(())
            })
            .unwrap();
        }
    }

    // From many threads at once, of all sizes.
    1: fn many_threads_ask_for_it(gpus) {
        let pool = gpus.pool(1);
        thread::scope(|s| {
            for seed in 0..4u8 {
                let pool = &pool;
                s.spawn(move || {
                    for i in 1..60 {
                        let mut x = pool.pinned::<u8>(i * 777).unwrap();
                        x.as_mut_slice().unwrap().fill(seed);
                        thread::yield_now();
                        assert!(x.as_slice().unwrap().iter().all(|&x| x == seed), "two threads have the same memory");
                    }
                });
            }
        });
    }
}
