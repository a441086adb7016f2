//! A fault plan: rules that say which calls fail and how, and the log of injected faults. Invariant: the faults of a
//! call depend only on the seed, the rule, the device and the count, never on time.

mod ops;
mod text;

pub use ops::FaultOp;
pub use text::BadFaultPlan;

use gpu_pool::{extend::lab::FailPoint, setters};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

/// Most entries in the log of a plan: a slow link on a busy pair fires at every copy.
const LOG: usize = 1 << 16;

/// Faults to inject: a list of rules, each with a device, an operation, a time and a fault. For
/// [`LabBuilder::faults`](crate::prelude::LabBuilder::faults); works on software GPUs and on CUDA.
///
/// The page "Testing without GPUs" of the guide has an example.
///
/// A plan can be written as text, for `GPU_POOL_FAULTS`. Rules are separated by `;`. [`Display`](std::fmt::Display)
/// writes the text that [`FromStr`](std::str::FromStr) reads. `FromStr` refuses a rule whose operation can never show
/// its fault, like a slow launch.
///
/// ```text
/// seed=7; 1:alloc:3+:oom; *:launch:p0.01:error; 2:any:40:lost; 0>1:copy-peer:*:slow=1ms+10us/MB; 0>1:any:*:drop
/// device[>peer] : operation : when : fault
/// when          3 the third time, 3+ from the third time on, * every time, p0.01 one time in a hundred
/// fault         oom, error, launch-failed, lost, slow=TIME, slow=TIME/MB, slow=TIME+TIME/MB, stuck, drop, corrupt
/// ```
///
/// Devices are ordinals of the pool that was built with the plan; its [`survivors`](gpu_pool::GpuPool::survivors) keep
/// the ordinals and the plan. Calls are counted by rule and device. A clone shares counts and log with its original,
/// until a rule is added to either. A count is reproducible if the order of calls is. Calls of a device come from its
/// own thread, except for staged copies, page-locked memory (of device 0) and drops on other threads; and waits poll,
/// so the number of their calls depends on time.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    seed: u64,
    rules: Arc<Vec<FaultRule>>,
    points: Vec<FailPoint>,
    state: Arc<Mutex<State>>,
}

/// One rule of a [`FaultPlan`]. By default it means any device, any operation, every time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "a rule does nothing before it is in a plan"]
pub struct FaultRule {
    device: Option<usize>,
    peer: Option<usize>,
    op: Option<FaultOp>,
    when: When,
    fault: Injected,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Always,
    Nth(u64),
    From(u64),
    Chance(f64),
}

/// The kind of an injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Injected {
    /// The call fails with `CUDA_ERROR_OUT_OF_MEMORY` and has no effect. The next call may succeed.
    OutOfMemory,
    /// The call fails with `CUDA_ERROR_UNKNOWN`, once, without effect.
    Error,
    /// The call and every later one of the device fail with `CUDA_ERROR_LAUNCH_FAILED`, as after a kernel that trapped.
    LaunchFailed,
    /// The call and every later one of the device fail with `CUDA_ERROR_DEVICE_UNAVAILABLE`: it has fallen off the bus.
    DeviceLost,
    /// Copies take longer: a time per copy, and a time per megabyte (2^20 bytes). The times are real time, also on
    /// machines with virtual time. In a capture, this and [`Stuck`](Self::Stuck) have no effect.
    Slow {
        /// Additional time per copy.
        per_copy: Duration,
        /// Additional time per megabyte.
        per_megabyte: Duration,
    },
    /// The operation does not complete until [`FaultPlan::release`] or the end of the pool. For any operation of a
    /// stream. On software GPUs, a wait for it returns [`Error::Deadlock`](gpu_pool::Error::Deadlock) after a second in
    /// which nothing else makes progress.
    Stuck,
    /// Peer access reports success, but no data arrives: copies do nothing; a kernel that uses the peer's memory loads
    /// junk, and its stores are lost. At [`FaultOp::VmMap`]: copies between device memories from and to the new mapping
    /// do nothing, on any device (as with NVIDIA's bug 6098762, CUDA.jl#3112).
    Drop,
    /// Peer access reports success, but some bytes arrive damaged: in copies, and in a peer's memory that a kernel
    /// loads or stores. At [`FaultOp::VmMap`]: in copies from and to the new mapping.
    Corrupt,
}

/// An injected fault, from [`FaultPlan::fired`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InjectedFault {
    /// The device whose driver was called.
    pub device: usize,
    /// The operation that was called.
    pub op: FaultOp,
    /// The number of the call among those that the rule counts on this device, from 1.
    pub count: u64,
    /// The injected fault.
    pub fault: Injected,
}

#[derive(Default)]
struct State {
    paused: bool,
    counts: HashMap<(usize, usize), u64>,
    fired: Vec<InjectedFault>,
    strikes: Vec<(usize, FailPoint)>,
    holding: Vec<Weak<dyn Release>>,
}

gpu_pool::debug_as!(State, |self| paused = self.paused, fired = self.fired, ..);

pub(crate) trait Release: Send + Sync {
    fn release(&self);
}

pub(crate) type Verdict = SmallVec<[(Injected, Option<usize>); 2]>;

impl FaultPlan {
    /// A plan without rules.
    pub fn new() -> Self {
        Self::default()
    }

    /// The plan injects nothing before [`resume`](Self::resume), so that a pool can be built first.
    #[must_use]
    pub fn paused(self) -> Self {
        self.pause();
        self
    }

    /// Injects and counts nothing until [`resume`](Self::resume). A lost device stays lost.
    pub fn pause(&self) {
        self.state.lock().paused = true;
    }

    /// Starts or restarts the plan, with all counts at zero. The log stays.
    pub fn resume(&self) {
        let mut state = self.state.lock();
        state.paused = false;
        state.counts.clear();
    }

    /// Resets all counts, for another run of the same program. Returns whether the plan is paused.
    pub(crate) fn start_over(&self) -> bool {
        let mut state = self.state.lock();
        state.counts.clear();
        state.paused
    }

    /// The faults injected so far, in order; at most the first 65536.
    pub fn fired(&self) -> Vec<InjectedFault> {
        self.state.lock().fired.clone()
    }

    /// Unblocks all operations that are [stuck](Injected::Stuck) now.
    pub fn release(&self) {
        let holding: Vec<_> = self.state.lock().holding.iter().filter_map(Weak::upgrade).collect();
        // Outside of the lock, since it calls drivers.
        holding.iter().for_each(|holder| holder.release());
    }

    pub(crate) fn holds(&self, holder: Weak<dyn Release>) {
        let mut state = self.state.lock();
        state.holding.retain(|other| other.strong_count() > 0);
        state.holding.push(holder);
    }

    /// The library fails once at this point of the device.
    #[doc(hidden)]
    pub fn strike(&self, device: usize, point: FailPoint) {
        self.state.lock().strikes.push((device, point));
    }

    pub(crate) fn fails(&self, device: usize, point: FailPoint) -> bool {
        self.points.contains(&point) || {
            let strikes = &mut self.state.lock().strikes;
            let at = strikes.iter().position(|strike| *strike == (device, point));
            at.map(|at| strikes.remove(at)).is_some()
        }
    }

    /// The faults for a call of `device`. `peers`: the other devices that the call involves.
    pub(crate) fn decide(&self, device: usize, op: FaultOp, peers: &[usize]) -> Verdict {
        let mut verdict = Verdict::new();
        if self.rules.is_empty() {
            return verdict;
        }
        let mut state = self.state.lock();
        if state.paused {
            return verdict;
        }
        for (index, rule) in self.rules.iter().enumerate() {
            if !rule.concerns(device, op, peers) {
                continue;
            }
            let count = state.counts.entry((index, device)).or_default();
            *count += 1;
            let count = *count;
            let fires = match rule.when {
                When::Always => true,
                When::Nth(n) => count == n,
                When::From(n) => count >= n,
                When::Chance(p) => draw([self.seed, index as u64, device as u64, count]) < p,
            };
            if fires {
                if state.fired.len() < LOG {
                    state.fired.push(InjectedFault { device, op, count, fault: rule.fault });
                }
                verdict.push((rule.fault, rule.peer));
            }
        }
        verdict
    }

    /// The `n`-th random number of the sequence `what`.
    pub(crate) fn random(&self, what: u64, n: u64) -> u64 {
        mix([self.seed, what, n].into_iter())
    }
}

setters! { FaultPlan;
    /// The seed of [`FaultRule::chance`]; its draws also depend on rule, device and count.
    #[must_use]
    pub fn seed(self, seed: u64) { self.seed = seed; }

    /// Adds a rule. Counts and log start anew, for this plan and its future clones.
    #[must_use]
    pub fn on(self, rule: FaultRule) {
        Arc::make_mut(&mut self.rules).push(rule);
        let paused = self.state.lock().paused;
        self.state = Arc::new(Mutex::new(State { paused, ..State::default() }));
    }

    /// The library itself fails at this point, on all devices, also while the plan is paused: for tests of the tests.
    #[doc(hidden)]
    #[must_use]
    pub fn at(self, point: FailPoint) { self.points.push(point); }
}

impl FaultRule {
    /// A rule for this fault: on any device, at any operation that can show it, every time.
    pub fn new(fault: Injected) -> Self {
        FaultRule { device: None, peer: None, op: None, when: When::Always, fault }
    }

    fn concerns(&self, device: usize, op: FaultOp, peers: &[usize]) -> bool {
        let lies = matches!(self.fault, Injected::Drop | Injected::Corrupt);
        // Only a rule that names `VmMap` concerns mappings; rules about peers do not.
        let of_mappings = op == FaultOp::VmMap && self.op == Some(op);
        self.fault.fits(op)
            && (!lies || !peers.is_empty() || of_mappings)
            && self.device.is_none_or(|d| d == device)
            && self.peer.is_none_or(|peer| peers.contains(&peer))
            && self.op.is_none_or(|own| own == op || (own == FaultOp::CopyPeer && op.is_peer_copy()))
    }
}

setters! { FaultRule;
    /// Only calls to this device, which runs the operation. Of a pair, it is the accessing device.
    pub fn device(self, device: usize) { self.device = Some(device); }

    /// Only calls that involve this other device's memory: copies, kernels, and peer rights.
    pub fn peer(self, peer: usize) { self.peer = Some(peer); }

    /// Only this operation.
    pub fn op(self, op: FaultOp) { self.op = Some(op); }

    /// Only the `n`-th time, from 1, on each device.
    ///
    /// # Panics
    /// When `n` is 0.
    #[track_caller]
    pub fn nth(self, n: u64) {
        assert!(n > 0, "times are counted from 1");
        self.when = When::Nth(n);
    }

    /// From the `n`-th time on, from 1, on each device.
    ///
    /// # Panics
    /// When `n` is 0.
    #[track_caller]
    pub fn from(self, n: u64) {
        assert!(n > 0, "times are counted from 1");
        self.when = When::From(n);
    }

    /// Each time with this probability.
    ///
    /// # Panics
    /// When it is not within 0 to 1.
    #[track_caller]
    pub fn chance(self, probability: f64) {
        assert!((0.0..=1.0).contains(&probability), "{probability} is not a probability");
        self.when = When::Chance(probability);
    }
}

impl Injected {
    fn fits(self, op: FaultOp) -> bool {
        match self {
            Injected::OutOfMemory | Injected::Error | Injected::LaunchFailed | Injected::DeviceLost => true,
            Injected::Slow { .. } => op.is_copy(),
            Injected::Stuck => op.is_submitted(),
            Injected::Drop | Injected::Corrupt => op.is_peer_copy() || matches!(op, FaultOp::Launch | FaultOp::VmMap),
        }
    }

    /// Whether the device is lost after this fault.
    pub(crate) fn is_sticky(self) -> bool {
        matches!(self, Injected::LaunchFailed | Injected::DeviceLost)
    }
}

/// A number from 0 to 1 (exclusive) that depends only on `of`, not on other threads.
fn draw(of: [u64; 4]) -> f64 {
    (mix(of.into_iter()) >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64's finaliser, over several words.
fn mix(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, |hash, word| {
        let mut z = (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
#[path = "../../tests/unit/faulty/plan_tests.rs"]
mod tests;
