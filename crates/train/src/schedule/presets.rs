//! The schedules that do all forward passes before the first backward pass, and what all presets share.

use super::{Action, Error, MAX_ACTIONS, OpSite, PipelineSchedule, Result, Work};
use crate::runtime::ErrorInternals;

impl PipelineSchedule {
    /// GPipe: each rank does all forward passes, then all backward passes. One stage on each rank.
    ///
    /// The simplest order. Ranks keep all micro-batches' activations. The bubble: `(ranks - 1) / (micros + ranks - 1)`.
    ///
    /// Source: Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, 2019,
    /// <https://arxiv.org/abs/1811.06965>.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks, 0 micro-batches, or more than [`MAX_ACTIONS`] actions.
    ///
    /// ```
    /// use gpu_pool::Error;
    /// use gpu_pool_train::PipelineSchedule;
    ///
    /// let schedule = PipelineSchedule::gpipe(2, 2)?;
    /// assert_eq!(schedule.to_csv(), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
    /// assert!(matches!(PipelineSchedule::gpipe(2, 0), Err(Error::InvalidArgument { .. }))); // No micro-batch.
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn gpipe(ranks: usize, micros: usize) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::gpipe");
        Shape { ranks, chunks: 1, micros }.check(2)?;
        let all = |stage, work| (0..micros).map(move |micro| Action { stage, work, micro });
        Self::new((0..ranks).map(|rank| all(rank, Work::Forward).chain(all(rank, Work::Backward)).collect()).collect())
    }

    /// Looped breadth first: each rank has `chunks` stages. It does all micro-batches in its first stage, then all in
    /// the next one; backward in the opposite order. Stage `s` is on rank `s % ranks`.
    ///
    /// It has the memory of [`gpipe`](Self::gpipe) for each stage. A stage works on all micro-batches in one go, so
    /// its weights, when they are sharded, are gathered once for each direction. The bubble is
    /// `(ranks - 1) / (chunks * micros + ranks - 1)`, if there are at least as many micro-batches as ranks.
    ///
    /// Source: Lamy-Poirier, *Breadth-First Pipeline Parallelism*, 2022, <https://arxiv.org/abs/2211.05953>.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks, chunks or micro-batches, or more than [`MAX_ACTIONS`] actions.
    ///
    /// ```
    /// use gpu_pool_train::PipelineSchedule;
    ///
    /// let schedule = PipelineSchedule::looped_bfs(2, 2, 2)?;
    /// let first = schedule.to_csv().lines().next().unwrap().to_owned();
    /// assert_eq!(first, "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0");
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn looped_bfs(ranks: usize, chunks: usize, micros: usize) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::looped_bfs");
        Shape { ranks, chunks, micros }.check(2)?;
        let rank = |rank| {
            let stages = (0..chunks).map(move |chunk| chunk * ranks + rank);
            let forward = stages
                .clone()
                .flat_map(|stage| (0..micros).map(move |micro| Action { stage, work: Work::Forward, micro }));
            let backward = stages
                .rev()
                .flat_map(|stage| (0..micros).rev().map(move |micro| Action { stage, work: Work::Backward, micro }));
            forward.chain(backward).collect()
        };
        Self::new((0..ranks).map(rank).collect())
    }
}

#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub ranks: usize,
    /// Stages on each rank.
    pub chunks: usize,
    pub micros: usize,
}

impl Shape {
    /// Refuses zeros, and shapes with too many actions, before anything is allocated. `works` is the number of actions
    /// of each stage for each micro-batch.
    #[track_caller]
    pub fn check(self, works: usize) -> Result<()> {
        let Shape { ranks, chunks, micros } = self;
        for (number, name) in [(ranks, "rank"), (chunks, "chunk"), (micros, "micro-batch")] {
            invalid_if!(number == 0, "PipelineSchedule", "a schedule needs at least one {name}");
        }
        let actions = ranks.checked_mul(chunks).and_then(|n| n.checked_mul(micros)).and_then(|n| n.checked_mul(works));
        if actions.is_some_and(|actions| actions <= MAX_ACTIONS) {
            return Ok(());
        }
        let shape = format_args!("{ranks} ranks, {chunks} chunks on each and {micros} micro-batches");
        Err(Error::invalid("PipelineSchedule", format_args!("{shape} make more than {MAX_ACTIONS} actions")))
    }
}
