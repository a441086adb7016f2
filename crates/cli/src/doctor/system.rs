//! The files of the system that `doctor` reads: `/proc` and `/sys`. Tests give a tree of their own.

use std::{fs, path::PathBuf};

/// Reads files by absolute paths.
pub trait System {
    /// The bytes of a file. None if it cannot be read.
    fn bytes(&self, path: &str) -> Option<Vec<u8>>;

    /// The names in a folder, sorted.
    fn names(&self, folder: &str) -> Vec<String>;

    /// The path to which a symbolic link leads, without links.
    fn target(&self, link: &str) -> Option<String>;

    /// The text of a file, trimmed.
    fn text(&self, path: &str) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes(path)?).trim().to_owned())
    }

    /// The first number in a file.
    fn number(&self, path: &str) -> Option<i64> {
        self.text(path)?.split_whitespace().next()?.parse().ok()
    }
}

/// This machine.
pub struct Machine;

impl System for Machine {
    fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        fs::read(path).ok()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn target(&self, link: &str) -> Option<String> {
        PathBuf::from(link).canonicalize().ok().map(|path| path.to_string_lossy().into_owned())
    }
}
