//! The tour, for a reader at a terminal.

use crate::{
    bold,
    find::{Findings, SEEDS},
    zoo::exhibit::{Caught, Exhibit, Program},
};
use anyhow::Result;
use std::io::Write;

/// Columns.
const WIDTH: usize = 100;

/// What can be said before anything has run.
pub fn before(out: &mut impl Write, exhibit: &Exhibit, place: usize, of: usize) -> Result<()> {
    writeln!(out, "{}", "─".repeat(WIDTH))?;
    writeln!(out, "{}", bold(&format!("{place}/{of}  {}", exhibit.title)))?;
    let name = format!("({})", exhibit.name);
    writeln!(out, "      {name}\n")?;
    paragraph(out, "  ", exhibit.mistake)?;
    writeln!(out)?;
    paragraph(out, "  seen in ", exhibit.thread.label)?;
    writeln!(out, "          {}\n", exhibit.thread.url)?;
    if let Some(wrong) = &exhibit.wrong {
        source(out, "wrong", wrong)?;
    }
    out.flush()?;
    Ok(())
}

/// What was found.
pub fn after(out: &mut impl Write, found: &Findings) -> Result<()> {
    let exhibit = found.exhibit;
    match exhibit.expected {
        Caught::DoesNotCompile { file, code } => {
            writeln!(out, "  {} it does not compile: {code}, as in {file}", bold("wrong:"))?;
        }
        Caught::Error(_) | Caught::Deadlock => {
            writeln!(out, "  {}", bold("what happens, with the checker and without:"))?;
            report(out, found.on.text.as_deref().unwrap_or("nothing"))?;
        }
        Caught::Healed => writeln!(out, "  {} {}", bold("what happens:"), silence(found))?,
        Caught::Report(_) => {
            match (&found.off.text, found.off.how.as_str()) {
                (Some(text), _) => {
                    writeln!(out, "  {}", bold("without the checker, a software GPU reports:"))?;
                    report(out, text)?;
                }
                (None, "not run") => {
                    writeln!(out, "  {} not run: it could kill the GPU's context", bold("without the checker:"))?
                }
                (None, _) => writeln!(out, "  {} {}", bold("without the checker:"), silence(found))?,
            }
            writeln!(out, "  {}", bold("with the checker:"))?;
            report(out, found.on.text.as_deref().unwrap_or("nothing"))?;
        }
    }
    writeln!(out)?;
    paragraph(out, "  mended: ", exhibit.mended)?;
    source(out, "right", &exhibit.right)?;
    match found.right.as_expected {
        true => writeln!(out, "  Its numbers are right, and the checker is silent.\n")?,
        false => writeln!(out, "  UNEXPECTED: {}: {}\n", found.right.how, found.right.text.as_deref().unwrap_or(""))?,
    }
    Ok(())
}

/// What a program does that nobody stops.
pub fn silence(found: &Findings) -> String {
    match found.wrong_numbers {
        Some(0) => format!("silent, and right by luck in each of {SEEDS} orders of its operations"),
        Some(wrong) => format!("silent, with wrong numbers in {wrong} of {SEEDS} orders of its operations"),
        None => "silent".to_owned(),
    }
}

fn source(out: &mut impl Write, what: &str, program: &Program) -> Result<()> {
    let (line, text) = program.text();
    writeln!(out, "  {} {}:{line}", bold(&format!("{what}:")), program.file)?;
    text.lines().try_for_each(|line| writeln!(out, "  │ {line}"))?;
    writeln!(out)?;
    Ok(())
}

fn report(out: &mut impl Write, text: &str) -> Result<()> {
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        paragraph(out, &format!("    {}", " ".repeat(indent)), line.trim_start())?;
    }
    Ok(())
}

/// Words in lines of [`WIDTH`]; `head` begins the first, the others are indented as far.
fn paragraph(out: &mut impl Write, head: &str, text: &str) -> Result<()> {
    let indent = " ".repeat(head.chars().count());
    let mut line = head.to_owned();
    for word in text.split(' ') {
        let full = line.chars().count() + 1 + word.chars().count() > WIDTH;
        if full && line.trim().chars().count() > 0 && line.len() > indent.len() {
            writeln!(out, "{}", line.trim_end())?;
            line = format!("{indent}  ");
        } else if line.len() > head.len() {
            line.push(' ');
        }
        line.push_str(word);
    }
    writeln!(out, "{}", line.trim_end())?;
    Ok(())
}
