//! An exhibit: its parts, its declaration, and the outcomes that count as caught.
//!
//! The files of exhibits declare theirs by [`exhibits`]. The example shows them;
//! `crates/lab/tests/bug_zoo.rs` checks each.

use super::ground::Ground;
use gpu_pool::{
    Error,
    extend::driver::{Fault, FaultKind},
};
use gpu_pool_lab::check::{Kind, Report};
use std::{fmt, sync::Arc};

/// A mistake: a program that makes it, and one that does not.
pub struct Exhibit {
    /// The name, for `--only` and for links.
    pub name: &'static str,
    /// The mistake, in a line.
    pub title: &'static str,
    /// The mistake, in a sentence or two.
    pub mistake: &'static str,
    /// The public thread about the mistake.
    pub thread: Thread,
    /// The program with the mistake, if it compiles.
    pub wrong: Option<Program>,
    /// The mended twin.
    pub right: Program,
    /// The difference of the twin, in a sentence.
    pub mended: &'static str,
    /// How the mistake is caught.
    pub expected: Caught,
    /// Which of the programs run on real GPUs.
    pub cuda: OnCuda,
}

/// A public thread.
pub struct Thread {
    pub label: &'static str,
    pub url: &'static str,
}

/// A program, and its source.
pub struct Program {
    pub run: fn(&Ground) -> Outcome,
    pub name: &'static str,
    pub file: &'static str,
    pub source: &'static str,
    /// Items that a reader must see: how each begins.
    pub needs: &'static [&'static str],
}

/// The exhibits of a file, as its `EXHIBITS`. Each lists: name and title; the mistake; the public thread; the wrong
/// program (if it compiles) with the items that a reader must see, how it is caught, and its effect on real GPUs; the
/// mended twin, and its difference. The text of the programs is taken from the file, named first.
macro_rules! exhibits {
    ($source:literal $($name:literal: $title:literal {
        $mistake:literal
        seen $repo:literal $kind:ident $number:literal: $label:literal
        wrong $($wrong:ident $(, $needs:literal)*)? => $caught:expr, $cuda:ident
        right $right:ident => $mended:literal
    })+) => {
        pub const EXHIBITS: &[Exhibit] = &[$({
            type Run = fn(&Ground) -> Outcome;
            const fn program(run: Run, name: &'static str, needs: &'static [&'static str]) -> Program {
                let file = concat!("examples/bug_zoo/zoo/", $source);
                Program { run, name, file, source: include_str!($source), needs }
            }
            #[allow(unused_mut, unused_assignments, reason = "some wrong programs do not compile")]
            let mut wrong = None;
            $(wrong = Some(program($wrong, stringify!($wrong), &[$($needs),*]));)?
            Exhibit {
                name: $name,
                title: $title,
                mistake: $mistake,
                thread: Thread {
                    label: concat!($repo, "#", $number, ": ", $label),
                    url: concat!("https://github.com/", $repo, "/", stringify!($kind), "/", $number),
                },
                wrong,
                right: program($right, stringify!($right), &[]),
                mended: $mended,
                expected: $caught,
                cuda: OnCuda::$cuda,
            }
        }),+];
    };
}
pub(crate) use exhibits;

impl Program {
    /// The function's text, and the line where it begins.
    pub fn text(&self) -> (usize, &'static str) {
        self.item(&format!("fn {}(", self.name))
    }

    /// The items that a reader must see.
    pub fn items(&self) -> impl Iterator<Item = &'static str> {
        self.needs.iter().map(|head| self.item(head).1)
    }

    fn item(&self, head: &str) -> (usize, &'static str) {
        // Only at the start of a line: calls and comments do not count.
        let start = self.source.match_indices(head).map(|(at, _)| at).find(|&at| self.source[..at].ends_with('\n'));
        let start = start.unwrap_or_else(|| panic!("{}: no `{head}`", self.file));
        let end = self.source[start..].find("\n}\n").unwrap_or_else(|| panic!("{}: `{head}` has no end", self.file));
        (self.source[..start].lines().count() + 1, &self.source[start..start + end + 2])
    }
}

/// How a mistake is caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caught {
    /// The checker refuses an operation.
    Report(Kind),
    /// The pool, or a driver, refuses a call, with or without the checker.
    Error(Refusal),
    /// A deadlock is reported, with or without the checker.
    Deadlock,
    /// The bare program cannot know. A pool finds out when it is built, and avoids the broken path.
    Healed,
    /// A file of `tests/compile_fail`, and the compiler's code.
    DoesNotCompile { file: &'static str, code: &'static str },
}

/// The errors in which exhibits end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    WrongDevice,
    PeerDenied,
    Mismatch(&'static str),
    NestedScope,
}

/// Which programs of an exhibit can run on real GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCuda {
    /// All.
    Runs,
    /// Without the checker the wrong program would kill the context, or hang.
    OnlyChecked,
    /// The checker does not see the mistake on real GPUs.
    Unseen,
    /// The wrong program would hang for ever.
    Never,
}

/// The result of a program.
pub type Outcome = Result<Seen, Trouble>;

/// Whether the numbers at the end are right.
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
    /// The checker's report, if the checker has refused the program.
    pub fn report(&self) -> Option<&Arc<Report>> {
        match self {
            Trouble::Pool(Error::Misuse { report, .. }) => Some(report),
            Trouble::Driver(fault) => fault.report.as_ref(),
            Trouble::Pool(_) => None,
        }
    }

    /// How the failure counts.
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
            // The checker's report says everything.
            _ if self.report().is_some() => self.report().expect("just seen").fmt(f),
            Trouble::Pool(error) => error.fmt(f),
            Trouble::Driver(fault) => fault.fmt(f),
        }
    }
}
