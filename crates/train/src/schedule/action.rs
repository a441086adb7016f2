//! One action of a schedule, and its text form `2F0` (PyTorch's): the stage, a letter for the work, the micro-batch.

use super::{Checked, ScheduleError};
use std::str::FromStr;

/// A computation of a rank for one micro-batch in one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The forward pass. Written `F`.
    Forward,
    /// The whole backward pass: the gradient of the input and the gradients of the weights. Written `B`.
    Backward,
    /// The first part of the backward pass: the gradient of the input, which the stage before waits for. Written `I`.
    BackwardInput,
    /// The second part of the backward pass: the gradients of the weights. No other action waits for it. Written `W`.
    BackwardWeights,
}

impl Work {
    /// The letter in PyTorch's text form.
    pub fn letter(self) -> char {
        match self {
            Work::Forward => 'F',
            Work::Backward => 'B',
            Work::BackwardInput => 'I',
            Work::BackwardWeights => 'W',
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Work::Forward => "forward pass",
            Work::Backward => "backward pass",
            Work::BackwardInput => "gradient of the input",
            Work::BackwardWeights => "gradients of the weights",
        }
    }
}

/// One entry of a schedule. Its text form is PyTorch's: `2F0` is the forward pass of micro-batch 0 in stage 2.
///
/// ```
/// use gpu_pool_train::{Action, Work};
///
/// let action: Action = "2F0".parse()?;
/// assert_eq!(action, Action { stage: 2, work: Work::Forward, micro: 0 });
/// assert_eq!(action.to_string(), "2F0");
/// assert!("F0".parse::<Action>().is_err()); // The stage is missing.
/// # Ok::<(), gpu_pool_train::ScheduleError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage, from 0.
    pub stage: usize,
    /// The computation.
    pub work: Work,
    /// The micro-batch, from 0.
    pub micro: usize,
}

display_as!(Action, |self, f| f.pad(&format!("{}{}{}", self.stage, self.work.letter(), self.micro)));

impl FromStr for Action {
    type Err = ScheduleError;

    /// Reads the text form. The error names line 1, column 1.
    fn from_str(text: &str) -> Checked<Self> {
        let read = Fields::split(text).and_then(Fields::action);
        read.map_err(|why| ScheduleError::unreadable(text, (1, 1), why))
    }
}

/// The three parts of an action's text: `12`, `SEND_F` and `3` of `12SEND_F3`.
pub(super) struct Fields<'a> {
    pub stage: usize,
    pub word: &'a str,
    pub micro: &'a str,
}

impl<'a> Fields<'a> {
    /// An error says what is wrong.
    pub fn split(text: &'a str) -> std::result::Result<Self, &'static str> {
        let (stage, rest) = text.split_at(digits(text));
        fail_if!(stage.is_empty(), "it does not start with the number of a stage");
        let word = rest.trim_end_matches(|c: char| c.is_ascii_digit());
        Ok(Fields { stage: number(stage)?, word, micro: &rest[word.len()..] })
    }

    pub fn action(self) -> std::result::Result<Action, &'static str> {
        let work = match self.word {
            "F" => Work::Forward,
            "B" => Work::Backward,
            "I" => Work::BackwardInput,
            "W" => Work::BackwardWeights,
            "BW" => return Err("in a file with BW, of an old PyTorch, write I for B, and B for BW"),
            _ => return Err("the part after the stage is none of F, B, I, W"),
        };
        Ok(Action { stage: self.stage, work, micro: number(self.micro)? })
    }
}

/// How many bytes of digits a text starts with.
fn digits(text: &str) -> usize {
    text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())
}

pub(super) fn number(digits: &str) -> std::result::Result<usize, &'static str> {
    match digits {
        "" => Err("the number of a micro-batch is missing at its end"),
        _ => digits.parse().map_err(|_| "its number is too large"),
    }
}
