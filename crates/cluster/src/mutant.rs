//! Broken rules, with which the search of `hub_search.rs` must find a mistake. Outside of tests no rule is broken,
//! and the compiler removes the code.

/// The rules of `docs/src/design/cluster.md`, broken in the hub and in a process's state. C1 and C4 are about
/// launches, which the search has a model of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// After its arrival a process decides by itself.
    C2Decides,
    /// The hub forgets that a scope has failed.
    C2Forgets,
    /// A commit has its turn at once.
    C3,
    /// An ordered scope begins before all have announced it.
    C5,
    /// Calls of a name are counted from 1 again though a scope of that name is open.
    CountsAgain,
    /// Only hosts that wait in a collective are told of a loss.
    C6,
    /// A failed scope ends the cluster.
    C7,
    /// No process is told of a scope that fails before it needs others.
    EarlyFailure,
    /// Such a failure belongs to the next scope of others, wherever that is begun.
    EarlyPlace,
    /// A proxied meeting keeps a member from its own collectives.
    Proxied,
    /// A rail begins before the step inside the process has staged its piece.
    RailWaits,
    /// A process arrives with the first of the members of a proxied meeting.
    LastArrives,
    /// With a mesh: when a scope fails, the hub drops all its collectives that it has not committed.
    DropsAtOnce,
    /// With a mesh: the hub does not hold an arrival that is behind another one.
    Overtakes,
    /// With a mesh: a process that has arrived elsewhere, too, does not wait for the hub's word.
    Hurries,
    /// With a mesh: a process that has arrived leaves a scope that has failed before the hub drops the collective.
    LeavesEarly,
}

#[cfg(any(test, feature = "extend"))]
thread_local! {
    static BROKEN: std::cell::Cell<Option<Rule>> = const { std::cell::Cell::new(None) };
}

/// Whether this rule is broken on this thread.
#[cfg(any(test, feature = "extend"))]
pub(super) fn is(rule: Rule) -> bool {
    BROKEN.get() == Some(rule)
}

/// Never, outside of tests.
#[cfg(not(any(test, feature = "extend")))]
#[inline(always)]
pub(super) const fn is(_rule: Rule) -> bool {
    false
}

#[cfg(any(test, feature = "extend"))]
pub fn broken<R>(rule: Option<Rule>, f: impl FnOnce() -> R) -> R {
    BROKEN.set(rule);
    let result = f();
    BROKEN.set(None);
    result
}
