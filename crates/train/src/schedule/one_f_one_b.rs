//! 1F1B and its two descendants: interleaved 1F1B, and ZB1P.
//!
//! All three fill the pipeline with some forward passes, then do one forward and one backward pass in turns, and drain
//! it. They differ in the number of passes that fill it, and in the place of the weights' gradients.

use super::{Action, Error, OpSite, PipelineSchedule, Result, Work, presets::Shape};
use crate::runtime::ErrorInternals;

impl PipelineSchedule {
    /// 1F1B: after forward passes fill the pipeline, each rank alternates forward and backward. One stage on each rank.
    ///
    /// The bubble is that of [`gpipe`](Self::gpipe), but rank `r` keeps the activations of at most `ranks - r`
    /// micro-batches, however many there are.
    ///
    /// Source: PipeDream-Flush in Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2020,
    /// <https://arxiv.org/abs/2006.09503>; the default of Megatron-LM.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks, 0 micro-batches, or more than
    /// [`MAX_ACTIONS`](super::MAX_ACTIONS) actions.
    ///
    /// ```
    /// use gpu_pool_train::PipelineSchedule;
    ///
    /// let schedule = PipelineSchedule::one_f_one_b(4, 16)?;
    /// let kept: Vec<_> = (0..4).map(|rank| schedule.in_flight(rank)).collect();
    /// assert_eq!(kept, [4, 3, 2, 1]);
    /// assert!(PipelineSchedule::one_f_one_b(4, usize::MAX).is_err()); // An error immediately, not a full memory.
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn one_f_one_b(ranks: usize, micros: usize) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::one_f_one_b");
        Self::interleaved(ranks, 1, micros)
    }

    /// Interleaved 1F1B: each rank has `chunks` stages, and changes between them after a round of micro-batches. Stage
    /// `s` is on rank `s % ranks`. With 1 chunk it is [`one_f_one_b`](Self::one_f_one_b).
    ///
    /// The stages are smaller, so the pipeline fills and drains faster: the bubble is
    /// `(ranks - 1) / (chunks * micros + ranks - 1)`. It needs more memory and `chunks` times as many transfers.
    ///
    /// A round has as many micro-batches as ranks, or a few more: there are `micros / ranks` rounds, rounded down, but
    /// at least 1. All rounds are equally long.
    ///
    /// Source: Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
    /// 2021, <https://arxiv.org/abs/2104.04473>. The rounds for other numbers than multiples of `ranks` are PyTorch's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks, chunks or micro-batches, for more than
    /// [`MAX_ACTIONS`](super::MAX_ACTIONS) actions, or, with 2 chunks or more, if the rounds cannot be equally long.
    ///
    /// ```
    /// use gpu_pool_train::PipelineSchedule;
    ///
    /// let schedule = PipelineSchedule::interleaved(2, 2, 4)?;
    /// assert_eq!((schedule.stages(), schedule.rank_of(2)), (4, 0));
    ///
    /// let wrong = PipelineSchedule::interleaved(2, 2, 5).unwrap_err();
    /// let why = "5 micro-batches on 2 ranks cannot be split into 2 equal rounds: take a multiple of 2";
    /// assert!(wrong.to_string().contains(why));
    /// assert!(PipelineSchedule::interleaved(2, 2, 6).is_ok());
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn interleaved(ranks: usize, chunks: usize, micros: usize) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::interleaved");
        let shape = Shape { ranks, chunks, micros };
        shape.check(2)?;
        // One more forward pass for each rank behind keeps all ranks busy, if hops take no time. A second one hides the
        // hops, for more memory. As in Megatron-LM, only the interleaved schedule has it.
        let lead = if chunks == 1 { 1 } else { 2 };
        Order { shape, round: round(shape)?, lead, split: false }.schedule()
    }

    /// Zero bubble, ZB1P: interleaved 1F1B that splits the backward pass, and fills a part of the bubble with gradients
    /// of weights. Stage `s` is on rank `s % ranks`.
    ///
    /// If the three parts F, I and W take equally long, then with 1 chunk the bubble is
    /// `(ranks - 1) / (3 * micros + ranks - 1)`: a third of the idle time of [`one_f_one_b`](Self::one_f_one_b). It is
    /// called ZB-H1 in the paper. [`zero_bubble_v`](Self::zero_bubble_v) has less bubble for more memory.
    ///
    /// Source: Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, <https://arxiv.org/abs/2401.10241>; the order is
    /// that of PyTorch's `ScheduleInterleavedZeroBubble`.
    ///
    /// # Errors
    /// As for [`interleaved`](Self::interleaved).
    ///
    /// ```
    /// use gpu_pool_train::{Costs, PipelineSchedule};
    ///
    /// let bubble = |schedule: PipelineSchedule| schedule.simulate(Costs::default()).map(|timeline| timeline.bubble);
    /// let plain = bubble(PipelineSchedule::one_f_one_b(4, 8)?)?;
    /// let split = bubble(PipelineSchedule::zero_bubble(4, 1, 8)?)?;
    /// assert!(split < plain / 2.0, "{split} {plain}");
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn zero_bubble(ranks: usize, chunks: usize, micros: usize) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::zero_bubble");
        let shape = Shape { ranks, chunks, micros };
        shape.check(3)?;
        Order { shape, round: round(shape)?, lead: 1, split: true }.schedule()
    }
}

/// Micro-batches that a stage takes before its rank turns to its next stage.
#[track_caller]
fn round(Shape { ranks, chunks, micros }: Shape) -> Result<usize> {
    let rounds = (micros / ranks).max(1);
    // With one chunk there is no other stage to turn to.
    if chunks > 1 && !micros.is_multiple_of(rounds) {
        let why = format_args!("cannot be split into {rounds} equal rounds: take a multiple of {ranks}");
        return Err(Error::invalid("PipelineSchedule", format_args!("{micros} micro-batches on {ranks} ranks {why}")));
    }
    Ok(micros / rounds)
}

struct Order {
    shape: Shape,
    round: usize,
    lead: usize,
    split: bool,
}

impl Order {
    #[track_caller]
    fn schedule(&self) -> Result<PipelineSchedule> {
        PipelineSchedule::new((0..self.shape.ranks).map(|rank| self.rank(rank)).collect())
    }

    fn rank(&self, rank: usize) -> Vec<Action> {
        let Shape { ranks, chunks, micros } = self.shape;
        let all = chunks * micros;
        let warm_up = ((chunks - 1) * self.round + self.lead * (ranks - 1 - rank)).min(all);
        let mut list: Vec<_> = (0..warm_up).map(|i| self.forward(rank, i)).collect();
        for i in 0..all {
            if warm_up + i < all {
                list.push(self.forward(rank, warm_up + i));
            }
            if !self.split {
                list.push(self.backward(rank, i, Work::Backward));
                continue;
            }
            list.push(self.backward(rank, i, Work::BackwardInput));
            // Rank `r` is `r` weights behind, so the last rank, which gets gradients first, has some left for the end.
            if let Some(weights) = i.checked_sub(rank) {
                list.push(self.backward(rank, weights, Work::BackwardWeights));
            }
        }
        if self.split {
            let left = all.saturating_sub(rank)..all;
            list.extend(left.map(|i| self.backward(rank, i, Work::BackwardWeights)));
        }
        list
    }

    fn forward(&self, rank: usize, i: usize) -> Action {
        let (chunk, micro) = self.place(i);
        Action { stage: chunk * self.shape.ranks + rank, work: Work::Forward, micro }
    }

    /// The `i`-th backward pass of a rank. The chunks come in the opposite order.
    fn backward(&self, rank: usize, i: usize, work: Work) -> Action {
        let (chunk, micro) = self.place(i);
        Action { stage: (self.shape.chunks - 1 - chunk) * self.shape.ranks + rank, work, micro }
    }

    /// A round in the first chunk, then in the next chunk; after the last chunk follows the next round.
    fn place(&self, i: usize) -> (usize, usize) {
        let (rounds, in_round) = (i / self.round, i % self.round);
        (rounds % self.shape.chunks, rounds / self.shape.chunks * self.round + in_round)
    }
}
