//! ZB-V: zero bubble with two stages on each rank, in the shape of a V.

use super::{Action, OpSite, PipelineSchedule, Result, Work, presets::Shape};

impl PipelineSchedule {
    /// ZB-V: stages run down the ranks and up, so rank `r` has `r` and `2 * ranks - 1 - r`. The backward pass is split.
    ///
    /// If F, I and W take equally long, with at least `2 * ranks` micro-batches, each rank works without a gap, and
    /// idles only while the pipeline fills and drains: `ranks - 1` times one such part. Each rank keeps at most
    /// `2 * ranks` activations of a stage. That is the memory of [`one_f_one_b`](Self::one_f_one_b) on its first rank,
    /// as stages are half as large. Rank 0 has the first and last stage: the loss can be computed where the inputs are.
    ///
    /// Source: Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, section 6, <https://arxiv.org/abs/2401.10241>; the
    /// order is that of PyTorch's `ScheduleZBVZeroBubble`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for 0 ranks, 0 micro-batches, or more than
    /// [`MAX_ACTIONS`](super::MAX_ACTIONS) actions, where fewer than `2 * ranks - 1` micro-batches count as that many.
    ///
    /// ```
    /// use gpu_pool_train::{Peer, PipelineSchedule};
    ///
    /// let schedule = PipelineSchedule::zero_bubble_v(2, 4)?;
    /// let ranks: Vec<_> = (0..schedule.stages()).map(|stage| schedule.rank_of(stage)).collect();
    /// assert_eq!(ranks, [0, 1, 1, 0]);
    /// // Stage 2 follows stage 1 on the same rank.
    /// let turn = schedule.steps(1).find(|step| step.action.stage == 2).unwrap();
    /// assert_eq!(turn.input, Peer::SameRank);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn zero_bubble_v(ranks: usize, micros: usize) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::zero_bubble_v");
        // The order below needs that many micro-batches. The surplus is left out again.
        let needed = micros.max(ranks.saturating_mul(2).saturating_sub(1));
        Shape { ranks, chunks: 2, micros }.check(3)?;
        Shape { ranks, chunks: 2, micros: needed }.check(3)?;
        let rank = |rank| {
            let mut list = Rank::new(rank, ranks).list(rank, ranks, needed);
            list.retain(|action| action.micro < micros);
            list
        };
        Self::new((0..ranks).map(rank).collect())
    }
}

struct Rank {
    list: Vec<Action>,
    /// The stage on the way down, and the stage on the way up.
    stages: [usize; 2],
    counts: [[usize; 3]; 2],
}

const DOWN: usize = 0;
const UP: usize = 1;
const F: usize = 0;
const I: usize = 1;
const W: usize = 2;
const WORKS: [Work; 3] = [Work::Forward, Work::BackwardInput, Work::BackwardWeights];

impl Rank {
    fn new(rank: usize, ranks: usize) -> Self {
        Rank { list: Vec::new(), stages: [rank, 2 * ranks - 1 - rank], counts: [[0; 3]; 2] }
    }

    fn push(&mut self, way: usize, works: &[usize]) {
        for &work in works {
            let micro = self.counts[way][work];
            self.list.push(Action { stage: self.stages[way], work: WORKS[work], micro });
            self.counts[way][work] += 1;
        }
    }

    fn list(mut self, rank: usize, ranks: usize, micros: usize) -> Vec<Action> {
        let below = ranks - rank;
        // Fill: until the first micro-batch has come back up to this rank.
        (0..2 * below - 1).for_each(|_| self.push(DOWN, &[F]));
        (0..rank).for_each(|_| {
            self.push(UP, &[F]);
            self.push(DOWN, &[F]);
        });
        (0..below).for_each(|_| self.push(UP, &[F, I, W]));
        // Steady state: one micro-batch of each way, all three parts.
        while self.counts[UP][F] < self.counts[DOWN][F] || self.counts[DOWN][F] < micros {
            if self.counts[DOWN][F] < micros {
                self.push(DOWN, &[F]);
            }
            self.push(DOWN, &[I, W]);
            self.push(UP, &[F, I, W]);
        }
        // Drain: gradients of inputs first, since other ranks wait for them.
        (0..rank).for_each(|_| {
            self.push(DOWN, &[I]);
            self.push(UP, &[I]);
        });
        (0..below).for_each(|_| self.push(DOWN, &[I, W]));
        for way in [UP, DOWN] {
            let left = self.counts[way][I] - self.counts[way][W];
            (0..left).for_each(|_| self.push(way, &[W]));
        }
        self.list
    }
}
