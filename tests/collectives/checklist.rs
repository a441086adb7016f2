//! `README.md` names tests that exist.

use std::{collections::BTreeSet, fs, path::Path};

/// `` `file.rs::name` `` in the table: beside this file, or from the crate's root if there is a slash in it.
fn named(text: &str) -> BTreeSet<(String, String)> {
    let in_code = text.split('`').skip(1).step_by(2);
    let named = in_code.filter_map(|code| code.split_once(".rs::"));
    named.map(|(file, name)| (format!("{file}.rs"), name.to_owned())).collect()
}

#[test]
fn every_test_that_the_readme_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let here = root.join("tests/collectives");
    let readme = fs::read_to_string(here.join("README.md")).unwrap();
    let named = named(&readme);
    assert!(named.len() > 50, "the table has become short: {}", named.len());
    let missing: Vec<_> = named
        .iter()
        .filter(|(file, name)| {
            let path = if file.contains('/') { root.join(file) } else { here.join(file) };
            let source = fs::read_to_string(&path).unwrap_or_default();
            !["(", "<"].iter().any(|after| source.contains(&format!("fn {name}{after}")))
        })
        .collect();
    assert!(missing.is_empty(), "the README names tests that are not there: {missing:?}");
}

/// Each row of a table says where the test is, or why there is none.
#[test]
fn every_row_says_where_or_why() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/collectives/README.md")).unwrap();
    let mut rows = 0;
    for row in readme.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| theirs")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let told = cells[1..].iter().any(|cell| cell.contains(".rs::") || cell.starts_with("none:"));
        assert!(told && !cells[0].is_empty(), "neither a test nor a reason: {row}");
        rows += 1;
    }
    assert!(rows > 60, "{rows} rows");
}

/// Every numbered complaint has its row.
#[test]
fn no_complaint_is_left_out() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/collectives/README.md")).unwrap();
    let missing: Vec<_> = (1..=20).filter(|number| !readme.contains(&format!("\n| {number} "))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
