//! What an exhibit is, and what counts as caught.

use super::ground::Ground;
use gpu_pool::{
    Error,
    driver::{
        Fault, FaultKind,
        check::{Kind, Report},
    },
};
use std::{fmt, sync::Arc};

/// A mistake: a program that makes it, and one that does not.
pub struct Exhibit {
    /// For `--only`, and for links.
    pub name: &'static str,
    /// What it is, in a line.
    pub title: &'static str,
    /// What goes wrong, in a sentence or two.
    pub mistake: &'static str,
    /// Where it was made in public.
    pub thread: Thread,
    /// The program with the mistake, if the compiler lets it pass.
    pub wrong: Option<Program>,
    /// The mended twin.
    pub right: Program,
    /// What the twin does otherwise, in a sentence.
    pub mended: &'static str,
    /// How the mistake is caught.
    pub expected: Caught,
    /// What happens on real GPUs.
    pub cuda: OnCuda,
}

/// A public thread.
pub struct Thread {
    pub label: &'static str,
    pub url: &'static str,
}

/// A program, and where its source is.
pub struct Program {
    pub run: fn(&Ground) -> Outcome,
    pub name: &'static str,
    pub file: &'static str,
    pub source: &'static str,
    /// How the items begin that it needs and a reader must see.
    pub needs: &'static [&'static str],
}

/// A function of this file as a [`Program`], with the items that it needs. The file has its text in `SOURCE`.
#[macro_export]
macro_rules! program {
    ($name:ident $(, $needs:literal)*) => {
        $crate::zoo::exhibit::Program {
            run: $name,
            name: stringify!($name),
            file: file!(),
            source: SOURCE,
            needs: &[$($needs),*],
        }
    };
}

impl Program {
    /// The function's text, and the line where it begins.
    pub fn text(&self) -> (usize, &'static str) {
        self.item(&format!("fn {}(", self.name))
    }

    /// The items that it needs.
    pub fn items(&self) -> impl Iterator<Item = &'static str> {
        self.needs.iter().map(|head| self.item(head).1)
    }

    fn item(&self, head: &str) -> (usize, &'static str) {
        // At the start of a line, so that it is neither a call nor a comment.
        let start = self.source.match_indices(head).map(|(at, _)| at).find(|&at| self.source[..at].ends_with('\n'));
        let start = start.unwrap_or_else(|| panic!("{}: no `{head}`", self.file));
        let end = self.source[start..].find("\n}\n").unwrap_or_else(|| panic!("{}: `{head}` has no end", self.file));
        (self.source[..start].lines().count() + 1, &self.source[start..start + end + 2])
    }
}

/// What an exhibit's mistake comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caught {
    /// The checker refuses an operation.
    Report(Kind),
    /// The pool, or a driver, refuses a call, with or without the checker.
    Error(Refusal),
    /// It is found that nobody can go on, with or without the checker.
    Deadlock,
    /// The bare program cannot know; a pool finds out when it is built, and goes another way.
    Healed,
    /// A file of `tests/compile_fail`, and the compiler's code.
    DoesNotCompile { file: &'static str, code: &'static str },
}

/// The errors that exhibits end in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    WrongDevice,
    PeerDenied,
    Mismatch(&'static str),
    NestedScope,
}

/// Which of its programs can be run on real GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCuda {
    /// All.
    Runs,
    /// The wrong one would kill the context, or hang, if nobody refused it.
    OnlyChecked,
    /// The wrong one is not seen there.
    Unseen,
    /// The wrong one would hang for ever.
    Never,
}

/// What a program came to.
pub type Outcome = Result<Seen, Trouble>;

/// The numbers in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    Right,
    Wrong,
}

impl Seen {
    /// Right if all numbers are `expected`.
    pub fn all(numbers: &[f32], expected: f32) -> Seen {
        Seen::when(!numbers.is_empty() && numbers.iter().all(|&x| x == expected))
    }

    pub fn when(right: bool) -> Seen {
        if right { Seen::Right } else { Seen::Wrong }
    }
}

/// How a program failed.
#[derive(Clone, Debug)]
pub enum Trouble {
    Pool(Error),
    Driver(Fault),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Pool(error)
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Trouble::Driver(fault)
    }
}

impl Trouble {
    /// What the checker had to say, if it was the checker.
    pub fn report(&self) -> Option<&Arc<Report>> {
        match self {
            Trouble::Pool(Error::Misuse { report, .. }) => Some(report),
            Trouble::Driver(fault) => fault.report.as_ref(),
            Trouble::Pool(_) => None,
        }
    }

    /// What it counts as.
    pub fn caught(&self) -> Option<Caught> {
        if let Some(report) = self.report() {
            return Some(Caught::Report(report.kind));
        }
        Some(match self {
            Trouble::Pool(Error::Deadlock { .. }) | Trouble::Driver(Fault { kind: FaultKind::Deadlock, .. }) => {
                Caught::Deadlock
            }
            Trouble::Pool(Error::PeerDenied { .. }) | Trouble::Driver(Fault { kind: FaultKind::PeerDenied, .. }) => {
                Caught::Error(Refusal::PeerDenied)
            }
            Trouble::Pool(Error::WrongDevice { .. }) => Caught::Error(Refusal::WrongDevice),
            Trouble::Pool(Error::Mismatch { what, .. }) => Caught::Error(Refusal::Mismatch(what)),
            Trouble::Pool(Error::NestedScope { .. }) => Caught::Error(Refusal::NestedScope),
            Trouble::Pool(_) | Trouble::Driver(_) => return None,
        })
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The checker's report says it all.
            _ if self.report().is_some() => self.report().expect("just seen").fmt(f),
            Trouble::Pool(error) => error.fmt(f),
            Trouble::Driver(fault) => fault.fmt(f),
        }
    }
}
