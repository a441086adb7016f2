//! Commitments to polynomials: the values at all roots of unity, and a Merkle tree over them.
//!
//! Kernels for GPUs are in `prove.cu`, which `kernels/build.py` compiles. Beside each launch stands its Rust half.

pub mod field;
pub mod merkle;
pub mod ntt;

use gpu_pool::{Device, DeviceBuffer, Module, PinnedBuffer, Result};

pub static MODULE: Module = Module::ptx(include_str!("../ptx/prove.ptx"));

/// The state of a device from job to job.
pub struct Prover {
    roots: DeviceBuffer<u64>,
}

impl Prover {
    pub fn new(dev: &Device) -> Result<Prover> {
        Ok(Prover { roots: dev.upload(&ntt::roots())? })
    }

    /// The root of the tree over the polynomial's values. `coefficients` are at least four, and a power of two. Does
    /// not wait; `as_slice` of the result does.
    #[track_caller]
    pub fn commit(&self, dev: &Device, coefficients: DeviceBuffer<u64>) -> Result<PinnedBuffer<u32>> {
        let values = ntt::transform(dev, &self.roots, coefficients)?;
        let tree = merkle::tree(dev, &values)?;
        let mut root = dev.pinned(8)?;
        dev.download_pinned(&tree.slice(8..16), &mut root)?;
        Ok(root)
    }

    /// The most device memory that [`commit`](Self::commit) holds for `2^log_n` coefficients: the values and the tree.
    pub fn bytes(log_n: u32) -> usize {
        (8 + 16) << log_n
    }
}
