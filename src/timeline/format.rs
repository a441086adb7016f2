//! The lines of a file: one event of the Chrome trace format each, in a JSON array. The array needs no end, so a file
//! is readable whenever whole lines are in it.

use crate::error::op_site::OpSite;
use std::{fmt, io::Write};

/// The version of the file: in the first event.
pub(super) const VERSION: u64 = 1;

/// A value among the arguments of an event.
#[derive(Clone, Copy)]
pub(super) enum Arg<'a> {
    Text(&'a str),
    Number(u64),
    /// A signed number of nanoseconds, in microseconds.
    Micros(i128),
    /// The set bits of a number.
    Bits(u64),
    Place(OpSite),
}

/// Events that are still to be written.
pub(super) struct Lines {
    pub text: Vec<u8>,
    pub process: u64,
}

/// Where an event is drawn, and when, in nanoseconds.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub row: u64,
    pub time: u64,
}

/// A text between quotes.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let special = |c: char| matches!(c, '"' | '\\' | '\0'..'\x20');
        for part in self.0.split_inclusive(special) {
            match part.chars().next_back().filter(|&c| special(c)) {
                None => f.write_str(part)?,
                Some(c) if c < ' ' => write!(f, "{}?", &part[..part.len() - 1])?,
                Some(c) => write!(f, "{}\\{c}", &part[..part.len() - 1])?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Arg<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Arg::Text(text) => write!(f, "\"{}\"", Escaped(text)),
            Arg::Number(number) => write!(f, "{number}"),
            Arg::Micros(nanos) => {
                let (sign, nanos) = (if nanos < 0 { "-" } else { "" }, nanos.unsigned_abs());
                match nanos % 1000 {
                    0 => write!(f, "{sign}{}", nanos / 1000),
                    rest => write!(f, "{sign}{}.{rest:03}", nanos / 1000),
                }
            }
            Arg::Bits(bits) => f.debug_list().entries((0..64).filter(|bit| bits >> bit & 1 == 1)).finish(),
            Arg::Place(OpSite { site, .. }) => write!(f, "\"{}:{}\"", Escaped(site.file()), site.line()),
        }
    }
}

impl Lines {
    /// The name of a row, of a process or of the file.
    pub fn meta(&mut self, name: &str, row: Option<u64>, args: &[(&str, Arg<'_>)]) {
        self.event("M", name, row, format_args!(""), Some(args));
    }

    pub fn slice(&mut self, at: At, length: u64, (name, kind): (&str, &str), args: &[(&str, Arg<'_>)]) {
        let (time, length) = (Arg::Micros(at.time.into()), Arg::Micros(length.into()));
        self.event("X", name, Some(at.row), format_args!(r#","ts":{time},"dur":{length},"cat":"{kind}""#), Some(args));
    }

    pub fn counter(&mut self, name: &str, time: u64, args: &[(&str, Arg<'_>)]) {
        self.event("C", name, None, format_args!(r#","ts":{}"#, Arg::Micros(time.into())), Some(args));
    }

    /// An arrow from the slice at one place to the slice at another one.
    pub fn flow(&mut self, id: u64, from: At, to: At) {
        let id = (self.process << 40) | id;
        for (phase, at) in [("s", from), ("f", to)] {
            let (row, time) = (Some(at.row), Arg::Micros(at.time.into()));
            self.event(phase, "cause", row, format_args!(r#","ts":{time},"cat":"wait","bp":"e","id":{id}"#), None);
        }
    }

    fn event(
        &mut self,
        phase: &str,
        name: &str,
        row: Option<u64>,
        more: fmt::Arguments<'_>,
        args: Option<&[(&str, Arg<'_>)]>,
    ) {
        let (name, process) = (Escaped(name), self.process);
        self.put(format_args!(r#"{{"ph":"{phase}","name":"{name}","pid":{process}"#));
        if let Some(row) = row {
            self.put(format_args!(r#","tid":{row}"#));
        }
        self.put(more);
        if let Some(args) = args {
            self.put(format_args!(r#","args":{{"#));
            for (i, (name, value)) in args.iter().enumerate() {
                self.put(format_args!(r#"{}"{name}":{value}"#, if i == 0 { "" } else { "," }));
            }
            self.put(format_args!("}}"));
        }
        self.put(format_args!("}},\n"));
    }

    fn put(&mut self, text: fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("a vector takes all");
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/timeline/format_tests.rs"]
mod tests;
