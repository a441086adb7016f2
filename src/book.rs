//! The programs of the README and of the book's pages are doctests, and the pages keep up with the crate.

/// Makes the Rust programs of each page doctests. `cargo test --doc book` runs them.
macro_rules! pages {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(#[cfg(doctest)] #[doc = include_str!(concat!("../", $path))] struct $name;)+
    };
}

pages! {
    FirstProgram: "docs/src/guide/first_program.md",
    Pools: "docs/src/guide/pools.md",
    Shards: "docs/src/guide/shards.md",
    State: "docs/src/guide/state.md",
    Memory: "docs/src/guide/memory.md",
    MemoryPool: "docs/src/guide/memory_pool.md",
    Streams: "docs/src/guide/streams.md",
    Kernels: "docs/src/guide/kernels.md",
    Collectives: "docs/src/guide/collectives.md",
    Gradients: "docs/src/guide/gradients.md",
    Graphs: "docs/src/guide/graphs.md",
    Operations: "docs/src/guide/operations.md",
    DataParallel: "docs/src/guide/data_parallel.md",
    Checkpoints: "docs/src/guide/checkpoints.md",
    TensorParallel: "docs/src/guide/tensor_parallel.md",
    Tasks: "docs/src/guide/tasks.md",
    Testing: "docs/src/guide/testing.md",
    Errors: "docs/src/guide/errors.md",
    Tuning: "docs/src/guide/tuning.md",
    Faq: "docs/src/guide/faq.md",
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        fs,
        path::{Path, PathBuf},
    };

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    /// All files of a kind in a folder.
    fn files(folder: &Path, kind: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(&path, kind, found);
            } else if path.extension().is_some_and(|extension| extension == kind) {
                found.push(path);
            }
        }
    }

    /// Whether rustdoc would compile a block of the page.
    fn has_programs(text: &str) -> bool {
        let mut inside = false;
        for line in text.lines().map(str::trim_start) {
            let Some(words) = line.strip_prefix("```") else { continue };
            // Rustdoc takes a block without a language for Rust, too.
            let compiled = |word: &str| matches!(word, "" | "rust" | "no_run" | "should_panic" | "compile_fail");
            let mut words = words.split(',').map(str::trim);
            if !inside && words.clone().all(|word| word != "ignore") && words.any(compiled) {
                return true;
            }
            inside = !inside;
        }
        false
    }

    #[test]
    fn every_page_with_a_program_is_a_doctest() {
        let mut pages = vec![root().join("README.md")];
        files(&root().join("docs/src"), "md", &mut pages);
        let with_programs: BTreeSet<String> = pages
            .iter()
            .filter(|page| has_programs(&fs::read_to_string(page).unwrap()))
            .map(|page| page.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/"))
            .collect();
        let books = ["src/book.rs", "crates/cluster/src/book.rs", "crates/train/src/book.rs"];
        let books = books.map(|book| fs::read_to_string(root().join(book)).unwrap()).concat();
        let paths = books.lines().filter_map(|line| line.split_once(": \"")?.1.strip_suffix("\","));
        let included: BTreeSet<String> = paths.filter(|path| path.ends_with(".md")).map(str::to_owned).collect();
        assert_eq!(included, with_programs, "left: pages in the crates' book.rs; right: pages with programs");
    }

    #[test]
    fn programs_are_told_from_what_is_only_shown() {
        assert!(has_programs("text\n```rust\ncode\n```\n"));
        assert!(has_programs("```text\n```\n\n```rust,no_run\n```\n"));
        assert!(has_programs("```\nlet x = 1;\n```\n"));
        assert!(!has_programs("```rust,ignore\ncode\n```\n```sh\nls\n```\n```text\n```\n"));
    }

    /// Rustdoc compiles all programs of the crate as one, in a folder of its own. A path that is relative to the page
    /// is not found there. Then rustdoc compiles and links them one by one, without a word, which takes minutes instead
    /// of seconds.
    #[test]
    fn programs_include_files_by_absolute_paths() {
        let mut pages = vec![root().join("README.md")];
        files(&root().join("docs/src"), "md", &mut pages);
        files(&root().join("src"), "rs", &mut pages);
        for page in pages {
            let is_source = page.extension().is_some_and(|extension| extension == "rs");
            for (number, line) in fs::read_to_string(&page).unwrap().lines().enumerate() {
                let is_program = !is_source || ["///", "//!"].iter().any(|mark| line.trim_start().starts_with(mark));
                let relative = ["include_str!(\"", "include_bytes!(\""].iter().any(|include| line.contains(include));
                assert!(!(is_program && relative), "{}:{}: use `env!`", page.display(), number + 1);
            }
        }
    }
}
