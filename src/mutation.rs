//! Bugs and panics that the crate's own tests inject into the library, to prove that the checker and the pool notice
//! them.
//!
//! Tests inject a bug with `inject`. The library asks through `DeviceHandle::injected` and `DeviceHandle::strike`.
//!
//! Invariant: outside of the crate's tests nothing is injected, and the compiler removes the code.

/// An injected bug of the library.
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
    /// A step of a collective does not wait for the peer's previous step.
    StepSkipped,
    /// A collective begins to read a peer's buffer before the peer's stream has reached the collective.
    StartSkipped,
    /// An exchange fetches into a slot whose old piece may not have been reduced yet.
    SlotFilledEarly,
    /// An exchange writes a result into a slot whose old result may not have been sent yet.
    ResultMadeEarly,
    /// A freed block forgets the operations that may still use it.
    UsesForgotten,
    /// A stream's count of completed operations is higher than the awaited work.
    CompletedTooEarly,
    /// The host reads page-locked memory without waiting for the copy into it.
    HostDoesNotWait,
    /// A host thread reduces data that may not have been copied to the host yet.
    FoldedEarly,
    /// A datum of an inbox is taken before it has arrived.
    DatumTakenEarly,
    /// A slot of an inbox is filled without the credit for it.
    SlotWithoutCredit,
    /// A room of an inbox is used in every meeting, not in every second one.
    OneRoom,
    /// A kernel that uses slots ends before the others have taken what it has sent.
    SlotsLeftFull,
    /// What is taken from an inbox is not wiped.
    DatumKept,
    /// The own copy of a sender is added up with the reserved NaN.
    OwnNanKept,
    /// An inbox keeps what a failed call has left.
    InboxKept,
    /// A chunk goes back to the driver while operations may still use it.
    ChunkReleasedEarly,
}

/// The point at which a device thread panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Panic {
    /// Before its entry may run.
    BeforeTurn,
    /// Before the member's closure.
    BeforeMember,
    /// While the member's streams drain.
    InDrain,
    /// After all members have drained.
    InRecovery,
    /// At the end of the thread.
    AtEnd,
}

/// By pool and device.
#[cfg(test)]
static ARMED: parking_lot::Mutex<Vec<(u64, usize, Panic)>> = parking_lot::Mutex::new(Vec::new());

/// Makes the device's thread panic once at this point.
#[cfg(test)]
pub(crate) fn arm(pool: u64, device: usize, place: Panic) {
    ARMED.lock().push((pool, device, place));
}

/// Panics if a test has armed this point.
#[cfg(test)]
pub(crate) fn strike(pool: u64, device: usize, place: Panic) {
    let mut armed = ARMED.lock();
    if let Some(at) = armed.iter().position(|armed| *armed == (pool, device, place)) {
        armed.remove(at);
        drop(armed);
        panic!("injected: {place:?}");
    }
}

/// Does nothing outside of the crate's own tests.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn strike(_pool: u64, _device: usize, _place: Panic) {}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// The bug that this thread injects into the pools that it builds.
#[cfg(test)]
pub(crate) fn here() -> Option<Bug> {
    PLANTED.get()
}

/// Injects a bug into the pools that `build` builds.
#[cfg(test)]
pub(crate) fn inject<R>(bug: Bug, build: impl FnOnce() -> R) -> R {
    PLANTED.set(Some(bug));
    let built = build();
    PLANTED.set(None);
    built
}

#[cfg(test)]
mod tests {
    use super::{Bug, inject};
    use crate::{
        Builder, Check, Device, DeviceBuffer, Error, GpuPool, ReduceOp, Result,
        collective::Algorithm,
        driver::check::{Kind, Report},
    };
    use std::sync::Arc;

    type Program = fn(&GpuPool) -> Result<()>;

    /// The checker reports nothing in a correct pool, and reports the program in a pool with the bug.
    #[track_caller]
    fn found(bug: Bug, builder: fn() -> Builder, program: Program) -> Arc<Report> {
        let right = builder().check(Check::Races).build().unwrap();
        program(&right).unwrap();
        right.close().unwrap();
        let wrong = inject(bug, || builder().check(Check::Races).build().unwrap());
        let error = program(&wrong).and_then(|()| wrong.close());
        match error {
            Err(Error::Misuse { report, .. }) => report,
            other => panic!("{bug:?} was not reported: {other:?}"),
        }
    }

    fn one() -> Builder {
        GpuPool::builder().host(1)
    }

    fn three() -> Builder {
        GpuPool::builder().host(3)
    }

    fn ring() -> Builder {
        three().algorithm(Algorithm::Ring)
    }

    fn staged() -> Builder {
        GpuPool::builder().host(2).without_peer_access()
    }

    fn two_streams(pool: &GpuPool) -> Result<()> {
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(1000)?;
            let side = dev.stream()?;
            dev.on(&side).scale(&mut x, 2.0)
        })
        .map(drop)
    }

    fn sums(pool: &GpuPool) -> Result<()> {
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(3000)?;
            dev.all_reduce(&mut x, ReduceOp::Sum)
        })
        .map(drop)
    }

    #[test]
    fn a_dropped_wait_between_streams() {
        let report = found(Bug::OrderDropped, one, two_streams);
        assert_eq!((report.kind, report.bytes.clone()), (Kind::Race, 0..4000));
        let before = report.before.as_ref().unwrap();
        assert_eq!((before.op, report.now.op), ("zeros", "scale"));
        assert!(before.site.unwrap().file().ends_with("mutation.rs") && before.site != report.now.site, "{report}");
    }

    #[test]
    fn a_completion_that_is_claimed_too_early() {
        assert_eq!(found(Bug::CompletedTooEarly, one, two_streams).kind, Kind::Race);
    }

    #[test]
    fn a_staging_piece_that_is_filled_too_early() {
        let report = found(Bug::PieceFilledEarly, one, |pool| {
            pool.run(|dev, _| dev.upload(&vec![1u8; 7 << 20]).map(drop)).map(drop)
        });
        assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "upload"), "{report}");
    }

    #[test]
    fn a_staging_piece_that_is_emptied_too_early() {
        let report = found(Bug::PieceEmptiedEarly, one, |pool| {
            pool.run(|dev, _| dev.download(&dev.zeros::<u8>(1000)?).map(drop)).map(drop)
        });
        assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "download"), "{report}");
    }

    #[test]
    fn a_staged_copy_with_one_event_instead_of_two() {
        let report = found(Bug::OneStagingEvent, staged, |pool| {
            pool.run(|dev, _| {
                let x = Arc::new(dev.zeros::<u8>(4 << 20)?);
                let all = dev.exchange(x)?;
                all[1 - dev.rank()].copy_to(dev).map(drop)
            })
            .map(drop)
        });
        assert_eq!((report.kind, report.now.op), (Kind::Race, "copy_to"), "{report}");
    }

    #[test]
    fn a_skipped_step_of_a_collective() {
        let report = found(Bug::StepSkipped, ring, sums);
        assert_eq!((report.kind, report.now.op), (Kind::Race, "all_reduce"), "{report}");
        // For a kernel over all members' memory, the step is the last one: memory is freed while peers use it.
        assert_eq!(found(Bug::StepSkipped, three, sums).kind, Kind::FreeInUse);
    }

    #[test]
    fn a_collective_that_starts_too_early() {
        for builder in [ring, three] {
            assert_eq!(found(Bug::StartSkipped, builder, sums).kind, Kind::Race);
        }
    }

    #[test]
    fn slots_of_an_exchange_that_are_used_too_early() {
        let copies = || GpuPool::builder().host(2).algorithm(Algorithm::Copies);
        for bug in [Bug::SlotFilledEarly, Bug::ResultMadeEarly] {
            // More pieces than there are slots.
            let report = found(bug, copies, |pool| {
                pool.run(|dev, _| dev.reduce(&mut dev.zeros::<u8>(9 << 20)?, ReduceOp::Max, 0)).map(drop)
            });
            assert_eq!((report.kind, report.now.op), (Kind::Race, "reduce"), "{report}");
        }
    }

    #[test]
    fn a_freed_block_that_forgets_its_uses() {
        let report = found(Bug::UsesForgotten, three, |pool| {
            pool.run(|dev, _| {
                let lent: Arc<DeviceBuffer<u8>> = Arc::new(dev.zeros(1 << 20)?);
                let theirs = dev.exchange(lent.clone())?;
                let copied = theirs[(dev.rank() + 1) % 3].copy_to(dev)?;
                drop((lent, theirs));
                dev.barrier()?;
                // The last handle may have been dropped on another thread, so one of these is the block in question.
                let next: Result<Vec<_>> = (0..4).map(|_| dev.zeros::<u8>(1 << 20)).collect();
                drop((copied, next?));
                Ok(())
            })
            .map(drop)
        });
        assert_eq!(report.kind, Kind::EarlyReuse, "{report}");
    }

    #[test]
    fn a_host_that_does_not_wait() {
        let report = found(Bug::HostDoesNotWait, one, |pool| {
            let mut host = pool.pinned::<u32>(100)?;
            let host = parking_lot::Mutex::new(&mut host);
            pool.run(|dev: &Device, _| {
                let host = &mut **host.lock();
                dev.download_pinned(&dev.zeros::<u32>(100)?, host)?;
                host.as_slice().map(drop)
            })
            .map(drop)
        });
        assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "PinnedBuffer::as_slice"), "{report}");
    }

    #[test]
    fn a_host_that_adds_up_what_has_not_come_down() {
        let hosted = || three().algorithm(Algorithm::Host);
        let report = found(Bug::FoldedEarly, hosted, sums);
        assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "all_reduce"), "{report}");
        // A slot is filled again while others still copy from it; that needs three pieces.
        let report = found(Bug::StepSkipped, hosted, |pool| {
            pool.run(|dev, _| dev.all_reduce(&mut dev.zeros::<f32>(100_000)?, ReduceOp::Sum)).map(drop)
        });
        assert_eq!((report.kind, report.now.op), (Kind::Race, "all_reduce"), "{report}");
    }

    /// Frees cannot return errors, so `close` reports them.
    #[test]
    fn a_chunk_that_goes_back_too_early() {
        let report = found(Bug::ChunkReleasedEarly, one, |pool| {
            pool.run(|dev, _| {
                drop(dev.zeros::<u8>(6 << 20)?);
                dev.trim().map(drop)
            })
            .map(drop)
        });
        assert_eq!(report.kind, Kind::FreeInUse, "{report}");
    }
}
