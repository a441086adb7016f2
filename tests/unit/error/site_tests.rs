use super::*;
use std::panic::Location;

#[test]
fn a_place_keeps_its_line() {
    let here = Location::caller();
    let site = CallSite::from(OpSite { op: "zeros", site: here });
    assert_eq!(site.to_string(), format!("zeros at {here}"));
    assert!(matches!(site.file, Cow::Borrowed(_)), "taking a snapshot copies no names");
}

#[test]
fn the_largest_holder_comes_first() {
    let (a, b) = (Some(site("upload", 1)), Some(site("zeros", 2)));
    let sums = holders([(a.clone(), 10), (b.clone(), 100), (a.clone(), 20), (None, 30)].into_iter());
    let shown: Vec<_> = sums.iter().map(|h| (h.site.clone(), h.blocks, h.bytes)).collect();
    assert_eq!(shown, [(b, 1, 100), (None, 1, 30), (a, 2, 30)]);
}
