//! The program's own code panics where the library calls it: the call says so, the next scope works, and no memory is
//! lost. (`Display`, `From`, the callback at out of memory and a `tracing` subscriber have tests of their own.)

use crate::support::{PATIENCE, guarded, until};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, GpuPool, Group, Hop, ReduceOp, Result,
    parallel::{self, DataParallel, Model, Optimizer, Pipeline, Schedule, Stage},
};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

const MESSAGE: &str = "a panic of the program";

#[derive(Clone, Copy, PartialEq)]
enum At {
    Clone,
    Drop,
    Hop,
    View,
    ViewMut,
    Parameters,
}

/// Its code panics there, but not while it unwinds.
struct Bomb(At);

impl Bomb {
    fn strike(&self, at: At) {
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

impl Hop for Bomb {
    fn hop(self, _: &Device) -> Result<Self> {
        self.strike(At::Hop);
        Ok(self)
    }
}

struct Memory(Bomb, DeviceBuffer<f32>);

impl Memory {
    fn new(dev: &Device, at: At) -> Result<Self> {
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

impl Model for Memory {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
        self.0.strike(At::Parameters);
        vec![&mut self.1]
    }
}

/// Passes on what it gets.
struct Passes;

impl Stage for Passes {
    type Activation = Bomb;
    type Saved = ();

    fn forward(&mut self, _: &Device, _: parallel::At, x: Bomb) -> Result<(Bomb, ())> {
        Ok((x, ()))
    }

    fn backward(&mut self, _: &Device, _: parallel::At, (): (), dy: Bomb) -> Result<Option<Bomb>> {
        Ok(Some(dy))
    }
}

type Case = (&'static str, fn(&GpuPool) -> Result<()>);

/// Device 1 runs the program's code while device 0 waits for it.
const FAIL: &[Case] = &[
    ("Clone of what all exchange", |pool| pool.run(|dev, _| dev.exchange(Bomb(At::Clone)).map(drop)).map(drop)),
    ("Clone of what one exchanges", |pool| {
        let own = |dev: &Device| if dev.rank() == 1 { At::Clone } else { At::Hop };
        pool.run(|dev, _| dev.exchange(Bomb(own(dev))).map(drop)).map(drop)
    }),
    ("AsView of a download", |pool| {
        pool.run(|dev, _| match dev.rank() {
            0 => dev.barrier(),
            _ => dev.download(&Memory::new(dev, At::View)?).map(drop),
        })
        .map(drop)
    }),
    ("AsViewMut of a fill", |pool| {
        pool.run(|dev, _| match dev.rank() {
            0 => dev.barrier(),
            _ => dev.fill(&mut Memory::new(dev, At::ViewMut)?, 1.0),
        })
        .map(drop)
    }),
    ("AsViewMut of a sum of all", |pool| {
        let own = |dev: &Device| if dev.rank() == 1 { At::ViewMut } else { At::Hop };
        pool.run(|dev, _| dev.all_reduce(&mut Memory::new(dev, own(dev))?, ReduceOp::Sum)).map(drop)
    }),
    ("Hop", |pool| {
        let mut pipeline = Pipeline::new(pool, Schedule::gpipe(2, 2)?, |_, _| Ok(Passes))?;
        pipeline.forward(|_, _| Ok(Bomb(At::Hop)), |_, _, _| Ok(())).map(drop)
    }),
    ("Model::parameters", |pool| {
        let own = |dev: &Device| if dev.rank() == 1 { At::Parameters } else { At::Hop };
        DataParallel::new(pool, Optimizer::sgd(0.1), |dev| Memory::new(dev, own(dev))).map(drop)
    }),
    ("the groups of a model", |pool| {
        fn group(dev: &Device) -> Result<Group<'_>> {
            assert!(dev.rank() != 1, "{MESSAGE}");
            dev.group(&[0, 1])
        }
        DataParallel::new_in(pool, group, Optimizer::sgd(0.1), |dev| Memory::new(dev, At::Hop)).map(drop)
    }),
];

/// A drop comes when nobody waits for its outcome.
const DROP: &[Case] = &[
    ("of what a pool holds for each device", |pool| pool.per_device(|_, _| Ok(Bomb(At::Drop))).map(drop)),
    ("of what a device was given and has not taken", |pool| {
        pool.run(|dev, _| if dev.rank() == 0 { dev.give(Bomb(At::Drop), 1, 7) } else { Ok(()) }).map(drop)
    }),
    ("of state behind a failed build", |pool| {
        let build = |dev: &Device| match dev.rank() {
            0 => Ok(Bomb(At::Drop)),
            _ => Err(Error::custom("on purpose")),
        };
        let error = pool.per_device(|dev, _| build(dev)).map(std::mem::forget).unwrap_err();
        assert_eq!(error.to_string(), "on purpose");
        Ok(())
    }),
];

#[test]
fn code_of_the_program_that_panics_fails_only_its_call() {
    guarded(|| {
        let pool = GpuPool::builder().check(Check::Races).host(2).timeout(PATIENCE / 2).build().unwrap();
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
        for (name, run) in FAIL {
            let error = run(&pool).unwrap_err();
            let known =
                matches!(&error, Error::Panicked { message, device, .. } if message.contains(MESSAGE) && *device < 2);
            assert!(known, "{name}: {error}");
            works(name);
        }
        for (name, run) in DROP {
            // A drop on the caller's thread may unwind there.
            if let Ok(ended) = catch_unwind(AssertUnwindSafe(|| run(&pool))) {
                assert!(matches!(ended, Ok(()) | Err(Error::Panicked { .. })), "{name}: {ended:?}");
            }
            works(name);
        }
        pool.close().unwrap();
    });
}
