use super::*;

impl Shadow {
    fn len(&self) -> usize {
        self.segments.len()
    }
}

fn access(component: Component, count: u64, manner: Manner) -> Access {
    Access { component, count, manner, note: Arc::new(Note::default()), owner: None }
}

#[test]
fn equal_neighbours_become_one() {
    let mut shadow = Shadow::default();
    let all = |_: &Access| true;
    shadow.note(&(0..100), &access(1, 1, Manner::WRITE), all);
    for i in 0..10 {
        shadow.note(&(10 * i..10 * i + 5), &access(2, i + 1, Manner::READ), all);
    }
    assert_eq!(shadow.len(), 20);
    shadow.note(&(5..95), &access(1, 2, Manner::WRITE), all);
    assert_eq!(shadow.len(), 3);
    shadow.note(&(0..100), &access(1, 3, Manner::WRITE), all);
    shadow.note(&(100..200), &access(1, 3, Manner::WRITE), all);
    assert_eq!(shadow.len(), 1);
    let taken = shadow.take(&(50..60));
    assert_eq!((taken.len(), shadow.len()), (1, 2));
    shadow.restore(taken);
    assert_eq!(shadow.len(), 1);
}

#[test]
fn flags_race_with_plain_accesses_only() {
    for (a, b, conflict) in [
        (Manner::RAISE, Manner::RAISE, false),
        (Manner::RAISE, Manner::AWAIT, false),
        (Manner::RAISE, Manner::READ, true),
        (Manner::AWAIT, Manner::READ, false),
        (Manner::AWAIT, Manner::WRITE, true),
        (Manner::READ, Manner::READ, false),
    ] {
        assert_eq!((a.conflicts(b), b.conflicts(a)), (conflict, conflict), "{a:?} {b:?}");
    }
    let all = [Manner::READ, Manner::WRITE, Manner::RAISE, Manner::AWAIT];
    for (a, b) in all.into_iter().flat_map(|a| all.map(|b| (a, b))) {
        let implied = all.into_iter().all(|x| !b.conflicts(x) || a.conflicts(x));
        assert_eq!(a.dominates(b), implied, "{a:?} {b:?}");
    }
}
