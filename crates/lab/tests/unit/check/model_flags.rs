//! Tests programs with flags, submitted in any order, against the graph of the whole program.
//!
//! Whether a flag orders two operations may be open until the flag is raised. So the model judges whole programs: the
//! account must accept a program without a race, and must refuse at least one call of a program with a race.

use super::{
    judge::Operand,
    note::Call,
    shadow::Manner,
    state::{Key, State},
};
use gpu_pool::extend::driver::Address;
use proptest::prelude::*;

const DATA: Address = 4096;
const FLAGS: Address = 1 << 16;
const STREAMS: usize = 3;
const BYTES: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    Touch {
        stream: usize,
        at: usize,
        bytes: usize,
        write: bool,
    },
    /// Each stream has its own flag and increments it.
    Raise {
        stream: usize,
    },
    Wait {
        stream: usize,
        flag: usize,
        value: u64,
    },
    /// A wait for an event.
    Follow {
        stream: usize,
        of: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let stream = 0..STREAMS;
    prop_oneof![
        5 => (stream.clone(), 0..BYTES, 1..4_usize, any::<bool>())
            .prop_map(|(stream, at, bytes, write)| Step::Touch { stream, at, bytes, write }),
        3 => stream.clone().prop_map(|stream| Step::Raise { stream }),
        3 => (stream.clone(), stream.clone(), 1..3_u64)
            .prop_map(|(stream, flag, value)| Step::Wait { stream, flag, value }),
        1 => (stream.clone(), stream).prop_map(|(stream, of)| Step::Follow { stream, of }),
    ]
}

/// Whether the finished program has a race; `None` if it would hang.
fn races(steps: &[Step]) -> Option<bool> {
    let mut before: Vec<Vec<usize>> = vec![];
    let mut last = [None; STREAMS];
    let mut raises = [const { Vec::new() }; STREAMS];
    let mut waits = vec![];
    for (i, step) in steps.iter().enumerate() {
        let (Step::Touch { stream, .. }
        | Step::Raise { stream }
        | Step::Wait { stream, .. }
        | Step::Follow { stream, .. }) = *step;
        let mut direct = Vec::from_iter(last[stream]);
        match *step {
            Step::Raise { stream } => raises[stream].push(i),
            Step::Wait { flag, value, .. } => waits.push((i, flag, value)),
            Step::Follow { of, .. } => direct.extend(last[of]),
            Step::Touch { .. } => {}
        }
        before.push(direct);
        last[stream] = Some(i);
    }
    for (wait, flag, value) in waits {
        before[wait].push(*raises[flag].get(value as usize - 1)?);
    }
    // Transitive closure: repeat until nothing changes.
    let n = steps.len();
    let mut after = vec![vec![false; n]; n];
    before.iter().enumerate().for_each(|(i, direct)| direct.iter().for_each(|&j| after[i][j] = true));
    for k in 0..n {
        for i in 0..n {
            for j in 0..n {
                after[i][j] |= after[i][k] && after[k][j];
            }
        }
    }
    if (0..n).any(|i| after[i][i]) {
        return None;
    }
    let touches = |i: usize| match steps[i] {
        Step::Touch { at, bytes, write, .. } => Some((at, at + bytes, write)),
        _ => None,
    };
    Some((0..n).any(|i| {
        (0..i).any(|j| match (touches(i), touches(j)) {
            (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1 && (a.2 || b.2) && !after[i][j] && !after[j][i],
            _ => false,
        })
    }))
}

/// Whether the account accepts the whole program.
fn accepted(steps: &[Step]) -> bool {
    let mut state = State::new(1);
    let key = |stream: usize| -> Key { (0, stream as u64) };
    (0..STREAMS).for_each(|stream| state.stream_created(key(stream)));
    state.events.insert((0, 99), Default::default());
    let host = state.host_enters();
    let mut raised = [0; STREAMS];
    let word = |flag: usize| FLAGS + 8 * flag as u64;
    steps.iter().all(|step| match *step {
        Step::Touch { stream, at, bytes, write } => {
            let manner = if write { Manner::WRITE } else { Manner::READ };
            let operand = Operand { address: DATA + at as u64, bytes, manner };
            state.submit(host, key(stream), Call::default(), &[operand], || Ok(())).is_ok()
        }
        Step::Raise { stream } => {
            raised[stream] += 1;
            state.raise(host, key(stream), Call::default(), (word(stream), raised[stream]), || Ok(())).is_ok()
        }
        Step::Wait { stream, flag, value } => {
            let operand = Operand::flag(word(flag));
            let submitted = state.submit(host, key(stream), Call::default(), &[operand], || Ok(()));
            submitted.map(|()| state.waits_for_flag(key(stream), word(flag), value)).is_ok()
        }
        Step::Follow { stream, of } => {
            state.recorded(host, (0, 99), key(of));
            let record = state.events[&(0, 99)].record.clone().unwrap();
            state.hear(key(stream), host).unwrap().clock.join(&record);
            true
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, max_global_rejects: 100_000, ..ProptestConfig::default() })]

    #[test]
    fn a_program_is_refused_if_and_only_if_it_races(steps in prop::collection::vec(step(), 1..14)) {
        let races = races(&steps);
        prop_assume!(races.is_some());
        prop_assert_eq!(accepted(&steps), races == Some(false));
    }
}

/// The programs above contain races, hangs, and waits that are submitted before their raise.
#[test]
fn the_model_sees_waits_that_come_first() {
    let (touch, wait) =
        (|stream, write| Step::Touch { stream, at: 0, bytes: 1, write }, Step::Wait { stream: 1, flag: 0, value: 1 });
    let raise = Step::Raise { stream: 0 };
    let good = [wait.clone(), touch(1, false), touch(0, true), raise.clone()];
    assert_eq!((races(&good), accepted(&good)), (Some(false), true));
    let bad = [wait.clone(), touch(1, false), raise, touch(0, true)];
    assert_eq!((races(&bad), accepted(&bad)), (Some(true), false));
    assert_eq!(races(&[wait]), None);
    // The first read is before the wait, so the flag does not order it. The second read must not replace it in the map.
    let second = Step::Wait { stream: 1, flag: 0, value: 2 };
    let bad = [
        touch(1, false),
        second,
        touch(1, false),
        Step::Raise { stream: 0 },
        touch(0, true),
        Step::Raise { stream: 0 },
    ];
    assert_eq!((races(&bad), accepted(&bad)), (Some(true), false));
    // The first raise of stream 1 ends the wait of stream 2, which learns nothing of stream 1's later waits.
    let bad = [
        Step::Raise { stream: 1 },
        Step::Wait { stream: 1, flag: 0, value: 1 },
        Step::Raise { stream: 1 },
        Step::Wait { stream: 2, flag: 1, value: 1 },
        touch(0, true),
        Step::Raise { stream: 0 },
        touch(2, false),
    ];
    assert_eq!((races(&bad), accepted(&bad)), (Some(true), false));
}
