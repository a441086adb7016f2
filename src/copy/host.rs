//! Copies between pageable host memory and a device, through page-locked pieces ([`Piece`]).
//!
//! Invariant: the GPU never accesses the caller's slice. `upload` has copied the slice into pieces when it returns, and
//! `download` copies out of a piece after the DMA into it has ended.
//!
//! Each [`DoubleBuffer`] has two pieces: the memcpy of one overlaps the other's DMA. A CPU thread copies slower than
//! the bus, so a large slice is split over several, which all send on the caller's stream. Small uploads share a piece.

use crate::driver::{Address, FailPoint};
use crate::error::{Error, Result, op_site::OpSite};
use crate::memory::{
    DeviceHandle, StreamCore,
    staging::{DoubleBuffer, DoubleBuffers, PIECE, Piece},
};
use crate::{Device, Event, gang::Gang, thread::worker::Worker};
use std::{cell::RefMut, panic::Location, ptr, sync::Arc, time::Duration};

const PACK: usize = 256;
/// Several threads copy at least this many bytes.
const PARALLEL: usize = 8 << 20;

/// How to wait for a piece, and when to give up. Helper threads use it, so it does not borrow the token.
struct Wait {
    fills: bool,
    gang: Arc<Gang>,
    limit: Duration,
}

impl Wait {
    fn of(dev: &Device, fills: bool) -> Self {
        Wait { fills, gang: dev.session.gang.clone(), limit: dev.worker.shared.deadline }
    }

    fn free(&self, piece: &mut Piece) -> Result<()> {
        let bug = if self.fills { FailPoint::PieceFilledEarly } else { FailPoint::PieceEmptiedEarly };
        piece.free(|event| if event.0.stream.handle.injected(bug) { Ok(()) } else { self.event(event) })
    }

    fn event(&self, event: &Event) -> Result<()> {
        let (stream, handle) = (&event.0.stream, &event.0.stream.handle);
        let passed = || handle.check("staging", handle.driver.event_wait(event.0.raw, Duration::from_millis(20)));
        let waited = stream.wait_while_advancing("staging", self.limit, passed, || self.gang.is_aborted());
        waited.map_err(|error| self.gang.aborted().unwrap_or(error))
    }
}

/// Sends `src` to `dst`. When it returns, even with an error, `src` is not needed any more. The caller counts the
/// operation: of its pieces, only those that are waited for before are counted here.
#[track_caller]
pub(crate) fn upload(dev: &Device, src: &[u8], dst: Address) -> Result<()> {
    let (stream, wait) = (&dev.stream, Wait::of(dev, true));
    let mut buffers = buffers(&dev.worker.staging.up, &dev.worker, src.len())?;
    if src.len() <= PIECE {
        return pack(&mut buffers[0], &wait, stream, src, dst);
    }
    let parts = cut(src.len(), buffers.len());
    in_parallel(&dev.worker.handle, &mut buffers, parts, |buffer, part| {
        for start in part.clone().step_by(PIECE) {
            let bytes = &src[start..part.end.min(start + PIECE)];
            let piece = buffer.switch();
            wait.free(piece)?;
            piece.streams.push(stream.clone());
            send(piece, 0, stream, bytes, dst + start as u64)?;
            stream.submit();
            piece.seal()?;
        }
        Ok(())
    })
}

/// Sends a small slice: packed into the current piece if it fits there, else in the other piece.
fn pack(buffer: &mut DoubleBuffer, wait: &Wait, stream: &Arc<StreamCore>, src: &[u8], dst: Address) -> Result<()> {
    if src.is_empty() {
        return Ok(());
    }
    let current = &mut buffer.pieces[buffer.next];
    let piece = if current.busy.is_empty() && current.filled + src.len() <= PIECE {
        &mut buffer.pieces[buffer.next]
    } else {
        current.seal()?;
        let piece = buffer.switch();
        wait.free(piece)?;
        piece
    };
    let offset = piece.filled;
    piece.filled = (offset + src.len()).next_multiple_of(PACK);
    if !piece.streams.iter().any(|s| s.id == stream.id) {
        piece.streams.push(stream.clone());
    }
    send(piece, offset, stream, src, dst)
}

fn send(piece: &Piece, offset: usize, stream: &StreamCore, bytes: &[u8], dst: Address) -> Result<()> {
    let at = piece.at(offset);
    debug_assert!(offset + bytes.len() <= PIECE);
    stream.handle.host_access("upload", at as u64, bytes.len(), true)?;
    // SAFETY: `offset + bytes.len() <= PIECE`. No DMA uses this part of the piece: the piece was free, and this part
    // was not given to a DMA since then.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    let driver = &stream.handle.driver;
    // SAFETY: the piece is page-locked, and the host does not touch this part before the piece's event. `dst` is live
    // and ordered by the caller's `Op`.
    stream.handle.check("upload", unsafe { driver.copy_to_device(dst, at, bytes.len(), stream.raw) })
}

/// Copies `src` to `dst`, and waits until the data has arrived.
#[track_caller]
pub(crate) fn download(dev: &Device, src: Address, dst: &mut [u8]) -> Result<()> {
    if dst.is_empty() {
        return Ok(());
    }
    let (stream, wait) = (&dev.stream, Wait::of(dev, false));
    let mut buffers = buffers(&dev.worker.staging.down, &dev.worker, dst.len())?;
    let parts = cut(dst.len(), buffers.len());
    let whole = Whole(dst.as_mut_ptr());
    in_parallel(&dev.worker.handle, &mut buffers, parts, |buffer, part| {
        let whole = &whole;
        // The DMA fills one piece while the host empties the other.
        let mut arriving: Option<(usize, usize, usize)> = None;
        for start in part.clone().step_by(PIECE) {
            let bytes = part.end.min(start + PIECE) - start;
            let piece = buffer.switch();
            // The piece is free already, except after a failed download.
            wait.free(piece)?;
            piece.streams.push(stream.clone());
            // SAFETY: `src` is live and ordered by the caller's `Op`. The piece is free, page-locked and large enough.
            let copied =
                unsafe { stream.handle.driver.copy_to_host(piece.at(0), src + start as u64, bytes, stream.raw) };
            stream.handle.check("download", copied)?;
            stream.submit();
            piece.seal()?;
            let this = (buffer.next, start, bytes);
            if let Some((index, start, bytes)) = arriving.replace(this) {
                whole.empty(&mut buffer.pieces[index], start, bytes, &wait)?;
            }
        }
        arriving.map_or(Ok(()), |(index, start, bytes)| whole.empty(&mut buffer.pieces[index], start, bytes, &wait))
    })
}

/// The caller's slice, written by several threads in disjoint parts.
struct Whole(*mut u8);

// SAFETY: the threads write disjoint parts while the caller's exclusive borrow lasts.
unsafe impl Sync for Whole {}

impl Whole {
    fn empty(&self, piece: &mut Piece, start: usize, bytes: usize, wait: &Wait) -> Result<()> {
        wait.free(piece)?;
        piece.block.handle.host_access("download", piece.at(0) as u64, bytes, false)?;
        // SAFETY: `start..start + bytes` lies in this thread's part of the slice; the DMA into the piece has completed.
        unsafe { ptr::copy_nonoverlapping(piece.at(0), self.0.add(start), bytes) };
        Ok(())
    }
}

/// The buffers for a transfer of `bytes`: one buffer for a small transfer, one per copy thread for a large one.
fn buffers<'a>(all: &'a DoubleBuffers, worker: &Worker, bytes: usize) -> Result<RefMut<'a, [DoubleBuffer]>> {
    let count = if bytes < PARALLEL { 1 } else { worker.shared.copy_threads };
    all.take(count, &worker.shared.pinned, worker.handle.device)
}

fn cut(bytes: usize, buffers: usize) -> Vec<std::ops::Range<usize>> {
    let pieces = bytes.div_ceil(PIECE);
    (0..buffers)
        .map(|i| crate::shard::balanced(i, buffers, pieces))
        .map(|r| (r.start * PIECE).min(bytes)..(r.end * PIECE).min(bytes))
        .collect()
}

/// Runs `f` for each buffer and its part: the first on this thread, the others on threads that end before this call.
#[track_caller]
fn in_parallel(
    handle: &DeviceHandle,
    buffers: &mut [DoubleBuffer],
    parts: Vec<std::ops::Range<usize>>,
    f: impl Fn(&mut DoubleBuffer, std::ops::Range<usize>) -> Result<()> + Sync,
) -> Result<()> {
    let Some((own, others)) = buffers.split_first_mut() else { return Ok(()) };
    if others.is_empty() {
        return f(own, parts[0].clone());
    }
    // For a checker: what this thread knows to have happened before.
    let known = handle.release();
    let place = OpSite::outermost("copy", Location::caller());
    crossbeam::thread::scope(|scope| {
        let helpers: Vec<_> = others
            .iter_mut()
            .zip(&parts[1..])
            .map(|(buffer, part)| {
                let (f, known) = (&f, known.as_deref());
                scope.builder().spawn(move |_| {
                    handle.acquire(known);
                    let _here = place.enter();
                    (f(buffer, part.clone()), handle.release())
                })
            })
            .collect();
        let mine = f(own, parts[0].clone());
        // Join all threads before returning, so that the caller's slice is free then.
        let theirs: Vec<_> = helpers.into_iter().map(|helper| helper.map(|helper| helper.join())).collect();
        theirs.into_iter().fold(mine, |all, one| {
            let joined = one.map_err(|e| {
                let OpSite { op, site } = place;
                Error::NoThread { op, device: Some(handle.device), why: e.to_string(), site }
            });
            all.and(joined.and_then(|one| {
                let (one, known) = one.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                handle.acquire(known.as_deref());
                one
            }))
        })
    })
    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
