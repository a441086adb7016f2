//! Pipelines over several processes: losses and gradients have the bits of one process with as many devices, and a
//! failing stage ends the step everywhere.

#[allow(dead_code, reason = "the model of other tests, too")]
#[path = "../parallel/pipeline/model.rs"]
mod model;

use crate::{
    fleet::{Fleet, pool, say},
    support::{Gpus, cases},
};
use gpu_pool::{Builder, Device, Error, GpuPool, Group, ReduceOp};
use gpu_pool_train::{Pipeline, PipelineSchedule, StageContext, Work};
use model::{Around, Layer, WIDTH, input, loss, pipelined};

fn schedule(name: &str, ranks: usize, micros: usize) -> PipelineSchedule {
    let schedule = match name {
        "gpipe" => PipelineSchedule::gpipe(ranks, micros),
        "1f1b" => PipelineSchedule::one_f_one_b(ranks, micros),
        "interleaved" => PipelineSchedule::interleaved(ranks, 2, micros),
        _ => PipelineSchedule::zero_bubble_v(ranks, micros),
    };
    schedule.unwrap()
}

fn bits(numbers: &[f32]) -> String {
    numbers.iter().map(|x| format!("{:08x}", x.to_bits())).collect::<Vec<_>>().join(",")
}

/// The world, or, in a pipeline beside another one, every second member of it.
fn team(dev: &Device, beside: bool) -> Result<Group<'_>, Error> {
    let world = dev.world()?;
    if !beside {
        return Ok(world);
    }
    let ranks: Vec<usize> = (0..world.count()).filter(|rank| rank % 2 == world.rank() % 2).collect();
    world.group(&ranks)
}

pub fn child(builder: Builder, what: &str, more: &[&str]) -> Result<(), Error> {
    let (name, ranks, micros) = (more[0], more[1].parse().unwrap(), more[2].parse().unwrap());
    let (pool, schedule) = (pool(builder)?, schedule(name, ranks, micros));
    match what {
        "pipeline" => trains(&pool, schedule, false)?,
        "pipelines" => trains(&pool, schedule, true)?,
        "endless-pipeline" => return endless(&pool, schedule),
        _ => fails(&pool, schedule)?,
    }
    pool.close()
}

/// Two steps, with an update after each; as `model::pipelined` does it in one process.
fn trains(pool: &GpuPool, schedule: PipelineSchedule, beside: bool) -> Result<(), Error> {
    let micros = schedule.micros();
    let mut pipeline = Pipeline::new_in(pool, move |dev| team(dev, beside), schedule, Layer::new)?;
    for step in 0..2 {
        let losses = pipeline.step(|dev, micro| input(dev, micro, micros), |dev, _, y| loss(dev, y))?;
        let found = pipeline.each(|dev, stage, layer| {
            if beside {
                // The two pipelines' gradients, one by device.
                dev.group(&[0, 1])?.all_reduce(&mut layer.dw, ReduceOp::Sum)?;
            }
            let gradients = layer.gradients(dev)?;
            layer.update(dev)?;
            Ok((stage, gradients))
        })?;
        if step == 1 {
            if !losses.is_empty() {
                say(format!("losses {}", bits(&losses)));
            }
            for (stage, gradients) in found {
                let end = if beside { WIDTH * WIDTH } else { gradients.len() };
                say(format!("stage {stage} {}", bits(&gradients[..end])));
            }
        }
    }
    let outputs = pipeline.forward(|dev, micro| input(dev, micro, micros), |dev, _, y| dev.download(&y))?;
    if !outputs.is_empty() {
        say(format!("outputs {}", bits(&outputs.concat())));
    }
    Ok(())
}

fn expected(name: &str, ranks: usize, micros: usize) -> Vec<String> {
    let (pool, schedule) = (Gpus::software().pool(ranks), schedule(name, ranks, micros));
    let (losses, gradients) = pipelined(&pool, &schedule, 2).unwrap();
    let stages = gradients.iter().enumerate().map(|(stage, gradients)| format!("stage {stage} {}", bits(gradients)));
    std::iter::once(format!("losses {}", bits(&losses))).chain(stages).collect()
}

#[test]
fn have_the_bits_of_one_process() {
    let all = [
        ("1f1b", &[2, 1][..], 5),
        ("gpipe", &[1, 2, 1], 4),
        ("interleaved", &[1, 1], 4),
        ("zero bubble v", &[1, 2], 6),
        ("1f1b", &[2, 2, 2], 7),
        ("gpipe", &[1, 1, 1], 2),
    ];
    for (name, shape, micros) in all.into_iter().take(cases(4, 6)) {
        let ranks = shape.iter().sum();
        let said = Fleet::start(&format!("pipeline {name} {ranks} {micros}").replace("zero bubble v", "zbv"), shape);
        let mut said = said.said().concat();
        // The outputs after two updates: as many rows as there are.
        let outputs = said.iter().position(|line| line.starts_with("outputs")).map(|at| said.remove(at)).unwrap();
        assert_eq!(outputs.matches(',').count() + 1, (3 * micros - 2) * WIDTH, "{name}");
        let mut expected = expected(name, ranks, micros);
        said.sort();
        expected.sort();
        assert_eq!(said, expected, "{name} {shape:?}");
    }
}

/// Data parallel times pipeline parallel: each pipeline has one device of each process.
#[test]
fn stand_beside_each_other() {
    let said = Fleet::start("pipelines 1f1b 2 4", &[2, 2]).said();
    let losses = |line: &&String| line.starts_with("losses");
    assert_eq!(said[0].iter().filter(losses).count(), 0);
    let last = said[1].iter().find(losses).unwrap();
    assert_eq!(last.matches(',').count() + 1, 8);
    let (first, second) = last["losses ".len()..].split_at(4 * 9);
    assert_eq!(first.trim_end_matches(','), second);
    for (host, lines) in said.iter().enumerate() {
        let stages: Vec<_> = lines.iter().filter(|line| line.starts_with("stage")).collect();
        assert!(stages.len() == 2 && stages[0] == stages[1] && stages[0].starts_with(&format!("stage {host} ")));
    }
}

/// Each action of a stage of process 1 fails once; then the stages are made anew, and a step succeeds.
fn fails(pool: &GpuPool, schedule: PipelineSchedule) -> Result<(), Error> {
    let micros = schedule.micros();
    for (work, bad) in [(Work::Forward, 0), (Work::Forward, 2), (Work::Backward, 1), (Work::Backward, 3)] {
        let build = |broken: bool| {
            move |dev: &Device, stage: usize| {
                let check: Check = Box::new(move |at: StageContext, now: Work| {
                    match at.stage == 1 && at.micro == bad && now == work {
                        true if broken => Err(Error::custom(format!("{now:?} of {bad} has failed"))),
                        _ => Ok(()),
                    }
                });
                Ok(Around(Layer::new(dev, stage)?, check))
            }
        };
        let mut pipeline = Pipeline::new_in(pool, |dev| dev.world(), schedule.clone(), build(true))?;
        let mut step = || pipeline.step(|dev, micro| input(dev, micro, micros), |dev, _, y| loss(dev, y));
        match step() {
            Err(Error::AbortedByHost { host, device, cause }) => say(format!("aborted by {host} {device:?}: {cause}")),
            Err(error) => say(format!("own: {error}")),
            Ok(_) => say("no error"),
        }
        say(matches!(step(), Err(Error::Poisoned { .. })));
        pipeline.reset(build(false))?;
        say(pipeline.step(|dev, micro| input(dev, micro, micros), |dev, _, y| loss(dev, y))?.len());
    }
    Ok(())
}

/// Steps without end, and without an update: the process is lost, or loses another one.
fn endless(pool: &GpuPool, schedule: PipelineSchedule) -> Result<(), Error> {
    let micros = schedule.micros();
    let mut pipeline = Pipeline::new_in(pool, |dev| dev.world(), schedule, Layer::new)?;
    for step in 0.. {
        if step == 3 {
            say("ready");
        }
        let done = pipeline.step(|dev, micro| input(dev, micro, micros), |dev, _, y| loss(dev, y));
        if let Err(error) = done {
            say(format!("error {error:?}"));
            let sums = pool.run(|dev, _| dev.download(&dev.sum(&dev.upload(&[1.0f32, 2.0])?)?))?;
            say(format!("local work {}", sums.iter().all(|sum| *sum == [3.0])));
            return Err(error);
        }
    }
    unreachable!("it does not end by itself")
}

#[test]
fn a_process_is_killed_in_mid_step() {
    for victim in [1, 0, 2].into_iter().cycle().take(cases(3, 30)) {
        let mut fleet = Fleet::start("endless-pipeline 1f1b 4 6", &[1, 2, 1]);
        (0..3).for_each(|rank| drop(fleet.until(rank, "ready")));
        fleet.signal(victim, libc::SIGKILL);
        for rank in (0..3).filter(|rank| *rank != victim) {
            let (_, error) = fleet.until(rank, "error ");
            assert!(error.contains(&format!("HostLost {{ host: {victim}")), "process {rank}: {error}");
            assert_eq!(fleet.until(rank, "local work ").1, "true");
            assert!(!fleet.ends(rank), "process {rank} has ended with 0");
        }
    }
}

type Check = Box<dyn Fn(StageContext, Work) -> Result<(), Error>>;

#[test]
fn a_failing_stage_ends_the_step_on_all() {
    let said = Fleet::start("failing-pipeline 1f1b 3 4", &[1, 1, 1]).said();
    for (process, lines) in said.iter().enumerate() {
        let causes = ["Forward of 0", "Forward of 2", "Backward of 1", "Backward of 3"];
        for (lines, cause) in lines.chunks(3).zip(causes) {
            let by = if process == 1 { "own: " } else { "aborted by 1 Some(0): " };
            assert_eq!(lines[0], format!("{by}{cause} has failed"), "{said:?}");
            assert_eq!(lines[1..], ["true", if process == 2 { "4" } else { "0" }], "{said:?}");
        }
        assert_eq!(lines.len(), 12);
    }
}
