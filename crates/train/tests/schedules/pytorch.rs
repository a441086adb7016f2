//! Tests after PyTorch's `test/distributed/pipelining/test_schedule.py` (BSD-3-Clause). Each names its model there.
//!
//! PyTorch's files of expected schedules are not copied. The tests compare checksums of them.

use gpu_pool_train::*;
use std::{collections::BTreeMap, time::Duration};

/// Stages on each rank, micro-batches, ranks: `TestSchedulePlan.setUp`.
const CASES: [(usize, usize, usize); 23] = [
    // Few stages.
    (2, 2, 2),
    (2, 4, 4),
    (2, 8, 2),
    (2, 8, 4),
    (2, 8, 8),
    (4, 4, 4),
    (4, 8, 4),
    (4, 8, 8),
    // Many micro-batches.
    (4, 16, 4),
    (4, 32, 4),
    (4, 64, 4),
    // Many ranks.
    (4, 16, 16),
    (4, 32, 32),
    (4, 128, 64),
    // Odd numbers of stages.
    (3, 2, 2),
    (3, 8, 2),
    (3, 12, 4),
    // Odd numbers of ranks.
    (4, 6, 3),
    (4, 10, 5),
    // No multiples of the ranks.
    (2, 3, 4),
    (2, 4, 4),
    (2, 10, 4),
    (2, 15, 4),
];

/// The five rules of `TestSchedulePlan._validate_pipeline_order`, for schedules without split backward passes.
fn follows_the_five_rules(schedule: &PipelineSchedule) {
    let half = Duration::from_millis(1);
    let costs = Costs { forward: 2 * half, backward_input: half, backward_weights: half, hop: Duration::ZERO };
    let timeline = schedule.simulate(costs).unwrap();
    let mut by_micro: Vec<Vec<Span>> = vec![Vec::new(); schedule.micros()];
    for &span in timeline.spans.iter().flatten() {
        by_micro[span.action.micro].push(span);
    }
    let stages = schedule.stages();
    let journey: Vec<_> = (0..stages)
        .map(|stage| (stage, Work::Forward))
        .chain((0..stages).rev().map(|stage| (stage, Work::Backward)))
        .collect();
    for spans in &mut by_micro {
        spans.sort_by_key(|span| span.start);
        // 1. Forward comes before backward. 2. A rank has a micro-batch before it sends it on. 4. No stage works on a
        // micro-batch before the stages before it: the journey of a micro-batch is down all stages, and up again.
        assert!(spans.iter().map(|span| (span.action.stage, span.action.work)).eq(journey.iter().copied()));
        // 5. No two ranks work on one micro-batch at one time.
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
    // 3. Each stage takes the micro-batches in sequence. Breadth first goes back in the opposite sequence.
    for stage in 0..stages {
        let micros = |work| {
            let of = move |a: &&Action| a.stage == stage && a.work == work;
            schedule.actions(schedule.rank_of(stage)).iter().filter(of).map(|a| a.micro).collect::<Vec<_>>()
        };
        assert!(micros(Work::Forward).is_sorted());
        let backward = micros(Work::Backward);
        assert!(backward.is_sorted() || backward.iter().rev().is_sorted());
    }
}

/// `TestSchedulePlan.test_pipeline_order`. PyTorch skips the cases without equal rounds here, and tests them in
/// `test_pipeline_order_flex_and_zero_bubble`, as `Interleaved1F1B`; so here is one test for both.
#[test]
fn pipeline_order() {
    for (chunks, micros, ranks) in CASES {
        follows_the_five_rules(&PipelineSchedule::interleaved(ranks, chunks, micros).unwrap());
        follows_the_five_rules(&PipelineSchedule::looped_bfs(ranks, chunks, micros).unwrap());
        follows_the_five_rules(&PipelineSchedule::gpipe(ranks, micros).unwrap());
        follows_the_five_rules(&PipelineSchedule::one_f_one_b(ranks, micros).unwrap());
    }
}

/// `TestSchedulePlan.test_pipeline_order_flex_and_zero_bubble` and `test_pipeline_order_for_v_schedules`. The checks of
/// PyTorch are those of [`PipelineSchedule::new`].
#[test]
fn pipeline_order_of_split_backward_passes() {
    for (chunks, micros, ranks) in CASES {
        let schedule = PipelineSchedule::zero_bubble(ranks, chunks, micros).unwrap();
        assert_eq!((schedule.stages(), schedule.micros()), (chunks * ranks, micros));
        let schedule = PipelineSchedule::zero_bubble_v(ranks, micros).unwrap();
        assert_eq!((schedule.stages(), schedule.micros()), (2 * ranks, micros));
    }
}

/// FNV-1a, 64 bits: a checksum of texts that are not in this repository.
fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// `TestScheduleLowering.test_csv`, with `artifacts/zb1p_2rank_2stagep_compute.csv` of commit 15380b18. The preset
/// makes the actions of that file in its order. The checksum is of the file without its empty cells, and with `I` for
/// `B`: the file is from the time when PyTorch wrote `B` for the gradient of the input.
#[test]
fn zero_bubble_is_pytorchs_file() {
    let schedule = PipelineSchedule::zero_bubble(2, 2, 8).unwrap();
    assert_eq!(checksum(&schedule.to_csv()), 0x85e0_f211_e4d8_4b65, "{schedule}");
}

/// DualPipeV, for a test only: the order of <https://github.com/deepseek-ai/DualPipe>, in PyTorch's CSV form.
fn dual_pipe_v(ranks: usize, micros: usize) -> String {
    let row = |rank: usize| {
        let stages = [rank, 2 * ranks - 1 - rank];
        let below = ranks - 1 - rank;
        let mut next = BTreeMap::new();
        let mut weights = std::collections::VecDeque::new();
        // `way` is 0 for the stage on the way down, and 1 for the stage on the way up. I and W count with B.
        let mut take = |way: usize, letter: char| {
            if letter == 'W' {
                let (stage, micro): (usize, usize) = weights.pop_front().unwrap();
                return format!("{stage}W{micro}");
            }
            let micro: &mut usize = next.entry((way, letter == 'F')).or_default();
            let text = format!("{}{letter}{micro}", stages[way]);
            if letter == 'I' {
                weights.push_back((stages[way], *micro));
            }
            *micro += 1;
            text
        };
        let mut row = Vec::new();
        row.extend((0..2 * below).map(|_| take(0, 'F')));
        row.extend((0..=rank).flat_map(|_| [take(0, 'F'), take(1, 'F')]));
        row.extend((0..below).flat_map(|_| [take(1, 'I'), take(1, 'W'), take(1, 'F')]));
        for i in 0..micros + rank + 1 - 2 * ranks {
            let (forward, backward) = (take(0, 'F'), take(1, 'B'));
            // The first pair of the last rank cannot overlap: the same micro-batch turns round there.
            match i == 0 && below == 0 {
                true => row.extend([forward, backward]),
                false => row.push(format!("({forward};{backward})OVERLAP_F_B")),
            }
            row.push(format!("({};{})OVERLAP_F_B", take(1, 'F'), take(0, 'B')));
        }
        for _ in 0..below {
            row.push(take(1, 'B'));
            row.push(format!("({};{})OVERLAP_F_B", take(1, 'F'), take(0, 'B')));
        }
        // The second half of these is split.
        for i in 0..=rank {
            let half = 2 * i + 1;
            row.push(take(1, if half > rank + 1 { 'I' } else { 'B' }));
            row.push(take(0, if half > rank { 'I' } else { 'B' }));
        }
        row.extend((0..below).flat_map(|_| [take(0, 'W'), take(0, 'I')]));
        row.extend((0..=rank).map(|_| take(0, 'W')));
        row.join(",") + "\n"
    };
    (0..ranks).map(row).collect()
}

/// `TestScheduleCsv.test_csv_compare`, with `artifacts/dualpipev_4rank_10mb.csv` of commit a2af973f. The checksum is of
/// the file as it is.
#[test]
fn csv_compare() {
    let file = dual_pipe_v(4, 10);
    assert_eq!(checksum(&file), 0xd8e3_ec68_72fc_0c24, "{file}");
    let schedule = PipelineSchedule::from_csv(&file).unwrap();
    assert_eq!((schedule.ranks(), schedule.stages(), schedule.micros()), (4, 8, 10));
    assert!((0..8).map(|stage| schedule.rank_of(stage)).eq([0, 1, 2, 3, 3, 2, 1, 0]));
    // Each overlapping pair has become two actions.
    let flat = file.replace(['(', ')'], "").replace("OVERLAP_F_B", "").replace(';', ",");
    assert_eq!(schedule.to_csv(), flat);
    assert_eq!(PipelineSchedule::from_csv(&flat).unwrap(), schedule);
}

/// `TestScheduleLowering.test_action_parse`. PyTorch's actions that only move data are no [`Action`]s here, but
/// [`PipelineSchedule::from_csv`] reads over them.
#[test]
fn action_parse() {
    let action = |stage, work, micro| Action { stage, work, micro };
    for (text, expected) in [
        ("1F0", action(1, Work::Forward, 0)),
        ("2I1", action(2, Work::BackwardInput, 1)),
        ("0W3", action(0, Work::BackwardWeights, 3)),
        ("0B3", action(0, Work::Backward, 3)),
        ("12F345", action(12, Work::Forward, 345)),
    ] {
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!(expected.to_string(), text);
        assert_eq!(format!("{expected:>8}|{expected:<8}|"), format!("{text:>8}|{text:<8}|"));
    }
    for text in ["1UNSHARD", "3RESHARD", "2SEND_B2", "1RECV_F1"] {
        assert!(matches!(text.parse::<Action>(), Err(ScheduleError::Unreadable { .. })), "{text}");
        let file = format!("0F0,{text},0B0\n");
        assert_eq!(PipelineSchedule::from_csv(&file).unwrap().to_csv(), "0F0,0B0\n", "{text}");
    }
}

/// `TestScheduleLowering.test_merge_bw`.
#[test]
fn merge_bw() {
    let split = PipelineSchedule::from_csv("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1\n").unwrap();
    let merged = split.merge_backward();
    assert_eq!(merged.to_csv(), "0F0,0F1,0F2,0I0,0I1,0W0,0B2,0W1\n");
    assert_eq!(merged, PipelineSchedule::from_csv(&merged.to_csv()).unwrap());
}

/// `TestScheduleLowering.test_send_recv`: a rank sends exactly the results that PyTorch's lowering sends.
#[test]
fn send_recv() {
    let transfers = |text: &str| {
        let schedule = PipelineSchedule::from_csv(text).unwrap();
        let letter = |work| if work == Work::Forward { 'F' } else { 'B' };
        let line = |rank| {
            let moved = schedule.steps(rank).flat_map(move |step| {
                let Action { stage, work, micro } = step.action;
                let received =
                    matches!(step.input, Peer::Rank(_)).then(|| format!("{stage}RECV_{}{micro}", letter(work)));
                let sent = matches!(step.output, Peer::Rank(_)).then(|| format!("{stage}SEND_{}{micro}", letter(work)));
                received.into_iter().chain(sent)
            });
            moved.collect::<Vec<_>>().join(" ")
        };
        (0..schedule.ranks()).map(line).collect::<Vec<_>>()
    };
    assert_eq!(
        transfers("0F0,0F1,   ,0B0,   ,0B1\n   ,1F0,1B0,1F1,1B1,   \n"),
        ["0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1", "1RECV_F0 1SEND_B0 1RECV_F1 1SEND_B1"],
    );
    // Two neighbouring stages on one rank send nothing to each other.
    assert_eq!(
        transfers(
            "0F0,0F1,,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n,1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1\n"
        ),
        [
            "0SEND_F0 0SEND_F1 3RECV_F0 3SEND_B0 3RECV_F1 3SEND_B1 0RECV_B0 0RECV_B1",
            "1RECV_F0 2SEND_F0 1RECV_F1 2SEND_F1 2RECV_B0 1SEND_B0 2RECV_B1 1SEND_B1",
        ],
    );
}

/// `TestValidateSchedule`.
#[test]
fn validate_schedule() {
    for valid in ["0F0,0B0\n1F0,1B0\n", "0F0,0I0,0W0\n1F0,1I0,1W0\n"] {
        assert!(PipelineSchedule::from_csv(valid).is_ok());
    }
    // `test_invalid_schedule_missing_rank`: the caller says how many ranks it has. A schedule without stage 1 is one of
    // a smaller pipeline; one with a gap is refused.
    assert_eq!(PipelineSchedule::from_csv("0F0,0B0\n").unwrap().ranks(), 1);
    let refused = |csv| PipelineSchedule::from_csv(csv).unwrap_err().to_string();
    assert!(refused("0F0,0B0\n2F0,2B0\n").contains("no rank has the stage 1: the schedule lacks"));
    // `test_invalid_schedule_missing_action`: PyTorch refuses forward passes alone. Here they are a schedule for
    // inference; one missing backward pass is refused.
    assert!(!PipelineSchedule::from_csv("0F0\n1F0\n").unwrap().is_training());
    assert!(refused("0F0,0B0\n1F0\n").contains("rank 1 lacks the action 1B0"));
}

/// `ScheduleUtilTests.test_generate_stage_to_rank_mapping`, for the styles that the presets use.
#[test]
fn stage_to_rank() {
    let places = |schedule: PipelineSchedule| (0..schedule.stages()).map(|s| schedule.rank_of(s)).collect::<Vec<_>>();
    assert_eq!(places(PipelineSchedule::interleaved(2, 1, 4).unwrap()), [0, 1]);
    assert_eq!(places(PipelineSchedule::interleaved(2, 2, 4).unwrap()), [0, 1, 0, 1]);
    assert_eq!(places(PipelineSchedule::interleaved(4, 2, 4).unwrap()), [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(places(PipelineSchedule::zero_bubble_v(2, 4).unwrap()), [0, 1, 1, 0]);
}
