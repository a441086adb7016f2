//! Writes the page `docs/src/guide/bug_zoo.md` from the results of a run, and a page for each exhibit in the folder of
//! that name.

use crate::{
    find::{Findings, SEEDS},
    record,
    tour::{compile_fail, silence},
    zoo::exhibit::{Caught, Program},
};
use anyhow::{Context, Result};
use std::{fmt::Write, fs, path::Path};

/// Writes the index to `path`, and the exhibits beside it.
pub fn write(path: &Path, all: &[Findings]) -> Result<()> {
    let folder = path.with_extension("");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut index = String::from(HEAD);
    table(&mut index, all)?;
    file(path, &index)?;
    for found in all {
        let mut page = String::from(MADE);
        exhibit(&mut page, found)?;
        file(&folder.join(found.exhibit.name).with_extension("md"), &page)?;
    }
    Ok(())
}

fn file(path: &Path, text: &str) -> Result<()> {
    // The compiler names files as the manifest does.
    let text = text.replace("crates/lab/../../", "");
    fs::write(path, text.trim_end().to_owned() + "\n").with_context(|| path.display().to_string())
}

const MADE: &str = "\
<!-- Made by `cargo run --example bug_zoo -- --markdown docs/src/guide/bug_zoo.md`; do not edit. -->

";

const HEAD: &str = "\
<!-- Made by `cargo run --example bug_zoo -- --markdown docs/src/guide/bug_zoo.md`; do not edit. -->

# The bug zoo

Typical mistakes in programs for several GPUs. Each comes from a public thread, runs on any computer (software GPUs),
is caught, and has a mended twin that is silent. `cargo run --example bug_zoo` walks through them;
`crates/lab/tests/bug_zoo.rs` checks each of them. Where the public API excludes a mistake, the wrong program is written
against bare devices, which look like the CUDA driver API.

";

fn table(page: &mut String, all: &[Findings]) -> Result<()> {
    let h200 = record::read(record::H200)?;
    writeln!(page, "## What is caught, and where\n")?;
    writeln!(
        page,
        "\"Wrong numbers\": how often the program ends in silence with wrong results on software GPUs without the"
    )?;
    writeln!(
        page,
        "checker, of {SEEDS} seeded orders of its operations. \"Not run\": without the checker it could kill the GPU's"
    )?;
    writeln!(page, "context, or hang for ever.\n")?;
    write!(page, "| exhibit | software GPUs, checker off | wrong numbers | software GPUs, checker on |")?;
    writeln!(page, "{}", if h200.is_some() { " 2 x H200, checker off | 2 x H200, checker on |" } else { "" })?;
    writeln!(page, "|---|---|---|---|{}", if h200.is_some() { "---|---|" } else { "" })?;
    for found in all {
        let name = found.exhibit.name;
        let numbers = found.wrong_numbers.map_or_else(|| "-".to_owned(), |n| format!("{n} of {SEEDS}"));
        write!(page, "| [{name}](bug_zoo/{name}.md) | {} | {numbers} | {} |", found.off.how, found.on.how)?;
        if let Some(rows) = &h200 {
            write!(page, " {} | {} |", record::cell(rows, name, "off"), record::cell(rows, name, "on"))?;
        }
        writeln!(page)?;
    }
    let twins = all.iter().filter(|found| found.right.as_expected).count();
    writeln!(page, "\n{twins} of {} mended twins are silent, with the checker on.", all.len())?;
    Ok(())
}

fn exhibit(page: &mut String, found: &Findings) -> Result<()> {
    let exhibit = found.exhibit;
    writeln!(page, "# {}\n\n## {}\n", exhibit.name, exhibit.title)?;
    writeln!(page, "{}\n\nSeen in [{}]({}).\n", exhibit.mistake, exhibit.thread.label, exhibit.thread.url)?;
    if let Some(wrong) = &exhibit.wrong {
        source(page, wrong)?;
    }
    match exhibit.expected {
        Caught::DoesNotCompile { file, code } => {
            writeln!(page, "`{file}`\n\n```rust,ignore\n{}```\n\nIt does not compile: {code}.\n", compile_fail(file)?)?;
        }
        Caught::Healed => writeln!(page, "What happens: {}.\n", silence(found))?,
        Caught::Error(_) | Caught::Deadlock => {
            writeln!(page, "With the checker and without:\n")?;
            text(page, found.on.text.as_deref().unwrap_or("nothing"))?;
        }
        Caught::Report(_) => {
            match &found.off.text {
                None => writeln!(page, "Without the checker: {}. With it:\n", silence(found))?,
                Some(said) => {
                    writeln!(page, "Without the checker, software GPUs report:\n")?;
                    text(page, said)?;
                    writeln!(page, "With it:\n")?;
                }
            }
            text(page, found.on.text.as_deref().unwrap_or("nothing"))?;
        }
    }
    writeln!(page, "Mended: {}\n", exhibit.mended)?;
    source(page, &exhibit.right)
}

fn source(page: &mut String, program: &Program) -> Result<()> {
    let (line, text) = program.text();
    writeln!(page, "`{}:{line}`\n\n```rust,ignore", program.file)?;
    program.items().try_for_each(|item| writeln!(page, "{item}\n"))?;
    writeln!(page, "{text}\n```\n")?;
    Ok(())
}

fn text(page: &mut String, said: &str) -> Result<()> {
    writeln!(page, "```text\n{said}\n```\n")?;
    Ok(())
}
