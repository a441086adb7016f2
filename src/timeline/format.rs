//! The lines of a file: one event of the Chrome trace format each, in a JSON array. The array needs no end, so a file
//! is readable whenever whole lines are in it.

use crate::error::op_site::OpSite;

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

impl Lines {
    /// The name of a row, of a process or of the file.
    pub fn meta(&mut self, name: &str, row: Option<u64>, args: &[(&str, Arg<'_>)]) {
        self.begin("M", name, row);
        self.args(args);
        self.end();
    }

    pub fn slice(&mut self, at: At, length: u64, (name, kind): (&str, &str), args: &[(&str, Arg<'_>)]) {
        self.begin("X", name, Some(at.row));
        self.raw(",\"ts\":");
        self.micros(at.time.into());
        self.raw(",\"dur\":");
        self.micros(length.into());
        self.raw(",\"cat\":\"");
        self.raw(kind);
        self.raw("\"");
        self.args(args);
        self.end();
    }

    pub fn counter(&mut self, name: &str, time: u64, args: &[(&str, Arg<'_>)]) {
        self.begin("C", name, None);
        self.raw(",\"ts\":");
        self.micros(time.into());
        self.args(args);
        self.end();
    }

    /// An arrow from the slice at one place to the slice at another one.
    pub fn flow(&mut self, id: u64, from: At, to: At) {
        for (phase, at) in [("s", from), ("f", to)] {
            self.begin(phase, "cause", Some(at.row));
            self.raw(",\"ts\":");
            self.micros(at.time.into());
            self.raw(",\"cat\":\"wait\",\"bp\":\"e\",\"id\":");
            self.number((self.process << 40) | id);
            self.end();
        }
    }

    fn begin(&mut self, phase: &str, name: &str, row: Option<u64>) {
        self.raw("{\"ph\":\"");
        self.raw(phase);
        self.raw("\",\"name\":");
        self.quoted(name);
        self.raw(",\"pid\":");
        self.number(self.process);
        if let Some(row) = row {
            self.raw(",\"tid\":");
            self.number(row);
        }
    }

    fn end(&mut self) {
        self.raw("},\n");
    }

    fn args(&mut self, args: &[(&str, Arg<'_>)]) {
        self.raw(",\"args\":{");
        for (i, (name, value)) in args.iter().enumerate() {
            self.raw(if i == 0 { "\"" } else { ",\"" });
            self.raw(name);
            self.raw("\":");
            match *value {
                Arg::Text(text) => self.quoted(text),
                Arg::Number(number) => self.number(number),
                Arg::Micros(nanos) => self.micros(nanos),
                Arg::Bits(bits) => {
                    self.raw("[");
                    for (i, bit) in (0..64).filter(|bit| bits >> bit & 1 == 1).enumerate() {
                        self.raw(if i == 0 { "" } else { "," });
                        self.number(bit);
                    }
                    self.raw("]");
                }
                Arg::Place(OpSite { site, .. }) => {
                    self.raw("\"");
                    self.escaped(site.file());
                    self.raw(":");
                    self.number(site.line().into());
                    self.raw("\"");
                }
            }
        }
        self.raw("}");
    }

    fn raw(&mut self, text: &str) {
        self.text.extend_from_slice(text.as_bytes());
    }

    fn quoted(&mut self, text: &str) {
        self.raw("\"");
        self.escaped(text);
        self.raw("\"");
    }

    fn escaped(&mut self, text: &str) {
        for &byte in text.as_bytes() {
            match byte {
                b'"' | b'\\' => self.text.extend_from_slice(&[b'\\', byte]),
                0..0x20 => self.raw("?"),
                _ => self.text.push(byte),
            }
        }
    }

    fn number(&mut self, mut number: u64) {
        let (mut digits, mut at) = ([0u8; 20], 20);
        loop {
            at -= 1;
            digits[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return self.text.extend_from_slice(&digits[at..]);
            }
        }
    }

    fn micros(&mut self, nanos: i128) {
        if nanos < 0 {
            self.raw("-");
        }
        let nanos = nanos.unsigned_abs();
        self.number((nanos / 1000) as u64);
        let rest = (nanos % 1000) as u64;
        if rest > 0 {
            let digit = |value: u64| b'0' + (value % 10) as u8;
            self.text.extend_from_slice(&[b'.', digit(rest / 100), digit(rest / 10), digit(rest)]);
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/timeline/format_tests.rs"]
mod tests;
