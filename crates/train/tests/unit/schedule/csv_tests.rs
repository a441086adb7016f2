//! Reading and writing CSV: what is skipped, what is refused, and at which line and column.

use super::*;

fn refused(text: &str) -> ScheduleError {
    PipelineSchedule::read_csv(text).unwrap_err()
}

#[track_caller]
fn unreadable(text: &str, at: (usize, usize), cell: &str, part: &str) {
    match refused(text) {
        ScheduleError::Unreadable { text, line, column, why } => {
            assert_eq!(((line, column), text.as_str()), (at, cell));
            assert!(why.contains(part), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_does_not_matter_is_skipped() {
    let plain = PipelineSchedule::gpipe(2, 2).unwrap();
    for text in [
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
        "0F0,0F1,0B0,0B1\r\n1F0,1F1,1B0,1B1\r\n",
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1",
        "\u{feff}0F0,0F1,,,,0B0,0B1\n,1F0,1F1,1B0,1B1,,\n\n\n",
        "  0F0 ,\t0F1, 0B0,0B1\n1F0,1F1,1B0,1B1\n  \n",
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n\
         1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD\n",
        "00F0,0F001,0B0,0B1\n1F0,1F1,1B0,1B1\n",
    ] {
        assert_eq!(PipelineSchedule::read_csv(text).as_ref(), Ok(&plain), "{text:?}");
    }
}

#[test]
fn overlapping_actions_become_single_ones_in_their_order() {
    let read = |text: &str| PipelineSchedule::from_csv(text).unwrap().to_csv();
    assert_eq!(read("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"), "0F0,0F1,0B0,0B1\n");
    assert_eq!(read("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n"), "0F0,0B0,0F1,0B1\n");
    assert_eq!(read("0F0,( 0F1 ; 0I0 ; 0W0 )OVERLAP_F_B,0B1\n"), "0F0,0F1,0I0,0W0,0B1\n");
}

#[test]
fn what_is_no_action_is_refused_with_its_place() {
    unreadable("0F0,0B0\n1F0,,1X0\n", (2, 3), "1X0", "none of F, B, I, W");
    unreadable("0F0,F0\n", (1, 2), "F0", "number of a stage");
    unreadable("hello\n", (1, 1), "hello", "number of a stage");
    unreadable("-1F0\n", (1, 1), "-1F0", "number of a stage");
    unreadable("0F\n", (1, 1), "0F", "micro-batch is missing");
    unreadable("0F-1\n", (1, 1), "0F-1", "none of F, B, I, W");
    unreadable("0f0\n", (1, 1), "0f0", "none of F, B, I, W");
    unreadable("0F0F\n", (1, 1), "0F0F", "none of F, B, I, W");
    unreadable("17\n", (1, 1), "17", "none of F, B, I, W");
    unreadable("0F0;0B0\n", (1, 1), "0F0;0B0", "none of F, B, I, W");
    unreadable("\"0F0\"\n", (1, 1), "\"0F0\"", "number of a stage");
    unreadable("0F99999999999999999999999\n", (1, 1), "0F99999999999999999999999", "too large");
    unreadable("99999999999999999999999F0\n", (1, 1), "99999999999999999999999F0", "too large");
    // A transfer needs its micro-batch; an operation on parameters has none.
    unreadable("0F0,0SEND_F\n", (1, 2), "0SEND_F", "micro-batch is missing");
    unreadable("0UNSHARD0\n", (1, 1), "0UNSHARD0", "none of F, B, I, W");
    unreadable("0SEND_X0\n", (1, 1), "0SEND_X0", "none of F, B, I, W");
    unreadable("0F0,(0F1;0B0)OVERLAP\n", (1, 2), "(0F1;0B0)OVERLAP", "OVERLAP_F_B");
    unreadable("0F0,(0F1;0B0\n", (1, 2), "(0F1;0B0", "OVERLAP_F_B");
    unreadable("()OVERLAP_F_B\n", (1, 1), "()OVERLAP_F_B", "number of a stage");
    unreadable("(0F0;0SEND_F0)OVERLAP_F_B\n", (1, 1), "(0F0;0SEND_F0)OVERLAP_F_B", "none of F, B, I, W");
    // Characters of several bytes are cut between characters.
    let long = "é".repeat(100);
    unreadable(&long, (1, 1), &"é".repeat(40), "number of a stage");
}

#[test]
fn an_old_file_gets_a_hint() {
    let error = refused("0F0,0BW0\n").to_string();
    assert_eq!(
        error,
        "line 1, column 2: `0BW0` is not an action such as 2F0: in a file with BW, of an old PyTorch, write I for B, \
         and B for BW",
    );
    let error = refused("0F0,0B0,0W0\n").to_string();
    assert_eq!(
        error,
        "rank 0 has the action 0W0, though a B computes the whole backward pass (stage 0, gradients of the weights, \
         micro-batch 0)",
    );
}

#[test]
fn a_rank_without_actions_is_refused() {
    assert_eq!(refused(""), ScheduleError::Shape("a schedule needs at least one rank".into()));
    assert_eq!(refused("0F0\n\n1F0\n"), ScheduleError::Shape("rank 1 has no action".into()));
    assert_eq!(refused("0F0\n,,,\n"), ScheduleError::Shape("rank 1 has no action".into()));
}

#[test]
fn each_rule_has_its_error() {
    use ScheduleError::*;
    let action = |text: &str| text.parse::<Action>().unwrap();
    let cases = [
        (
            "0F0,0B0\n0F1,0B1\n",
            TwoPlaces { action: action("0F1"), ranks: [0, 1] },
            "stage 0 is on rank 0, but rank 1 has its action 0F1",
        ),
        (
            "0F0,0B0,0F1\n",
            Count { action: action("0B1"), rank: Some(0), found: 0, expected: 1 },
            "rank 0 lacks the action 0B1 (stage 0, backward pass, micro-batch 1)",
        ),
        (
            "0F0,0F0,0B0\n",
            Count { action: action("0F0"), rank: Some(0), found: 2, expected: 1 },
            "rank 0 has the action 0F0 2 times (stage 0, forward pass, micro-batch 0)",
        ),
        (
            "0F0,0I0\n",
            Count { action: action("0W0"), rank: Some(0), found: 0, expected: 1 },
            "rank 0 lacks the action 0W0 (stage 0, gradients of the weights, micro-batch 0)",
        ),
        (
            "0F0,2F0\n",
            Count { action: action("1F0"), rank: None, found: 0, expected: 1 },
            "no rank has the stage 1: the schedule lacks the action 1F0 (stage 1, forward pass, micro-batch 0)",
        ),
        (
            // A double action before the hole does not move it.
            "0F0,0F0,0F1,0F5\n",
            Count { action: action("0F2"), rank: Some(0), found: 0, expected: 1 },
            "rank 0 lacks the action 0F2 (stage 0, forward pass, micro-batch 2)",
        ),
        (
            "0B0,0F0\n",
            Order { rank: 0, early: action("0B0"), late: action("0F0") },
            "rank 0 has 0B0 before 0F0, but 0B0 needs the result of 0F0",
        ),
        (
            "0F0,0W0,0I0\n",
            Order { rank: 0, early: action("0W0"), late: action("0I0") },
            "rank 0 has 0W0 before 0I0, but 0W0 needs the result of 0I0",
        ),
        (
            // One rank alone is stuck, since a later entry of its own list makes what it needs.
            "0F0,2F0,1F0\n",
            Stuck(vec![StuckAction { rank: 0, action: action("2F0"), needs: action("1F0"), on: 0 }]),
            "the schedule would deadlock: rank 0 waits at 2F0 for 1F0 of rank 0",
        ),
    ];
    for (text, error, message) in cases {
        assert_eq!(refused(text), error, "{text}");
        assert_eq!(error.to_string(), message);
    }
    let error: Box<dyn std::error::Error> = Box::new(refused("x"));
    assert!(error.source().is_none());
}

/// The message of a deadlock of many ranks stays readable. The error itself has all of them.
#[test]
fn a_deadlock_of_many_ranks_names_some() {
    // The last rank wants its second micro-batch before the others get the gradient of the first one.
    let text: String = (0..20).map(|stage| format!("{stage}F0,{stage}B0,{stage}F1,{stage}B1\n")).collect();
    let text = text.replace("19F0,19B0,19F1,19B1", "19F0,19F1,19B0,19B1");
    let error = refused(&text);
    let ScheduleError::Stuck(blocked) = &error else { panic!("{error:?}") };
    assert_eq!(blocked.len(), 20);
    assert!(error.to_string().ends_with("rank 7 waits at 7B0 for 8B0 of rank 8; and 12 more"), "{error}");
}

/// A stage or micro-batch far away must not make a table of that size.
#[test]
fn huge_numbers_are_missing_actions() {
    for action in ["18446744073709551615F0", "0F18446744073709551615", "18446744073709551615F18446744073709551615"] {
        match refused(action) {
            ScheduleError::Count { action, found: 0, expected: 1, .. } => assert_eq!(action.to_string(), "0F0"),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(refused("0F0,1000000F0"), ScheduleError::Count { found: 0, .. }));
}
