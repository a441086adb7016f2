//! Several buffers in one call: small ones are brought together by one kernel, reduced as one, and brought back by
//! another. The others go one by one.
//!
//! What all are told in each meeting is the whole list, so the first one finds lists that differ; and what is packed
//! with what depends on the list alone.

use super::{
    Group,
    choose::choose,
    kernels::{self, Pairs, Part},
    launch,
    ops::in_place,
    request::Request,
};
use crate::fabric::{
    call::Call,
    layout::{DeviceBarrier, MOST},
    plan::Shape,
    types::{Element, ReduceOp},
};
use crate::{
    Device,
    error::Result,
    memory::{AsViewMut, DeviceViewMut, hazard::Access},
};
use smallvec::SmallVec;

const NAME: &str = "all_reduce_many";

/// Bytes of a buffer up to which it is packed: to copy it twice takes less than a launch of its own.
const SMALL: usize = 256 << 10;
/// Bytes that are packed together, at most: of scratch.
const PACK: usize = 4 << 20;

/// Whether it takes fewer launches to reduce so many buffers together than one by one.
fn pays(buffers: usize) -> bool {
    buffers > 1 + 2 * buffers.div_ceil(MOST)
}

impl Device {
    /// [`all_reduce`](Self::all_reduce) of several buffers of one type: PyTorch's `all_reduce_coalesced`, NCCL's group
    /// calls. Any mixture of lengths does, also none; all members give the same lengths in the same order.
    ///
    /// Buffers of up to 256 KiB go together, up to 4 MiB at a time: a hundred of them take one meeting and 15 launches,
    /// and scratch of their size. Larger ones go one by one. Each has the bits that `all_reduce` gives it.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let (mut weights, mut bias) = (dev.upload(&[1.0f32, 2.0])?, dev.upload(&[shard.index() as f32])?);
    ///     dev.all_reduce_many(&mut [&mut weights, &mut bias], ReduceOp::Sum)?;
    ///     Ok((dev.download(&weights)?, dev.download(&bias)?))
    /// })?;
    /// assert_eq!(found, vec![(vec![2.0, 4.0], vec![1.0]); 2]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// A `Vec` of buffers goes as `&mut all`. Buffers that are fields of other values go as an iterator, which is run
    /// once:
    ///
    /// ```
    /// # use gpu_pool::{DeviceBuffer, GpuPool, ReduceOp};
    /// struct Layer { w: DeviceBuffer<f32>, name: &'static str }
    /// # let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let layer = |name| Ok(Layer { w: dev.upload(&[1.0f32])?, name });
    ///     let mut model = [layer("first")?, layer("frozen")?, layer("last")?];
    ///     let trained = model.iter_mut().filter(|layer| layer.name != "frozen");
    ///     dev.all_reduce_many(trained.map(|layer| &mut layer.w), ReduceOp::Sum)?;
    ///     model.iter().map(|layer| Ok(dev.download(&layer.w)?[0])).collect::<gpu_pool::Result<Vec<_>>>()
    /// })?;
    /// assert_eq!(found, [[2.0, 1.0, 2.0]; 2]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// For gradients see [`GradientExchange`](crate::GradientExchange): there, they lie together
    /// from the start, and are reduced beside the backward pass.
    ///
    /// # Errors
    /// As of all collectives, above; lists that differ are a `Mismatch`.
    #[track_caller]
    pub fn all_reduce_many<V>(&self, xs: impl IntoIterator<Item = V>, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut,
        V::Elem: Element,
    {
        self.everyone().all_reduce_many(xs, op)
    }
}

/// One buffer of the list.
fn one<T: Element>(call: &Call, op: ReduceOp, x: DeviceViewMut<'_, T>) -> Request {
    let len = x.len();
    in_place(call.clone(), Some(op), Shape::AllReduce { len }, x)
}

impl Group<'_> {
    /// [`Device::all_reduce_many`].
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_reduce_many<V>(&self, xs: impl IntoIterator<Item = V>, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut,
        V::Elem: Element,
    {
        // The caller's code runs here only: nothing was announced yet, and each view is taken once.
        let mut xs: Vec<V> = xs.into_iter().collect();
        let mut all: Vec<DeviceViewMut<'_, V::Elem>> = xs.iter_mut().map(|x| x.view_mut()).collect();
        let lens: SmallVec<[usize; 64]> = all.iter().map(|x| x.len()).collect();
        let call = Call::new(NAME).elements(V::Elem::DTYPE, lens.iter().sum()).counts(&lens);
        // Nothing to add is no part of it, unless there is nothing else: members meet all the same.
        all.retain(|x| !x.is_empty());
        if all.is_empty() {
            let mut none = self.dev.allocate::<V::Elem>(NAME, 0)?;
            return self.run(one(&call, op, none.view_mut()));
        }
        let size = V::Elem::DTYPE.size();
        let packed = |x: &mut DeviceViewMut<'_, V::Elem>| {
            self.count() > 1 && x.len() * size <= SMALL && self.packs(&one(&call, op, x.view_mut()))
        };
        // First those behind which the next one begins where it is copied at full speed.
        all.sort_by_cached_key(|x| x.len() * size % 16 != 0);
        let (mut small, mut rest): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        for mut x in all {
            if packed(&mut x) { small.push(x) } else { rest.push(x) }
        }
        // Loops where closures would do: errors name the caller's line.
        for x in rest {
            self.run(one(&call, op, x))?;
        }
        let mut small = &mut small[..];
        while !small.is_empty() {
            let mut bytes = 0;
            let mut fits = |x: &DeviceViewMut<'_, V::Elem>| {
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

    /// Whether a buffer may go together with others.
    fn packs(&self, request: &Request) -> bool {
        choose(&self.case(request, self.limits())).0.packs()
    }

    /// Buffers that go together, if that is worth it.
    #[track_caller]
    fn pack<T: Element>(&self, call: &Call, op: ReduceOp, xs: &mut [DeviceViewMut<'_, T>]) -> Result<()> {
        if pays(xs.len()) {
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

    /// The buffers to the wire, where they stand one behind the other, or back.
    #[track_caller]
    fn copy_all<T: Element>(
        &self,
        xs: &[DeviceViewMut<'_, T>],
        wire: &DeviceViewMut<'_, T>,
        there: bool,
    ) -> Result<()> {
        let dev = self.dev;
        let of_buffers = if there { Access::Read } else { Access::Write };
        let mut access = dev.op_in_graph(NAME)?;
        match there {
            true => access.scratch(wire.block, wire.bytes())?,
            false => access.touch(wire.block, wire.bytes(), Access::Read, false)?,
        }
        let mut pairs = Vec::with_capacity(xs.len());
        let mut next = wire.address();
        for x in xs {
            access.touch(x.block, x.bytes(), of_buffers, false)?;
            let bytes = x.bytes().len();
            let (own, packed) = (Part { address: x.address(), bytes }, Part { address: next, bytes });
            pairs.push(if there { (own, packed) } else { (packed, own) });
            next += bytes as u64;
        }
        let copied = pairs.chunks(MOST).try_for_each(|pairs| {
            let largest = pairs.iter().map(|(from, _)| from.bytes).max().unwrap_or(0);
            let each = launch::blocks(largest);
            let args = Pairs { pairs, blocks_per_pair: each, meet: DeviceBarrier::NONE }.args(dev.worker.is_software());
            launch::launch_on(&dev.worker, &dev.stream, NAME, &kernels::pairs(), each * pairs.len() as u32, &args)
        });
        access.done(&copied);
        // Also after a failure: launches before it touch the memory.
        access.submitted();
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16 go by one launch there and one back.
    #[test]
    fn fewer_launches() {
        let paying: Vec<usize> = (0..20).filter(|count| pays(*count)).collect();
        assert_eq!(paying, (4..20).collect::<Vec<_>>());
        assert!((20..1000).all(pays));
    }
}
