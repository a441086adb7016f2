//! The presets against what their papers promise, and against arguments without sense.

use gpu_pool::{Error, Result};
use gpu_pool_train::*;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

fn timeline(schedule: Result<PipelineSchedule>) -> Timeline {
    schedule.unwrap().simulate(Costs::default()).unwrap()
}

#[track_caller]
fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-9, "{found}, not {wanted}");
}

/// Idle time over all time, if a rank is idle for `idle` units and busy for `busy` units.
fn share(idle: usize, busy: usize) -> f64 {
    idle as f64 / (idle + busy) as f64
}

#[test]
fn bubbles_are_those_of_the_papers() {
    for ranks in 2..=8 {
        for micros in [4, 8, 16, 32, 64] {
            let lost = ranks - 1;
            near(timeline(PipelineSchedule::gpipe(ranks, micros)).bubble, share(lost, micros));
            near(timeline(PipelineSchedule::one_f_one_b(ranks, micros)).bubble, share(lost, micros));
            for chunks in [2, 3, 4].into_iter().filter(|_| micros >= ranks && micros % ranks == 0) {
                near(
                    timeline(PipelineSchedule::interleaved(ranks, chunks, micros)).bubble,
                    share(lost, chunks * micros),
                );
            }
            for chunks in [1, 2, 3].into_iter().filter(|_| micros >= ranks) {
                near(
                    timeline(PipelineSchedule::looped_bfs(ranks, chunks, micros)).bubble,
                    share(lost, chunks * micros),
                );
            }
            if micros >= ranks {
                // ZB-H1: (ranks - 1) * (F + I - W).
                near(timeline(PipelineSchedule::zero_bubble(ranks, 1, micros)).bubble, share(lost, 3 * micros));
            }
            if micros >= 2 * ranks {
                near(timeline(PipelineSchedule::zero_bubble_v(ranks, micros)).bubble, share(lost, 6 * micros));
            }
        }
    }
}

/// In ZB-V each rank works without a gap, once it has started.
#[test]
fn zero_bubble_v_has_no_gap() {
    for (ranks, micros) in [(2, 4), (4, 8), (4, 20), (8, 16)] {
        for spans in timeline(PipelineSchedule::zero_bubble_v(ranks, micros)).spans {
            assert!(spans.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranks} {micros}");
        }
    }
}

#[test]
fn saved_activations_are_those_of_the_papers() {
    for ranks in 1..=6 {
        for micros in [1, 2, 3, 6, 12, 24] {
            let kept = |schedule: Result<PipelineSchedule>| timeline(schedule).in_flight;
            assert_eq!(kept(PipelineSchedule::gpipe(ranks, micros)), vec![micros; ranks]);
            assert_eq!(kept(PipelineSchedule::looped_bfs(ranks, 3, micros)), vec![3 * micros; ranks]);
            let falling: Vec<_> = (0..ranks).map(|rank| micros.min(ranks - rank)).collect();
            assert_eq!(kept(PipelineSchedule::one_f_one_b(ranks, micros)), falling);
            // ZB-H1 keeps what 1F1B's first rank keeps.
            assert!(
                kept(PipelineSchedule::zero_bubble(ranks, 1, micros)).iter().all(|&kept| kept <= ranks.min(micros))
            );
            // Each stage of ZB-V is half as large.
            assert!(
                kept(PipelineSchedule::zero_bubble_v(ranks, micros)).iter().all(|&kept| kept <= 2 * ranks.min(micros))
            );
            assert_eq!(kept(PipelineSchedule::gpipe(ranks, micros).map(|s| s.forward_only())), vec![0; ranks]);
        }
    }
}

#[test]
fn hops_add_up() {
    let costs = Costs { hop: MS / 4, ..Costs::default() };
    for (ranks, micros) in [(1, 3), (2, 4), (4, 8)] {
        let end = PipelineSchedule::gpipe(ranks, micros).unwrap().simulate(costs).unwrap().end;
        // The first micro-batch goes down, the last one's gradient goes up.
        assert_eq!(end, 3 * MS * (micros + ranks - 1) as u32 + 2 * costs.hop * (ranks - 1) as u32);
    }
    // Four stages have three hops in each direction. In a V the one at the turn costs nothing.
    let v = PipelineSchedule::zero_bubble_v(2, 1).unwrap();
    let without = v.simulate(Costs::default()).unwrap().end;
    assert_eq!(v.simulate(costs).unwrap().end, without + 4 * costs.hop);
}

#[test]
fn stages_are_where_the_documentation_says() {
    let places = |schedule: Result<PipelineSchedule>| {
        let schedule = schedule.unwrap();
        (0..schedule.stages()).map(|stage| schedule.rank_of(stage)).collect::<Vec<_>>()
    };
    assert_eq!(places(PipelineSchedule::gpipe(3, 2)), [0, 1, 2]);
    assert_eq!(places(PipelineSchedule::one_f_one_b(3, 2)), [0, 1, 2]);
    assert_eq!(places(PipelineSchedule::interleaved(3, 2, 3)), [0, 1, 2, 0, 1, 2]);
    assert_eq!(places(PipelineSchedule::looped_bfs(2, 3, 2)), [0, 1, 0, 1, 0, 1]);
    assert_eq!(places(PipelineSchedule::zero_bubble(2, 2, 2)), [0, 1, 0, 1]);
    assert_eq!(places(PipelineSchedule::zero_bubble_v(3, 2)), [0, 1, 2, 2, 1, 0]);
    assert_eq!(places(PipelineSchedule::new(vec![vec!["1F0".parse().unwrap()], vec!["0F0".parse().unwrap()]])), [1, 0]);
}

#[test]
fn one_rank_and_one_micro_batch_are_enough() {
    for micros in [1, 2, 5] {
        assert_eq!(timeline(PipelineSchedule::gpipe(1, micros)).bubble, 0.0);
        assert_eq!(timeline(PipelineSchedule::one_f_one_b(1, micros)).in_flight, [1]);
        assert_eq!(timeline(PipelineSchedule::zero_bubble(1, 3, micros)).bubble, 0.0);
        assert_eq!(timeline(PipelineSchedule::zero_bubble_v(1, micros)).bubble, 0.0);
    }
    for ranks in [1, 2, 5] {
        assert_eq!(timeline(PipelineSchedule::one_f_one_b(ranks, 1)).end, 3 * MS * ranks as u32);
        assert_eq!(timeline(PipelineSchedule::interleaved(ranks, 2, 1)).end, 6 * MS * ranks as u32);
    }
}

/// Every preset by its arguments; those with one stage on each rank ignore `chunks`.
type Preset = fn(usize, usize, usize) -> Result<PipelineSchedule>;
pub(super) const PRESETS: [Preset; 6] = [
    |ranks, _, micros| PipelineSchedule::gpipe(ranks, micros),
    |ranks, _, micros| PipelineSchedule::one_f_one_b(ranks, micros),
    PipelineSchedule::interleaved,
    PipelineSchedule::looped_bfs,
    PipelineSchedule::zero_bubble,
    |ranks, _, micros| PipelineSchedule::zero_bubble_v(ranks, micros),
];

#[test]
fn arguments_without_sense_are_errors_at_once() {
    let start = std::time::Instant::now();
    let huge = usize::MAX;
    for (i, preset) in PRESETS.into_iter().enumerate() {
        let has_chunks = matches!(i, 2..=4);
        for (ranks, chunks, micros, part) in [
            (0, 1, 1, "at least one rank"),
            (1, 1, 0, "at least one micro-batch"),
            (0, 0, 0, "at least one rank"),
            (0, 1, huge, "at least one rank"),
            (huge, 1, 0, "at least one micro-batch"),
            (huge, 1, 1, "more than 4194304 actions"),
            (1, 1, huge, "more than 4194304 actions"),
            (huge, huge, huge, "more than 4194304 actions"),
            (2, 1, huge / 2, "more than 4194304 actions"),
            (1 << 32, 1 << 32, 1 << 32, "more than 4194304 actions"),
            (100_000, 1, 100_000, "more than 4194304 actions"),
        ] {
            match preset(ranks, chunks, micros) {
                Err(Error::InvalidArgument { why, .. }) => assert!(why.contains(part), "{i}: {why}"),
                other => panic!("{i} {ranks} {chunks} {micros}: {other:?}"),
            }
        }
        if has_chunks {
            for (chunks, part) in [(0, "at least one chunk"), (huge, "more than"), (huge / 2 + 1, "more than")] {
                match preset(2, chunks, 2) {
                    Err(Error::InvalidArgument { why, .. }) => assert!(why.contains(part), "{i}: {why}"),
                    other => panic!("{i} {chunks}: {other:?}"),
                }
            }
        }
    }
    // ZB-V makes its order for `2 * ranks - 1` micro-batches, even where there is one.
    assert!(matches!(PipelineSchedule::zero_bubble_v(huge / 2, 1), Err(Error::InvalidArgument { .. })));
    assert!(matches!(PipelineSchedule::zero_bubble_v(100_000, 1), Err(Error::InvalidArgument { .. })));
    // Far above what the checks take, far below what filling the memory would take.
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_list_of_too_many_actions_is_an_error() {
    let action = Action { stage: 0, work: Work::Forward, micro: 0 };
    let wrong = PipelineSchedule::check(vec![vec![action; MAX_ACTIONS + 1]]).unwrap_err();
    assert_eq!(wrong, ScheduleError::Shape("4194305 actions are more than 4194304".into()));
}

#[test]
fn rounds_that_are_not_equal_are_refused() {
    for preset in [PipelineSchedule::interleaved, PipelineSchedule::zero_bubble] {
        assert!(matches!(preset(4, 2, 9), Err(Error::InvalidArgument { .. })));
        assert!(preset(4, 2, 10).is_ok()); // Two rounds of 5.
        assert!(preset(4, 2, 3).is_ok()); // One round of 3.
        assert!(preset(4, 1, 9).is_ok()); // One chunk knows no rounds.
    }
}

#[test]
fn costs_that_do_not_fit_are_an_error() {
    let schedule = PipelineSchedule::one_f_one_b(2, 2).unwrap();
    let huge = Duration::MAX;
    for costs in [
        Costs { forward: huge, ..Costs::default() },
        Costs { backward_input: huge, backward_weights: huge, ..Costs::default() },
        Costs { hop: huge, ..Costs::default() },
    ] {
        assert!(matches!(schedule.simulate(costs), Err(Error::InvalidArgument { .. })));
    }
    let nothing = schedule
        .simulate(Costs {
            forward: Duration::ZERO,
            backward_input: Duration::ZERO,
            backward_weights: Duration::ZERO,
            ..Costs::default()
        })
        .unwrap();
    assert_eq!((nothing.end, nothing.bubble), (Duration::ZERO, 0.0));
}

#[test]
fn steps_say_where_inputs_come_from() {
    let show = |schedule: &PipelineSchedule, rank| {
        let peer = |peer| match peer {
            Peer::Caller => "caller".to_owned(),
            Peer::SameRank => "here".to_owned(),
            Peer::Rank(rank) => rank.to_string(),
        };
        let step = |step: Step| {
            let needs = step.needs.map_or("-".into(), |needs| needs.to_string());
            format!("{} {needs} {}>{}", step.action, peer(step.input), peer(step.output))
        };
        schedule.steps(rank).map(step).collect::<Vec<_>>().join(", ")
    };
    let v = PipelineSchedule::from_csv("0F0,3F0,3B0,0I0,0W0\n1F0,2F0,2I0,1B0,2W0\n").unwrap();
    assert_eq!(show(&v, 0), "0F0 - caller>1, 3F0 2F0 1>caller, 3B0 3F0 caller>1, 0I0 1B0 1>caller, 0W0 0I0 here>here");
    assert_eq!(show(&v, 1), "1F0 0F0 0>here, 2F0 1F0 here>0, 2I0 3B0 0>here, 1B0 2I0 here>0, 2W0 2I0 here>here");
    // A single stage talks to the caller only.
    assert_eq!(show(&PipelineSchedule::gpipe(1, 1).unwrap(), 0), "0F0 - caller>caller, 0B0 0F0 caller>caller");
    assert_eq!(show(&v.forward_only(), 1), "1F0 0F0 0>here, 2F0 1F0 here>0");
    assert_eq!(show(&v.merge_backward(), 0), "0F0 - caller>1, 3F0 2F0 1>caller, 3B0 3F0 caller>1, 0B0 1B0 1>caller");
}
