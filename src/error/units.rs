//! `Display` for bytes, times and counts, for memory reports.

use std::fmt;

/// Bytes in binary units: `512 B`, `1.5 KiB`, `24.0 MiB`, `1.25 GiB`.
#[derive(Clone, Copy)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut units = [("KiB", 1), ("MiB", 1), ("GiB", 2), ("TiB", 2), ("PiB", 2), ("EiB", 2)].into_iter().peekable();
        let mut value = self.0 as f64 / 1024.0;
        // 1023.96 KiB would be rounded to 1024.0 KiB, so it is written as 1.0 MiB.
        while value >= 1023.95 && units.len() > 1 {
            value /= 1024.0;
            units.next();
        }
        let (unit, digits) = *units.peek().expect("the last is never taken");
        f.pad(&format!("{value:.digits$} {unit}"))
    }
}

/// Microseconds as a time: `850 us`, `12.34 ms`, `3.200 s`.
#[derive(Clone, Copy)]
pub(crate) struct Micros(pub(crate) u64);

display_as!(Micros, |self, f| f.pad(&match self.0 {
    us @ 0..1000 => format!("{us} us"),
    us @ 1000..1_000_000 => format!("{:.2} ms", us as f64 / 1e3),
    us => format!("{:.3} s", us as f64 / 1e6),
}));

/// `1 block`, `2 blocks`.
pub(crate) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
#[path = "../../tests/unit/error/units_tests.rs"]
mod tests;
