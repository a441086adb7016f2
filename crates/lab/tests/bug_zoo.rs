//! The bug zoo keeps its word: each mistake is caught, as what the exhibit says and where it was made, and each mended
//! twin is silent; on software GPUs, as fast as they can and one operation at a time, and on CUDA.

#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../../../examples/bug_zoo/zoo/mod.rs"]
mod zoo;

use std::{collections::BTreeSet, path::Path};
use support::guarded;
use zoo::{
    exhibit::{Caught, Exhibit, OnCuda, Outcome, Program, Seen, Trouble},
    ground::{Ground, cuda_devices},
};

/// What the example has written.
const PAGE: &str = "docs/src/guide/bug_zoo.md";
/// Orders of operations that each program is run in.
const SEEDS: u64 = 3;

fn run(program: &'static Program, ground: &Ground) -> Outcome {
    let ground = ground.clone();
    guarded(move || (program.run)(&ground))
}

/// How the wrong program failed.
fn trouble(exhibit: &'static Exhibit, ground: &Ground) -> Option<Trouble> {
    let outcome = run(exhibit.wrong.as_ref()?, ground);
    let name = exhibit.name;
    match exhibit.expected {
        // Without a pool there is nobody to notice.
        Caught::Healed => {
            assert!(matches!(outcome, Ok(Seen::Wrong)), "{name} on {ground:?}: {outcome:?}");
            None
        }
        expected => {
            let trouble = outcome.expect_err(&format!("{name} on {ground:?} was not caught"));
            assert_eq!(trouble.caught(), Some(expected), "{name} on {ground:?}: {trouble}");
            Some(trouble)
        }
    }
}

/// A report leads to the lines where the mistake was made.
fn leads_to_the_program(exhibit: &'static Exhibit, trouble: &Trouble) {
    let (Some(report), Some(wrong)) = (trouble.report(), &exhibit.wrong) else { return };
    let (first, text) = wrong.text();
    let lines = first..first + text.lines().count();
    let within =
        |site: gpu_pool::error::Site| site.file().ends_with(wrong.file) && lines.contains(&(site.line() as usize));
    let operations = std::iter::once(&report.now).chain(&report.before);
    for operation in operations {
        let site =
            operation.site.unwrap_or_else(|| panic!("{}: `{}` has no place: {report}", exhibit.name, operation.op));
        assert!(within(site), "{}: {site} is not in `{}`: {report}", exhibit.name, wrong.name);
    }
    let needs_two = matches!(exhibit.expected, Caught::Report(kind) if NEED_BOTH.contains(&kind));
    assert!(!needs_two || report.before.is_some(), "{}: only one side: {report}", exhibit.name);
}

/// Reports of two operations.
const NEED_BOTH: [gpu_pool_lab::check::Kind; 3] = {
    use gpu_pool_lab::check::Kind::{FreeInUse, HostAccess, Race};
    [Race, FreeInUse, HostAccess]
};

fn silent(exhibit: &'static Exhibit, ground: &Ground) {
    let outcome = run(&exhibit.right, ground);
    assert!(matches!(outcome, Ok(Seen::Right)), "{} on {ground:?}: {outcome:?}", exhibit.name);
}

#[test]
fn mistakes_are_caught_where_they_were_made() {
    for exhibit in zoo::all() {
        if let Some(trouble) = trouble(exhibit, &Ground::software(true)) {
            leads_to_the_program(exhibit, &trouble);
        }
    }
}

#[test]
fn mistakes_are_caught_whatever_the_order() {
    for exhibit in zoo::all() {
        for seed in 0..SEEDS {
            trouble(exhibit, &Ground::seeded(true, seed));
        }
    }
}

#[test]
fn mended_twins_are_silent() {
    for exhibit in zoo::all() {
        silent(exhibit, &Ground::software(true));
        (0..SEEDS).for_each(|seed| silent(exhibit, &Ground::seeded(true, seed)));
    }
}

/// What the checker reports, nobody else does: the exhibits are about something.
#[test]
fn without_the_checker_races_are_silent() {
    for exhibit in zoo::all() {
        let (Caught::Report(kind), Some(wrong)) = (exhibit.expected, &exhibit.wrong) else { continue };
        let outcome = run(wrong, &Ground::software(false));
        let reported = outcome.as_ref().err().and_then(|trouble| trouble.caught());
        assert_eq!(reported, None, "{}: {outcome:?}", exhibit.name);
        if kind == gpu_pool_lab::check::Kind::Race {
            assert!(outcome.is_ok(), "{}: {outcome:?}", exhibit.name);
        }
    }
}

#[test]
fn mistakes_are_caught_on_two_cuda_devices() {
    support::on_cuda(2, |_| {
        let ground = Ground::cuda(true);
        assert!(cuda_devices() >= 2);
        // As long as somebody has the contexts, they need not be made anew for each program.
        let _kept = ground.bare::<2>().unwrap();
        for exhibit in zoo::all() {
            match exhibit.cuda {
                OnCuda::Runs | OnCuda::OnlyChecked => drop(trouble(exhibit, &ground)),
                OnCuda::Unseen => {
                    let outcome = exhibit.wrong.as_ref().map(|wrong| run(wrong, &ground));
                    assert!(matches!(outcome, Some(Ok(_))), "{}: {outcome:?}", exhibit.name);
                }
                OnCuda::Never => {}
            }
        }
    });
}

#[test]
fn mended_twins_are_silent_on_two_cuda_devices() {
    support::on_cuda(2, |_| {
        let ground = Ground::cuda(true);
        let _kept = ground.bare::<2>().unwrap();
        zoo::all().into_iter().for_each(|exhibit| silent(exhibit, &ground));
    });
}

#[test]
fn exhibits_are_complete() {
    let index = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(PAGE);
    let all_names = std::fs::read_to_string(&index).unwrap();
    let all = zoo::all();
    assert!(all.len() >= 15, "{}", all.len());
    let names: BTreeSet<_> = all.iter().map(|e| e.name).collect();
    assert_eq!(names.len(), all.len(), "a name occurs twice");
    for exhibit in all {
        let Exhibit { name, title, mistake, mended, thread, wrong, right, .. } = exhibit;
        assert!(!title.is_empty() && [mistake, mended].iter().all(|text| text.ends_with(['.', ')'])), "{name}");
        assert!(thread.url.starts_with("https://"), "{name}: {}", thread.url);
        let number = thread.url.rsplit('/').next().unwrap();
        assert!(thread.label.contains(&format!("#{number}:")), "{name}: label and address of the thread differ");
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
        assert!(all_names.contains(&format!("| [{name}](bug_zoo/{name}.md) |")), "{name} is not in {PAGE}");
        let page = std::fs::read_to_string(index.with_extension("").join(name).with_extension("md")).unwrap();
        assert!(page.contains(&format!("\n# {name}\n")) && page.contains(thread.url), "{name} is not on its page");
        for program in wrong.iter().chain([right]) {
            let (line, text) = program.text();
            let file = program.file;
            let shown = page.contains(&format!("`{file}:{line}`\n")) && page.contains(text);
            assert!(shown, "`{}` has changed: run `cargo run --example bug_zoo -- --markdown {PAGE}`", program.name);
            assert!(line > 1 && text.starts_with("fn ") && text.ends_with('}'), "{name}: {text}");
            assert!(program.items().all(|item| item.ends_with('}')), "{name}");
            let widest = program.items().chain([text]).flat_map(str::lines).map(|line| line.chars().count()).max();
            assert!(widest <= Some(95), "{name}: `{}` does not fit in a terminal", program.name);
        }
        match exhibit.expected {
            Caught::DoesNotCompile { file, code } => {
                assert!(wrong.is_none(), "{name}");
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
                let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
                assert!(text.contains(&format!("//~ {code}")), "{file} is not refused with {code}");
            }
            _ => assert!(wrong.is_some(), "{name}"),
        }
    }
}
