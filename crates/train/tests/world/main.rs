//! One model on the devices of several processes, which are pools of this one.

#[path = "../../../cluster/tests/support/loopback/mod.rs"]
#[allow(dead_code, reason = "the rest is for tests of `gpu-pool-cluster`")]
mod loopback;

use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, ReduceOp, Result, Shard, gradients::GradientExchange};
use gpu_pool_train::{
    DataParallel, Gradients, LearningRate, Model, Optimizer, Parameter, Pipeline, PipelineSchedule, Stage, StageContext,
};
use half::{bf16, f16};
use loopback::Hosts;

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

/// The layers' sums are over all processes, also beside a product.
#[cfg(feature = "blas")]
#[test]
fn tensor_parallel_layers_of_several_processes() {
    use gpu_pool_train::{ColumnLinear, RowLinear, part_of};
    let run = |pool: &GpuPool, blocks: Option<&'static [u16]>| {
        pool.run(|dev, _| {
            let group = dev.world()?;
            let small = |len: usize| (0..len).map(|i| (i * 7 % 5) as f32 - 2.0).collect::<Vec<_>>();
            let mut column = ColumnLinear::new(&group, &small(5 * 7), &small(7))?;
            let mut row = RowLinear::new(&group, &small(7 * 5), &small(5))?;
            row.part.blocks = blocks;
            let own = part_of(&group, group.rank(), 7, 1)?.len();
            let (x, h) = (dev.upload(&small(8 * 5))?, dev.upload(&small(8 * own))?);
            let y = row.forward(&group, &h, 8)?;
            let part = row.forward_to_rows(&group, &h, 8)?;
            let dx = column.backward(&group, &x, &h, 8, false)?;
            Ok([dev.download(&y)?, dev.download(&part)?, dev.download(&dx)?])
        })
    };
    let alone = run(&GpuPool::builder().host(3).build().unwrap(), None).unwrap();
    for blocks in [None, Some(&[2, 1, 1][..])] {
        let found = Hosts::new(&[2, 1]).each(|_, pool| run(pool, blocks));
        assert_eq!(found.into_iter().flat_map(Result::unwrap).collect::<Vec<_>>(), alone, "{blocks:?}");
    }
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

/// A closure that fails on one process poisons the model on all; `clear_poison` goes on from the last step.
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
        model.clear_poison()?;
        assert!(before == parameters(&mut model)?);
        step(&mut model, false)?;
        Ok::<_, Error>((parameters(&mut model)?, failed.to_string()))
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert!(found[0].0[0] == found[1].0[0]);
    assert_eq!(found[1].1, "on purpose");
    assert!(found[0].1.contains("host 1"), "{}", found[0].1);
}

/// Groups across processes are by themselves: one that was not finite has fewer steps, and `clear_poison` still helps.
#[test]
fn groups_that_have_other_numbers_of_steps() {
    let hosts = Hosts::new(&[2, 2]);
    let found = hosts.each(|host, pool| {
        let mut model = DataParallel::new_in(
            pool,
            |dev| dev.world()?.group(&[dev.index(), dev.index() + 2]),
            Optimizer::sgd(1.0),
            |dev| Ok(One::<f32>(dev.zeros(3)?)),
        )?;
        let step = |model: &mut DataParallel<One<f32>>, odd: f32| {
            model.step(2, |dev, _, _, gradients| {
                gradients.write(0, |own| dev.fill(own, if dev.index() == 1 { odd } else { 1.0 }))
            })
        };
        step(&mut model, f32::NAN)?;
        assert!(matches!(step(&mut model, 1.0), Err(Error::NotFinite { step: 0, .. })));
        let fails = model.step(2, |dev, _, _, gradients| match (host, dev.index()) {
            (1, 0) => Err(Error::custom("on purpose")),
            // With this gradient, too, the other host's device could make its step before it hears of the failure.
            (1, _) => loop {
                dev.check()?;
                std::thread::yield_now();
            },
            _ => gradients.write(0, |own| dev.fill(own, 1.0)),
        });
        assert!(fails.is_err());
        model.clear_poison()?;
        step(&mut model, 1.0)?;
        model.verify()?;
        model.each(|dev, own| Ok(dev.download(&own.0)?[0]))
    });
    for found in found {
        // Two members' gradients of 1: three steps of one group, one of the other.
        assert_eq!(found.unwrap(), [-6.0, -2.0]);
    }
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

/// A model of one parameter.
struct One<T: Parameter>(DeviceBuffer<T>);

impl<T: Parameter> Model<T> for One<T> {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>> {
        vec![&mut self.0]
    }
}

/// Three zeros.
fn zeros<T: Parameter>(pool: &GpuPool, optimizer: Optimizer) -> Result<DataParallel<One<T>, T>> {
    DataParallel::new_in(pool, |dev| dev.world(), optimizer, |dev| Ok(One(dev.zeros(3)?)))
}

/// A pass over `rows` rows of this process, of which each has this gradient: the last one is a step.
fn piece<T: Parameter>(
    model: &mut DataParallel<One<T>, T>,
    rows: usize,
    last: bool,
    of: impl Fn(f32) -> T + Sync,
    gradient: f32,
) -> Result<()> {
    let pass = |dev: &Device, shard: Shard, _: &mut One<T>, gradients: &mut Gradients<'_, T>| {
        let sum = shard.range(rows).len() as f32 * gradient * gradients.scale;
        gradients.write(0, |own| dev.fill(own, of(sum)))
    };
    if last { model.step(rows, pass).map(drop) } else { model.accumulate(rows, pass).map(drop) }
}

/// The first weight of each device.
fn first<T: Parameter<Acc = f32>>(model: &mut DataParallel<One<T>, T>) -> Result<Vec<f32>> {
    model.each(|dev, model| Ok(T::wide(dev.download(&model.0)?[0])))
}

/// In `bf16` a sum of ones stops at 256 of them; the pieces of the processes have different sizes.
#[test]
fn many_pieces_of_halves_are_one_batch() {
    for optimizer in [Optimizer::sgd(1.0), Optimizer::sgd(1.0).sharded()] {
        let hosts = Hosts::new(&[2, 1]);
        let found = hosts.each(|host, pool| {
            let mut model = zeros::<bf16>(pool, optimizer)?;
            for at in 0..300 {
                piece(&mut model, 2 - host, at == 299, bf16::from_f32, 1.0)?;
            }
            first(&mut model)
        });
        for found in found {
            assert!(found.unwrap().iter().all(|x| *x == -1.0));
        }
    }
}

/// The mean over all rows of all processes, in all that is told, whatever the pieces.
#[test]
fn norms_are_of_the_mean_over_all_processes() {
    // By process: rows and their gradient, piece by piece.
    let all: [[&[(usize, f32)]; 2]; 4] = [
        [&[(6, 1.0), (2, 1.0)], &[(6, 1.0), (2, 1.0)]],
        [&[(6, 3.0), (2, 1.0)], &[(1, 2.0), (3, 5.0)]],
        [&[(1, 4.0), (0, 0.0), (7, 0.5)], &[(0, 0.0), (5, 2.0), (9, 1.0)]],
        // Means that are as large as the type allows.
        [&[(1, 60_000.0), (9, 60_000.0)], &[(30, 60_000.0), (0, 0.0)]],
    ];
    for pieces in all {
        let rows: usize = pieces.iter().flat_map(|own| own.iter()).map(|(rows, _)| rows).sum();
        let sum: f64 = pieces.iter().flat_map(|own| own.iter()).map(|&(rows, g)| rows as f64 * f64::from(g)).sum();
        let mean = sum / rows as f64;
        let hosts = Hosts::new(&[1, 2]);
        let found = hosts.each(|host, pool| {
            let (mut wide, mut half) =
                (zeros::<f32>(pool, Optimizer::sgd(1.0))?, zeros::<f16>(pool, Optimizer::sgd(1.0).sharded())?);
            for (at, &(rows, gradient)) in pieces[host].iter().enumerate() {
                let last = at + 1 == pieces[host].len();
                piece(&mut wide, rows, last, |x| x, gradient)?;
                piece(&mut half, rows, last, f16::from_f32, gradient)?;
            }
            let norms = [wide.gradient_norms()?, half.gradient_norms()?].map(Option::unwrap);
            Ok::<_, Error>((norms, first(&mut wide)?, first(&mut half)?))
        });
        for found in found {
            let ([wide, half], weights, halves) = found.unwrap();
            let near = |x: f32, wanted: f64, bound: f64| {
                let far = (f64::from(x) / wanted - 1.0).abs();
                assert!(far <= bound, "{x}, not {wanted}; {pieces:?}");
            };
            wide.into_iter().for_each(|x| near(x, mean * 3f64.sqrt(), 1e-6));
            half.into_iter().for_each(|x| near(x, mean * 3f64.sqrt(), 2e-3));
            weights.into_iter().for_each(|x| near(x, -mean, 1e-6));
            halves.into_iter().for_each(|x| near(x, -mean, 2e-3));
        }
    }
}

/// A process may have no rows, also in the last batch; if no process has any, all of them are told so, and go on.
#[test]
fn a_process_without_rows() {
    for optimizer in [Optimizer::sgd(1.0), Optimizer::sgd(1.0).sharded()] {
        let hosts = Hosts::new(&[2, 1]);
        let found = hosts.each(|host, pool| {
            let mut model = zeros::<f32>(pool, optimizer)?;
            let mut seen = Vec::new();
            for rows in [[3, 0], [0, 0], [0, 2]] {
                let step = piece(&mut model, rows[host], true, |x| x, 1.0);
                let held = piece(&mut model, rows[1 - host], false, |x| x, 2.0);
                assert_eq!(step.is_ok(), held.is_ok());
                seen.extend([step, held].into_iter().filter_map(Result::err));
                if rows != [0, 0] {
                    model.step(1, |dev, _, _, gradients| {
                        let sum = if dev.rank() == 0 { gradients.scale } else { 0.0 };
                        gradients.write(0, |own| dev.fill(own, sum))
                    })?;
                }
            }
            model.verify()?;
            Ok::<_, Error>((seen, model.steps(), first(&mut model)?))
        });
        for found in found {
            let (seen, steps, weights) = found.unwrap();
            assert_eq!((seen.len(), steps), (2, 4));
            for (error, name) in seen.iter().zip(["DataParallel::step", "DataParallel::accumulate"]) {
                let Error::InvalidArgument { op, why, site, .. } = error else { panic!("{error}") };
                assert!(*op == name && why.contains("0 rows") && site.file().ends_with("main.rs"), "{error}");
            }
            // 3 rows of 1; then 3 rows of 2 and 2 rows of 1; 2 rows of 1; then 2 rows of 2 and 2 of 1.
            let wanted = -(1.0 + 8.0 / 5.0 + 1.0 + 6.0 / 4.0);
            assert!(weights.iter().all(|x| (x - wanted).abs() < 1e-5), "{weights:?}, not {wanted}");
        }
    }
}

/// What one process is refused before it meets the others is told to them, with its cause.
#[test]
fn what_one_process_is_refused_ends_the_call_of_all() {
    let hosts = Hosts::new(&[1, 1]);
    #[track_caller]
    fn told<R>([own, other]: &[Result<R>; 2], cause: &str) {
        let (own, other) = (own.as_ref().err().unwrap(), other.as_ref().err().unwrap());
        assert!(matches!(own, Error::InvalidArgument { .. } | Error::Custom(_)), "{own}");
        assert!(own.to_string().contains(cause), "{own}");
        let Error::AbortedByHost { host: 0, .. } = other else { panic!("{other}") };
        assert!(other.to_string().contains(cause), "{other}");
    }
    let both = |f: &(dyn Fn(usize, &GpuPool) -> Result<()> + Sync)| <[_; 2]>::try_from(hosts.each(f)).unwrap();
    let rate = |host: usize| if host == 0 { f64::NAN } else { 0.5 };
    told(&both(&|host, pool| zeros::<f32>(pool, Optimizer::sgd(rate(host))).map(drop)), "out of its range");
    // A schedule whose second rate is no `f32`.
    let schedule = |host: usize| match host {
        0 => LearningRate::Exponential { factor: 1e300 },
        _ => LearningRate::Constant,
    };
    let second = both(&|host, pool| {
        let mut model = zeros::<f32>(pool, Optimizer::sgd(0.5).schedule(schedule(host)))?;
        piece(&mut model, 2, true, |x| x, 1.0).expect("a rate of 0.5");
        piece(&mut model, 2, true, |x| x, 1.0)
    });
    told(&second, "not finite in f32");
    // A schedule without backward passes.
    let training = PipelineSchedule::gpipe(2, 1).unwrap();
    let schedules = [training.forward_only(), training];
    let steps = both(&|host, pool| {
        let mut pipeline = Pipeline::new_in(pool, |dev| dev.world(), schedules[host].clone(), |_, _| Ok(Passes))?;
        pipeline.step(|dev, _| dev.zeros::<f32>(1), |_, _, y| Ok((y, 0.0f32))).map(drop)
    });
    told(&steps, "no backward passes");
    // A graph has no collectives of several processes. It is refused in all, and the model is as it was.
    let captured = both(&|_, pool| {
        let mut model = zeros::<f32>(pool, Optimizer::sgd(0.5))?;
        let refused = model.capture_step(2, |_, _, _, _| Ok(())).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument { .. }) && refused.to_string().contains("several processes"));
        piece(&mut model, 2, true, |x| x, 1.0)
    });
    captured.into_iter().for_each(Result::unwrap);
    // One process calls `step`, and the other one `accumulate`.
    let calls = both(&|host, pool| piece(&mut zeros::<f32>(pool, Optimizer::sgd(0.5))?, 2, host == 0, |x| x, 1.0));
    for error in calls.map(Result::unwrap_err) {
        let Error::WorldMismatch { .. } = &error else { panic!("{error}") };
        assert!(["DataParallel::step", "DataParallel::accumulate"].iter().all(|op| error.to_string().contains(op)));
    }
}

/// A stage that passes everything on.
struct Passes;

impl Stage for Passes {
    type Activation = DeviceBuffer<f32>;
    type Saved = ();

    fn forward(&mut self, _: &Device, _: StageContext, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, ())> {
        Ok((x, ()))
    }

    fn backward(
        &mut self,
        _: &Device,
        _: StageContext,
        (): (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        Ok(Some(dy))
    }
}

/// One process finds no checkpoint, or a foreign one. All fail with its cause, and the next one heals all.
#[cfg(feature = "checkpoints")]
#[test]
fn a_checkpoint_that_one_process_cannot_read() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.each(|host, pool| {
        let mut model = zeros::<f32>(pool, Optimizer::sgd(0.5))?;
        let saved = model.checkpoint()?;
        let missing = "/nowhere/at/all";
        let loaded = if host == 0 { model.load(missing) } else { model.restore(&saved) };
        let first_error = loaded.unwrap_err().to_string();
        let foreign = gpu_pool_train::Checkpoint::new();
        let restored = model.restore(if host == 1 { &foreign } else { &saved }).unwrap_err().to_string();
        model.restore(&saved)?;
        piece(&mut model, 2, true, |x| x, 1.0)?;
        Ok::<_, Error>((first_error, restored, first(&mut model)?))
    });
    for found in found {
        let (missing, foreign, weights) = found.unwrap();
        assert!(missing.contains("/nowhere/at/all"), "{missing}");
        assert!(foreign.contains("no number of steps"), "{foreign}");
        assert!(weights.iter().all(|x| *x == -0.5));
    }
}

/// Averages of `f16` whose sum within a process is out of range.
#[test]
fn averages_of_halves_between_processes_do_not_overflow() {
    for hosts in [Hosts::new(&[2, 3]), Hosts::on_devices(&[2, 2])] {
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let mut x = dev.upload(&[f16::from_f32(40_000.0); 70])?;
            world.all_reduce(&mut x, ReduceOp::Avg)?;
            let (y, mut own) = (dev.upload(&vec![f16::from_f32(60_000.0); 9 * world.count()])?, dev.zeros(9)?);
            world.reduce_scatter(&y, &mut own, ReduceOp::Avg)?;
            Ok([dev.download(&x)?, dev.download(&own)?].concat())
        });
        for found in found {
            let near = |x: &f16, wanted: f32| (x.to_f32() / wanted - 1.0).abs() < 2e-3;
            assert!(found[..70].iter().all(|x| near(x, 40_000.0)) && found[70..].iter().all(|x| near(x, 60_000.0)));
        }
    }
}
