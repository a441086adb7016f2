//! Finds kernels that write to arguments which they declare as read-only
//! ([`MachineConfig::watch_reads`](super::MachineConfig::watch_reads)).
//!
//! The library orders operations by these declarations, so the damage of such a write would show much later. A watched
//! kernel gets private copies of its `&[T]` slices (each up to [`LIMIT`]), which are compared with the originals
//! afterwards: the memory stays intact, and the report names kernel and argument.

use super::Block;
use crate::driver::{HostArg, KernelArg};
use crate::error::{
    misuse::{Kind, Operation, Report},
    op_site::OpSite,
};
use std::{ops::Range, slice, sync::Arc};

/// Larger slices are not watched.
pub const LIMIT: usize = 16 << 20;

#[derive(Default)]
pub(super) struct Watched {
    copies: Vec<Copy>,
}

struct Copy {
    argument: usize,
    original: *const u8,
    bytes: usize,
    copy: Arc<Block>,
}

impl Watched {
    /// A slice is not watched if there is no memory for its copy.
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
            // runs. The copy has the same length, and only this launch uses it.
            unsafe { copy.at(0).copy_from_nonoverlapping(original, bytes) };
            *ptr = copy.at(0);
            watched.copies.push(Copy { argument, original, bytes, copy });
        }
        watched
    }

    /// The first argument whose copy the kernel has changed, with the range from the first to the last changed byte.
    pub fn harm(&self) -> Option<(usize, Range<usize>)> {
        self.copies.iter().find_map(|copy| {
            // SAFETY: as in `new`; the kernel has returned, so no code writes to the copy.
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

#[derive(Clone, Copy)]
pub(super) struct Launched {
    pub name: &'static str,
    pub place: Option<OpSite>,
    pub device: usize,
    pub stream: usize,
}

/// `argument` counts from 0.
pub(super) fn report(by: Launched, args: &[KernelArg], argument: usize, bytes: Range<usize>) -> Report {
    let Launched { name, place, device, stream } = by;
    let length = match args.get(argument) {
        Some(KernelArg::Slice { bytes, .. }) => *bytes,
        _ => 0,
    };
    Report {
        kind: Kind::WrongDeclaration,
        now: Operation {
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
            "kernel `{name}` wrote to bytes {}..{} of the {length} of its argument {argument}, which it \
             declares as read: declare it `&mut [T]`. The software GPU gave it a copy, so the buffer is unchanged; on \
             a GPU it would not be, and nothing would order that write",
            bytes.start, bytes.end
        ),
    }
}
