//! When each action of a schedule runs on ideal devices. `check.rs` finds deadlocks by it.
//!
//! The model: a rank computes one action at a time, in the order of its list, as soon as the input is there. A result
//! reaches another rank one hop after the action ends, and the hop keeps no rank busy.

use super::error::at_caller;
use super::{Action, Checked, OpSite, Peer, PipelineSchedule, Result, ScheduleError, StuckAction, Work};
use std::{collections::VecDeque, time::Duration};

/// How long the actions take in [`PipelineSchedule::simulate`]: for one micro-batch in one stage.
///
/// The default is 1 ms for each of the three parts and no time for a hop. With it, bubbles are those of the papers,
/// where a backward pass takes twice as long as a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A [`Forward`](Work::Forward).
    pub forward: Duration,
    /// A [`BackwardInput`](Work::BackwardInput). A [`Backward`](Work::Backward) takes this and `backward_weights`.
    pub backward_input: Duration,
    /// A [`BackwardWeights`](Work::BackwardWeights).
    pub backward_weights: Duration,
    /// From the end of an action to the arrival of its result on another rank. On its own rank it is there immediately.
    pub hop: Duration,
}

impl Default for Costs {
    fn default() -> Self {
        let part = Duration::from_millis(1);
        Costs { forward: part, backward_input: part, backward_weights: part, hop: Duration::ZERO }
    }
}

impl Costs {
    pub(super) const ZERO: Costs = Costs {
        forward: Duration::ZERO,
        backward_input: Duration::ZERO,
        backward_weights: Duration::ZERO,
        hop: Duration::ZERO,
    };

    /// `None` if the sum is larger than a [`Duration`] can be.
    fn of(&self, work: Work) -> Option<Duration> {
        match work {
            Work::Forward => Some(self.forward),
            Work::Backward => self.backward_input.checked_add(self.backward_weights),
            Work::BackwardInput => Some(self.backward_input),
            Work::BackwardWeights => Some(self.backward_weights),
        }
    }
}

/// When an action runs. Part of a [`Timeline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The rank's computation.
    pub action: Action,
    /// Time from the start of the step.
    pub start: Duration,
    /// Time from the start of the step.
    pub end: Duration,
}

/// The result of [`PipelineSchedule::simulate`].
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// By rank, in order: when each of its actions runs.
    pub spans: Vec<Vec<Span>>,
    /// When the last action ends.
    pub end: Duration,
    /// The share of the time up to `end`, summed over all ranks, in which ranks are idle: 0 is perfect, 1 is all idle.
    /// It is 0 if nothing takes any time.
    pub bubble: f64,
    /// By rank: the most activations that it keeps at one time, see [`PipelineSchedule::in_flight`].
    pub in_flight: Vec<usize>,
}

/// Needs the feature `insight`, which is a default feature.
#[cfg(feature = "insight")]
impl Timeline {
    /// The timeline in the Chrome trace format, as JSON: <https://ui.perfetto.dev> opens it.
    ///
    /// There is a row for each rank, with the most activations that it saves at one time, and a box for each action.
    ///
    /// ```
    /// use gpu_pool_train::{Costs, PipelineSchedule};
    ///
    /// let timeline = PipelineSchedule::zero_bubble(4, 1, 8)?.simulate(Costs::default())?;
    /// let json = timeline.to_chrome_trace(); // std::fs::write("zero_bubble.json", &json)
    /// assert!(json.contains(r#""name":"3I2""#) && json.contains(r#""cat":"gradient of the input""#));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn to_chrome_trace(&self) -> String {
        use gpu_pool::extend::train::{ChromeTrace, Row};
        let mut trace = ChromeTrace::default();
        for (rank, spans) in self.spans.iter().enumerate() {
            let row = Row { process: 0, thread: rank };
            let kept = self.in_flight.get(rank).copied().unwrap_or(0);
            trace.name_row(row, &format!("rank {rank}, saves {kept}"));
            for Span { action, start, end } in spans {
                let args = serde_json::json!({ "stage": action.stage, "micro-batch": action.micro });
                trace.slice(row, &action.to_string(), action.work.name(), (*start, *end), args);
            }
        }
        trace.finish()
    }
}

impl PipelineSchedule {
    /// Computes when each action runs on ideal devices: equal stages, constant times, no limit of bandwidth.
    ///
    /// The cost is proportional to the number of actions. Touches no device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) if a time is larger than a [`Duration`] can be.
    ///
    /// ```
    /// use gpu_pool_train::{Costs, PipelineSchedule};
    /// use std::time::Duration;
    ///
    /// let costs = Costs {
    ///     forward: Duration::from_millis(5),
    ///     backward_input: Duration::from_millis(5),
    ///     backward_weights: Duration::from_millis(5),
    ///     hop: Duration::ZERO,
    /// };
    /// // 8 micro-batches and 3 more to fill and drain the pipeline, at 15 ms each.
    /// let timeline = PipelineSchedule::one_f_one_b(4, 8)?.simulate(costs)?;
    /// assert_eq!(timeline.end, Duration::from_millis((8 + 3) * 15));
    /// assert!((timeline.bubble - 3.0 / 11.0).abs() < 1e-9);
    /// assert_eq!(timeline.in_flight, [4, 3, 2, 1]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn simulate(&self, costs: Costs) -> Result<Timeline> {
        let _here = OpSite::here("PipelineSchedule::simulate");
        let spans = at_caller(run(self, &costs))?;
        let end = spans.iter().flatten().map(|span| span.end).max().unwrap_or_default();
        let busy: f64 = spans.iter().flatten().map(|span| (span.end - span.start).as_secs_f64()).sum();
        let all = end.as_secs_f64() * self.ranks() as f64;
        // Rounding must not make it negative.
        let bubble = if all > 0.0 { (1.0 - busy / all).max(0.0) } else { 0.0 };
        let in_flight = (0..self.ranks()).map(|rank| self.in_flight(rank)).collect();
        Ok(Timeline { spans, end, bubble, in_flight })
    }
}

/// Runs each rank as far as it gets, until no rank gets any further. A rank is looked at again when a result for it is
/// made, so the cost is proportional to the number of actions.
pub(super) fn run(schedule: &PipelineSchedule, costs: &Costs) -> Checked<Vec<Vec<Span>>> {
    let ranks = schedule.ranks();
    let mut spans: Vec<Vec<Span>> = schedule.actions.iter().map(|list| Vec::with_capacity(list.len())).collect();
    let mut results = Results::new(schedule);
    let mut queue: VecDeque<usize> = (0..ranks).collect();
    let mut queued = vec![true; ranks];
    while let Some(rank) = queue.pop_front() {
        queued[rank] = false;
        while let Some(&action) = schedule.actions[rank].get(spans[rank].len()) {
            let Some(ready) = results.ready(action, rank, costs.hop)? else { break };
            let start = spans[rank].last().map_or(Duration::ZERO, |last| last.end).max(ready);
            let end = costs.of(action.work).and_then(|cost| start.checked_add(cost)).ok_or_else(too_long)?;
            spans[rank].push(Span { action, start, end });
            results.add(action, end);
            if let Peer::Rank(to) = schedule.output(action)
                && !queued[to]
            {
                queued[to] = true;
                queue.push_back(to);
            }
        }
    }

    let next = |rank: usize| Some((rank, *schedule.actions[rank].get(spans[rank].len())?));
    let blocked = (0..ranks).filter_map(next).filter_map(|(rank, action)| {
        let needs = schedule.needs(action)?;
        Some(StuckAction { rank, action, needs, on: schedule.rank_of(needs.stage) })
    });
    match blocked.collect::<Vec<_>>() {
        blocked if blocked.is_empty() => Ok(spans),
        blocked => Err(ScheduleError::Stuck(blocked)),
    }
}

fn too_long() -> ScheduleError {
    ScheduleError::Shape("with these costs the step takes longer than a Duration can be".into())
}

struct Results<'a> {
    schedule: &'a PipelineSchedule,
    ends: Vec<[Option<Duration>; 2]>,
}

impl<'a> Results<'a> {
    fn new(schedule: &'a PipelineSchedule) -> Self {
        Results { schedule, ends: vec![[None; 2]; schedule.stages() * schedule.micros] }
    }

    /// When the input of an action is on its rank; `None` if it is not made yet.
    fn ready(&self, action: Action, rank: usize, hop: Duration) -> Checked<Option<Duration>> {
        let Some(needs) = self.schedule.needs(action) else { return Ok(Some(Duration::ZERO)) };
        let kind = usize::from(needs.work != Work::Forward);
        match self.ends[needs.stage * self.schedule.micros + needs.micro][kind] {
            Some(end) if self.schedule.rank_of(needs.stage) != rank => {
                end.checked_add(hop).map(Some).ok_or_else(too_long)
            }
            end => Ok(end),
        }
    }

    fn add(&mut self, action: Action, end: Duration) {
        let kind = match action.work {
            Work::Forward => 0,
            Work::Backward | Work::BackwardInput => 1,
            Work::BackwardWeights => return,
        };
        self.ends[action.stage * self.schedule.micros + action.micro][kind] = Some(end);
    }
}
