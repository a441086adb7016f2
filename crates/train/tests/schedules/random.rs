//! Random schedules: what `new` accepts runs to its end, what it refuses does not, and nothing panics.

use super::presets::PRESETS;
use gpu_pool::Error;
use gpu_pool_train::*;
use proptest::prelude::*;
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

/// A preset with small arguments. Arguments that cannot be split into equal rounds are left out.
fn preset() -> impl Strategy<Value = PipelineSchedule> {
    (0..PRESETS.len(), 1..6_usize, 1..4_usize, 1..10_usize, any::<bool>(), any::<bool>()).prop_filter_map(
        "no equal rounds",
        |(preset, ranks, chunks, micros, forward, merge)| {
            let schedule = PRESETS[preset](ranks, chunks, micros).ok()?;
            let schedule = if merge { schedule.merge_backward() } else { schedule };
            Some(if forward { schedule.forward_only() } else { schedule })
        },
    )
}

fn lists(schedule: &PipelineSchedule) -> Vec<Vec<Action>> {
    (0..schedule.ranks()).map(|rank| schedule.actions(rank).to_vec()).collect()
}

/// What an action waits for, written once more, and without [`PipelineSchedule`]: results are named by stage,
/// micro-batch, and whether they are gradients.
fn inputs(Action { stage, work, micro }: Action, stages: usize) -> Vec<(usize, usize, bool)> {
    match work {
        Work::Forward => (stage > 0).then(|| (stage - 1, micro, false)).into_iter().collect(),
        Work::BackwardWeights => vec![(stage, micro, true)],
        Work::Backward | Work::BackwardInput => {
            let own = (stage, micro, false);
            if stage + 1 == stages { vec![own] } else { vec![own, (stage + 1, micro, true)] }
        }
    }
}

fn result(Action { stage, work, micro }: Action) -> Option<(usize, usize, bool)> {
    (work != Work::BackwardWeights).then_some((stage, micro, work != Work::Forward))
}

fn stages(lists: &[Vec<Action>]) -> usize {
    lists.iter().flatten().map(|action| action.stage + 1).max().unwrap_or(0)
}

/// Lets the ranks run in turns, one action each, from the last rank to the first. True if all lists come to their end.
fn runs(lists: &[Vec<Action>]) -> bool {
    let stages = stages(lists);
    let mut made = HashSet::new();
    let mut at = vec![0; lists.len()];
    loop {
        let mut moved = false;
        for rank in (0..lists.len()).rev() {
            let Some(&action) = lists[rank].get(at[rank]) else { continue };
            if inputs(action, stages).iter().all(|input| made.contains(input)) {
                made.extend(result(action));
                at[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            return (0..lists.len()).all(|rank| at[rank] == lists[rank].len());
        }
    }
}

/// The starts of all actions, as the smallest solution of "after the action before, and after the inputs": repeated
/// until nothing changes. No queue, no order of ranks.
fn starts(lists: &[Vec<Action>], cost: impl Fn(Work) -> u64, hop: u64) -> Vec<Vec<u64>> {
    let stages = stages(lists);
    let rank_of: HashMap<usize, usize> =
        lists.iter().enumerate().flat_map(|(rank, list)| list.iter().map(move |a| (a.stage, rank))).collect();
    let mut starts: Vec<Vec<u64>> = lists.iter().map(|list| vec![0; list.len()]).collect();
    loop {
        let mut ends = HashMap::new();
        for (list, starts) in lists.iter().zip(&starts) {
            for (&action, start) in list.iter().zip(starts) {
                ends.extend(result(action).map(|result| (result, start + cost(action.work))));
            }
        }
        let mut next = starts.clone();
        for (rank, list) in lists.iter().enumerate() {
            let mut free = 0;
            for (i, &action) in list.iter().enumerate() {
                let arrive =
                    |input: &(usize, usize, bool)| ends[input] + if rank_of[&input.0] == rank { 0 } else { hop };
                let ready = inputs(action, stages).iter().map(arrive).max().unwrap_or(0);
                next[rank][i] = free.max(ready);
                free = next[rank][i] + cost(action.work);
            }
        }
        if next == starts {
            return starts;
        }
        starts = next;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn csv_round_trip(schedule in preset()) {
        prop_assert_eq!(&PipelineSchedule::from_csv(&schedule.to_csv()).unwrap(), &schedule);
        prop_assert_eq!(PipelineSchedule::check(lists(&schedule)), Ok(schedule));
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[0-3FBIWSEND_RCV(;),\n ]{0,60}") {
        if let Ok(schedule) = PipelineSchedule::from_csv(&text) {
            prop_assert_eq!(PipelineSchedule::from_csv(&schedule.to_csv()).unwrap(), schedule);
        }
    }

    #[test]
    fn any_numbers_make_a_schedule_or_an_error(
        preset in 0..PRESETS.len(),
        ranks in prop_oneof![0..9_usize, any::<usize>()],
        chunks in prop_oneof![0..5_usize, any::<usize>()],
        micros in prop_oneof![0..17_usize, any::<usize>()],
    ) {
        match PRESETS[preset](ranks, chunks, micros) {
            Ok(schedule) => {
                prop_assert_eq!((schedule.ranks(), schedule.micros()), (ranks, micros));
                prop_assert!(runs(&lists(&schedule)));
            }
            Err(error) => prop_assert!(matches!(error, Error::InvalidArgument { .. }), "{}", error),
        }
    }

    #[test]
    fn simulation_agrees_with_a_simple_model(
        schedule in preset(), forward in 0..9_u64, input in 0..9_u64, weights in 0..9_u64, hop in 0..9_u64,
    ) {
        let nanos = Duration::from_nanos;
        let timeline = schedule.simulate(Costs {
            forward: nanos(forward),
            backward_input: nanos(input),
            backward_weights: nanos(weights),
            hop: nanos(hop),
        });
        let timeline = timeline.unwrap();
        let cost = |work| match work {
            Work::Forward => forward,
            Work::Backward => input + weights,
            Work::BackwardInput => input,
            Work::BackwardWeights => weights,
        };
        let lists = lists(&schedule);
        let starts = starts(&lists, cost, hop);
        let (mut end, mut busy) = (0, 0);
        for (rank, list) in lists.iter().enumerate() {
            prop_assert_eq!(timeline.spans[rank].len(), list.len());
            for ((&action, &start), span) in list.iter().zip(&starts[rank]).zip(&timeline.spans[rank]) {
                let finish = start + cost(action.work);
                prop_assert_eq!(*span, Span { action, start: nanos(start), end: nanos(finish) });
                end = end.max(finish);
                busy += cost(action.work);
            }
        }
        prop_assert_eq!(timeline.end, nanos(end));
        let all = (end * lists.len() as u64) as f64;
        let bubble = if all > 0.0 { (all - busy as f64) / all } else { 0.0 };
        prop_assert!((timeline.bubble - bubble).abs() < 1e-9 && (0.0..=1.0).contains(&timeline.bubble));
    }

    #[test]
    fn saved_activations_agree_with_a_set(schedule in preset()) {
        for (rank, list) in lists(&schedule).iter().enumerate() {
            let (mut saved, mut most) = (HashSet::new(), 0);
            for action in list {
                match action.work {
                    Work::Forward => saved.insert((action.stage, action.micro)),
                    Work::BackwardInput => false,
                    Work::Backward | Work::BackwardWeights => saved.remove(&(action.stage, action.micro)),
                };
                most = most.max(saved.len());
            }
            prop_assert_eq!(schedule.in_flight(rank), if schedule.is_training() { most } else { 0 });
            prop_assert!(saved.is_empty() || !schedule.is_training());
        }
    }

    /// What rank A sends to rank B is what B expects from A, and the input of a step was made before.
    #[test]
    fn outputs_meet_inputs(schedule in preset()) {
        let (mut sent, mut received) = (HashSet::new(), HashSet::new());
        for rank in 0..schedule.ranks() {
            for step in schedule.steps(rank) {
                if let Peer::Rank(to) = step.output {
                    prop_assert!(sent.insert((rank, to, step.action)));
                }
                match (step.input, step.needs) {
                    (Peer::Rank(from), Some(needs)) => prop_assert!(received.insert((from, rank, needs))),
                    (Peer::Rank(_), None) => prop_assert!(false, "{:?}", step),
                    (_, Some(needs)) => prop_assert_eq!(schedule.rank_of(needs.stage), rank),
                    (_, None) => prop_assert_eq!((step.action.stage, step.action.work), (0, Work::Forward)),
                }
            }
        }
        prop_assert_eq!(sent, received);
    }

    #[test]
    fn one_moved_action_is_refused_or_runs(
        schedule in preset(), rank in any::<prop::sample::Index>(), from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
    ) {
        let mut lists = lists(&schedule);
        let rank = rank.index(lists.len());
        let action = lists[rank].remove(from.index(schedule.actions(rank).len()));
        let to = to.index(lists[rank].len() + 1);
        lists[rank].insert(to, action);
        match PipelineSchedule::check(lists.clone()) {
            Ok(moved) => {
                prop_assert!(runs(&lists));
                prop_assert!(moved.simulate(Costs::default()).is_ok());
                let _ = moved.to_string();
            }
            Err(ScheduleError::Order { rank: at, .. }) => prop_assert!(at == rank && !runs(&lists)),
            Err(ScheduleError::Stuck(blocked)) => {
                prop_assert!(!runs(&lists));
                for StuckAction { rank, action, needs, on } in blocked {
                    prop_assert!(lists[rank].contains(&action) && lists[on].contains(&needs));
                }
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn one_dropped_or_doubled_action_is_refused(
        schedule in preset(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(),
        double in any::<bool>(),
    ) {
        let mut lists = lists(&schedule);
        let rank = rank.index(lists.len());
        let at = at.index(lists[rank].len());
        let action = lists[rank][at];
        if double {
            lists[rank].push(action);
        } else {
            lists[rank].remove(at);
        }
        let empty = lists[rank].is_empty();
        match PipelineSchedule::check(lists) {
            Err(ScheduleError::Count { .. }) => {}
            Err(ScheduleError::Shape(_)) => prop_assert!(empty),
            // Without its last forward pass, or its only backward pass, a small schedule is a schedule for inference.
            Ok(smaller) => prop_assert!(!double && !smaller.is_training()),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn an_action_on_another_rank_is_refused(
        schedule in preset(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(),
    ) {
        let mut lists = lists(&schedule);
        prop_assume!(lists.len() > 1);
        let rank = rank.index(lists.len());
        prop_assume!(lists[rank].len() > 1);
        let action = lists[rank].remove(at.index(schedule.actions(rank).len()));
        let other = (rank + 1) % lists.len();
        lists[other].push(action);
        match PipelineSchedule::check(lists) {
            Err(ScheduleError::TwoPlaces { ranks, .. }) => {
                prop_assert!(ranks.contains(&rank) && ranks.contains(&other));
            }
            // The only action of its stage: the stage has moved. In inference with one micro-batch that may be right.
            Ok(_) | Err(ScheduleError::Stuck(_)) => prop_assert!(!schedule.is_training() && schedule.micros() == 1),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    /// All lists in random order: `new` accepts them exactly if they run.
    #[test]
    fn random_orders_are_refused_or_run(
        lists in preset().prop_map(|schedule| lists(&schedule)).prop_flat_map(|lists| {
            lists.into_iter().map(|list| Just(list).prop_shuffle()).collect::<Vec<_>>()
        }),
    ) {
        prop_assert_eq!(PipelineSchedule::new(lists.clone()).is_ok(), runs(&lists));
    }
}
