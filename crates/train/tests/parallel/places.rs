//! Each public function of the crate that can fail is called wrongly: its error names the function, and its call in
//! this file.
//!
//! `.ci/places.py` compares this table with rustdoc's pages, so that no function is forgotten: it reads the names in
//! [`told`].

use crate::{
    support::{self, failure, guarded},
    told::{group_of, on_one_of, told},
};
use gpu_pool::{Device, DeviceBuffer, Error, ReduceOp, Result};
use gpu_pool_train::{
    ColumnLinear, Costs, DataParallel, Indices, LocalOptimizer, Model, Optimizer, ParameterGroup, Pipeline,
    PipelineSchedule, RowLinear, RowNorm, SequenceNorm, ShardedOptimizer, ShardedState, Stage, StageContext,
    VocabularyEmbedding, gather_rows, part_of, scatter_rows, vocabulary_cross_entropy,
};
use parking_lot::Mutex;

/// Functions that are not called wrongly here, and why.
#[rustfmt::skip]
const EXCEPTED: [(&str, &str); 1] = [
    ("Checkpoint::save", "its error is the operating system's, in `Error::Custom`"),
];

#[test]
fn sharded_layers_have_places() {
    on_one_of(support::builder(), |dev, far| {
        let (g, x, mut y, big) = (&group_of(dev), dev.zeros::<f32>(4)?, dev.zeros::<f32>(5)?, vec![0.0f32; 2 << 20]);
        told("part_of", part_of(g, 7, 4, 1));
        told("gather_rows", gather_rows(g, &x, 3, 3));
        told("scatter_rows", scatter_rows(g, &x, 3, 3));
        told("Indices::new", Indices::new(g, &[7], 3));
        let (words, others) = (Indices::new(g, &[1], 2)?, Indices::new(g, &[1], 3)?);
        told("VocabularyEmbedding::new", VocabularyEmbedding::new(g, &[1.0f32; 5], 2));
        let mut table = VocabularyEmbedding::new(g, &[1.0f32; 4], 2)?;
        told("VocabularyEmbedding::forward", table.forward(g, &others));
        told("VocabularyEmbedding::backward", table.backward(g, &words, &x, false));
        told("vocabulary_cross_entropy", vocabulary_cross_entropy(g, &mut y, &words, 1.0));
        told("ColumnLinear::new", ColumnLinear::new(g, &[1.0f32; 5], &[1.0; 2]));
        told("ColumnLinear::in_units", ColumnLinear::in_units(g, &[1.0f32; 5], &[1.0; 2], 1));
        let mut columns = ColumnLinear::new(g, &[1.0f32; 4], &[1.0; 2])?;
        told("ColumnLinear::forward", columns.forward(g, &y, 2));
        told("ColumnLinear::forward_from_rows", columns.forward_from_rows(g, &y, 2));
        told("ColumnLinear::backward", columns.backward(g, &y, &y, 2, false));
        told("ColumnLinear::backward_to_rows", columns.backward_to_rows(g, &y, &y, 2, false));
        told("RowLinear::new", RowLinear::new(g, &[1.0f32; 5], &[1.0; 2]));
        told("RowLinear::in_units", RowLinear::in_units(g, &[1.0f32; 5], &[1.0; 2], 1));
        let mut rows = RowLinear::new(g, &[1.0f32; 4], &[1.0; 2])?;
        told("RowLinear::forward", rows.forward(g, &y, 2));
        told("RowLinear::forward_norm", rows.forward_norm(g, &x, 2, &mut y, RowNorm::rms(&x, 1e-5)));
        told("RowLinear::forward_to_rows", rows.forward_to_rows(g, &y, 2));
        told("RowLinear::backward", rows.backward(g, &y, &y, 2, false));
        told("RowLinear::backward_from_rows", rows.backward_from_rows(g, &y, &y, 2, false));
        told("SequenceNorm::layer", SequenceNorm::layer(dev, &big, &big, 1e-5));
        told("SequenceNorm::rms", SequenceNorm::rms(dev, &big, 1e-5));
        let mut norm = SequenceNorm::rms(dev, &[1.0f32; 4], 1e-5)?;
        told("SequenceNorm::forward", norm.forward(dev, &y));
        let (_, saved) = norm.forward(dev, &x)?;
        told("SequenceNorm::backward", norm.backward(g, far, &saved, &y, false));

        told("ShardedOptimizer::new", ShardedOptimizer::<f32>::new(g, Optimizer::sgd(-1.0), ReduceOp::Sum, &[4]));
        let mut own = ShardedOptimizer::<f32>::new(g, Optimizer::adam(0.1), ReduceOp::Sum, &[4])?;
        told("ShardedOptimizer::set_rate", own.set_rate(-1.0));
        told("ShardedOptimizer::step", own.step(dev, &mut y, &mut [dev.zeros::<f32>(4)?]));
        told("ShardedOptimizer::set_state", own.set_state(dev, &ShardedState::default()));
        let group = |optimizer| [ParameterGroup::new(optimizer, &[4])];
        told("LocalOptimizer::new", LocalOptimizer::<f32>::new(dev, &group(Optimizer::sgd(-1.0))));
        let mut local = LocalOptimizer::<f32>::new(dev, &group(Optimizer::adam(0.1)))?;
        told("LocalOptimizer::set_rate", local.set_rate(7, 0.1));
        told("LocalOptimizer::step", local.step(dev, &[&x], &mut [&mut y]));
        told("LocalOptimizer::step_in", local.step_in(g, &[&x], &mut [&mut y]));
        let captured = dev.capture(|dev| {
            told("LocalOptimizer::prepare", local.prepare(dev));
            told("ShardedOptimizer::prepare", own.prepare(dev));
            told("ShardedOptimizer::state", own.state(dev));
            Ok(())
        });
        assert!(captured.is_err());
        Ok(())
    });
}

/// A file, and no checkpoint.
#[cfg(feature = "checkpoints")]
const NO_CHECKPOINT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

struct Two([DeviceBuffer<f32>; 2]);

impl Model for Two {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
        self.0.iter_mut().collect()
    }
}

fn two(dev: &Device) -> Result<Two> {
    Ok(Two([dev.zeros(3)?, dev.zeros(4)?]))
}

#[test]
fn data_parallel_calls_have_places() {
    guarded(|| {
        let pool = support::builder().host(2).build().unwrap();
        let (right, wrong) = (Optimizer::sgd(0.1), Optimizer::sgd(-1.0));
        told("DataParallel::new", DataParallel::new(&pool, wrong, two));
        told("DataParallel::new_on", DataParallel::new_on(&pool, &[7], right, two));
        told("DataParallel::new_in", DataParallel::new_in(&pool, |dev| dev.world(), wrong, two));
        let mut model = DataParallel::new(&pool, right, two).unwrap();
        told("DataParallel::set_rate", model.set_rate(-1.0));
        told("DataParallel::capture_step", model.capture_step(0, |_, _, _, _| Ok(())));
        told("DataParallel::launch_steps", model.launch_steps(1, |_, _, _, _| Ok(())));
        told("DataParallel::step", model.step(2, |_, _, _, _| Ok(())));
        told("DataParallel::forward", model.forward(2, |_, _, _| Ok(vec![()])));
        told("DataParallel::each", model.each(|_, _| Ok(())));
        told("DataParallel::verify", model.verify());
        told("DataParallel::gradient_norms", model.gradient_norms());
        model.clear_poison().unwrap();
        told("DataParallel::accumulate", model.accumulate(2, |_, _, _, _| Ok(())));
        #[cfg(feature = "checkpoints")]
        {
            use gpu_pool_train::Checkpoint;
            told("DataParallel::checkpoint", model.checkpoint());
            told("DataParallel::save", model.save("never made"));
            told("DataParallel::load", model.load(NO_CHECKPOINT));
            told("DataParallel::restore", model.restore(&Checkpoint::new()));
        }
        model.clear_poison().unwrap();
        let given = model.step(2, |dev, _, _, gradients| {
            told("Gradients::write", gradients.write(7, |_| Ok(())));
            told("Gradients::add", gradients.add(7, |_, _| Ok(())));
            gradients.write(0, |g| dev.fill(g, 1.0))?;
            let line = line!() + 1;
            let inner = gradients.write(1, |g| dev.copy(&dev.zeros::<f32>(9)?, g));
            // A closure's own call has its own name.
            assert!(matches!(inner, Err(Error::InvalidArgument { op: "copy", site, .. }) if site.line() == line));
            Ok(())
        });
        assert!(!matches!(given, Err(Error::Panicked { .. })), "{given:?}");
        let model = Mutex::new(model);
        pool.run(|dev, _| {
            if dev.rank() == 0 {
                told("DataParallel::clear_poison", model.lock().clear_poison());
            }
            Ok(())
        })
        .unwrap();

        // Replicas that differ: the two places are those of the call.
        let mut model = DataParallel::new(&pool, right, two).unwrap();
        model.each(|dev, two| dev.fill(&mut two.0[0], dev.index() as f32)).unwrap();
        let line = line!() + 1;
        let differ = failure(model.verify());
        let Error::Mismatch { a_site, b_site, .. } = &differ else { panic!("{differ}") };
        assert!([a_site, b_site].iter().all(|site| site.file() == file!() && site.line() == line), "{differ}");
        let line = line!() + 1;
        let differ =
            failure(DataParallel::new(&pool, right, |dev| Ok(Two([dev.zeros(3)?, dev.zeros(4 + dev.index())?]))));
        let Error::Mismatch { a_site, b_site, .. } = &differ else { panic!("{differ}") };
        assert!(
            [a_site, b_site].iter().all(|site| site.file() == file!() && (line..line + 2).contains(&site.line())),
            "{differ}"
        );
    });
}

struct Same;

impl Stage for Same {
    type Activation = DeviceBuffer<f32>;
    type Saved = ();
    fn forward(&mut self, _: &Device, _: StageContext, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, ())> {
        Ok((x, ()))
    }
    fn backward(
        &mut self,
        _: &Device,
        _: StageContext,
        _: (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        Ok(Some(dy))
    }
}

#[test]
fn pipelines_and_schedules_have_places() {
    guarded(|| {
        told("PipelineSchedule::gpipe", PipelineSchedule::gpipe(0, 1));
        told("PipelineSchedule::looped_bfs", PipelineSchedule::looped_bfs(0, 1, 1));
        told("PipelineSchedule::one_f_one_b", PipelineSchedule::one_f_one_b(0, 1));
        told("PipelineSchedule::interleaved", PipelineSchedule::interleaved(0, 1, 1));
        told("PipelineSchedule::zero_bubble", PipelineSchedule::zero_bubble(0, 1, 1));
        told("PipelineSchedule::zero_bubble_v", PipelineSchedule::zero_bubble_v(0, 1));
        told("PipelineSchedule::new", PipelineSchedule::new(vec![]));
        told("PipelineSchedule::from_csv", PipelineSchedule::from_csv("?"));
        let long = Costs { hop: std::time::Duration::MAX, ..Costs::default() };
        told("PipelineSchedule::simulate", PipelineSchedule::gpipe(2, 2).unwrap().simulate(long));

        let pool = support::builder().host(2).build().unwrap();
        let three = || PipelineSchedule::gpipe(3, 1).unwrap();
        told("Pipeline::new", Pipeline::new(&pool, three(), |_, _| Ok(Same)));
        told("Pipeline::new_in", Pipeline::new_in(&pool, |dev| dev.world(), three(), |_, _| Ok(Same)));
        let mut model = Pipeline::new(&pool, PipelineSchedule::gpipe(2, 1).unwrap(), |_, _| Ok(Same)).unwrap();
        let failed = model.each(|_, _, _| Err::<(), _>(Error::custom("a test")));
        assert!(failed.is_err());
        told("Pipeline::each", model.each(|_, _, _| Ok(())));
        told("Pipeline::forward", model.forward(|dev, _| dev.zeros(1), |_, _, _| Ok(())));
        told("Pipeline::step", model.step(|dev, _| dev.zeros(1), |_, _, y| Ok((y, ()))));
        #[cfg(feature = "checkpoints")]
        {
            told("Pipeline::checkpoint", model.checkpoint(|_, _, _, _| Ok(())));
            told("Pipeline::save", model.save("never made", |_, _, _, _| Ok(())));
            told("Pipeline::load", model.load(NO_CHECKPOINT, |_, _, _, _| Ok(())));
        }
        let model = Mutex::new(model);
        pool.run(|dev, _| {
            if dev.rank() == 0 {
                #[cfg(feature = "checkpoints")]
                told("Pipeline::restore", model.lock().restore(&Default::default(), |_, _, _, _| Ok(())));
                told("Pipeline::reset", model.lock().reset(|_, _| Ok(Same)));
                told("Pipeline::clear_poison", model.lock().clear_poison());
            }
            Ok(())
        })
        .unwrap();
    });
}

#[test]
#[cfg(feature = "checkpoints")]
fn checkpoints_have_places() {
    use gpu_pool_train::{Checkpoint, Cut};
    let mut checkpoint = Checkpoint::new();
    told("Checkpoint::insert", checkpoint.insert("x", &[3], &[1.0f32]));
    told("Checkpoint::tensor", checkpoint.tensor::<f32>("x"));
    told("Checkpoint::shape", checkpoint.shape("x"));
    told("Checkpoint::load", Checkpoint::load(NO_CHECKPOINT));
    on_one_of(support::builder(), |dev, far| {
        let (g, mut empty) = (&group_of(dev), Checkpoint::new());
        told("Checkpoint::insert_part", empty.insert_part(g, "x", &Cut::whole(&[3]), far));
        told("Checkpoint::part", empty.part::<f32>(g, "x", &Cut::whole(&[3])));
        let mut columns = ColumnLinear::new(g, &[1.0f32; 4], &[1.0; 2])?;
        told("ColumnLinear::load", columns.load(g, &empty, "x"));
        let mut rows = RowLinear::new(g, &[1.0f32; 4], &[1.0; 2])?;
        told("RowLinear::load", rows.load(g, &empty, "x"));
        let mut table = VocabularyEmbedding::new(g, &[1.0f32; 4], 2)?;
        told("VocabularyEmbedding::load", table.load(g, &empty, "x"));
        let mut local = LocalOptimizer::<f32>::new(dev, &[ParameterGroup::new(Optimizer::adam(0.1), &[4])])?;
        told("LocalOptimizer::save", local.save(g, &mut empty, "x", &[]));
        told("LocalOptimizer::load", local.load(g, &empty, "x", &[]));
        let captured = dev.capture(|dev| {
            let g = &group_of(dev);
            told("ColumnLinear::save", columns.save(g, &mut empty, "x"));
            told("RowLinear::save", rows.save(g, &mut empty, "x"));
            told("VocabularyEmbedding::save", table.save(g, &mut empty, "x"));
            Ok(())
        });
        assert!(captured.is_err());
        Ok(())
    });
}

/// The table of exceptions is read by `.ci/places.py`.
#[test]
fn exceptions_have_reasons() {
    assert!(EXCEPTED.iter().all(|(name, why)| !name.is_empty() && !why.is_empty()));
}
