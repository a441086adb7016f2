//! Sums of all elements before one, and elements in order: `kernels/order.cu`.
//!
//! A scan adds up each tile, scans these sums, and adds them to the sums in the tiles. A sort does so with counts of
//! digits, 4 bits at a time. Invariant: the order of additions depends on the length alone: the same bits in every run.

use super::family::{In, Out, kernels, small};
use super::number::{Number, Word, by_word, key};
use crate::kernels::ORDER;
use crate::runtime::{Operations, as_type, as_type_mut};
use gpu_pool::{AsView, AsViewMut, DType, Device, DeviceBuffer, DeviceView, DeviceViewMut, LaunchDims, Result};

const TILE: usize = 2048;
const THREADS: u32 = 256;
const DIGITS: usize = 16;

fn digit<W: Word>(x: W, shift: u32, kind: u32) -> usize {
    (key(x, kind) >> shift) as usize % DIGITS
}

kernels! { ORDER of Number;
    fn scan_sums(_, x: In<T>, sums: Out<T::Sum>, n: u64) = "scan_sums" {
        let zero = <T::Sum as bytemuck::Zeroable>::zeroed();
        for (sum, tile) in sums.iter_mut().zip(x[..n as usize].chunks(TILE)) {
            *sum = tile.iter().fold(zero, |sum, x| T::Sum::plus(sum, T::to_sum(*x)));
        }
    }
    fn scan_kernel(_, x: In<T>, offsets: In<T::Sum>, y: Out<T>, n: u64, exclusive: u32) = "scan" {
        let tiles = x[..n as usize].chunks(TILE).zip(y.chunks_mut(TILE));
        for (offset, (x, y)) in offsets.iter().zip(tiles) {
            let mut sum = *offset;
            for (x, y) in x.iter().zip(y) {
                let next = T::Sum::plus(sum, T::to_sum(*x));
                *y = T::of_sum(if exclusive != 0 { sum } else { next });
                sum = next;
            }
        }
    }
}
kernels! { ORDER of Word;
    fn digits(_, x: In<T>, counts: Out<u32>, n: u64, shift: u32, kind: u32) = "digits" {
        let tiles = counts.len() / DIGITS;
        counts.fill(0);
        for (tile, x) in x[..n as usize].chunks(TILE).enumerate() {
            x.iter().for_each(|x| counts[digit(*x, shift, kind) * tiles + tile] += 1);
        }
    }
    fn scatter(_, x: In<T>, y: Out<T>, places: In<u32>, n: u64, shift: u32, kind: u32) = "scatter" {
        let (tiles, mut next) = (places.len() / DIGITS, places.to_vec());
        for (tile, x) in x[..n as usize].chunks(TILE).enumerate() {
            for x in x {
                let place = &mut next[digit(*x, shift, kind) * tiles + tile];
                y[*place as usize] = *x;
                *place += 1;
            }
        }
    }
}

/// Running sums and sorting, of floats and integers ([`Number`]). They take memory of the size of the buffer beside the
/// result. Two runs give the same bits. Streams and errors: see [`ops`](super).
pub trait Orders: Operations {
    /// The sum of each element and all before it, in a new buffer (`cumsum` of PyTorch and NumPy). Half types are added
    /// up in `f32`, and each sum is rounded once; integers wrap, in their own type.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[3u32, 1, 4, 1, 5])?;
    /// assert_eq!(dev.download(&dev.inclusive_sum(&x)?)?, [3, 4, 8, 9, 14]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn inclusive_sum<X: AsView<Elem: Number>>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>> {
        let (x, _here) = (x.view(), self.enter("inclusive_sum"));
        let mut y = self.allocate("inclusive_sum", x.len())?;
        scan(self.device(), "inclusive_sum", x, y.view_mut(), false)?;
        Ok(y)
    }

    /// The sum of all elements before each one, 0 for the first, in a new buffer. As
    /// [`inclusive_sum`](Self::inclusive_sum). The places of parts that follow each other, from their lengths.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let lens = dev.upload(&[3u32, 1, 4, 1, 5])?;
    /// assert_eq!(dev.download(&dev.exclusive_sum(&lens)?)?, [0, 3, 4, 8, 9]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn exclusive_sum<X: AsView<Elem: Number>>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>> {
        let (x, _here) = (x.view(), self.enter("exclusive_sum"));
        let mut y = self.allocate("exclusive_sum", x.len())?;
        scan(self.device(), "exclusive_sum", x, y.view_mut(), true)?;
        Ok(y)
    }

    /// The elements in rising order, in a new buffer. Floats go by [`f32::total_cmp`]: -0 before 0, NaNs at the ends.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[0.5f32, -1.0, 3.0, -2.5])?;
    /// assert_eq!(dev.download(&dev.sort(&x)?)?, [-2.5, -1.0, 0.5, 3.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for 2^31 elements or more; else see above.
    #[track_caller]
    fn sort<X: AsView<Elem: Number>>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>> {
        let (x, dev, _here) = (x.view(), self.device(), self.enter("sort"));
        let mut y = self.allocate("sort", x.len())?;
        dev.copy(&x, &mut y)?;
        sort(dev, "sort", y.view_mut())?;
        Ok(y)
    }

    /// [`sort`](Self::sort) in place. Errors: as [`sort`](Self::sort).
    #[track_caller]
    fn sort_in_place<X: AsViewMut<Elem: Number>>(&self, x: &mut X) -> Result<()> {
        let (x, _here) = (x.view_mut(), self.enter("sort_in_place"));
        sort(self.device(), "sort_in_place", x)
    }
}

impl Orders for Device {}

/// A block for each tile. A block goes on with a further one where a grid cannot have as many.
fn blocks(tiles: usize) -> LaunchDims {
    LaunchDims { grid: (tiles.min(1 << 20) as u32, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 }
}

fn scan<T: Number>(
    dev: &Device,
    op: &'static str,
    x: DeviceView<'_, T>,
    y: DeviceViewMut<'_, T>,
    exclusive: bool,
) -> Result<()> {
    let (n, tiles) = (x.len() as u64, x.len().div_ceil(TILE));
    let offsets = match tiles {
        0 => return Ok(()),
        1 => dev.zeros::<T::Sum>(1)?,
        _ => {
            let (mut sums, mut offsets) = (dev.allocate::<T::Sum>(op, tiles)?, dev.allocate::<T::Sum>(op, tiles)?);
            // SAFETY: the kernel reads `n` elements, and writes a sum for each tile.
            unsafe { dev.launch(&scan_sums::<T>(), blocks(tiles), (x, &mut sums, n))? };
            scan::<T::Sum>(dev, op, sums.view(), offsets.view_mut(), true)?;
            offsets
        }
    };
    // SAFETY: `x` and `y` have `n` elements, and there is an offset for each tile.
    unsafe { dev.launch(&scan_kernel::<T>(), blocks(tiles), (x, &offsets, y, n, u32::from(exclusive))) }
}

fn sort<T: Number>(dev: &Device, op: &'static str, mut x: DeviceViewMut<'_, T>) -> Result<()> {
    let (len, tiles) = (x.len(), x.len().div_ceil(TILE));
    small(op, "elements", len)?;
    if len < 2 {
        return Ok(());
    }
    let mut counts = dev.allocate::<u32>(op, DIGITS * tiles)?;
    let mut places = dev.allocate::<u32>(op, DIGITS * tiles)?;
    let mut other = dev.allocate::<T>(op, len)?;
    // An even number of passes, so the last one ends in `x`.
    for shift in (0..8 * size_of::<T>() as u32).step_by(DIGITS.ilog2() as usize) {
        let (from, to) = match shift / DIGITS.ilog2() % 2 {
            0 => (x.view(), other.view_mut()),
            _ => (other.view(), x.view_mut()),
        };
        by_word!(T, W => {
            let n = len as u64;
            // SAFETY: words are as large as the elements; counts and places are 16 for each tile. The kernels look at
            // each place: between them a graph that another device launches may write `x`.
            unsafe {
                let (from, to) = (as_type::<T, W>(from, len), as_type_mut::<T, W>(to, len));
                dev.launch(&digits::<W>(), blocks(tiles), (from, &mut counts, n, shift, T::KIND))?;
                scan::<u32>(dev, op, counts.view(), places.view_mut(), true)?;
                dev.launch(&scatter::<W>(), blocks(tiles), (from, to, &places, n, shift, T::KIND))?;
            }
        });
    }
    Ok(())
}
