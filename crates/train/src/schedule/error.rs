//! Why a list of actions, or a text, is no schedule.

use super::{Action, Checked};
use crate::runtime::ErrorInternals;
use gpu_pool::{Error, Result};
use std::fmt;

/// Why a list of actions, a text or the arguments of a preset make no [`PipelineSchedule`](super::PipelineSchedule).
///
/// The message names rank and action; for a text, also line and column.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A text is not an action.
    Unreadable {
        /// The text; its first 40 characters if it is longer.
        text: String,
        /// The line of the CSV file, from 1. Line `n` holds the actions of rank `n - 1`.
        line: usize,
        /// The column of the CSV file, from 1: it counts the cells of the line, not their characters.
        column: usize,
        /// The fault of the text.
        why: &'static str,
    },
    /// Two ranks have actions of one stage.
    TwoPlaces {
        /// The first action of the stage on the second rank.
        action: Action,
        /// The two ranks.
        ranks: [usize; 2],
    },
    /// An action is missing, or is there too often.
    Count {
        /// The action.
        action: Action,
        /// The rank of the action's stage; `None` if the stage has no action on any rank.
        rank: Option<usize>,
        /// How often the action is there.
        found: usize,
        /// How often it should be there: 0 or 1. It is 0 for an `I` or a `W` beside a `B` of the same micro-batch.
        expected: usize,
    },
    /// One rank has two actions in the wrong order.
    Order {
        /// The rank.
        rank: usize,
        /// The action that comes first in the list of the rank.
        early: Action,
        /// The action that comes after it, but makes the input of `early`.
        late: Action,
    },
    /// The ranks would wait for each other for ever. One entry for each rank that cannot finish.
    Stuck(Vec<StuckAction>),
    /// The numbers of ranks, chunks, micro-batches or actions make no sense.
    Shape(String),
}

/// An action that waits for ever, and its reason. Part of [`ScheduleError::Stuck`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckAction {
    /// The rank that cannot go on.
    pub rank: usize,
    /// The next action of the rank.
    pub action: Action,
    /// The action whose result `action` needs.
    pub needs: Action,
    /// The rank that has `needs` in its list. If it is `rank` itself, then `needs` comes later in its list.
    pub on: usize,
}

/// How many blocked ranks a message names.
const SHOWN: usize = 8;

impl ScheduleError {
    pub(super) fn unreadable(text: &str, (line, column): (usize, usize), why: &'static str) -> Self {
        ScheduleError::Unreadable { text: text.chars().take(40).collect(), line, column, why }
    }
}

/// The result of a constructor: the error has the place of its caller.
#[track_caller]
pub(super) fn at_caller<T>(checked: Checked<T>) -> Result<T> {
    checked.map_err(|error| Error::invalid("PipelineSchedule", error))
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { text, line, column, why } => {
                write!(f, "line {line}, column {column}: `{text}` is not an action such as 2F0: {why}")
            }
            Self::TwoPlaces { action, ranks: [first, second] } => {
                let stage = action.stage;
                write!(f, "stage {stage} is on rank {first}, but rank {second} has its action {action}")
            }
            Self::Count { action, rank, found, expected } => {
                let Action { stage, work, micro } = *action;
                match rank {
                    Some(rank) => write!(f, "rank {rank} ")?,
                    None => write!(f, "no rank has the stage {stage}: the schedule ")?,
                }
                match (found, expected) {
                    (0, _) => write!(f, "lacks the action {action}")?,
                    (_, 0) => write!(f, "has the action {action}, though a B computes the whole backward pass")?,
                    _ => write!(f, "has the action {action} {found} times")?,
                }
                write!(f, " (stage {stage}, {}, micro-batch {micro})", work.name())
            }
            Self::Order { rank, early, late } => {
                write!(f, "rank {rank} has {early} before {late}, but {early} needs the result of {late}")
            }
            Self::Stuck(blocked) => {
                f.write_str("the schedule would deadlock: ")?;
                for (i, StuckAction { rank, action, needs, on }) in blocked.iter().take(SHOWN).enumerate() {
                    let separator = if i == 0 { "" } else { "; " };
                    write!(f, "{separator}rank {rank} waits at {action} for {needs} of rank {on}")?;
                }
                match blocked.len().saturating_sub(SHOWN) {
                    0 => Ok(()),
                    more => write!(f, "; and {more} more"),
                }
            }
            Self::Shape(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for ScheduleError {}
