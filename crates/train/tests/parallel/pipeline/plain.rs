//! What needs no model: what goes from stage to stage, bad input, memory.

use super::schedules;
use crate::{on_both, support::failure};
use gpu_pool::{Device, DeviceBuffer, Error};
use gpu_pool_train::{Pipeline, PipelineSchedule, Stage, StageContext};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::*},
};

/// Adds its number, and keeps what it passes on.
struct Adds;

/// Buffers that are shared, that may be missing, and values of the host.
type Parts = (Vec<Arc<DeviceBuffer<f32>>>, Option<DeviceBuffer<u32>>, (usize, String));

impl Stage for Adds {
    type Activation = Parts;
    type Saved = Arc<DeviceBuffer<f32>>;
    fn forward(&mut self, dev: &Device, at: StageContext, x: Parts) -> Result<(Parts, Arc<DeviceBuffer<f32>>), Error> {
        let (mut all, mut y, (count, name)) = x;
        let mut own = dev.upload(&vec![at.stage as f32; at.micro])?;
        dev.axpy(1.0, &**all.last().unwrap(), &mut own)?;
        all.push(Arc::new(own));
        assert!(all.iter().all(|x| x.device() == dev.index()), "all parts are here");
        if let Some(y) = &mut y {
            dev.fill(y, count as u32)?;
        }
        let kept = all.last().unwrap().clone();
        Ok(((all, y, (count + 1, format!("{name} {}", at.stage))), kept))
    }
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: Arc<DeviceBuffer<f32>>,
        dy: Parts,
    ) -> Result<Option<Parts>, Error> {
        let sum = (0..=at.stage).sum::<usize>() as f32;
        assert_eq!(dev.download(&*saved)?, vec![sum; at.micro]);
        Ok(Some(dy))
    }
}

/// A stage that does nothing, with values of the host.
struct Nothing;

impl Stage for Nothing {
    type Activation = usize;
    type Saved = ();
    fn forward(&mut self, _: &Device, _: StageContext, x: usize) -> Result<(usize, ()), Error> {
        Ok((x, ()))
    }
    fn backward(&mut self, _: &Device, _: StageContext, _: (), dy: usize) -> Result<Option<usize>, Error> {
        Ok((dy != 99).then_some(dy))
    }
}

fn is_here(error: &Error, text: &str) -> bool {
    let found = error.to_string();
    matches!(error, Error::InvalidArgument { site, .. } if site.file() == file!()) && found.contains(text)
        || panic!("`{text}` is not in {found}")
}

on_both! {
    // `test_kwargs_with_tracer`: more than one tensor goes along.
    2: fn activations_of_several_parts(gpus) {
        let pool = gpus.pool(2);
        let mut model = Pipeline::new(&pool, PipelineSchedule::interleaved(2, 2, 4).unwrap(), |_, _| Ok(Adds)).unwrap();
        let found = model.step(
            |dev, micro| {
                let first = vec![Arc::new(dev.zeros(micro)?)];
                Ok((first, (micro > 1).then(|| dev.zeros(3)).transpose()?, (micro, String::new())))
            },
            |dev, micro, parts| {
                let (all, y, (count, name)) = &parts;
                assert_eq!((all.len(), *count, name.as_str()), (5, micro + 4, " 0 1 2 3"));
                let sums = all.iter().map(|x| dev.download(&**x)).collect::<Result<Vec<_>, _>>()?;
                let y = y.as_ref().map(|y| dev.download(y)).transpose()?;
                Ok((parts, (sums, y)))
            },
        );
        for (micro, (sums, y)) in found.unwrap().into_iter().enumerate() {
            assert_eq!(sums, [0.0, 0.0, 1.0, 3.0, 6.0].map(|sum| vec![sum; micro]));
            assert_eq!(y, (micro > 1).then(|| vec![micro as u32 + 3; 3]));
        }
    }

    // What the closure has answered when the stages were made counts.
    2: fn a_group_closure_that_changes_its_mind(gpus) {
        let pool = gpus.pool(2);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let schedule = PipelineSchedule::interleaved(2, 2, 4).unwrap();
        let made = Pipeline::new_in(
            &pool,
            move |dev| {
                let turned = counted.fetch_add(1, SeqCst) / 2 % 2 == 1;
                dev.group(if turned { &[1, 0] } else { &[0, 1] })
            },
            schedule,
            |_, _| Ok(Nothing),
        );
        let mut model = made.unwrap();
        for _ in 0..3 {
            let seen = model.step(|_, micro| Ok(micro), |_, _, y| Ok((y, y as u64))).unwrap();
            assert_eq!(seen, [0, 1, 2, 3]);
            assert_eq!(model.each(|dev, stage, _| Ok((stage, dev.index()))).unwrap(), [(0, 0), (1, 1), (2, 0), (3, 1)]);
        }
        assert_eq!(calls.load(SeqCst), 2);
        // Then device 1 has the even stages.
        model.reset(|_, _| Ok(Nothing)).unwrap();
        model.step(|_, micro| Ok(micro), |_, _, y| Ok((y, ()))).unwrap();
        assert_eq!(model.each(|dev, stage, _| Ok((stage, dev.index()))).unwrap(), [(0, 1), (1, 0), (2, 1), (3, 0)]);
    }

    2: fn bad_input_is_refused_with_its_place(gpus) {
        let pool = gpus.pool(2);
        let nothing = |_: &Device, _: usize| Ok(Nothing);
        // More stages than devices, and fewer.
        for (ranks, stages) in [(1, 1), (3, 3)] {
            let error = failure(Pipeline::new(&pool, PipelineSchedule::gpipe(ranks, 2).unwrap(), nothing));
            is_here(&error, &format!("{stages} stages on {ranks} devices, and there are 2 devices"));
        }
        let schedule = PipelineSchedule::interleaved(4, 2, 4).unwrap();
        is_here(&failure(Pipeline::new(&pool, schedule, nothing)), "8 stages on 4 devices, and there are 2 devices");
        let schedule = || PipelineSchedule::gpipe(2, 2).unwrap();
        let error = failure(Pipeline::new_in(&pool, |dev| dev.group(&[dev.rank()]), schedule(), nothing));
        is_here(&error, "there are 1 devices");
        let error = failure(Pipeline::new_in(&pool, |dev| dev.group(&[7]), schedule(), nothing));
        is_here(&error, "rank 7 in a gang of 2");
        // Each device says that it is the first one.
        let error = Pipeline::new_in(&pool, |dev| dev.group(&[dev.rank(), 1 - dev.rank()]), schedule(), nothing);
        let error = failure(error);
        is_here(&error, "the group of device ");
        is_here(&failure(PipelineSchedule::one_f_one_b(2, 0)), "at least one micro-batch");
        is_here(&failure(PipelineSchedule::interleaved(2, 2, 5)), "equal rounds");
        is_here(&failure(PipelineSchedule::new(vec![])), "at least one rank");
        is_here(&failure(PipelineSchedule::from_csv("0F0,0X0")), "line 1, column 2");
        // Within the pool's errors, the type of a closure's error is inferred: `Error` is made from no other one.
        let around = || -> Result<usize, Error> {
            let inferred = || Ok(PipelineSchedule::gpipe(2, pool.device_count())?.micros());
            let micros = inferred()?;
            Ok(micros)
        };
        assert_eq!(around().unwrap(), 2);

        let mut forward = Pipeline::new(&pool, PipelineSchedule::gpipe(2, 2).unwrap().forward_only(), nothing).unwrap();
        is_here(&failure(forward.step(|_, m| Ok(m), |_, _, y| Ok((y, ())))), "no backward passes");
        assert_eq!(forward.forward(|_, m| Ok(m + 10), |_, _, y| Ok(y)).unwrap(), [10, 11]);

        // A loss that is no number is told, and harms nothing.
        let mut model = Pipeline::new(&pool, PipelineSchedule::gpipe(2, 3).unwrap(), nothing).unwrap();
        let root = |_: &Device, micro, y| Ok((y, (1.0 - micro as f64).sqrt()));
        is_here(&failure(model.step(|_, m| Ok(m), root)), "the loss of micro-batch 2 is NaN");
        let root = |_: &Device, micro, y| Ok((y, (0.5 - micro as f32).sqrt()));
        is_here(&failure(model.step(|_, m| Ok(m), root)), "the loss of micro-batch 1 is NaN");
        assert_eq!(model.step(|_, m| Ok(m), |_, _, y| Ok((y, y))).unwrap(), [0, 1, 2]);
        // In a type of one's own it comes as it is.
        assert!(model.step(|_, m| Ok(m), |_, _, y| Ok((y, Some(f32::NAN)))).unwrap()[0].unwrap().is_nan());

        // A gradient that is missing where it is needed.
        let error = failure(model.step(|_, m| Ok(m), |_, micro, y| Ok((if micro == 1 { 99 } else { y }, ()))));
        is_here(&error, "1B1: stage 1 has returned no gradient of its input, which stage 0 needs");
        assert!(matches!(model.step(|_, m| Ok(m), |_, _, y| Ok((y, ()))), Err(Error::Poisoned { .. })));
        model.clear_poison().unwrap();
        assert_eq!(model.step(|_, m| Ok(m), |_, _, y| Ok((y, y))).unwrap(), [0, 1, 2]);

        // A schedule that splits, and a stage that does not.
        let mut model = Pipeline::new(&pool, PipelineSchedule::zero_bubble(2, 1, 3).unwrap(), nothing).unwrap();
        let error = failure(model.step(|_, m| Ok(m), |_, _, y| Ok((y, ()))));
        is_here(&error, "the stage does not implement `backward_input` and `backward_weights`");
        model.reset(nothing).unwrap();
        assert_eq!(model.forward(|_, m| Ok(m), |_, _, y| Ok(y)).unwrap(), [0, 1, 2]);
    }

    // The values that the pipeline keeps are those that the schedule says, no more.
    2: fn memory_is_bounded(gpus) {
        for (name, schedule) in schedules(2, 8) {
            let pool = gpus.pool(2);
            let counts: Arc<[Count; 2]> = Arc::default();
            let make = |dev: &Device, _| Ok(Counts(counts.clone(), dev.rank()));
            let mut model = Pipeline::new(&pool, schedule.clone(), make).unwrap();
            model.step(|_, m| Ok(m), |_, _, y| Ok((y, ()))).unwrap();
            for (rank, count) in counts.iter().enumerate() {
                assert_eq!(count.most.load(SeqCst), schedule.in_flight(rank), "{name}, rank {rank}");
                assert_eq!(count.live.load(SeqCst), 0);
            }
            // And nothing for backward passes that do not come.
            counts.iter().for_each(|count| count.most.store(0, SeqCst));
            model.forward(|_, m| Ok(m), |_, _, _| Ok(())).unwrap();
            assert!(counts.iter().all(|count| count.most.load(SeqCst) == 1 && count.live.load(SeqCst) == 0));
        }
    }
}

#[derive(Default)]
struct Count {
    live: AtomicUsize,
    most: AtomicUsize,
}

/// Counts the saved values of a device.
struct Counts(Arc<[Count; 2]>, usize);

struct Kept(Arc<[Count; 2]>, usize);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0[self.1].live.fetch_sub(1, SeqCst);
    }
}

impl Stage for Counts {
    type Activation = usize;
    type Saved = Kept;
    fn forward(&mut self, _: &Device, _: StageContext, x: usize) -> Result<(usize, Kept), Error> {
        let count = &self.0[self.1];
        let live = count.live.fetch_add(1, SeqCst) + 1;
        count.most.fetch_max(live, SeqCst);
        Ok((x, Kept(self.0.clone(), self.1)))
    }
    fn backward(&mut self, _: &Device, _: StageContext, _: Kept, dy: usize) -> Result<Option<usize>, Error> {
        Ok(Some(dy))
    }
    fn backward_input(&mut self, _: &Device, _: StageContext, _: &mut Kept, dy: usize) -> Result<Option<usize>, Error> {
        Ok(Some(dy))
    }
    fn backward_weights(&mut self, _: &Device, _: StageContext, _: Kept) -> Result<(), Error> {
        Ok(())
    }
}

/// A rank that keeps more than the limit is told, once.
#[test]
fn a_limit_warns() {
    let told = Arc::new(Mutex::new(Vec::new()));
    tracing::subscriber::with_default(Collects(told.clone()), || {
        let pool = crate::support::Gpus::software().pool(3);
        let make = |schedule: PipelineSchedule| Pipeline::new(&pool, schedule, |_, _| Ok(Nothing)).unwrap();
        assert_eq!(PipelineSchedule::one_f_one_b(3, 8).unwrap().in_flight(0), 3);
        let _fits = make(PipelineSchedule::one_f_one_b(3, 8).unwrap()).limit_in_flight(3);
        assert_eq!(told.lock().unwrap().len(), 0);
        let _warns = make(PipelineSchedule::one_f_one_b(3, 8).unwrap()).limit_in_flight(2);
        assert_eq!(*told.lock().unwrap(), ["rank=0 in_flight=3 limit=2 "]);
        let _warns = make(PipelineSchedule::gpipe(3, 8).unwrap()).limit_in_flight(4);
        assert_eq!(told.lock().unwrap().len(), 1 + 3);
    });
}

struct Collects(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Collects {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        *about.level() == tracing::Level::WARN && about.target().contains("pipeline")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() != "message" {
                    self.0 += &format!("{}={value:?} ", field.name());
                }
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
