//! `README.md` names tests that exist.

use crate::checklist::Checklist;

#[test]
fn every_test_that_the_readme_names_exists() {
    Checklist::of("memory").assert_exists(50);
}

#[test]
fn every_row_says_where_or_why() {
    Checklist::of("memory").assert_told(60);
}
