//! An action as an executor needs it: where its input comes from, and where its result goes.

use super::{Action, PipelineSchedule, Work};

/// Where the input of an action comes from, or where its result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// The code around the pipeline. It gives the micro-batches to stage 0, takes the outputs of the last stage, and
    /// gives back the gradients of the loss. It may drop the gradients of the micro-batches that stage 0 computes.
    Caller,
    /// The rank of the action. Nothing has to be sent.
    SameRank,
    /// This other rank.
    Rank(usize),
}

/// An action, with the action that it waits for and the places of its input and its result.
///
/// ```
/// use gpu_pool_train::{Peer, PipelineSchedule};
///
/// let schedule = PipelineSchedule::gpipe(2, 1)?;
/// let steps: Vec<_> = schedule.steps(1).collect();
/// assert_eq!(steps[0].action, "1F0".parse().unwrap());
/// assert_eq!(steps[0].needs, Some("0F0".parse().unwrap()));
/// assert_eq!(steps[0].input, Peer::Rank(0));
/// assert_eq!(steps[0].output, Peer::Caller); // To the loss.
/// assert_eq!(steps[1].action, "1B0".parse().unwrap());
/// assert_eq!(steps[1].input, Peer::Caller); // From the loss.
/// assert_eq!(steps[1].output, Peer::Rank(0));
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The rank's computation.
    pub action: Action,
    /// The action whose result this one uses. `None` for a forward pass of stage 0. A backward pass of the last stage
    /// uses the loss, so it needs the forward pass of that stage.
    pub needs: Option<Action>,
    /// Where the input comes from: an activation for a forward pass, a gradient for a backward pass. Gradients of
    /// weights use the result of [`Work::BackwardInput`] on the same rank.
    pub input: Peer,
    /// Where the result goes. Gradients of weights stay on the same rank.
    pub output: Peer,
}

impl PipelineSchedule {
    /// The actions of a rank in order, each with the places of its input and its result.
    ///
    /// # Panics
    /// If there is no rank `rank`.
    pub fn steps(&self, rank: usize) -> impl ExactSizeIterator<Item = Step> + '_ {
        self.actions[rank].iter().map(|&action| Step {
            action,
            needs: self.needs(action),
            input: self.input(action),
            output: self.output(action),
        })
    }

    pub(super) fn needs(&self, action: Action) -> Option<Action> {
        let Action { stage, work, micro } = action;
        let needs = match work {
            Work::Forward if stage == 0 => return None,
            Work::Forward => Action { stage: stage - 1, ..action },
            Work::BackwardWeights => Action { work: Work::BackwardInput, ..action },
            Work::Backward | Work::BackwardInput if stage + 1 == self.stages() => {
                Action { work: Work::Forward, ..action }
            }
            Work::Backward | Work::BackwardInput => {
                let split = self.split[(stage + 1) * self.micros + micro];
                let work = if split { Work::BackwardInput } else { Work::Backward };
                Action { stage: stage + 1, work, micro }
            }
        };
        Some(needs)
    }

    fn input(&self, Action { stage, work, .. }: Action) -> Peer {
        match work {
            Work::Forward => stage.checked_sub(1).map_or(Peer::Caller, |before| self.peer(stage, before)),
            Work::Backward | Work::BackwardInput => self.peer(stage, stage + 1),
            Work::BackwardWeights => Peer::SameRank,
        }
    }

    pub(super) fn output(&self, Action { stage, work, .. }: Action) -> Peer {
        match work {
            Work::Forward => self.peer(stage, stage + 1),
            Work::Backward | Work::BackwardInput => {
                stage.checked_sub(1).map_or(Peer::Caller, |before| self.peer(stage, before))
            }
            Work::BackwardWeights => Peer::SameRank,
        }
    }

    /// Where the stage `other` is, seen from `stage`. The caller stands after the last stage.
    fn peer(&self, stage: usize, other: usize) -> Peer {
        match self.rank_of.get(other) {
            None => Peer::Caller,
            Some(&rank) if rank == self.rank_of[stage] => Peer::SameRank,
            Some(&rank) => Peer::Rank(rank),
        }
    }
}
