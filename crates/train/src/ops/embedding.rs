//! Rows of a table by their numbers, and the gradient of that: `kernels/embedding.cu`. Invariant: the gradient adds up
//! in the order of the indices, without atomics: the same bits every run.

use super::family::{In, Out, each_row, kernels, small, wide};
use crate::kernels::EMBEDDING;
use crate::runtime::{Operations, Real, as_type, as_type_mut, lanes, rows_of, same_len, stride};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceCopy, DeviceView, Kernel, LaunchDims, Result, kernel, kernel::Float,
};
use std::collections::BTreeMap;

/// The types of indices and labels: `u32` and `i32`. A negative `i32` is out of range. Others are converted by
/// [`Device::cast`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no type of indices or labels",
    note = "indices and labels are u32 or i32; `dev.cast::<u32, _>(&x)` converts others"
)]
pub trait Index: DeviceCopy + sealed::Sealed {
    /// The same memory as words: a negative number is greater than every bound.
    #[doc(hidden)]
    fn words(view: DeviceView<'_, Self>) -> DeviceView<'_, u32> {
        let n = view.len();
        // SAFETY: all these types have four bytes.
        unsafe { as_type(view, n) }
    }
    #[doc(hidden)]
    fn show(word: u32) -> String;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for i32 {}
}
impl Index for u32 {
    fn show(word: u32) -> String {
        word.to_string()
    }
}
impl Index for i32 {
    fn show(word: u32) -> String {
        (word as i32).to_string()
    }
}

kernel! {
    static GATHER: "gather_rows" in EMBEDDING,
    fn(table: &[u8], indices: &[u32], out: &mut [u8], n: u64, width: u64, rows: u32) |_dims| {
        let width = width as usize;
        for (out, &index) in out.chunks_exact_mut(width).zip(indices).take(n as usize) {
            match index < rows {
                true => out.copy_from_slice(&table[index as usize * width..][..width]),
                false => out.fill(0xff),
            }
        }
    }
}

/// Indices whose rows are added up by themselves: as in `kernels/embedding.cu`.
const PIECE: usize = 1024;

kernels! { EMBEDDING;
    fn backward(_, dy: In<T>, indices: In<u32>, dtable: Out<T>, n: u64, cols: u32, rows: u32) = "embedding_backward" {
        let (mut sums, zeros) = (BTreeMap::<u32, Vec<T::Acc>>::new(), vec![T::Acc::of(0.0); cols as usize]);
        let dy: Vec<&[T]> = each_row(dy, n, cols).collect();
        for (dy, indices) in dy.chunks(PIECE).zip(indices.chunks(PIECE)) {
            let mut parts = BTreeMap::<u32, Vec<T::Acc>>::new();
            for (dy, &index) in dy.iter().zip(indices).filter(|&(_, &index)| index < rows) {
                let part = parts.entry(index).or_insert_with(|| zeros.clone());
                part.iter_mut().zip(*dy).for_each(|(sum, dy)| *sum += wide(dy));
            }
            for (index, part) in parts {
                let sum = sums.entry(index).or_insert_with(|| zeros.clone());
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        for (index, sums) in sums {
            let row = &mut dtable[index as usize * cols as usize..][..cols as usize];
            row.iter_mut().zip(sums).for_each(|(x, sum)| *x = T::narrow(wide(x) + sum));
        }
    }
}

/// Rows of a table by their numbers. Streams and errors: see [`ops`](super).
pub trait Embeddings: Operations {
    /// The rows `indices` of `table`, of `cols` elements, one after the other, in a new buffer: PyTorch's `embedding`.
    ///
    /// An index that is no row gives a row of NaN; [`check_indices`](super::Rows::check_indices) waits, and names it.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let table = dev.upload(&[0.0f32, 1.0, 10.0, 11.0, 20.0, 21.0])?; // 3 x 2
    /// let rows = dev.embedding(&table, 2, &dev.upload(&[2i32, 0, 2])?)?;
    /// assert_eq!(dev.download(&rows)?, [20.0, 21.0, 0.0, 1.0, 20.0, 21.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn embedding<X: AsView<Elem: Float>, L: AsView<Elem: Index>>(
        &self,
        table: &X,
        cols: usize,
        indices: &L,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let (table, indices) = (table.view(), L::Elem::words(indices.view()));
        let _here = self.enter("embedding");
        let rows = small("embedding", "rows", rows_of("embedding", table.len(), cols)?)?;
        let n = indices.len();
        let mut out = self.allocate::<X::Elem>("embedding", n.saturating_mul(cols))?;
        let (width, bytes) = (cols * size_of::<X::Elem>(), out.len() * size_of::<X::Elem>());
        let table_bytes = table.len() * size_of::<X::Elem>();
        // SAFETY: these are the bytes of both.
        let (table, to) =
            unsafe { (as_type::<_, u8>(table, table_bytes), as_type_mut::<_, u8>(out.view_mut(), bytes)) };
        let args = (table, indices, to, n as u64, width as u64, rows);
        // SAFETY: `table` has `rows` rows of `width` bytes, `out` has `n`, and there are `n` indices.
        unsafe { self.launch(&GATHER, stride(bytes.div_ceil(64)), args)? };
        Ok(out)
    }

    /// The gradient of [`embedding`](Self::embedding), added to `dtable`, rows of `cols` elements: the row `indices[i]`
    /// gets the `i`-th row of `dy`. Rows that no index names are not touched. An index that is no row is ignored.
    ///
    /// The order of the additions is that of `indices`, in `f32` (of `f64` in `f64`): those of each 1024 indices, then
    /// these sums, so that a row that millions name is right, too. Each row of the table is rounded once: the same bits
    /// every run, without atomics. It costs more than atomics do: for each row of the table
    /// the GPU looks through all indices. That is a table's rows times the indices in reads of 4 bytes, mostly from
    /// caches; and a row that very many indices name (padding, say) is added up by one block.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let (dy, indices) = (dev.upload(&[1.0f32, 2.0, 4.0])?, dev.upload(&[1u32, 0, 1])?);
    /// let mut dtable = dev.upload(&[0.0f32, 100.0, 7.0])?; // 3 x 1
    /// dev.embedding_backward(&dy, 1, &indices, &mut dtable)?;
    /// assert_eq!(dev.download(&dtable)?, [2.0, 105.0, 7.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn embedding_backward<L: AsView<Elem: Index>, X: AsViewMut<Elem: Float>>(
        &self,
        dy: &impl AsView<Elem = X::Elem>,
        cols: usize,
        indices: &L,
        dtable: &mut X,
    ) -> Result<()> {
        const OP: &str = "embedding_backward";
        let (dy, indices, dtable) = (dy.view(), L::Elem::words(indices.view()), dtable.view_mut());
        let _here = self.enter(OP);
        let rows = small(OP, "rows", rows_of(OP, dtable.len(), cols)?)?;
        let n = rows_of(OP, dy.len(), cols)?;
        same_len(OP, n, indices.len())?;
        let pieces = cols.div_ceil(256 * lanes::<X::Elem>()).min(65535) as u32;
        let dims = LaunchDims { grid: (rows.max(1), pieces, 1), block: (256, 1, 1), shared_bytes: 0 };
        let kernel: Kernel<_> = backward::<X::Elem>();
        // SAFETY: `dy` has `n` rows of `cols` elements, `dtable` has `rows`, and there are `n` indices.
        unsafe { self.launch(&kernel, dims, (dy, indices, dtable, n as u64, cols as u32, rows)) }
    }
}

impl Embeddings for Device {}
