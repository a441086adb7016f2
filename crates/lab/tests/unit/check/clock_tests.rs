use super::*;

impl Clock {
    pub fn len(&self) -> usize {
        self.counts.len()
    }
}

fn clock(counts: &[(Component, u64)]) -> Clock {
    Clock { counts: counts.into(), waits: SmallVec::new() }
}

#[test]
fn joins_and_meets_are_pointwise() {
    for (a, b, join, meet, news) in [
        (&[(1, 5), (3, 2)][..], &[(2, 7), (3, 4)][..], &[(1, 5), (2, 7), (3, 4)][..], &[(3, 2)][..], true),
        (&[(1, 5), (3, 2)], &[(1, 4), (3, 2)], &[(1, 5), (3, 2)], &[(1, 4), (3, 2)], false),
        (&[(1, 5), (3, 2)], &[(3, 2)], &[(1, 5), (3, 2)], &[(3, 2)], false),
        (&[], &[(9, 1)], &[(9, 1)], &[], true),
    ] {
        let mut joined = clock(a);
        assert_eq!(joined.join(&clock(b)), news);
        assert_eq!(&joined.counts[..], join);
        let mut met = clock(a);
        met.meet(&clock(b));
        assert_eq!(&met.counts[..], meet);
    }
    assert!(clock(&[(1, 5)]).covers(1, 5) && !clock(&[(1, 5)]).covers(1, 6) && !clock(&[(1, 5)]).covers(2, 1));
}

#[test]
fn a_raised_flag_reaches_whoever_has_joined_the_mark() {
    let wait = FlagWait::new(0x100, 1);
    let mut waiting = clock(&[(1, 1)]);
    waiting.add_wait(wait.clone());
    let mut heir = clock(&[]);
    heir.join(&waiting);
    assert!(heir.is_pending() && !heir.covers(7, 3));
    wait.raise(clock(&[(7, 3)]));
    assert!(!heir.is_pending() && heir.covers(7, 3) && !heir.covers(7, 4));
    heir.flatten();
    assert!(heir.waits.is_empty() && heir.covers(7, 3));
    wait.lower();
    assert!(waiting.is_pending() && !waiting.covers(7, 3));
}
