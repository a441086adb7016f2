//! Pipeline schedules as plain data: which rank does which action, in which order.
//!
//! Invariant: each value of [`PipelineSchedule`] is complete and runnable. `check.rs` proves both when it is made.

mod action;
mod check;
mod csv;
mod diagram;
mod error;
mod one_f_one_b;
mod presets;
mod simulate;
mod step;
mod v;

#[cfg(test)]
#[path = "../tests/unit/schedule/csv_tests.rs"]
mod csv_tests;

use crate::runtime::OpSite;
use gpu_pool::{Error, Result};

pub use action::{Action, Work};
pub use error::{ScheduleError, StuckAction};
pub use simulate::{Costs, Span, Timeline};
pub use step::{Peer, Step};

type Checked<T> = std::result::Result<T, ScheduleError>;

/// The most actions that a [`PipelineSchedule`] may have: 2^22, about four million.
///
/// It makes a wrong argument an error. Without it, `PipelineSchedule::gpipe(4, usize::MAX)` would fill memory.
pub const MAX_ACTIONS: usize = 1 << 22;

/// The order in which the ranks of a pipeline compute. Every value is complete and runnable.
///
/// A pipeline splits a model into *stages* `0..stages`, and a batch into *micro-batches* `0..micros`. A *rank* is a
/// device of the pipeline. Each stage lives on one rank; a rank may have several stages. A schedule holds a list of
/// [`Action`]s for each rank.
///
/// # Validity
///
/// Each constructor checks these rules, and returns an [`Error::InvalidArgument`] that names the action that breaks
/// them, at the place of the call. [`check`](PipelineSchedule::check) returns it as a typed [`ScheduleError`].
///
/// * Each rank has at least one action, and there are at most [`MAX_ACTIONS`] in all.
/// * All actions of a stage are on one rank.
/// * Each stage computes the forward pass of each micro-batch once. If there is any backward action, each stage also
///   computes the backward pass of each micro-batch once: either as one [`Backward`](Work::Backward), or as one
///   [`BackwardInput`](Work::BackwardInput) and one [`BackwardWeights`](Work::BackwardWeights).
/// * The ranks cannot deadlock. Sends do not wait for their receiver, so a deadlock can only be a circle of actions
///   that wait for each other's results.
///
/// The place of a stage follows from the actions. In [`interleaved`](PipelineSchedule::interleaved),
/// [`looped_bfs`](PipelineSchedule::looped_bfs) and [`zero_bubble`](PipelineSchedule::zero_bubble), stage `s` is on
/// rank `s % ranks` (round robin). In [`zero_bubble_v`](PipelineSchedule::zero_bubble_v), the stages run down the ranks
/// and up again.
///
/// # Examples
///
/// ```
/// use gpu_pool_train::PipelineSchedule;
///
/// let schedule = PipelineSchedule::one_f_one_b(2, 3)?;
/// assert_eq!(schedule.to_csv(), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// A schedule that would deadlock does not exist. Here rank 0 wants a gradient before rank 1 has got its input:
///
/// ```
/// use gpu_pool_train::PipelineSchedule;
///
/// let wrong = PipelineSchedule::from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n").unwrap_err();
/// let why = "would deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0";
/// assert!(wrong.to_string().contains(why));
/// let right = PipelineSchedule::from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
/// assert!(right.is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineSchedule {
    /// By rank, in order.
    actions: Vec<Vec<Action>>,
    /// By stage: the rank where the stage lives.
    rank_of: Vec<usize>,
    micros: usize,
    /// By stage and micro-batch: whether the backward pass is split into input and weights.
    split: Vec<bool>,
}

impl PipelineSchedule {
    /// A schedule from the actions of each rank, in order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], if the actions break one of the rules [above](PipelineSchedule#validity).
    #[track_caller]
    pub fn new(actions: Vec<Vec<Action>>) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::new");
        error::at_caller(Self::check(actions))
    }

    /// As [`new`](Self::new), but the error is typed: for programs that search for schedules.
    ///
    /// # Errors
    /// [`ScheduleError`], if the actions break one of the rules [above](PipelineSchedule#validity).
    pub fn check(actions: Vec<Vec<Action>>) -> Checked<Self> {
        check::check(actions)
    }

    /// The forward passes alone, in the same order: for inference. It can run: forward passes wait only for each other.
    #[must_use]
    pub fn forward_only(&self) -> Self {
        let forward = |list: &Vec<Action>| list.iter().copied().filter(|a| a.work == Work::Forward).collect();
        PipelineSchedule {
            actions: self.actions.iter().map(forward).collect(),
            rank_of: self.rank_of.clone(),
            micros: self.micros,
            split: vec![false; self.split.len()],
        }
    }

    /// Joins each [`BackwardInput`](Work::BackwardInput) with its [`BackwardWeights`](Work::BackwardWeights), where the
    /// one directly follows the other: one [`Backward`](Work::Backward) is cheaper than two calls. The result is
    /// runnable: nothing waits for a `BackwardWeights`. Stages before it may get their gradient later.
    #[must_use]
    pub fn merge_backward(&self) -> Self {
        let mut merged = self.clone();
        for list in &mut merged.actions {
            list.dedup_by(|next, last| {
                let joins = (last.work, next.work) == (Work::BackwardInput, Work::BackwardWeights)
                    && (last.stage, last.micro) == (next.stage, next.micro);
                if joins {
                    last.work = Work::Backward;
                    merged.split[last.stage * self.micros + last.micro] = false;
                }
                joins
            });
        }
        merged
    }

    /// How many ranks there are. At least 1.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// How many stages there are, over all ranks. At least as many as ranks.
    pub fn stages(&self) -> usize {
        self.rank_of.len()
    }

    /// How many micro-batches there are. At least 1.
    pub fn micros(&self) -> usize {
        self.micros
    }

    /// Whether there are backward passes. Either all stages have them for all micro-batches, or none has any.
    pub fn is_training(&self) -> bool {
        self.actions[0].iter().any(|action| action.work != Work::Forward)
    }

    /// The rank where a stage lives.
    ///
    /// # Panics
    /// If there is no stage `stage`.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of[stage]
    }

    /// The stages that live on a rank, in ascending order.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.stages()).filter(move |&stage| self.rank_of[stage] == rank)
    }

    /// The actions of a rank, in order.
    ///
    /// # Panics
    /// If there is no rank `rank`.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// The most activations that a rank keeps at one time for backward passes, counted in micro-batches of one stage.
    ///
    /// A forward pass saves one. [`Backward`](Work::Backward) or [`BackwardWeights`](Work::BackwardWeights) frees it.
    /// So [`BackwardInput`](Work::BackwardInput) frees nothing. A schedule without backward passes saves nothing.
    ///
    /// ```
    /// use gpu_pool_train::PipelineSchedule;
    ///
    /// assert_eq!(PipelineSchedule::gpipe(4, 8)?.in_flight(0), 8); // Grows with the number of micro-batches.
    /// assert_eq!(PipelineSchedule::one_f_one_b(4, 8)?.in_flight(0), 4); // Does not.
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Panics
    /// If there is no rank `rank`.
    pub fn in_flight(&self, rank: usize) -> usize {
        if !self.is_training() {
            return 0;
        }
        let (mut now, mut most) = (0, 0);
        for action in &self.actions[rank] {
            match action.work {
                Work::Forward => now += 1,
                Work::Backward | Work::BackwardWeights => now -= 1,
                Work::BackwardInput => {}
            }
            most = most.max(now);
        }
        most
    }
}
