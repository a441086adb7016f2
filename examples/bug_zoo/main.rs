//! A tour of typical mistakes in programs for several GPUs. Each comes with a public thread about it, its effect,
//! how it is caught, and a mended twin.
//!
//! ```sh
//! cargo run --example bug_zoo                              # all of it; no GPU needed
//! cargo run --example bug_zoo -- --only missing-wait
//! cargo run --example bug_zoo -- --table                   # which are caught where, with and without the checker
//! cargo run --example bug_zoo -- --markdown docs/src/guide/bug_zoo.md
//! cargo run --example bug_zoo -- --backend cuda --json benches/results/2xH200/bug_zoo.json
//! ```
//!
//! * `zoo`: the programs; `crates/lab/tests/bug_zoo.rs` runs them, too
//! * `find`: runs the programs and records the results
//! * `tour`, `table`, `markdown`, `record`: write the results to a terminal, a page, and a JSON file

mod find;
mod markdown;
mod record;
mod table;
mod tour;
mod zoo;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use find::Findings;
use std::{
    io::{self, IsTerminal, Write, stdout},
    path::PathBuf,
    process::ExitCode,
};
use zoo::{
    exhibit::Exhibit,
    ground::{Ground, cuda_devices},
};

/// Walks through the mistakes that programs for several GPUs are made of.
#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct Options {
    /// Names and titles only
    #[arg(long)]
    list: bool,
    /// This exhibit only; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Software GPUs, or two real ones
    #[arg(long, value_enum, default_value_t = Kind::Host)]
    backend: Kind,
    /// Which are caught where, in a table
    #[arg(long)]
    table: bool,
    /// Writes the tour to a file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Writes the findings on this backend to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Host,
    Cuda,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe: `| head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is gone, too, nothing can be done.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let exhibits = chosen(&options.only)?;
    let mut out = stdout();
    if options.list {
        return exhibits.iter().try_for_each(|e| writeln!(out, "{:<26}{}", e.name, e.title)).context("stdout");
    }
    let cuda = options.backend == Kind::Cuda;
    ensure!(!cuda || cuda_devices() >= 2, "--backend cuda: needs two CUDA devices, there are {}", cuda_devices());
    // While this value holds the contexts, they need not be created again for each program.
    let _kept = if cuda { Ground::cuda(false).bare::<2>().ok() } else { None };
    let tour = !options.table && options.markdown.is_none() && options.json.is_none();
    let mut all = Vec::new();
    for (place, exhibit) in exhibits.iter().copied().enumerate() {
        if tour {
            tour::before(&mut out, exhibit, place + 1, exhibits.len())?;
        }
        let findings = Findings::of(exhibit, cuda);
        if tour {
            tour::after(&mut out, &findings)?;
        }
        all.push(findings);
    }
    if options.table || tour {
        table::write(&mut out, &all, cuda)?;
    }
    if let Some(path) = &options.markdown {
        ensure!(!cuda, "--markdown: the page is made from a run on software GPUs; results of others come from --json");
        markdown::write(path, &all)?;
    }
    if let Some(path) = &options.json {
        std::fs::write(path, record::write(&all, cuda)?).with_context(|| path.display().to_string())?;
    }
    let wrong: Vec<&str> = all.iter().filter(|f| !f.as_expected()).map(|f| f.exhibit.name).collect();
    if !wrong.is_empty() {
        bail!("not as expected: {}", wrong.join(", "));
    }
    Ok(())
}

fn chosen(only: &[String]) -> Result<Vec<&'static Exhibit>> {
    let all = zoo::all();
    if only.is_empty() {
        return Ok(all);
    }
    let find = |name: &String| {
        all.iter().copied().find(|e| e.name == *name).with_context(|| format!("no exhibit `{name}`; see --list"))
    };
    only.iter().map(find).collect()
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_one = |io: &io::Error| io.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(is_one))
}

/// Columns of the output: those of the terminal, at most 100, which can still be read well.
fn width() -> u16 {
    const MOST: u16 = 100;
    // The table library knows the width of a terminal. A terminal that reports 0 columns does not know it.
    comfy_table::Table::new().width().filter(|&width| width > 0).map_or(MOST, |width| width.clamp(40, MOST))
}

/// Bold text if stdout is a terminal.
fn bold(text: &str) -> String {
    if stdout().is_terminal() { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
}
