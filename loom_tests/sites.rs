//! Compares the table of mutants with the source: each site of the code is in the table, each entry of the table is a
//! site, and every ordering stronger than `Relaxed` has a name. This is the unit test of `src/sync/site.rs`, with and
//! without loom.

pub(crate) mod table;

use std::{collections::BTreeSet, fs, path::Path};
use table::TEETH;

// Without the cfg `cargo loom` would find no model, and pass. So the build fails instead.
#[cfg(not(loom))]
const _: () = assert!(
    option_env!("GPU_POOL_LOOM").is_none(),
    "`--cfg loom` did not arrive: is RUSTFLAGS set? It replaces the flags that `cargo loom` passes"
);

#[cfg(not(loom))]
#[test]
fn outside_loom_a_name_changes_nothing() {
    use crate::sync::site::{flag, ord};
    use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
    assert_eq!([Acquire, Release, AcqRel].map(|order| ord("any", order)), [Acquire, Release, AcqRel]);
    assert!(!flag("any"));
}

/// The code that the models drive: `sync/`, `gang/`, and of `crates/cluster` the files of its threads (without tests
/// and comments), white space squeezed out.
fn code() -> Vec<(String, String)> {
    let mut files = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for floor in ["src/sync", "src/gang", "loom_tests/sources"].map(|floor| root.join(floor)) {
        for path in fs::read_dir(&floor).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            // `word.rs`: loom has no atomics on memory that it did not make, so its orderings cannot be weakened in a
            // model.
            if !name.ends_with(".rs")
                || ["shim.rs", "site.rs", "word.rs"].contains(&&*name)
                || name.ends_with("_tests.rs")
            {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(all(test").next().unwrap();
            let lines = text.lines().map(|line| line.split("//").next().unwrap());
            files.push((name, lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect()));
        }
    }
    assert!(files.len() >= 9, "the sources moved");
    for file in ["world.rs", "scope.rs"] {
        assert!(files.iter().any(|(name, _)| name == file), "the cluster's threads moved");
    }
    files
}

/// The names given to `function`, with what follows each name.
fn names<'a>(code: &'a str, function: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    code.split(function).skip(1).filter_map(|rest| rest.strip_prefix('"')?.split_once('"'))
}

/// The mutants that models bring along: wrong orders in code that only uses `sync/`.
fn of_models() -> Vec<String> {
    let entries = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("loom_tests")).unwrap();
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.unwrap().path()).ok());
    texts.flat_map(|text| names(&text, "flag(").map(|(site, _)| site.to_owned()).collect::<Vec<_>>()).collect()
}

#[test]
fn every_site_has_a_tooth_and_every_tooth_a_site() {
    let mut sites = BTreeSet::new();
    for (_, code) in code() {
        for (site, rest) in names(&code, "ord(") {
            if rest.starts_with(",AcqRel") {
                // Each half must be needed; then so is the whole.
                sites.insert(format!("{site}=acquire"));
                sites.insert(format!("{site}=release"));
            } else {
                sites.insert(site.to_owned());
            }
        }
        for function in ["fence_at(", "flag(", "tell("] {
            sites.extend(names(&code, function).map(|(site, _)| site.to_owned()));
        }
    }
    sites.extend(of_models().into_iter().filter(|site| site.starts_with("model.")));
    let teeth: BTreeSet<_> = TEETH.iter().flat_map(|t| t.mutants).map(|(mutant, _)| (*mutant).to_owned()).collect();
    println!("{} sites", sites.len());
    assert_eq!(sites.difference(&teeth).collect::<Vec<_>>(), Vec::<&String>::new(), "sites without a tooth");
    assert_eq!(teeth.difference(&sites).collect::<Vec<_>>(), Vec::<&String>::new(), "teeth without a site");
}

#[test]
fn every_file_is_included_and_has_the_models_of_the_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("loom_tests");
    let included = ["mod.rs", "cluster.rs"].map(|file| fs::read_to_string(folder.join(file)).unwrap()).concat();
    let mut files = BTreeSet::new();
    for path in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        let file = path.file_stem().unwrap().to_str().unwrap();
        // `hub`: no model of loom; it has mutants of its own.
        if path.is_dir() || ["mod", "cluster", "sites", "table", "support", "hub"].contains(&file) {
            continue;
        }
        assert!(included.contains(&format!("\nmod {file};\n")), "neither mod.rs nor cluster.rs includes {file}.rs");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(&format!("bite(\"{file}\")")), "{file}.rs does not run its mutants");
        for tooth in TEETH.iter().filter(|tooth| tooth.file == file) {
            assert!(text.contains(&format!("fn {}()", tooth.model)), "{file}.rs has no model {}", tooth.model);
        }
        files.insert(file.to_owned());
    }
    let in_table: BTreeSet<_> = TEETH.iter().map(|tooth| tooth.file.to_owned()).collect();
    assert_eq!(files, in_table);
}

#[test]
fn no_ordering_goes_without_a_name() {
    for (file, mut code) in code() {
        for function in ["ord(", "fence_at("] {
            // What a site names is replaced by nothing; what remains must be weak.
            while let Some(start) = code.find(&format!("{function}\"")) {
                let end = start + code[start..].find(')').expect("a call ends");
                code.replace_range(start..end, "");
            }
        }
        for strong in ["Acquire", "Release", "AcqRel", "SeqCst"] {
            assert!(!code.contains(strong), "{file}: {strong} without a site");
        }
    }
}
