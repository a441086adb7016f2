//! Bugs of the library that its own tests plant, to prove that the checker finds them. Outside of those tests there are
//! none: `Link::planted` is `false` then, and the compiler removes what depends on it.

/// One mistake in the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A stream does not wait for a conflicting use on another stream.
    OrderDropped,
    /// An upload fills a staging piece while a copy may still read it.
    PieceFilledEarly,
    /// A download empties a staging piece before the copy into it is over.
    PieceEmptiedEarly,
    /// A staged copy fills a buffer that the other device may not have emptied: one event instead of two.
    OneStagingEvent,
    /// A step of a collective does not wait for the peer's step before it.
    StepSkipped,
    /// A collective begins to read a peer's buffer before the peer's stream has got there.
    StartSkipped,
    /// A freed block forgets who may still use it.
    UsesForgotten,
    /// A stream's count of completed operations runs ahead of what was waited for.
    CompletedTooEarly,
    /// The host looks at page-locked memory without waiting for the copy into it.
    HostDoesNotWait,
    /// A chunk goes back to the driver while operations may still use it.
    ChunkReleasedEarly,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// The bug that pools built by this thread shall have.
#[cfg(test)]
pub(crate) fn here() -> Option<Bug> {
    PLANTED.get()
}

/// Plants a bug in the pools that `build` builds.
#[cfg(test)]
pub(crate) fn plant<R>(bug: Bug, build: impl FnOnce() -> R) -> R {
    PLANTED.set(Some(bug));
    let built = build();
    PLANTED.set(None);
    built
}
