//! The program's own code panics where the library calls it: the call says so, the next scope works, and no memory is
//! lost. (`Display`, `From`, the callback at out of memory and a `tracing` subscriber have tests of their own.)

use crate::bomb::{At, Bomb, Case, Memory, fails_only_its_call};
use gpu_pool::{Device, Error, ReduceOp};

/// Device 1 runs the program's code while device 0 waits for it.
const FAIL: &[Case] = &[
    ("Clone of what all exchange", |pool| pool.run(|dev, _| dev.exchange(Bomb(At::Clone)).map(drop)).map(drop)),
    ("Clone of what one exchanges", |pool| {
        let own = |dev: &Device| if dev.rank() == 1 { At::Clone } else { At::Transfer };
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
        let own = |dev: &Device| if dev.rank() == 1 { At::ViewMut } else { At::Transfer };
        pool.run(|dev, _| dev.all_reduce(&mut Memory::new(dev, own(dev))?, ReduceOp::Sum)).map(drop)
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
    fails_only_its_call(FAIL, DROP);
}
