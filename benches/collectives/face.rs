//! Collectives that `Device` does not have yet, by way of the host: right, and slow. An inherent method of the same name
//! comes before the trait's, so that this file goes when they are there.

use gpu_pool::{Device, DeviceBuffer, ReduceOp, Result};

use crate::ops::Number;

/// All sum, whatever `_op` says.
pub trait Face {
    fn all_reduce_by_host<T: Number>(&self, x: &mut DeviceBuffer<T>) -> Result<()>;
    fn reduce_scatter<T: Number>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>, _op: ReduceOp) -> Result<()>;
    fn all_gather<T: Number>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>) -> Result<()>;
    fn broadcast<T: Number>(&self, x: &mut DeviceBuffer<T>, root: usize) -> Result<()>;
    fn all_to_all<T: Number>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>) -> Result<()>;
}

fn sum<T: Number>(all: &[Vec<T>], i: usize) -> T {
    T::narrow(all.iter().map(|x| x[i].wide()).sum())
}

impl Face for Device {
    fn all_reduce_by_host<T: Number>(&self, x: &mut DeviceBuffer<T>) -> Result<()> {
        let all = self.exchange(self.download(x)?)?;
        let sums: Vec<T> = (0..x.len()).map(|i| sum(&all, i)).collect();
        self.upload_into(&sums, x)
    }

    fn reduce_scatter<T: Number>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>, _op: ReduceOp) -> Result<()> {
        let (all, len) = (self.exchange(self.download(src)?)?, dst.len());
        let sums: Vec<T> = (self.rank() * len..(self.rank() + 1) * len).map(|i| sum(&all, i)).collect();
        self.upload_into(&sums, dst)
    }

    fn all_gather<T: Number>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>) -> Result<()> {
        let all = self.exchange(self.download(src)?)?;
        self.upload_into(&all.concat(), dst)
    }

    fn broadcast<T: Number>(&self, x: &mut DeviceBuffer<T>, root: usize) -> Result<()> {
        let mine = if self.rank() == root { self.download(x)? } else { Vec::new() };
        let all = self.exchange(mine)?;
        self.upload_into(&all[root], x)
    }

    fn all_to_all<T: Number>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>) -> Result<()> {
        let (all, len) = (self.exchange(self.download(src)?)?, dst.len() / self.count());
        let mine: Vec<T> = all.iter().flat_map(|x| &x[self.rank() * len..(self.rank() + 1) * len]).copied().collect();
        self.upload_into(&mine, dst)
    }
}
