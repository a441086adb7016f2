//! `README.md` names tests that exist.

use crate::checklist::Checklist;

#[test]
fn every_test_that_the_readme_names_exists() {
    Checklist::of("collectives").assert_exists(50);
}

#[test]
fn every_row_says_where_or_why() {
    Checklist::of("collectives").assert_told(60);
}

/// Every numbered complaint has its row.
#[test]
fn no_complaint_is_left_out() {
    let text = Checklist::of("collectives").text;
    let missing: Vec<_> = (1..=20).filter(|number| !text.contains(&format!("\n| {number} "))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
