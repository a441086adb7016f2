//! One model on the devices of several processes, which are pools of this one.

use super::{DataParallel, Gradients, Model};
use crate::{
    Device, DeviceBuffer, Error, GpuPool, GradientExchange, ReduceOp, Result, Shard,
    collective::world::loopback::Hosts, parallel::Optimizer,
};

const LEN: usize = 5000;

struct Two([DeviceBuffer<f32>; 2]);

impl Model for Two {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
        self.0.iter_mut().collect()
    }
}

fn new(pool: &GpuPool, optimizer: Optimizer) -> Result<DataParallel<Two>> {
    // All get the parameters of rank 0.
    let build = |dev: &Device| Ok(Two([dev.upload(&vec![dev.index() as f32; LEN])?, dev.upload(&[1.0; 3])?]));
    DataParallel::new_in(pool, |dev| dev.world(), optimizer, build)
}

/// The gradient of row `r` is `r + 1` everywhere.
fn pass(dev: &Device, rows: impl Iterator<Item = usize>, gradients: &mut Gradients<'_>) -> Result<()> {
    let sum = rows.map(|row| (row + 1) as f32).sum::<f32>() * gradients.scale;
    gradients.write(1, |g| dev.fill(g, sum))?;
    gradients.write(0, |g| dev.fill(g, -sum))
}

/// Trains on rows `begin..begin + rows` of each step. Returns the parameters of each device.
fn train(pool: &GpuPool, optimizer: Optimizer, (begin, rows): (usize, usize), steps: usize) -> Result<Vec<Vec<f32>>> {
    let mut model = new(pool, optimizer)?;
    for _ in 0..steps {
        model.step(rows, |dev, shard: Shard, _, gradients| {
            pass(dev, shard.range(rows).map(|row| begin + row), gradients)
        })?;
    }
    model.verify()?;
    parameters(&mut model)
}

fn parameters(model: &mut DataParallel<Two>) -> Result<Vec<Vec<f32>>> {
    model.each(|dev, model| Ok([dev.download(&model.0[0])?, dev.download(&model.0[1])?].concat()))
}

/// The weights of the rows are those of one process, whichever process has how many; sums here are exact.
#[test]
fn processes_train_one_model() {
    let all =
        [Optimizer::sgd(0.5), Optimizer::adam(0.1), Optimizer::adam(0.1).sharded(), Optimizer::sgd(0.5).sharded()];
    for optimizer in all {
        let alone = train(&GpuPool::builder().host(3).build().unwrap(), optimizer, (0, 8), 3).unwrap();
        for shape in [&[2, 1][..], &[1, 1, 1]] {
            let hosts = Hosts::new(shape);
            let rows = [&[(0, 5), (5, 3)][..], &[(0, 1), (1, 4), (5, 3)]][shape.len() - 2];
            let found = hosts.each(|host, pool| train(pool, optimizer, rows[host], 3));
            for found in found.into_iter().flat_map(Result::unwrap) {
                assert!(found == alone[0], "{optimizer:?} {shape:?}");
            }
        }
    }
}

#[test]
fn accumulated_pieces_have_the_weights_of_all_processes() {
    let hosts = Hosts::new(&[1, 1]);
    let found = hosts.each(|host, pool| {
        let mut model = new(pool, Optimizer::sgd(1.0))?;
        for piece in [2 + 2 * host, 1] {
            let of =
                |dev: &Device, _: Shard, _: &mut Two, gradients: &mut Gradients<'_>| pass(dev, 0..piece, gradients);
            if piece > 1 {
                model.accumulate(piece, of)?
            } else {
                model.step(piece, of)?
            };
        }
        parameters(&mut model)
    });
    // Rows 1..=2 and 1, and 1..=4 and 1: a sum of 15 over 8 rows.
    let found: Vec<Vec<f32>> = found.into_iter().flat_map(Result::unwrap).collect();
    assert!(found.iter().all(|x| x[..] == found[0] && x[0] == 15.0 / 8.0 && x[LEN] == 1.0 - 15.0 / 8.0), "{found:?}");
}

#[cfg(feature = "checkpoints")]
#[test]
fn each_process_writes_a_whole_checkpoint() {
    let hosts = Hosts::new(&[2, 1]);
    let optimizer = Optimizer::adam(0.1).sharded();
    let step = |model: &mut DataParallel<Two>| {
        model.step(2, |dev, shard, _, gradients| pass(dev, shard.range(2), gradients)).map(drop)
    };
    let found = hosts.each(|_, pool| {
        let mut model = new(pool, optimizer)?;
        step(&mut model)?;
        let checkpoint = model.checkpoint()?;
        step(&mut model)?;
        let after = parameters(&mut model)?.remove(0);
        // The other way of keeping the state.
        let mut other = new(pool, Optimizer::adam(0.1))?;
        other.restore(&checkpoint)?;
        step(&mut other)?;
        let names: Vec<String> = checkpoint.names().map(str::to_owned).collect();
        let first = checkpoint.tensor::<f32>("first.0")?;
        Ok::<_, Error>((after.clone(), parameters(&mut other)?.remove(0) == after, names, first))
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!(found[0], found[1]);
    assert!(found[0].1 && found[0].3.iter().all(|x| *x == found[0].3[0] && *x != 0.0));
}

/// A closure that fails on one process poisons the model on all; `recover` goes on from the last step.
#[test]
fn a_failed_step_can_be_recovered() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.each(|host, pool| {
        let mut model = new(pool, Optimizer::sgd(0.5))?;
        let step = |model: &mut DataParallel<Two>, fails: bool| {
            model.step(3, |dev, shard, _, gradients| match fails && dev.index() == 0 {
                true => Err(Error::custom("on purpose")),
                false => pass(dev, shard.range(3), gradients),
            })
        };
        step(&mut model, false)?;
        let before = parameters(&mut model)?;
        let failed = step(&mut model, host == 1).unwrap_err();
        model.recover()?;
        assert!(before == parameters(&mut model)?);
        step(&mut model, false)?;
        Ok::<_, Error>((parameters(&mut model)?, failed.to_string()))
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert!(found[0].0[0] == found[1].0[0]);
    assert_eq!(found[1].1, "on purpose");
    assert!(found[0].1.contains("host 1"), "{}", found[0].1);
}

/// Unused gradients, the order of readiness, members without a batch: all of them across processes.
#[test]
fn gradient_exchanges_span_processes() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let builder = GradientExchange::builder().reduce(ReduceOp::Avg).norm(true);
        let mut gradients = builder.build_in(&world, &[4, 3000, 5])?;
        let mut seen = Vec::new();
        for step in 0..2 {
            assert_eq!(gradients.join(dev, me > 0)?, 2);
            for i in [2, 0].into_iter().skip(usize::from(me == 1)) {
                dev.fill(&mut gradients.grad_mut(i)?, (me * 3 + i + step) as f32)?;
                gradients.ready(dev, i)?;
            }
            let unused = gradients.finish(dev)?.unused().to_vec();
            seen.push((unused, dev.download(&gradients.grad(0)?)?, dev.download(&gradients.grad(2)?)?));
        }
        Ok(seen)
    });
    for found in found {
        let step = |step: usize| {
            let second = ((2 + step) + (6 + 2 + step)) as f32 / 3.0;
            (vec![1], vec![(0.0 + 3.0 + 6.0 + 3.0 * step as f32) / 3.0; 4], vec![second; 5])
        };
        for (at, (unused, first, second)) in found.into_iter().enumerate() {
            let wanted = step(at);
            assert_eq!((unused, first), (wanted.0, wanted.1));
            assert!(second.iter().all(|x| (x - wanted.2[0]).abs() < 1e-5), "{second:?}");
        }
    }
    // Sizes that differ.
    let found = hosts.run(|dev| {
        let world = dev.world()?;
        GradientExchange::builder().build_in(&world, &[4 + usize::from(world.rank() == 2)]).map(drop)
    });
    assert!(found.iter().all(|found| matches!(found, Err(Error::WorldMismatch { .. }))), "{found:?}");
}
