//! The proof that a list of actions is a schedule. [`PipelineSchedule::check`] calls it, and so all constructors do.
//!
//! Counts come first: a stage without actions must not make the tables below larger than the list.

use super::{Action, Checked, Costs, MAX_ACTIONS, PipelineSchedule, ScheduleError, Work, simulate};

pub(super) fn check(actions: Vec<Vec<Action>>) -> Checked<PipelineSchedule> {
    let schedule = count(actions)?;
    order(&schedule)?;
    // The time does not matter here, only that the run ends.
    simulate::run(&schedule, &Costs::ZERO)?;
    Ok(schedule)
}

/// Checks that each stage is on one rank, and that each action is there once.
fn count(actions: Vec<Vec<Action>>) -> Checked<PipelineSchedule> {
    let number = actions.iter().map(Vec::len).sum::<usize>();
    fail_if!(actions.is_empty(), ScheduleError::Shape("a schedule needs at least one rank".into()));
    if let Some(rank) = actions.iter().position(Vec::is_empty) {
        return Err(ScheduleError::Shape(format!("rank {rank} has no action")));
    }
    fail_if!(number > MAX_ACTIONS, ScheduleError::Shape(format!("{number} actions are more than {MAX_ACTIONS}")));

    let (stages, micros) = extent(&actions)?;
    let mut rank_of = vec![usize::MAX; stages];
    for (rank, list) in actions.iter().enumerate() {
        for &action in list {
            match &mut rank_of[action.stage] {
                first if *first == usize::MAX => *first = rank,
                first if *first == rank => {}
                first => return Err(ScheduleError::TwoPlaces { action, ranks: [*first, rank] }),
            }
        }
    }

    let mut found = vec![[0_u32; 4]; stages * micros];
    for action in actions.iter().flatten() {
        found[action.stage * micros + action.micro][action.work as usize] += 1;
    }
    let training = actions.iter().flatten().any(|action| action.work != Work::Forward);
    for (cell, found) in found.iter().enumerate() {
        let (stage, micro) = (cell / micros, cell % micros);
        let [_, whole, input, weights] = *found;
        let split = whole == 0 && (input > 0 || weights > 0);
        let expected = [1, u32::from(training && !split), u32::from(split), u32::from(split)];
        for work in [Work::Forward, Work::Backward, Work::BackwardInput, Work::BackwardWeights] {
            let (found, expected) = (found[work as usize] as usize, expected[work as usize] as usize);
            if found != expected {
                let action = Action { stage, work, micro };
                let rank = Some(rank_of[stage]).filter(|&rank| rank != usize::MAX);
                return Err(ScheduleError::Count { action, rank, found, expected });
            }
        }
    }
    let split = found.iter().map(|found| found[Work::BackwardInput as usize] > 0).collect();
    Ok(PipelineSchedule { actions, rank_of, micros, split })
}

/// Stages and micro-batches. Their product is at most the number of forward passes, so tables of that size are safe.
fn extent(actions: &[Vec<Action>]) -> Checked<(usize, usize)> {
    let all = || actions.iter().flatten();
    let stages = all().map(|action| action.stage).max().unwrap_or(0).saturating_add(1);
    let micros = all().map(|action| action.micro).max().unwrap_or(0).saturating_add(1);
    let mut forward: Vec<_> = all().filter(|a| a.work == Work::Forward).map(|a| (a.stage, a.micro)).collect();
    if stages.checked_mul(micros).is_some_and(|cells| cells <= forward.len()) {
        return Ok((stages, micros));
    }

    // A forward pass is missing: the first hole in the sorted list.
    forward.sort_unstable();
    forward.dedup();
    let hole = (0..).zip(&forward).find(|&(i, &at)| at != (i / micros, i % micros)).map_or(forward.len(), |(i, _)| i);
    let action = Action { stage: hole / micros, work: Work::Forward, micro: hole % micros };
    let rank = actions.iter().position(|list| list.iter().any(|a| a.stage == action.stage));
    Err(ScheduleError::Count { action, rank, found: 0, expected: 1 })
}

/// Checks that each rank computes, for each stage and micro-batch, F before B or I, and I before W. The run would
/// report a deadlock; this error is easier to read.
fn order(schedule: &PipelineSchedule) -> Checked<()> {
    let micros = schedule.micros;
    let mut done = vec![[false; 4]; schedule.stages() * micros];
    for (rank, list) in schedule.actions.iter().enumerate() {
        for &early in list {
            let done = &mut done[early.stage * micros + early.micro];
            let needs = match early.work {
                Work::Forward => None,
                Work::Backward | Work::BackwardInput => Some(Work::Forward),
                Work::BackwardWeights => Some(Work::BackwardInput),
            };
            if let Some(work) = needs.filter(|&work| !done[work as usize]) {
                return Err(ScheduleError::Order { rank, early, late: Action { work, ..early } });
            }
            done[early.work as usize] = true;
        }
    }
    Ok(())
}
