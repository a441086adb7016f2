//! The library's events: they go to the user's `tracing` subscriber, or without one to stderr.
//!
//! So a program without one still learns that it hangs, or that a variable is misspelt: an event that the calling
//! thread's subscriber would not get is one line on stderr, if its level is at most `GPU_POOL_LOG`.

use crate::variables;
use once_cell::sync::OnceCell;
use std::{
    fmt::{self, Write as _},
    io::Write as _,
};
use tracing::{dispatcher, subscriber::NoSubscriber};

/// Each includes those before it.
const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];
/// Without `GPU_POOL_LOG`.
const DEFAULT: usize = 2;

/// The values of `GPU_POOL_LOG`, for an error.
pub(crate) const EXPECTED: &str = "off, error, warn, info or debug";

pub(crate) fn parse(text: &str) -> Option<usize> {
    LEVELS.iter().position(|level| *level == text)
}

/// Whether the calling thread has a `tracing` subscriber.
pub fn has_subscriber() -> bool {
    !dispatcher::get_default(|subscriber| subscriber.is::<NoSubscriber>())
}

/// Whether events of this level go to stderr.
pub fn is_wanted(level: &str) -> bool {
    static MOST: OnceCell<usize> = OnceCell::new();
    // `Builder::build` refuses a value that is not understood. Until then the default holds.
    let most = || variables::text("GPU_POOL_LOG").ok().flatten().and_then(|text| parse(text.trim())).unwrap_or(DEFAULT);
    parse(level).is_some_and(|level| level <= *MOST.get_or_init(most))
}

/// Writes an event to stderr.
pub fn write(level: &str, text: fmt::Arguments<'_>, fields: &[(&str, &dyn fmt::Display)]) {
    // One write, so that lines of several threads do not mix. If stderr is closed, no place is left to report it.
    let _ = std::io::stderr().write_all(line(level, text, fields).as_bytes());
}

fn line(level: &str, text: fmt::Arguments<'_>, fields: &[(&str, &dyn fmt::Display)]) -> String {
    let mut line = format!("gpu-pool: {level}: {text}");
    for (i, (name, value)) in fields.iter().enumerate() {
        let _ = write!(line, "{}{name}={value}", if i == 0 { " (" } else { ", " });
    }
    line + if fields.is_empty() { "\n" } else { ")\n" }
}

/// Emits an event: `event!(warn, "name", fields, "text")`. The guide's page on logging lists the names, which programs
/// may rely on. The fields are `name = value`, `name`, `?name` or `%name`, as those of `tracing`. A panic of a
/// subscriber is caught: many events are emitted in drops, or while other threads wait for this one.
#[doc(hidden)]
#[macro_export]
macro_rules! event {
    ($level:ident, $name:literal, $($event:tt)+) => {{
        $crate::extend::contain(|| {
            if $crate::extend::log::has_subscriber() {
                $crate::extend::log::tracing::$level!(name: concat!("gpu_pool.", $name), $($event)+);
            } else if $crate::extend::log::is_wanted(stringify!($level)) {
                $crate::event_line!($level [] $($event)+);
            }
        });
    }};
}

#[doc(hidden)]
#[macro_export]
macro_rules! event_line {
    ($level:ident [$($fields:tt)*] $text:literal $($args:tt)*) => {
        $crate::extend::log::write(stringify!($level), format_args!($text $($args)*), &[$($fields)*])
    };
    ($level:ident [$($fields:tt)*] ?$name:ident, $($rest:tt)+) => {
        $crate::event_line!($level [$($fields)* (stringify!($name), &format_args!("{:?}", $name)),] $($rest)+)
    };
    ($level:ident [$($fields:tt)*] %$name:ident, $($rest:tt)+) => {
        $crate::event_line!($level [$($fields)* (stringify!($name), &format_args!("{}", $name)),] $($rest)+)
    };
    ($level:ident [$($fields:tt)*] $name:ident = $value:expr, $($rest:tt)+) => {
        $crate::event_line!($level [$($fields)* (stringify!($name), &format_args!("{:?}", $value)),] $($rest)+)
    };
    ($level:ident [$($fields:tt)*] $name:ident, $($rest:tt)+) => {
        $crate::event_line!($level [$($fields)*] ?$name, $($rest)+)
    };
}

#[cfg(test)]
#[path = "../tests/unit/log_tests.rs"]
mod tests;
