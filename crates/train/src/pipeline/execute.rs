//! The executor: one member's part of a step, on its device thread.
//!
//! A member does the actions of its list in order. A value for another device is given to it on the host, without a
//! wait; a value from another device is fetched over the link, on streams for that. So copies overlap computing. Events
//! are recorded after each action: a copy that lands in memory of an earlier micro-batch waits for the last use of that
//! memory, and not for all that was enqueued since. Invariant: a value is in exactly one place: in the box of the
//! device that needs it, in `kept`, or in a call.

use super::stage::{NotSplit, Stage, StageContext};
use crate::runtime::{DeviceInternals, ErrorInternals, GroupInternals, Label, LastCall, OpSite};
use crate::schedule::{Action, Peer, PipelineSchedule, Step, Work};
use gpu_pool::{Device, Error, Group, Result, Stream, collective::Transfer};

/// The caller's code that makes the micro-batches.
pub(super) type Input<'a, A> = &'a (dyn Fn(&Device, usize) -> Result<A> + Sync);

/// The caller's code that makes, of the last stage's output, its gradient (if the step trains) and a value.
pub(super) type Output<'a, A, R> = &'a (dyn Fn(&Device, usize, A) -> Result<(Option<A>, R)> + Sync);

pub(super) struct Part<'a, S: Stage> {
    pub call: LastCall,
    pub schedule: &'a PipelineSchedule,
    pub group: &'a Group<'a>,
    pub stages: &'a mut [(usize, S)],
}

/// Runs this member's actions. Returns the values of the last stage's micro-batches, if that stage is its own.
pub(super) fn run<S: Stage, R>(
    part: Part<'_, S>,
    input: Input<'_, S::Activation>,
    output: Output<'_, S::Activation, R>,
) -> Result<Vec<R>> {
    let Part { call, schedule, group, stages } = part;
    let (dev, micros) = (group.device(), schedule.micros());
    let slots = stages.len() * micros;
    let mut local = vec![usize::MAX; schedule.stages()];
    stages.iter().enumerate().for_each(|(at, (stage, _))| local[*stage] = at);
    let has_last = local[schedule.stages() - 1] != usize::MAX;
    let mut member = Member {
        call,
        schedule,
        group,
        local,
        links: (0..2 * stages.len()).map(|_| Link::new(group)).collect::<Result<_>>()?,
        kept: (0..2 * slots).map(|_| None).collect(),
        saved: (0..slots).map(|_| None).collect(),
        accumulate: vec![false; stages.len()],
        results: (0..if has_last { micros } else { 0 }).map(|_| None).collect(),
    };
    for step in schedule.steps(group.rank()) {
        member.act(step, stages, input, output)?;
        dev.record_early(call.0)?;
    }
    Ok(member.results.into_iter().map(|result| result.expect("a schedule has all forward passes")).collect())
}

struct Link {
    /// Where what comes from other devices is fetched.
    into: Stream,
    /// Where what goes to other processes is copied to the host, if the group has members there.
    out: Option<Stream>,
}

impl Link {
    fn new(group: &Group<'_>) -> Result<Link> {
        let dev = group.device();
        Ok(Link { into: dev.stream()?, out: group.spans_processes().then(|| dev.stream()).transpose()? })
    }
}

struct Member<'a, S: Stage, R> {
    call: LastCall,
    schedule: &'a PipelineSchedule,
    group: &'a Group<'a>,
    /// By stage: its place among the member's stages.
    local: Vec<usize>,
    /// By local stage: for activations, and for gradients. On one stream for both, an activation would stand behind a
    /// gradient that comes later; and with it the stage before, when it uses the memory again.
    links: Vec<Link>,
    kept: Vec<Option<S::Activation>>,
    saved: Vec<Option<S::Saved>>,
    accumulate: Vec<bool>,
    results: Vec<Option<R>>,
}

impl<S: Stage, R> Member<'_, S, R> {
    fn act(
        &mut self,
        step: Step,
        stages: &mut [(usize, S)],
        input: Input<'_, S::Activation>,
        output: Output<'_, S::Activation, R>,
    ) -> Result<()> {
        let (dev, action, last) = (self.group.device(), step.action, self.schedule.stages() - 1);
        let Action { stage, micro, .. } = action;
        let (here, slot) = (self.local[stage], self.slot(stage, micro));
        let at = StageContext { stage, micro, is_first: stage == 0, accumulate: self.accumulate[here] };
        let own = &mut stages[here].1;
        match action.work {
            Work::Forward => {
                let x =
                    if step.input == Peer::Caller { OpSite::outside(|| input(dev, micro))? } else { self.take(step)? };
                let (y, saved) = OpSite::outside(|| own.forward(dev, at, x))?;
                if self.schedule.is_training() {
                    self.saved[slot] = Some(saved);
                }
                if step.output != Peer::Caller {
                    return self.pass(step, stage + 1, y);
                }
                let (dy, result) = OpSite::outside(|| output(dev, micro, y))?;
                self.results[micro] = Some(result);
                self.kept[2 * slot + 1] = dy;
                Ok(())
            }
            Work::Backward | Work::BackwardInput => {
                let dy = if stage == last { self.keep(slot, action) } else { self.take(step)? };
                let dx = if action.work == Work::Backward {
                    let saved = self.saved[slot].take().expect("a schedule has F before B");
                    self.accumulate[here] = true;
                    OpSite::outside(|| own.backward(dev, at, saved, dy))?
                } else {
                    let saved = self.saved[slot].as_mut().expect("a schedule has F before I");
                    OpSite::outside(|| own.backward_input(dev, at, saved, dy))
                        .map_err(|error| self.split(error, action))?
                };
                match (step.output, dx) {
                    (Peer::Caller, _) => Ok(()),
                    (_, Some(dx)) => self.pass(step, stage - 1, dx),
                    (_, None) => Err(self.wrong(format_args!(
                        "{action}: stage {stage} has returned no gradient of its input, which stage {} needs",
                        stage - 1
                    ))),
                }
            }
            Work::BackwardWeights => {
                let saved = self.saved[slot].take().expect("a schedule has I before W");
                self.accumulate[here] = true;
                OpSite::outside(|| own.backward_weights(dev, at, saved)).map_err(|error| self.split(error, action))
            }
        }
    }

    fn pass(&mut self, step: Step, stage: usize, value: S::Activation) -> Result<()> {
        let (micro, backward) = (step.action.micro, step.action.work != Work::Forward);
        match step.output {
            Peer::Rank(rank) => {
                let (group, dev) = (self.group, self.group.device());
                let link = &self.links[2 * self.local[step.action.stage] + usize::from(backward)];
                // To another process the value is copied, beside the stages' work.
                let via = dev.on(link.out.as_ref().unwrap_or(&link.into));
                group.on(&via).give_transfer(self.call, self.label(stage, micro, backward), value, rank)
            }
            _ => {
                let slot = self.slot(stage, micro);
                self.kept[2 * slot + usize::from(backward)] = Some(value);
                Ok(())
            }
        }
    }

    fn take(&mut self, step: Step) -> Result<S::Activation> {
        let Action { stage, micro, work } = step.action;
        let Peer::Rank(rank) = step.input else { return Ok(self.keep(self.slot(stage, micro), step.action)) };
        let (dev, backward) = (self.group.device(), work != Work::Forward);
        let link = dev.on(&self.links[2 * self.local[stage] + usize::from(backward)].into);
        let there: S::Activation =
            self.group.on(&link).take_transfer(self.call, self.label(stage, micro, backward), rank)?;
        let _here = dev.enter(self.call);
        there.transfer(&link)
    }

    fn keep(&mut self, slot: usize, action: Action) -> S::Activation {
        let backward = usize::from(action.work != Work::Forward);
        self.kept[2 * slot + backward].take().expect("a schedule has what an action needs before it")
    }

    fn slot(&self, stage: usize, micro: usize) -> usize {
        self.local[stage] * self.schedule.micros() + micro
    }

    fn label(&self, stage: usize, micro: usize, backward: bool) -> Label {
        Label::Internal(((stage * self.schedule.micros() + micro) as u64) << 1 | u64::from(backward))
    }

    fn split(&self, error: Error, action: Action) -> Error {
        if matches!(&error, Error::Custom(cause) if cause.is::<NotSplit>()) {
            let stage = action.stage;
            return self
                .wrong(format_args!("the schedule splits backward passes ({action}), and stage {stage}: {error}"));
        }
        error
    }

    fn wrong(&self, why: std::fmt::Arguments<'_>) -> Error {
        Error::invalid_at(self.call.1, self.call.0, why)
    }
}
