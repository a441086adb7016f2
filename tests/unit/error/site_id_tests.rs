use super::*;
use std::{panic::Location, thread};

/// All names at all places.
fn all(names: &[&'static str], sites: &[Site]) -> Vec<(OpId, SiteId)> {
    names.iter().flat_map(|name| sites.iter().map(|site| ids(name, site))).collect()
}

#[test]
fn numbers_stand_for_what_they_were_made_of_on_every_thread() {
    // The names have one length, so they push each other out of the cache.
    #[rustfmt::skip]
    let sites: [Site; 18] = [
        here(), here(), here(), here(), here(), here(), here(), here(), here(),
        here(), here(), here(), here(), here(), here(), here(), here(), here(),
    ];
    assert!(sites.iter().enumerate().all(|(k, site)| !sites[..k].contains(site)));
    let names = ["all_reduce", "all_gather", "all_to_all"];
    let (first, again) = (all(&names, &sites), all(&names, &sites));
    let elsewhere = thread::spawn(move || all(&names, &sites)).join().unwrap();
    assert!(first == again && first == elsewhere);
    for (k, (name, place)) in first.into_iter().enumerate() {
        assert_eq!((name.text(), place.site()), (names[k / sites.len()], sites[k % sites.len()]));
        assert_eq!((OpId::of_bits(name.bits()), SiteId::of_bits(place.bits())), (name, place));
    }
}

#[track_caller]
fn here() -> Site {
    Location::caller()
}
