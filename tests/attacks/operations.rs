//! What safe code could do to the library if it wanted to; each of these once worked.

use crate::support::{TIMEOUT, guarded};
use gpu_pool::{AsView, AsViewMut, DeviceBuffer, DeviceView, DeviceViewMut, Error, GpuPool, Matrix, Result};
use gpu_pool_lab::prelude::*;
use std::{sync::mpsc, thread, time::Duration};

/// Reads as one buffer and writes as another: `AsView` and `AsViewMut` are public and safe to implement.
struct TwoFaced<'a, T: gpu_pool::DeviceCopy> {
    long: &'a DeviceBuffer<T>,
    short: &'a mut DeviceBuffer<T>,
}

impl<T: gpu_pool::DeviceCopy> AsView for TwoFaced<'_, T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        self.long.view()
    }
}

impl<T: gpu_pool::DeviceCopy> AsViewMut for TwoFaced<'_, T> {
    fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        self.short.view_mut()
    }
}

/// Forty neighbours in one slab; `write` gets one of them. How many words of the others are not zero afterwards?
fn damage(write: impl Fn(&gpu_pool::Device, &mut DeviceBuffer<f32>) -> Result<()> + Sync) -> usize {
    let pool = GpuPool::builder().check(gpu_pool_lab::Check::Races).host(1).build().unwrap();
    let damage = pool.run(|dev, _| {
        let mut small = (0..40).map(|_| dev.zeros::<f32>(64)).collect::<Result<Vec<_>>>()?;
        let mut short = small.remove(20);
        let _ = write(dev, &mut short);
        let mut damage = 0;
        for other in &small {
            damage += dev.download(other)?.iter().filter(|&&x| x != 0.0).count();
        }
        Ok(damage)
    });
    damage.unwrap()[0]
}

#[test]
fn fill_takes_address_and_length_from_one_view() {
    let hit = damage(|dev, short| {
        let long = dev.zeros(2048)?;
        dev.fill(&mut TwoFaced { long: &long, short }, 7.0)
    });
    assert_eq!(hit, 0);
}

#[test]
fn gemm_takes_address_and_length_from_one_view() {
    let hit = damage(|dev, short| {
        let long = dev.zeros(1024)?;
        let mut a = dev.zeros::<f32>(32)?;
        dev.fill(&mut a, 1.0)?;
        let (column, row) = (Matrix::new(&a, 32, 1)?, Matrix::new(&a, 1, 32)?);
        dev.gemm(1.0, column, row, 0.0, &mut TwoFaced { long: &long, short })
    });
    assert_eq!(hit, 0);
}

#[test]
fn every_other_operation_does_too() {
    let hit = damage(|dev, short| {
        let long = dev.zeros::<f32>(2048)?;
        let _ = dev.scale(&mut TwoFaced { long: &long, short: &mut *short }, 2.0);
        let _ = dev.axpy(1.0, &long, &mut TwoFaced { long: &long, short: &mut *short });
        let _ = dev.upload_into(&[1.0; 2048], &mut TwoFaced { long: &long, short: &mut *short });
        let _ = dev.copy(&long, &mut TwoFaced { long: &long, short: &mut *short });
        dev.all_reduce(&mut TwoFaced { long: &long, short }, gpu_pool::ReduceOp::Sum)
    });
    assert_eq!(hit, 0);
}

fn two() -> GpuPool {
    GpuPool::builder().check(gpu_pool_lab::Check::Races).host(2).timeout(TIMEOUT / 2).build().unwrap()
}

/// Converting the library's error runs the caller's code: on the caller's thread, not where peers wait for it.
#[test]
fn an_error_conversion_that_panics_reaches_the_caller() {
    #[derive(Debug)]
    struct Refuses;
    impl From<Error> for Refuses {
        fn from(_: Error) -> Self {
            panic!("no")
        }
    }
    impl std::fmt::Display for Refuses {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("refuses")
        }
    }
    guarded(|| {
        let pool = two();
        let scope = || pool.try_run::<(), Refuses>(|dev, _| if dev.index() == 0 { panic!("first") } else { Ok(()) });
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(scope)).is_err());
        assert_eq!(pool.run(|dev, _| dev.exchange(dev.index())).unwrap(), [[0, 1], [0, 1]]);
    });
}

/// So does dropping the errors that nobody will see.
#[test]
fn errors_of_the_caller_are_dropped_on_its_thread() {
    struct Homesick;
    impl Drop for Homesick {
        fn drop(&mut self) {
            assert!(!thread::current().name().is_some_and(|name| name.starts_with("gpu-pool")));
        }
    }
    impl From<Error> for Homesick {
        fn from(_: Error) -> Self {
            Homesick
        }
    }
    impl std::fmt::Display for Homesick {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("homesick")
        }
    }
    guarded(|| {
        let pool = two();
        assert!(pool.try_run::<(), Homesick>(|_, _| Err(Homesick)).is_err());
        assert_eq!(pool.run(|dev, _| dev.exchange(dev.index())).unwrap(), [[0, 1], [0, 1]]);
    });
}

/// A scope that waits for a stuck device is not kept waiting by the life of others.
#[test]
fn a_scope_behind_a_stuck_one_times_out_while_other_devices_work() {
    let error = guarded(|| {
        let pool = GpuPool::builder()
            .check(gpu_pool_lab::Check::Races)
            .host(2)
            .timeout(Duration::from_millis(600))
            .build()
            .unwrap();
        let ((release, held), (tell, told)) = (mpsc::channel::<()>(), mpsc::channel());
        let held = std::sync::Mutex::new(held);
        thread::scope(|s| {
            let stuck = s.spawn(|| {
                pool.on(&[0]).run(|_, _| {
                    tell.send(()).unwrap();
                    Ok(held.lock().unwrap().recv().is_ok())
                })
            });
            let stop = std::sync::Arc::new(std::sync::Mutex::new(false));
            let busy = s.spawn({
                let (stop, pool) = (stop.clone(), &pool);
                move || {
                    while !*stop.lock().unwrap() {
                        pool.on(&[1]).run(|dev, _| dev.synchronize()).unwrap();
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            });
            told.recv().unwrap();
            let error = pool.on(&[0]).run(|_, _| Ok(())).unwrap_err();
            *stop.lock().unwrap() = true;
            release.send(()).unwrap();
            stuck.join().unwrap().unwrap();
            busy.join().unwrap();
            error
        })
    });
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[0]), "{error}");
}
