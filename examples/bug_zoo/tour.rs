//! The tour, for a reader at a terminal.

use crate::{
    bold,
    find::{Findings, SEEDS},
    width,
    zoo::exhibit::{Caught, Exhibit, Program},
};
use anyhow::{Context, Result};
use std::io::Write;

/// Prints the part before a run: the mistake, its thread, the wrong program.
pub fn before(out: &mut impl Write, exhibit: &Exhibit, place: usize, of: usize) -> Result<()> {
    writeln!(out, "{}", "─".repeat(width().into()))?;
    writeln!(out, "{}", bold(&format!("{place}/{of}  {}", exhibit.title)))?;
    let name = format!("({})", exhibit.name);
    writeln!(out, "      {name}\n")?;
    paragraph(out, "  ", exhibit.mistake, 0)?;
    writeln!(out)?;
    paragraph(out, "  seen in ", exhibit.thread.label, 0)?;
    writeln!(out, "          {}\n", exhibit.thread.url)?;
    if let Some(wrong) = &exhibit.wrong {
        source(out, "wrong", wrong)?;
    }
    out.flush()?;
    Ok(())
}

/// Prints the part after a run: the outcome, and the mended program.
pub fn after(out: &mut impl Write, found: &Findings) -> Result<()> {
    let exhibit = found.exhibit;
    match exhibit.expected {
        Caught::DoesNotCompile { file, code } => {
            writeln!(out, "  {} {file}", bold("wrong:"))?;
            compile_fail(file)?.lines().try_for_each(|line| writeln!(out, "  │ {line}"))?;
            writeln!(out, "\n  {} it does not compile: {code}", bold("what happens:"))?;
        }
        Caught::Error(_) | Caught::Deadlock => {
            writeln!(out, "  {}", bold("what happens, with the checker and without:"))?;
            report(out, found.on.text.as_deref().unwrap_or("nothing"))?;
        }
        Caught::Healed => labelled(out, "what happens:", &silence(found))?,
        Caught::Report(_) => {
            match (&found.off.text, found.off.how.as_str()) {
                (Some(text), _) => {
                    writeln!(out, "  {}", bold("without the checker, a software GPU reports:"))?;
                    report(out, text)?;
                }
                (None, "not run") => {
                    writeln!(out, "  {} not run: it could kill the GPU's context", bold("without the checker:"))?
                }
                (None, _) => labelled(out, "without the checker:", &silence(found))?,
            }
            writeln!(out, "  {}", bold("with the checker:"))?;
            report(out, found.on.text.as_deref().unwrap_or("nothing"))?;
        }
    }
    writeln!(out)?;
    paragraph(out, "  mended: ", exhibit.mended, 0)?;
    source(out, "right", &exhibit.right)?;
    match found.right.as_expected {
        true => writeln!(out, "  Its numbers are right, and the checker is silent.\n")?,
        false => writeln!(out, "  UNEXPECTED: {}: {}\n", found.right.how, found.right.text.as_deref().unwrap_or(""))?,
    }
    Ok(())
}

/// The outcome of a program that nothing stops.
pub fn silence(found: &Findings) -> String {
    match found.wrong_numbers {
        Some(0) => format!("silent, and its own numbers are right in each of {SEEDS} orders of its operations"),
        Some(wrong) => format!("silent, with wrong numbers in {wrong} of {SEEDS} orders of its operations"),
        None => "silent".to_owned(),
    }
}

/// The source of a program that the compiler refuses.
pub fn compile_fail(file: &str) -> Result<String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

fn source(out: &mut impl Write, what: &str, program: &Program) -> Result<()> {
    let (line, text) = program.text();
    writeln!(out, "  {} {}:{line}", bold(&format!("{what}:")), program.file)?;
    for item in program.items() {
        item.lines().try_for_each(|line| writeln!(out, "  │ {line}"))?;
        writeln!(out, "  │")?;
    }
    text.lines().try_for_each(|line| writeln!(out, "  │ {line}"))?;
    writeln!(out)?;
    Ok(())
}

fn report(out: &mut impl Write, text: &str) -> Result<()> {
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        // Never breaks a line between an operation and its place in the source.
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let text = words.join(" ").replace(" at ", " at\u{a0}");
        paragraph(out, &format!("    {}", " ".repeat(indent)), &text, 4)?;
    }
    Ok(())
}

/// A paragraph after a bold label.
fn labelled(out: &mut impl Write, label: &str, text: &str) -> Result<()> {
    let mut plain = Vec::new();
    paragraph(&mut plain, &format!("  {label} "), text, 0)?;
    // Bold is added after wrapping, because its codes take no columns.
    out.write_all(String::from_utf8(plain)?.replacen(label, &bold(label), 1).as_bytes())?;
    Ok(())
}

/// Wraps words into lines of [`width`]. `head` begins the first line; the others are indented as far, and by `more`.
pub fn paragraph(out: &mut impl Write, head: &str, text: &str, more: usize) -> Result<()> {
    let indent = " ".repeat(head.chars().count() + more);
    let mut line = head.to_owned();
    let width = usize::from(width());
    for word in text.split(' ') {
        let full = line.chars().count() + 1 + word.chars().count() > width;
        if full && line != indent && line != head {
            writeln!(out, "{}", line.trim_end().replace('\u{a0}', " "))?;
            line = indent.clone();
        } else if line.len() > head.len() && line != indent {
            line.push(' ');
        }
        line.push_str(word);
    }
    writeln!(out, "{}", line.trim_end().replace('\u{a0}', " "))?;
    Ok(())
}
