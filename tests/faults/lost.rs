//! Devices that are lost: named, and the others go on. Hardware is not lost on demand, so this is for software GPUs.

use crate::{
    rig::{CRASH, STRAY_MODULE, assert_works, host, reduce},
    support::{self, TIMEOUT, failure, guarded},
};
use gpu_pool::{Error, LaunchDims, ReduceOp, kernel};

/// Rule 9. xmr-stak#2054: the bad GPU is named, and the others go on.
#[test]
fn a_lost_device_is_named_and_the_others_keep_working() {
    guarded(|| {
        let pool = host(3);
        let kept = pool.run(|dev, _| dev.upload(&[dev.index() as f32; 4])).unwrap();
        let error = failure(pool.run(|dev, _| {
            if dev.index() == 1 {
                let mut x = dev.zeros::<u32>(4)?;
                // SAFETY: the kernel touches nothing.
                unsafe { dev.launch(&CRASH, LaunchDims::cover(1), (&mut x,)) }?;
            }
            reduce(dev, 1000)?;
            dev.barrier()?;
            dev.synchronize()
        }));
        let Error::DeviceLost { device: 1, name, .. } = &error else { panic!("{error}") };
        assert!(name.contains("LAUNCH_FAILED") && name.contains("illegal address, so to speak"), "{name}");
        assert_eq!(pool.report().lost, [false, true, false]);
        // The device stays lost, whatever is asked of it,
        for _ in 0..2 {
            let error = failure(pool.on(&[1]).run(|dev, _| dev.zeros::<u8>(1)));
            assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
            let error = failure(pool.run(|dev, _| dev.zeros::<u8>(1)));
            assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
        }
        // a gang of the others works on, with their data,
        let sums = pool.on(&[0, 2]).run(|dev, _| {
            let mut x = kept[dev.index()].copy_to(dev)?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), [[2.0; 4]; 2]);
        // and they make a pool of their own.
        let rest = pool.survivors().unwrap();
        assert_eq!(rest.device_count(), 2);
        assert_eq!(rest.run(|dev, _| Ok(dev.info().ordinal)).unwrap(), [0, 2]);
        assert_works(&rest);
        drop(kept);
        pool.close().unwrap();
        assert_works(&rest);
    });
}

/// One after the other, while peers wait for each in a collective.
#[test]
fn devices_are_lost_until_none_is_left() {
    guarded(|| {
        let mut pool = support::builder().host(3).module(&STRAY_MODULE).memory_limit(64 << 20).build().unwrap();
        for left in (0..3).rev() {
            let error = failure(pool.run(|dev, _| {
                if dev.rank() == 0 {
                    let mut x = dev.zeros::<u32>(1)?;
                    // SAFETY: the kernel touches nothing.
                    unsafe { dev.launch(&CRASH, LaunchDims::cover(1), (&mut x,)) }?;
                    return dev.synchronize();
                }
                reduce(dev, 10)
            }));
            assert!(matches!(error, Error::DeviceLost { device: 0, .. }), "{error}");
            match pool.survivors() {
                Ok(rest) => {
                    assert_eq!(rest.device_count(), left);
                    assert_works(&rest);
                    // The settings go with it.
                    let error = failure(rest.run(|dev, _| dev.zeros::<u8>(100 << 20)));
                    assert!(matches!(error, Error::OutOfMemory { capacity, .. } if capacity == 64 << 20), "{error}");
                    pool = rest;
                }
                Err(error) => {
                    assert!(left == 0 && matches!(error, Error::NoDevice { .. }), "{left}: {error}");
                    return;
                }
            }
        }
        panic!("three devices died, and some are left");
    });
}

/// A panic's payload is a value of the user's, and so is its `Drop`: that panics, too, and the workers live on.
#[test]
fn a_payload_that_panics_when_it_is_dropped_loses_its_device_only() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a payload panics");
        }
    }
    kernel! {
        static BOMB: "bomb" in STRAY_MODULE, fn(x: &mut [u32]) |_dims| {
            if x.first() == Some(&0) {
                std::panic::panic_any(Bomb);
            }
            x.fill(7);
        }
    }
    // Each of them would cost a worker.
    const DEVICES: usize = 10;
    guarded(|| {
        let builder = support::builder().host(DEVICES).module(&STRAY_MODULE).timeout(TIMEOUT / 2);
        let pool = builder.build().unwrap();
        let work = |device: usize, first: u32| {
            pool.on(&[device]).run(|dev, _| {
                let mut x = dev.upload(&[first])?;
                // SAFETY: the kernel touches what its signature says.
                unsafe { dev.launch(&BOMB, LaunchDims::cover(1), (&mut x,)) }?;
                dev.download(&x)
            })
        };
        for device in 0..DEVICES - 1 {
            let error = failure(work(device, 0));
            assert!(matches!(&error, Error::DeviceLost { device: lost, .. } if *lost == device), "{error}");
        }
        assert_eq!(work(DEVICES - 1, 1).unwrap(), [[7]]);
    });
}
