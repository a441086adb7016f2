//! Kernels watched for writes through arguments that they declare as read.
//!
//! What such a write destroys is seen much later and elsewhere, since the library orders operations by the
//! declarations. A watched kernel gets private copies of its `&[T]` slices (each up to [`LIMIT`]), which are compared
//! with the originals afterwards. So the device's memory is unharmed, and the report names kernel and argument.

use super::memory::Block;
use crate::driver::{
    HostArg, KernelArg,
    check::{Deed, Kind, OpSite, Report},
};
use std::{ops::Range, slice, sync::Arc};

/// Larger slices are not watched.
pub const LIMIT: usize = 16 << 20;

/// The private copies of one launch.
#[derive(Default)]
pub(super) struct Watched {
    copies: Vec<Copy>,
}

struct Copy {
    /// Which argument.
    argument: usize,
    original: *const u8,
    bytes: usize,
    copy: Arc<Block>,
}

impl Watched {
    /// Puts copies in the place of slices that are only read. One that there is no memory for is not watched.
    pub fn new(args: &mut [HostArg]) -> Self {
        let mut watched = Watched::default();
        for (argument, arg) in args.iter_mut().enumerate() {
            let HostArg::Slice { ptr, bytes: length, write: false } = arg else { continue };
            let bytes = *length;
            if bytes == 0 || bytes > LIMIT {
                continue;
            }
            let Some(copy) = Block::zeroed(bytes) else { continue };
            let original = ptr.cast_const();
            // SAFETY: the slice is live, initialised (all allocations are) and claimed for reading while the kernel
            // runs; the copy is as long, and nobody else's.
            unsafe { copy.at(0).copy_from_nonoverlapping(original, bytes) };
            *ptr = copy.at(0);
            watched.copies.push(Copy { argument, original, bytes, copy });
        }
        watched
    }

    /// What the kernel did to the copies, if anything: the argument, and the range of bytes from the first to the last
    /// that differs.
    pub fn harm(&self) -> Option<(usize, Range<usize>)> {
        self.copies.iter().find_map(|copy| {
            // SAFETY: as in `new`; the kernel has returned, so nobody writes to the copy.
            let (was, is) = unsafe {
                (
                    slice::from_raw_parts(copy.original, copy.bytes),
                    slice::from_raw_parts(copy.copy.at(0).cast_const(), copy.bytes),
                )
            };
            if was == is {
                return None;
            }
            let differs = |i: &usize| was[*i] != is[*i];
            let first = (0..copy.bytes).find(differs)?;
            let last = (0..copy.bytes).rfind(differs)?;
            Some((copy.argument, first..last + 1))
        })
    }
}

/// Where a launch was made and runs.
#[derive(Clone, Copy)]
pub(super) struct Launched {
    pub name: &'static str,
    pub place: Option<OpSite>,
    pub device: usize,
    pub stream: usize,
}

/// The report on a kernel that wrote through its argument number `argument` (from 0).
pub(super) fn report(by: Launched, args: &[KernelArg], argument: usize, bytes: Range<usize>) -> Report {
    let Launched { name, place, device, stream } = by;
    let length = match args.get(argument) {
        Some(KernelArg::Slice { bytes, .. }) => *bytes,
        _ => 0,
    };
    Report {
        kind: Kind::WrongDeclaration,
        now: Deed {
            op: place.map_or("launch", |place| place.op),
            detail: format!("kernel `{name}`, argument {argument}"),
            site: place.map(|place| place.site),
            device: Some(device),
            stream: Some(stream),
            write: true,
        },
        before: None,
        bytes: bytes.clone(),
        allocation: None,
        missing: format!(
            "kernel `{name}` wrote to bytes {}..{} of the {length} of its argument {argument}, which it declares as read: \
             declare it `&mut [T]`. The software GPU gave it a copy, so the buffer is unchanged; on a GPU it would not be, and \
             nothing would order that write",
            bytes.start, bytes.end
        ),
    }
}
