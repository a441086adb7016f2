//! Code of the program that panics where the library calls it.

use crate::support::{TIMEOUT, guarded, until};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, GpuPool, ReduceOp, Result,
    collective::Transfer,
};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

pub const MESSAGE: &str = "a panic of the program";

/// Where it panics.
#[derive(Clone, Copy, PartialEq)]
pub enum At {
    Clone,
    Drop,
    Transfer,
    View,
    ViewMut,
    #[allow(dead_code, reason = "for the tests of `gpu-pool-train`")]
    Parameters,
}

/// Its code panics there, but not while it unwinds.
pub struct Bomb(pub At);

impl Bomb {
    pub fn strike(&self, at: At) {
        assert!(self.0 != at || thread::panicking(), "{MESSAGE}");
    }
}

impl Clone for Bomb {
    fn clone(&self) -> Self {
        self.strike(At::Clone);
        Bomb(self.0)
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        self.strike(At::Drop);
    }
}

impl Transfer for Bomb {
    fn transfer(self, _: &Device) -> Result<Self> {
        self.strike(At::Transfer);
        Ok(self)
    }
}

pub struct Memory(pub Bomb, pub DeviceBuffer<f32>);

impl Memory {
    pub fn new(dev: &Device, at: At) -> Result<Self> {
        Ok(Memory(Bomb(at), dev.zeros(1000)?))
    }
}

impl AsView for Memory {
    type Elem = f32;
    fn view(&self) -> DeviceView<'_, f32> {
        self.0.strike(At::View);
        self.1.view()
    }
}

impl AsViewMut for Memory {
    fn view_mut(&mut self) -> DeviceViewMut<'_, f32> {
        self.0.strike(At::ViewMut);
        self.1.view_mut()
    }
}

pub type Case = (&'static str, fn(&GpuPool) -> Result<()>);

/// Those of `fail` fail, those of `drop` may; after each of them the pool works, and no memory is lost.
pub fn fails_only_its_call(fail: &'static [Case], drop: &'static [Case]) {
    guarded(move || {
        let pool = GpuPool::builder().check(Check::Races).host(2).timeout(TIMEOUT / 2).build().unwrap();
        let in_use = || pool.memory_stats().iter().map(|stats| stats.in_use).collect::<Vec<_>>();
        let works = |name: &str| {
            let found = pool.run(|dev, _| {
                let mut x = dev.upload(&[dev.rank() as f32 + 1.0; 100])?;
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                Ok((dev.exchange(dev.rank())?, dev.download(&x)?))
            });
            assert_eq!(found.unwrap(), vec![(vec![0, 1], vec![3.0; 100]); 2], "after {name}");
            // Devices count what they have freed when their parts of a scope have ended.
            until(name, || in_use() == [0, 0]).unwrap();
        };
        works("nothing");
        for (name, run) in fail {
            let error = run(&pool).unwrap_err();
            let known =
                matches!(&error, Error::Panicked { message, device, .. } if message.contains(MESSAGE) && *device < 2);
            assert!(known, "{name}: {error}");
            works(name);
        }
        for (name, run) in drop {
            // A drop on the caller's thread may unwind there.
            if let Ok(ended) = catch_unwind(AssertUnwindSafe(|| run(&pool))) {
                assert!(matches!(ended, Ok(()) | Err(Error::Panicked { .. })), "{name}: {ended:?}");
            }
            works(name);
        }
        pool.close().unwrap();
    });
}
