//! A `README.md` that maps others' tests to ours tells the truth.

use std::{collections::BTreeSet, fs, path::Path};

/// The table of `tests/<folder>/README.md`.
pub struct Checklist {
    folder: &'static str,
    /// All of it.
    #[allow(dead_code, reason = "not every suite looks at it")]
    pub text: String,
}

impl Checklist {
    pub fn of(folder: &'static str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder).join("README.md");
        Checklist { folder, text: fs::read_to_string(path).unwrap() }
    }

    /// `` `file.rs::name` ``: beside the table, or from the crate's root if there is a slash in it.
    fn named(&self) -> BTreeSet<(String, String)> {
        let in_code = self.text.split('`').skip(1).step_by(2);
        let named = in_code.filter_map(|code| code.split_once(".rs::"));
        named.map(|(file, name)| (format!("{file}.rs"), name.to_owned())).collect()
    }

    /// Every test that it names is there, and it names at least so many.
    #[track_caller]
    pub fn assert_exists(&self, at_least: usize) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let here = root.join("tests").join(self.folder);
        let named = self.named();
        assert!(named.len() >= at_least, "the table has become short: {}", named.len());
        let is_missing = |(file, name): &&(String, String)| {
            let path = if file.contains('/') { root.join(file) } else { here.join(file) };
            let source = fs::read_to_string(&path).unwrap_or_default();
            !["(", "<"].iter().any(|after| source.contains(&format!("fn {name}{after}")))
        };
        let missing: Vec<_> = named.iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "the README names tests that are not there: {missing:?}");
    }

    /// Each row says where the test is, or why there is none; and there are at least so many.
    #[track_caller]
    pub fn assert_told(&self, at_least: usize) {
        let rows = self.text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| theirs"));
        let rows: Vec<&str> = rows.collect();
        for row in &rows {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let told = cells[1..].iter().any(|cell| cell.contains(".rs::") || cell.starts_with("none:"));
            assert!(told && !cells[0].is_empty(), "neither a test nor a reason: {row}");
        }
        assert!(rows.len() >= at_least, "{} rows", rows.len());
    }
}
