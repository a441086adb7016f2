//! Tensors that several devices have in parts, and checkpoints within a checkpoint.
//!
//! A file has whole tensors, so it does not depend on the number of devices. Invariant: all members of a group come to
//! the same shapes, or to the same error.

use super::{Checkpoint, Data, Tensor};
use crate::runtime::{Call, ErrorInternals, GroupInternals, OpSite, exclusive};
use gpu_pool::{AsView, Element, Error, Group, Result};
use std::{borrow::Cow, sync::Arc};

/// How a tensor lies on the devices of a group: the shape of this device's part, and the side that is cut. Parts may
/// differ in length, and are in the order of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    shape: Vec<usize>,
    along: Option<usize>,
}

/// Where a device's part lies in a whole tensor: in each of `blocks` blocks of `whole` elements, those of each member.
struct Placed {
    shape: Vec<usize>,
    blocks: usize,
    lens: Vec<usize>,
}

/// At most `usize::MAX`, which no tensor has: then a side may still be 0.
fn product(sides: &[usize]) -> usize {
    if sides.contains(&0) { 0 } else { sides.iter().fold(1, |product: usize, side| product.saturating_mul(*side)) }
}

impl Cut {
    /// Each device has all of it.
    pub fn whole(shape: &[usize]) -> Self {
        Cut { shape: shape.into(), along: None }
    }

    /// Cut along a side, counted from 0: rows of a matrix are side 0, columns side 1. `shape` is that of the own part.
    ///
    /// # Panics
    /// When there is no such side.
    #[track_caller]
    pub fn along(side: usize, shape: &[usize]) -> Self {
        assert!(side < shape.len(), "side {side} of {shape:?}");
        Cut { shape: shape.into(), along: Some(side) }
    }

    pub(crate) fn len(&self) -> usize {
        product(&self.shape)
    }

    /// All members call it.
    #[track_caller]
    fn place(&self, op: &'static str, group: &Group<'_>) -> Result<Placed> {
        let own = [&[self.along.map_or(0, |side| side + 1)], &self.shape[..]].concat();
        let own: Vec<u8> = own.iter().flat_map(|n| (*n as u64).to_le_bytes()).collect();
        let all = group.exchange_bytes(&Call::new(op), own)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("chunks of 8")) as usize;
        let all: Vec<Vec<usize>> = all.iter().map(|cut| cut.chunks_exact(8).map(number).collect()).collect();
        let mut shape = all[0][1..].to_vec();
        let Some(side) = all[0][0].checked_sub(1) else {
            return match all.iter().all(|cut| *cut == all[0]) {
                true => Ok(Placed { shape, blocks: 1, lens: vec![self.len()] }),
                false => Err(Error::invalid(op, format_args!("members with other cuts: {all:?}"))),
            };
        };
        let others = |cut: &[usize]| [&cut[..=side], &cut[side + 2..]].concat();
        let fits = |cut: &Vec<usize>| cut.len() == all[0].len() && others(cut) == others(&all[0]);
        invalid_if!(!all.iter().all(fits), op, "parts that make no whole along side {side}: {all:?}");
        shape[side] = all.iter().fold(0, |sum: usize, cut| sum.saturating_add(cut[side + 1]));
        let rest = product(&shape[side + 1..]);
        // An empty tensor has no blocks, whatever its other sides are.
        let empty = product(&shape) == 0;
        let len = |cut: &Vec<usize>| if empty { 0 } else { cut[side + 1].saturating_mul(rest) };
        let blocks = if empty { 0 } else { product(&shape[..side]) };
        Ok(Placed { blocks, lens: all.iter().map(len).collect(), shape })
    }
}

impl Checkpoint {
    /// Puts a tensor in of which each device has a part. All members of the group call it, each with a checkpoint of
    /// its own, and it **waits**. That of rank 0 then has the whole tensor; the others have none.
    ///
    /// ```
    /// use gpu_pool::GpuPool;
    /// use gpu_pool_train::{Checkpoint, Cut};
    ///
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let group = dev.group(&[0, 1])?;
    ///     let column = dev.upload(&[1.0f32, 2.0].map(|x| x + 10.0 * dev.rank() as f32))?;
    ///     let mut checkpoint = Checkpoint::new();
    ///     checkpoint.insert_part(&group, "w", &Cut::along(1, &[2, 1]), &column)?;
    ///     Ok(checkpoint)
    /// })?;
    /// assert_eq!(found[0].tensor::<f32>("w")?, [1.0, 11.0, 2.0, 12.0]); // two columns
    /// let rows = pool.run(|dev, _| found[0].part::<f32>(&dev.group(&[0, 1])?, "w", &Cut::along(0, &[1, 2])))?;
    /// assert_eq!(rows[1], [2.0, 12.0]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a part of another length, in a capture, and on all members for parts that make no
    /// whole; as [`insert`](Self::insert); those of [`Group::gather_v`] and
    /// [`Device::download`](gpu_pool::Device::download).
    #[track_caller]
    pub fn insert_part<X: AsView<Elem: Element>>(
        &mut self,
        group: &Group<'_>,
        name: &str,
        cut: &Cut,
        x: &X,
    ) -> Result<()> {
        let _here = OpSite::here("insert_part");
        let (x, dev, leads) = (x.view(), group.device(), group.rank() == 0);
        invalid_if!(x.len() != cut.len(), "insert_part", "`{name}`: {} elements are no {cut:?}", x.len());
        let Placed { shape, blocks, lens } = cut.place("insert_part", group)?;
        if lens.len() == 1 {
            return if leads { self.insert(name, &shape, &dev.download(&x)?) } else { Ok(()) };
        }
        let counts: Vec<usize> = lens.iter().map(|len| len * blocks).collect();
        let all = leads.then(|| dev.zeros::<X::Elem>(counts.iter().sum())).transpose()?;
        group.gather_v(&x, all.as_ref().map(|all| exclusive(all.view())), &counts, 0)?;
        let Some(all) = all else { return Ok(()) };
        let (all, mut whole, mut start) = (dev.download(&all)?, Vec::with_capacity(all.len()), 0);
        let parts: Vec<&[X::Elem]> = counts
            .iter()
            .map(|count| {
                start += count;
                &all[start - count..start]
            })
            .collect();
        for block in 0..blocks {
            parts.iter().zip(&lens).for_each(|(part, len)| whole.extend_from_slice(&part[block * len..][..*len]));
        }
        self.insert(name, &shape, &whole)
    }

    /// This device's part of a tensor. All members of the group call it with the same checkpoint. See
    /// [`insert_part`](Self::insert_part).
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor) and [`Group::exchange`]; [`Error::InvalidArgument`] if parts make another shape.
    #[track_caller]
    pub fn part<T: Element>(&self, group: &Group<'_>, name: &str, cut: &Cut) -> Result<Vec<T>> {
        let _here = OpSite::here("part");
        let Placed { shape, blocks, lens } = cut.place("part", group)?;
        let own = self.get("part", name)?;
        invalid_if!(own.shape != shape, "part", "`{name}` is {:?}, and the members' parts make {shape:?}", own.shape);
        let whole = self.tensor::<T>(name)?;
        if lens.len() == 1 {
            return Ok(whole);
        }
        let (start, len) = (lens[..group.rank()].iter().sum::<usize>(), lens[group.rank()]);
        let block = lens.iter().sum::<usize>();
        Ok((0..blocks).flat_map(|k| whole[k * block + start..][..len].iter().copied()).collect())
    }

    /// Puts all tensors and notes of another checkpoint in, with `prefix` before their names; equal names are replaced.
    pub fn insert_section(&mut self, prefix: &str, section: Checkpoint) {
        let Checkpoint { file, tensors, notes } = section;
        for (name, Tensor { dtype, shape, data }) in tensors {
            let data = match data {
                Data::InFile(range) => Data::Own(file[range].to_vec()),
                own => own,
            };
            self.tensors.insert(format!("{prefix}{name}"), Tensor { dtype, shape, data });
        }
        self.notes.extend(notes.into_iter().map(|(name, text)| (format!("{prefix}{name}"), text)));
    }

    /// The tensors and notes whose names begin with `prefix`, without it.
    #[must_use]
    pub fn section(&self, prefix: &str) -> Checkpoint {
        let without = |name: &String| name.strip_prefix(prefix).map(str::to_owned);
        Checkpoint {
            file: Arc::clone(&self.file),
            tensors: self.tensors.iter().filter_map(|(name, x)| Some((without(name)?, x.clone()))).collect(),
            notes: self.notes.iter().filter_map(|(name, text)| Some((without(name)?, text.clone()))).collect(),
        }
    }
}

pub(crate) fn named<'n>(prefix: &str, name: &'n str) -> Cow<'n, str> {
    if prefix.is_empty() { name.into() } else { format!("{prefix}.{name}").into() }
}
