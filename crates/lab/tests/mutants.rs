//! The library with bugs: the checker finds each of them, and reports nothing without it.

use gpu_pool::collective::Algorithm;
use gpu_pool::{
    Builder, Device, DeviceBuffer, Error, GpuPool, ReduceOp, Result,
    error::{Kind, Report},
};
use gpu_pool_lab::{Check, FailPoint, FaultPlan, prelude::*};
use std::sync::Arc;

type Program = fn(&GpuPool) -> Result<()>;

/// The checker reports nothing in a correct pool, and reports the program in a pool with the bug.
#[track_caller]
fn found(bug: FailPoint, builder: fn() -> Builder, program: Program) -> Arc<Report> {
    let right = builder().check(Check::Races).build().unwrap();
    program(&right).unwrap();
    right.close().unwrap();
    let wrong = builder().check(Check::Races).faults(FaultPlan::new().at(bug)).build().unwrap();
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
    let report = found(FailPoint::OrderDropped, one, two_streams);
    assert_eq!((report.kind, report.bytes.clone()), (Kind::Race, 0..4000));
    let before = report.before.as_ref().unwrap();
    assert_eq!((before.op, report.now.op), ("zeros", "scale"));
    assert!(before.site.unwrap().file().ends_with("mutants.rs") && before.site != report.now.site, "{report}");
}

#[test]
fn a_completion_that_is_claimed_too_early() {
    assert_eq!(found(FailPoint::CompletedTooEarly, one, two_streams).kind, Kind::Race);
}

#[test]
fn a_staging_piece_that_is_filled_too_early() {
    let report = found(FailPoint::PieceFilledEarly, one, |pool| {
        pool.run(|dev, _| dev.upload(&vec![1u8; 7 << 20]).map(drop)).map(drop)
    });
    assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "upload"), "{report}");
}

#[test]
fn a_staging_piece_that_is_emptied_too_early() {
    let report = found(FailPoint::PieceEmptiedEarly, one, |pool| {
        pool.run(|dev, _| dev.download(&dev.zeros::<u8>(1000)?).map(drop)).map(drop)
    });
    assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "download"), "{report}");
}

#[test]
fn a_staged_copy_with_one_event_instead_of_two() {
    let report = found(FailPoint::OneStagingEvent, staged, |pool| {
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
    let report = found(FailPoint::StepSkipped, ring, sums);
    assert_eq!((report.kind, report.now.op), (Kind::Race, "all_reduce"), "{report}");
    // For a kernel over all members' memory, the step is the last one: memory is freed while peers use it.
    assert_eq!(found(FailPoint::StepSkipped, three, sums).kind, Kind::FreeInUse);
}

#[test]
fn a_collective_that_starts_too_early() {
    for builder in [ring, three] {
        assert_eq!(found(FailPoint::StartSkipped, builder, sums).kind, Kind::Race);
    }
}

#[test]
fn slots_of_an_exchange_that_are_used_too_early() {
    let copies = || GpuPool::builder().host(2).algorithm(Algorithm::Copies);
    for bug in [FailPoint::SlotFilledEarly, FailPoint::ResultMadeEarly] {
        // More pieces than there are slots.
        let report = found(bug, copies, |pool| {
            pool.run(|dev, _| dev.reduce(&mut dev.zeros::<u8>(9 << 20)?, ReduceOp::Max, 0)).map(drop)
        });
        assert_eq!((report.kind, report.now.op), (Kind::Race, "reduce"), "{report}");
    }
}

#[test]
fn a_freed_block_that_forgets_its_uses() {
    let report = found(FailPoint::UsesForgotten, three, |pool| {
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
    let report = found(FailPoint::HostDoesNotWait, one, |pool| {
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
    let report = found(FailPoint::FoldedEarly, hosted, sums);
    assert_eq!((report.kind, report.now.op), (Kind::HostAccess, "all_reduce"), "{report}");
    // A slot is filled again while others still copy from it; that needs three pieces.
    let report = found(FailPoint::StepSkipped, hosted, |pool| {
        pool.run(|dev, _| dev.all_reduce(&mut dev.zeros::<f32>(100_000)?, ReduceOp::Sum)).map(drop)
    });
    assert_eq!((report.kind, report.now.op), (Kind::Race, "all_reduce"), "{report}");
}

/// Frees cannot return errors, so `close` reports them.
#[test]
fn a_chunk_that_goes_back_too_early() {
    let report = found(FailPoint::ChunkReleasedEarly, one, |pool| {
        pool.run(|dev, _| {
            drop(dev.zeros::<u8>(6 << 20)?);
            dev.trim().map(drop)
        })
        .map(drop)
    });
    assert_eq!(report.kind, Kind::FreeInUse, "{report}");
}
