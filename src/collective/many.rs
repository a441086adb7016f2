//! `all_reduce_many`: several buffers in one call. One kernel packs small buffers together, they are reduced as one
//! buffer, and another kernel unpacks them. Large buffers go one by one. [`api`](super::api) calls it.
//!
//! Invariant: each meeting compares the whole list of lengths, so the first meeting finds lists that differ. Which
//! buffers are packed together depends on that list and on the builder's settings alone.

use super::{Group, Pairs, Part, Request, case::Case, choose::choose, kernels, launch, ops::in_place};
use crate::{
    error::Result,
    fabric::{Call, DeviceBarrier, Element, MOST, ReduceOp, Shape, types::Algorithm},
    memory::{Access, AsViewMut, DeviceViewMut},
};
use smallvec::SmallVec;

const NAME: &str = "all_reduce_many";

/// Most bytes of a buffer that is packed: two copies of it take less time than a launch of its own.
const SMALL: usize = 256 << 10;
const PACK: usize = 4 << 20;

/// Whether `buffers` buffers take fewer launches together than one by one.
fn pays(buffers: usize) -> bool {
    buffers > 1 + 2 * buffers.div_ceil(MOST)
}

fn one<T: Element>(call: &Call, op: ReduceOp, x: DeviceViewMut<'_, T>) -> Request {
    let len = x.len();
    in_place(call.clone(), Some(op), Shape::AllReduce { len }, x)
}

impl Group<'_> {
    #[track_caller]
    pub(super) fn reduce_many<T: Element>(&self, mut all: Vec<DeviceViewMut<'_, T>>, op: ReduceOp) -> Result<()> {
        let lens: SmallVec<[usize; 64]> = all.iter().map(|x| x.len()).collect();
        let call = Call::new(NAME).elements(T::DTYPE, lens.iter().sum()).counts(&lens);
        // Empty buffers need no work. If all are empty, the members still have to meet.
        all.retain(|x| !x.is_empty());
        if all.is_empty() {
            let mut none = self.dev.allocate::<T>(NAME, 0)?;
            return self.run(one(&call, op, none.view_mut()));
        }
        let size = T::DTYPE.size();
        let packed = |x: &mut DeviceViewMut<'_, T>| {
            self.count() > 1 && x.len() * size <= SMALL && self.packs(&one(&call, op, x.view_mut()))
        };
        // First buffers of a multiple of 16 bytes: the one behind is aligned for copies at full speed.
        all.sort_by_cached_key(|x| x.len() * size % 16 != 0);
        let (mut small, mut rest): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        for mut x in all {
            if packed(&mut x) { small.push(x) } else { rest.push(x) }
        }
        // A loop, not a closure: errors name the caller's line.
        for x in rest {
            self.run(one(&call, op, x))?;
        }
        let mut small = &mut small[..];
        while !small.is_empty() {
            let mut bytes = 0;
            let mut fits = |x: &DeviceViewMut<'_, T>| {
                bytes += x.len() * size;
                bytes <= PACK
            };
            let count = small.iter().take_while(|x| fits(x)).count();
            let (pack, behind) = small.split_at_mut(count);
            self.pack(&call, op, pack)?;
            small = behind;
        }
        Ok(())
    }

    /// With several processes it does: no element's bits depend on its place. Only what all have alike may decide.
    fn packs(&self, request: &Request) -> bool {
        match &self.across {
            None => {
                let meeting = self.meeting();
                choose(&Case::of(&meeting, request, meeting.limits())).0.packs()
            }
            Some(_) => self.dev.worker.shared.algorithm != Algorithm::Host,
        }
    }

    #[track_caller]
    fn pack<T: Element>(&self, call: &Call, op: ReduceOp, xs: &mut [DeviceViewMut<'_, T>]) -> Result<()> {
        // Between processes a meeting takes longer than the two launches that pack.
        if pays(xs.len()) || self.across.is_some() && xs.len() > 1 {
            let mut wire = self.dev.allocate::<T>(NAME, xs.iter().map(|x| x.len()).sum())?;
            let together = one(call, op, wire.view_mut());
            if self.packs(&together) {
                self.copy_all(xs, &wire.view_mut(), true)?;
                self.run(together)?;
                return self.copy_all(xs, &wire.view_mut(), false);
            }
        }
        for x in xs {
            self.run(one(call, op, x.view_mut()))?;
        }
        Ok(())
    }

    /// Copies the buffers to the packed buffer, one behind the other, or back.
    #[track_caller]
    fn copy_all<T: Element>(&self, xs: &[DeviceViewMut<'_, T>], wire: &DeviceViewMut<'_, T>, pack: bool) -> Result<()> {
        let dev = self.dev;
        let of_buffers = if pack { Access::Read } else { Access::Write };
        let mut access = dev.op_in_graph(NAME)?;
        match pack {
            true => access.scratch(wire.block, wire.bytes())?,
            false => access.touch(wire.block, wire.bytes(), Access::Read, false)?,
        }
        let mut pairs = Vec::with_capacity(xs.len());
        let mut next = wire.address();
        for x in xs {
            access.touch(x.block, x.bytes(), of_buffers, false)?;
            let bytes = x.bytes().len();
            let (own, packed) = (Part { address: x.address(), bytes }, Part { address: next, bytes });
            pairs.push(if pack { (own, packed) } else { (packed, own) });
            next += bytes as u64;
        }
        access.reserve()?;
        let copied = pairs.chunks(MOST).try_for_each(|pairs| {
            let largest = pairs.iter().map(|(from, _)| from.bytes).max().unwrap_or(0);
            let each = launch::blocks(largest);
            let args = Pairs { pairs, blocks_per_pair: each, meet: DeviceBarrier::NONE }.args(dev.worker.is_software());
            launch::launch_on(&dev.worker, &dev.stream, NAME, &kernels::pairs(), each * pairs.len() as u32, &args)
        });
        access.done(&copied);
        // Also after a failure: earlier launches touch the memory.
        access.submitted();
        copied
    }
}

#[cfg(test)]
#[path = "../../tests/unit/collective/many_tests.rs"]
mod tests;
