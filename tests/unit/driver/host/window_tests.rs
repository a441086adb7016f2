use super::*;

const G: u64 = GRANULARITY as u64;
const N: usize = GRANULARITY;

fn windows() -> Windows {
    Windows::new(1 << 40..(1 << 40) + 64 * G)
}

#[test]
fn windows_do_not_overlap_and_are_reused_late() {
    let mut windows = windows();
    let a = windows.reserve(16 * G, false).unwrap();
    let b = windows.reserve(16 * G, false).unwrap();
    assert!(b >= a + 17 * G && windows.reserve(32 * G, false).is_err() && windows.reserve(1, false).is_err());
    windows.release(a, 16 * G).unwrap();
    let c = windows.reserve(16 * G, false).unwrap();
    assert!(c > b, "a stale address finds nothing for long");
    let d = windows.reserve(16 * G, false).unwrap();
    assert_eq!(d, a, "then the search starts over");
    assert!(windows.reserve(16 * G, false).is_err());
    assert!(windows.release(d, 15 * G).is_err() && windows.release(d + G, G).is_err());
    windows.map(d, N).unwrap();
    assert!(windows.release(d, 16 * G).is_err(), "something is mapped");
    windows.unmap(d, N, |_| false).unwrap();
    windows.release(d, 16 * G).unwrap();
}

#[test]
fn a_range_is_there_if_all_of_it_is_mapped() {
    let mut windows = windows();
    let a = windows.reserve(16 * G, false).unwrap();
    windows.map(a + G, N).unwrap();
    windows.map(a + 2 * G, 2 * N).unwrap();
    windows.map(a + 5 * G, N).unwrap();
    let there = |at, n| windows.resolve(at, n).map(|(_, offset)| offset as u64);
    assert_eq!(there(a + G, 3 * N), Some(G));
    assert_eq!(there(a + 2 * G - 1, 2), Some(2 * G - 1), "over an edge");
    for (at, n) in [(a, 1), (a + G, 3 * N + 1), (a + 4 * G, 1), (a + G, 5 * N), (a + 6 * G, 1), (a + G, usize::MAX)] {
        assert_eq!(there(at, n), None, "{at:#x} {n}");
    }
    assert!([a, a + G].iter().all(|&at| windows.map(at, 2 * N).is_err()), "taken");
    assert!(windows.map(a + 15 * G, 2 * N).is_err() && windows.map(a + 7 * G, 1).is_err());
    assert!(windows.unmap(a + 2 * G, N, |_| false).is_err() && windows.unmap(a + 3 * G, N, |_| false).is_err());
    windows.unmap(a + 2 * G, 2 * N, |_| false).unwrap();
    assert!(windows.resolve(a + 2 * G, 1).is_none() && windows.resolve(a + G, N).is_some());
}
