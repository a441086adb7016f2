use super::*;

fn space() -> Space {
    let mapping = |bytes| Mapping { bytes, handle: 0, shared: false };
    Space {
        windows: BTreeMap::from([(1000, 100)]),
        mappings: BTreeMap::from([(1020, mapping(10)), (1030, mapping(20))]),
        readers: BTreeSet::new(),
        admitted: None,
    }
}

#[test]
fn places_lie_in_windows_and_are_free() {
    let space = space();
    assert!([(1000, 20), (1010, 10), (1050, 50)].iter().all(|&(at, n)| space.check_place(at, n).is_ok()));
    let bad = [(990, 10), (990, 20), (1000, 21), (1025, 1), (1029, 2), (1049, 1), (1090, 11), (u64::MAX - 1, 9)];
    assert!(bad.iter().all(|&(at, n)| space.check_place(at, n).is_err()));
}

#[test]
fn only_whole_mappings_go() {
    let space = space();
    assert!(space.whole(1020, 10).is_ok() && space.whole(1030, 20).is_ok());
    assert!([(1020, 30), (1030, 10), (1031, 19), (1000, 10)].iter().all(|&(at, n)| space.whole(at, n).is_err()));
}

#[test]
fn wishes_are_given_up_one_by_one() {
    let all = std::iter::successors(Some(Wishes { exportable: true, rdma: true }), |wishes| wishes.fewer());
    let all: Vec<_> = all.map(|wishes| (wishes.exportable, wishes.rdma)).collect();
    assert_eq!(all, [(true, true), (true, false), (false, false)]);
}
