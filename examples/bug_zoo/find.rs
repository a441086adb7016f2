//! Runs an exhibit's programs, and records how each ended.
//!
//! Called by `main` for every exhibit. The tour, the table, the page and the JSON file show these [`Findings`].

use crate::zoo::{
    exhibit::{Caught, Exhibit, OnCuda, Outcome, Refusal, Seen},
    ground::Ground,
};
use gpu_pool_lab::check::Kind;

/// Number of seeded orders in which a wrong program runs without the checker.
pub const SEEDS: u64 = 32;

/// The result of one run.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The result in a few words, for tables.
    pub how: String,
    /// The report or the error.
    pub text: Option<String>,
    pub as_expected: bool,
}

/// The results of one exhibit on one kind of devices.
pub struct Findings {
    pub exhibit: &'static Exhibit,
    /// The wrong program, without the checker (`off`) and with it (`on`).
    pub off: Finding,
    pub on: Finding,
    /// The mended program, with the checker.
    pub right: Finding,
    /// The number of [`SEEDS`] orders in which the wrong program ends silently with wrong numbers, on software GPUs.
    /// `None` if it never ends silently.
    pub wrong_numbers: Option<u64>,
}

impl Findings {
    pub fn of(exhibit: &'static Exhibit, cuda: bool) -> Findings {
        // A fixed order of operations, so that reports are the same in every run. The tests use other orders.
        let ground = |check| if cuda { Ground::cuda(check) } else { Ground::seeded(check, 0) };
        let twin = |ground: Ground| match (exhibit.right.run)(&ground) {
            Ok(Seen::Right) => finding("silent", None, true),
            Ok(Seen::Wrong) => finding("wrong numbers", None, false),
            Err(trouble) => finding("fails", Some(trouble.to_string()), false),
        };
        let mut right = twin(ground(true));
        if right.as_expected && !cuda {
            right = twin(Ground::software(true));
        }
        let (off, on) = (wrong(exhibit, &ground(false)), wrong(exhibit, &ground(true)));
        let wrong_numbers = if cuda { None } else { wrong_numbers(exhibit) };
        Findings { exhibit, off, on, right, wrong_numbers }
    }

    pub fn as_expected(&self) -> bool {
        self.off.as_expected && self.on.as_expected && self.right.as_expected
    }
}

fn finding(how: impl Into<String>, text: Option<String>, as_expected: bool) -> Finding {
    Finding { how: how.into(), text, as_expected }
}

/// Runs the program with the mistake.
fn wrong(exhibit: &Exhibit, ground: &Ground) -> Finding {
    if let Caught::DoesNotCompile { code, .. } = exhibit.expected {
        return finding(format!("does not compile ({code})"), None, true);
    }
    let Some(program) = &exhibit.wrong else { return finding("not run", None, true) };
    let runs = match exhibit.cuda {
        OnCuda::Runs | OnCuda::Unseen => true,
        OnCuda::OnlyChecked => ground.check,
        OnCuda::Never => false,
    };
    if ground.cuda && !runs {
        return finding("not run", None, true);
    }
    judge(exhibit, ground, (program.run)(ground))
}

fn judge(exhibit: &Exhibit, ground: &Ground, outcome: Outcome) -> Finding {
    let silent = match exhibit.expected {
        Caught::Report(_) => !ground.check || (ground.cuda && exhibit.cuda == OnCuda::Unseen),
        Caught::Healed => true,
        Caught::Error(_) | Caught::Deadlock | Caught::DoesNotCompile { .. } => false,
    };
    match outcome {
        Ok(_) if exhibit.expected == Caught::Healed => finding("silent; a pool goes round it", None, true),
        Ok(_) => finding("silent", None, silent),
        Err(trouble) => {
            let caught = trouble.caught();
            let how = match (caught, &trouble) {
                (Some(caught), _) => words(caught).to_owned(),
                // A software GPU is stricter than a real one: it refuses work that names freed memory, or loses the
                // device.
                (None, _) => "driver error".to_owned(),
            };
            let by_the_driver = !ground.check && !ground.cuda && caught.is_none();
            finding(
                how,
                Some(without_addresses(&trouble.to_string())),
                caught == Some(exhibit.expected) || by_the_driver,
            )
        }
    }
}

/// Removes addresses: they differ from run to run, and tell a reader nothing.
fn without_addresses(text: &str) -> String {
    let mut parts = text.split("0x");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(part.len());
        let (address, rest) = part.split_at(digits);
        let is_long = address.len() > 8;
        shown += if is_long { "(an address)" } else { "0x" };
        shown += if is_long { rest } else { part };
    }
    shown
}

/// How a mistake is caught, in a few words.
pub fn words(caught: Caught) -> &'static str {
    match caught {
        Caught::Report(Kind::Race) => "report: race",
        Caught::Report(Kind::UseAfterFree) => "report: use after free",
        Caught::Report(Kind::FreeInUse) => "report: freed in use",
        Caught::Report(Kind::EarlyReuse) => "report: early reuse",
        Caught::Report(Kind::HostAccess) => "report: host access",
        Caught::Report(Kind::UninitializedRead) => "report: unwritten bytes",
        Caught::Report(Kind::UnrecordedEvent) => "report: unrecorded event",
        Caught::Report(Kind::WrongDeclaration) => "report: wrong declaration",
        Caught::Report(_) => "report",
        Caught::Error(Refusal::WrongDevice) => "error: WrongDevice",
        Caught::Error(Refusal::PeerDenied) => "error: PeerDenied",
        Caught::Error(Refusal::Mismatch(_)) => "error: Mismatch",
        Caught::Error(Refusal::NestedScope) => "error: NestedScope",
        Caught::Deadlock => "deadlock report",
        Caught::Healed => "the pool goes round it",
        Caught::DoesNotCompile { .. } => "does not compile",
    }
}

fn wrong_numbers(exhibit: &Exhibit) -> Option<u64> {
    let program = exhibit.wrong.as_ref()?;
    let mut wrong = 0;
    for seed in 0..SEEDS {
        match (program.run)(&Ground::seeded(false, seed)) {
            Ok(Seen::Right) => {}
            Ok(Seen::Wrong) => wrong += 1,
            Err(_) => return None,
        }
    }
    Some(wrong)
}
