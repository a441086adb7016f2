//! Checkpoints of what lies on several devices: parts of tensors, layers of tensor parallel, stages of a pipeline, and
//! the optimizers beside them.

use crate::{
    data_parallel::rig::{bits, number},
    on_both,
    support::{Gpus, cases, failure},
};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, Error, GpuPool, Group, PerDevice, Result};
use gpu_pool_train::{
    Checkpoint, ColumnLinear, Cut, LocalOptimizer, Optimizer, ParameterGroup, Pipeline, PipelineSchedule, RowLinear,
    Stage, StageContext, VocabularyEmbedding,
};
use proptest::prelude::*;

const INPUTS: usize = 5;
const HIDDEN: usize = 7;
const WORDS: usize = 11;

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    (0..len).map(|i| number(seed, i) as f32).collect()
}

/// A table, a layer cut by columns and one cut by rows, with their optimizer.
struct Net {
    table: VocabularyEmbedding<f32>,
    first: ColumnLinear<f32>,
    second: RowLinear<f32>,
    optimizer: LocalOptimizer,
}

fn everyone(dev: &Device) -> Result<Group<'_>> {
    dev.group(&(0..dev.count()).collect::<Vec<_>>())
}

impl Net {
    fn new(dev: &Device, seed: u64) -> Result<Self> {
        let group = &everyone(dev)?;
        let table = VocabularyEmbedding::new(group, &numbers(seed, WORDS * INPUTS), INPUTS)?;
        let first = ColumnLinear::new(group, &numbers(seed + 1, INPUTS * HIDDEN), &numbers(seed + 2, HIDDEN))?;
        let second = RowLinear::new(group, &numbers(seed + 3, HIDDEN * 3), &numbers(seed + 4, 3))?;
        let adam = Optimizer::adam_w(0.1).clip(2.0);
        let rows = table.table.len() - INPUTS;
        let sizes = [rows, first.part.weight.len(), first.part.bias.len(), second.part.weight.len()];
        let groups = [
            ParameterGroup::new(adam, &sizes),
            ParameterGroup::new(adam.decay(0.0), &[second.part.bias.len()]).replicated(),
        ];
        Ok(Net { table, first, second, optimizer: LocalOptimizer::new(dev, &groups)? })
    }

    fn cuts(&self) -> Vec<Cut> {
        [vec![self.table.cut()], self.first.cuts().to_vec(), self.second.cuts().to_vec()].concat()
    }

    /// A step with the gradients that each element of the whole tensors has, whatever device it is on.
    fn step(&mut self, dev: &Device, whole: &Checkpoint, step: u64) -> Result<()> {
        let group = &everyone(dev)?;
        let mut grads = Vec::new();
        for (i, (cut, name)) in self.cuts().iter().zip(NAMES).enumerate() {
            let mut of = Checkpoint::new();
            let shape = whole.shape(name)?;
            of.insert(name, shape, &numbers(100 * step + i as u64, shape.iter().product()))?;
            grads.push(dev.upload(&of.part::<f32>(group, name, cut)?)?);
        }
        let rows = self.table.table.len() - INPUTS;
        let mut table = self.table.table.slice_mut(..rows);
        let (a, b) = (&mut self.first.part, &mut self.second.part);
        let weights =
            &mut [table.view_mut(), a.weight.view_mut(), a.bias.view_mut(), b.weight.view_mut(), b.bias.view_mut()];
        self.optimizer.step_in(group, &grads, weights).map(drop)
    }

    fn save(&self, dev: &Device) -> Result<Checkpoint> {
        let (group, mut to) = (&everyone(dev)?, Checkpoint::new());
        self.table.save(group, &mut to, "table")?;
        self.first.save(group, &mut to, "first")?;
        self.second.save(group, &mut to, "second")?;
        self.optimizer.save(group, &mut to, "adam", &self.cuts())?;
        Ok(to)
    }

    fn load(&mut self, dev: &Device, from: &Checkpoint) -> Result<()> {
        let group = &everyone(dev)?;
        self.table.load(group, from, "table")?;
        self.first.load(group, from, "first")?;
        self.second.load(group, from, "second")?;
        let cuts = self.cuts();
        self.optimizer.load(group, from, "adam", &cuts)
    }
}

const NAMES: [&str; 5] = ["table.weight", "first.weight", "first.bias", "second.weight", "second.bias"];

fn nets(pool: &GpuPool, seed: u64) -> PerDevice<Net> {
    pool.per_device(|dev, _| Net::new(dev, seed)).unwrap()
}

/// The checkpoint of rank 0. The others have notes and no tensor.
fn saved(nets: &mut PerDevice<Net>) -> Checkpoint {
    let mut all = nets.run(|dev, _, net| net.save(dev)).unwrap();
    assert!(all[1..].iter().all(|own| own.names().count() == 0));
    all.swap_remove(0)
}

fn same(a: &Checkpoint, b: &Checkpoint) {
    assert!(a.names().eq(b.names()), "{a:?} {b:?}");
    for name in a.names() {
        assert_eq!(a.shape(name).unwrap(), b.shape(name).unwrap(), "{name}");
        assert!(bits(&a.tensor::<f32>(name).unwrap()) == bits(&b.tensor::<f32>(name).unwrap()), "{name}");
    }
}

fn train(nets: &mut PerDevice<Net>, whole: &Checkpoint, steps: std::ops::Range<u64>) {
    steps.for_each(|step| drop(nets.run(|dev, _, net| net.step(dev, whole, step)).unwrap()));
}

/// Multiplies by numbers that it learns.
struct Factor {
    factor: DeviceBuffer<f32>,
    gradient: DeviceBuffer<f32>,
    optimizer: LocalOptimizer,
}

impl Stage for Factor {
    type Activation = DeviceBuffer<f32>;
    type Saved = DeviceBuffer<f32>;

    fn forward(
        &mut self,
        dev: &Device,
        _: StageContext,
        x: DeviceBuffer<f32>,
    ) -> Result<(DeviceBuffer<f32>, DeviceBuffer<f32>)> {
        use gpu_pool_train::prelude::*;
        Ok((dev.mul(&x, &self.factor)?, x))
    }

    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        x: DeviceBuffer<f32>,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        use gpu_pool_train::prelude::*;
        dev.scale(&mut self.gradient, f32::from(u8::from(at.accumulate)))?;
        dev.axpy(1.0, &dev.mul(&x, &dy)?, &mut self.gradient)?;
        dev.mul(&dy, &self.factor).map(Some)
    }
}

fn pipeline(pool: &GpuPool, seed: u64) -> Pipeline<Factor> {
    let ranks = pool.device_count();
    Pipeline::new(pool, PipelineSchedule::one_f_one_b(ranks, 2).unwrap(), |dev, stage| {
        let groups = [ParameterGroup::new(Optimizer::adam(0.1).clip(1.0), &[4])];
        Ok(Factor {
            factor: dev.upload(&numbers(seed + stage as u64, 4))?,
            gradient: dev.zeros(4)?,
            optimizer: LocalOptimizer::new(dev, &groups)?,
        })
    })
    .unwrap()
}

fn train_pipeline(model: &mut Pipeline<Factor>, steps: usize) {
    for _ in 0..steps {
        model.step(|dev, micro| dev.upload(&numbers(micro as u64, 4)), |dev, _, y| Ok((y.copy_to(dev)?, ()))).unwrap();
        let step = |dev: &Device, _, own: &mut Factor| {
            own.optimizer.step_in(&everyone(dev)?, &[&own.gradient], &mut [&mut own.factor]).map(drop)
        };
        model.each(step).unwrap();
    }
}

fn write(dev: &Device, _: usize, own: &mut Factor, to: &mut Checkpoint) -> Result<()> {
    to.insert("factor", &[2, 2], &dev.download(&own.factor)?)?;
    own.optimizer.save(&dev.group(&[dev.index()])?, to, "adam", &[Cut::whole(&[2, 2])])
}

fn read(dev: &Device, _: usize, own: &mut Factor, from: &Checkpoint) -> Result<()> {
    dev.upload_into(&from.tensor("factor")?, &mut own.factor)?;
    own.optimizer.load(&dev.group(&[dev.index()])?, from, "adam", &[Cut::whole(&[2, 2])])
}

/// What members put in is the whole tensor, and what they take out is what they have put in.
fn parts_make_a_whole(gpus: Gpus, lens: &[usize], before: &[usize], behind: &[usize]) {
    let (n, side) = (lens.len(), before.len());
    let shape = |len: usize| [before, &[len], behind].concat();
    let whole: Vec<f64> = (0..shape(lens.iter().sum()).iter().product()).map(|i| i as f64).collect();
    // By a plain loop over blocks.
    let (block, rest) = (lens.iter().sum::<usize>(), behind.iter().product::<usize>());
    let part = |rank: usize| -> Vec<f64> {
        let start: usize = lens[..rank].iter().sum();
        let own = |i: &usize| (start..start + lens[rank]).contains(&(i / rest % block));
        (0..whole.len()).filter(own).map(|i| whole[i]).collect()
    };
    let found = gpus.pool(n).run(|dev, _| {
        let (group, rank) = (&everyone(dev)?, dev.rank());
        let (cut, mut checkpoint) = (Cut::along(side, &shape(lens[rank])), Checkpoint::new());
        checkpoint.insert_part(group, "x", &cut, &dev.upload(&part(rank))?)?;
        let whole = if rank == 0 { checkpoint } else { Checkpoint::new() };
        Ok((whole, cut))
    });
    let checkpoint = &found.unwrap()[0].0;
    assert_eq!(checkpoint.tensor::<f64>("x").unwrap(), whole, "{lens:?} {before:?} {behind:?}");
    assert_eq!(checkpoint.shape("x").unwrap(), shape(lens.iter().sum()));
    let back = gpus
        .pool(n)
        .run(|dev, _| checkpoint.part::<f64>(&everyone(dev)?, "x", &Cut::along(side, &shape(lens[dev.rank()]))));
    back.unwrap().iter().enumerate().for_each(|(rank, own)| assert_eq!(*own, part(rank), "rank {rank}"));
}

on_both! {
    1: fn parts_of_tensors_make_a_whole(gpus) {
        let most = gpus.up_to(3);
        let sides = || prop::collection::vec(1usize..4, 0..3);
        let parts = (prop::collection::vec(0usize..4, 1..=most), sides(), sides());
        let settings = ProptestConfig { cases: cases(12, 60), failure_persistence: None, ..Default::default() };
        proptest!(settings, |((lens, before, behind) in parts)| {
            parts_make_a_whole(gpus, &lens, &before, &behind);
        });
    }

    // Six steps are three, a file, and three more, on any number of devices: each element is updated by itself, and the
    // norm is exact.
    1: fn tensor_parallel_goes_on_with_other_devices(gpus) {
        let pools = [1, gpus.up_to(2), gpus.up_to(3)].map(|n| gpus.pool(n));
        for before in &pools {
            let mut straight = nets(before, 1);
            let whole = saved(&mut straight);
            train(&mut straight, &whole, 0..3);
            let half = saved(&mut straight);
            train(&mut straight, &whole, 3..6);
            let end = saved(&mut straight);
            for after in &pools {
                let mut resumed = nets(after, 50);
                resumed.run(|dev, _, net| net.load(dev, &half)).unwrap();
                same(&saved(&mut resumed), &half);
                train(&mut resumed, &whole, 3..6);
                same(&saved(&mut resumed), &end);
                assert_eq!(saved(&mut resumed).noted("adam.steps"), Some("6"));
            }
        }
    }

    1: fn a_pipeline_goes_on_from_its_checkpoint(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let mut straight = pipeline(&pool, 1);
        train_pipeline(&mut straight, 3);
        let half = straight.checkpoint(write).unwrap();
        train_pipeline(&mut straight, 3);
        let end = straight.checkpoint(write).unwrap();
        assert_eq!(end.names().filter(|name| name.starts_with("stage0.")).count(), 3);
        let path = std::env::temp_dir().join(format!("gpu-pool-{}-stages-{}", std::process::id(), gpus.is_cuda()));
        let mut resumed = pipeline(&pool, 50);
        // After a failure, too.
        assert!(resumed.each(|_, _, _| Err::<(), _>(Error::custom("a test"))).is_err());
        resumed.restore(&half, read).unwrap();
        resumed.save(&path, write).unwrap();
        let mut other = pipeline(&pool, 90);
        other.load(&path, read).unwrap();
        std::fs::remove_file(&path).unwrap();
        for model in [&mut resumed, &mut other] {
            train_pipeline(model, 3);
            same(&model.checkpoint(write).unwrap(), &end);
        }
    }

    2: fn parts_that_do_not_fit_are_refused_on_all_devices(gpus) {
        let pool = gpus.pool(2);
        let found = pool.run(|dev, _| {
            let (group, rank, x) = (&everyone(dev)?, dev.rank(), dev.zeros::<f32>(6)?);
            let mut to = Checkpoint::new();
            to.insert("x", &[4, 3], &[0.0f32; 12])?;
            let cuts = [Cut::along(0, &[2, 3]), Cut::along(0, &[3, 2])];
            let errors = [
                failure(to.insert_part(group, "y", &cuts[rank], &x)),
                failure(to.insert_part(group, "y", &[Cut::whole(&[6]), Cut::along(0, &[6])][rank], &x)),
                failure(to.insert_part(group, "y", &[Cut::whole(&[6]), Cut::whole(&[3, 2])][rank], &x)),
                failure(to.insert_part(group, "y", &Cut::whole(&[7]), &x)),
                failure(to.part::<f32>(group, "x", &Cut::along(1, &[2, 3]))),
                failure(to.part::<f32>(group, "z", &cuts[0])),
                failure(to.part::<f64>(group, "x", &cuts[0])),
            ];
            assert_eq!(to.part::<f32>(group, "x", &cuts[0])?, [0.0; 6]);
            Ok(errors)
        });
        for error in found.unwrap().iter().flatten() {
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
    }
}

#[test]
fn sections_have_their_names_behind_a_prefix() {
    let (mut inner, mut outer) = (Checkpoint::new(), Checkpoint::new());
    inner.insert("x", &[2], &[1.0f32, 2.0]).unwrap();
    inner.note("epoch", 3);
    outer.insert("x", &[1], &[9u8]).unwrap();
    outer.insert_section("a.", inner.clone());
    let path = std::env::temp_dir().join(format!("gpu-pool-{}-sections", std::process::id()));
    outer.save(&path).unwrap();
    let mut loaded = Checkpoint::load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(loaded.names().eq(["a.x", "x"]));
    let section = loaded.section("a.");
    same(&section, &inner);
    assert_eq!((section.noted("epoch"), loaded.noted("a.epoch")), (Some("3"), Some("3")));
    loaded.insert_section("b.", section);
    assert_eq!(loaded.tensor::<f32>("b.x").unwrap(), [1.0, 2.0]);
}

/// As `DataParallel` and `ShardedOptimizer` refuse them.
#[test]
fn a_state_of_another_optimizer_is_refused() {
    Gpus::software()
        .pool(1)
        .run(|dev, _| {
            let group = dev.group(&[0])?;
            let made = |optimizer: Optimizer, sizes: &[usize]| {
                let mut own = LocalOptimizer::<f32>::new(dev, &[ParameterGroup::new(optimizer, sizes)])?;
                let grads = sizes.iter().map(|&n| dev.zeros::<f32>(n)).collect::<Result<Vec<_>>>()?;
                let mut weights = sizes.iter().map(|&n| dev.zeros::<f32>(n)).collect::<Result<Vec<_>>>()?;
                own.step(dev, &grads, &mut weights)?;
                Ok::<_, Error>(own)
            };
            let cuts = |sizes: &[usize]| sizes.iter().map(|&n| Cut::whole(&[n])).collect::<Vec<_>>();
            let (adam, momentum) = (Optimizer::adam(0.1), Optimizer::sgd(0.1).momentum(0.9));
            let mut saved = Checkpoint::new();
            made(adam, &[3, 4, 5])?.save(&group, &mut saved, "own", &cuts(&[3, 4, 5]))?;
            made(momentum, &[7])?.save(&group, &mut saved, "other", &cuts(&[7]))?;
            for (optimizer, sizes) in
                [(momentum, &[3, 4, 5][..]), (Optimizer::sgd(0.1), &[3, 4, 5]), (adam, &[3, 4]), (adam, &[3])]
            {
                let error = failure(made(optimizer, sizes)?.load(&group, &saved, "own", &cuts(sizes)));
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            }
            made(adam, &[3, 4, 5])?.load(&group, &saved, "own", &cuts(&[3, 4, 5]))
        })
        .unwrap();
}

/// Sides whose product is no number, and tensors without elements.
#[test]
fn shapes_that_no_tensor_has() {
    let pool = Gpus::software().pool(2);
    let insert = |cut: &Cut| {
        pool.run(|dev, _| {
            let (group, mut into) = (everyone(dev)?, Checkpoint::new());
            into.insert_part(&group, "x", cut, &dev.zeros::<f32>(0)?)?;
            Ok(into)
        })
    };
    for shape in [&[1 << 40, 0][..], &[usize::MAX, 0, 3], &[0, 1 << 40, 1 << 40]] {
        for side in 0..shape.len() {
            let cut = Cut::along(side, shape);
            let found = insert(&cut).unwrap();
            let part = pool.run(|dev, _| found[0].part::<f32>(&everyone(dev)?, "x", &cut));
            assert_eq!(part.unwrap(), [[0.0; 0]; 2], "{cut:?}");
        }
    }
    let error = failure(insert(&Cut::along(0, &[1 << 32, 1 << 32])));
    assert!(matches!(error, Error::InvalidArgument { op: "insert_part", .. }), "{error}");
}
