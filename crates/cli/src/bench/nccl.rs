//! NCCL beside the crate's own collectives, if it is found: a rank on each device, and the operations in its words.

use super::{number::Number, op::Case};
use gpu_pool::{Device, DeviceBuffer, GpuPool, PerDevice, Result};
#[cfg(feature = "cuda")]
pub use gpu_pool_cluster::peer::Peer;

/// There is none in this build.
#[cfg(not(feature = "cuda"))]
pub enum Peer {}

/// A rank for each device, and the library's version; or why there are none.
#[cfg(feature = "cuda")]
pub fn join(pool: &GpuPool) -> Result<(PerDevice<Peer>, String), String> {
    if pool.report().devices.iter().any(|device| device.pci_bus_id.is_empty()) {
        return Err("these are software GPUs".to_owned());
    }
    let text = |error: gpu_pool::Error| error.to_string();
    let id = gpu_pool_cluster::peer::Id::new().map_err(text)?;
    Ok((pool.per_device(|dev, _| Peer::join(dev, id)).map_err(text)?, id.version()))
}

#[cfg(not(feature = "cuda"))]
pub fn join(_: &GpuPool) -> Result<(PerDevice<Peer>, String), String> {
    Err("this program was built without the feature `cuda`".to_owned())
}

/// Submits so many calls, from one buffer to the other or within `dst`.
#[cfg(feature = "cuda")]
pub fn submit<T: Number>(
    (peer, dev): (&Peer, &Device),
    case: &Case,
    src: Option<&DeviceBuffer<T>>,
    dst: &mut DeviceBuffer<T>,
    calls: u32,
) -> Result<()> {
    use super::op::Op;
    use gpu_pool_cluster::peer::Op as Theirs;
    let reduce = case.reduction.op();
    let op = match case.op {
        Op::AllReduce => Theirs::AllReduce(reduce),
        Op::AllGather => Theirs::AllGather,
        Op::ReduceScatter => Theirs::ReduceScatter(reduce),
        Op::Broadcast => Theirs::Broadcast(case.root),
        Op::Reduce => Theirs::Reduce(reduce, case.root),
        Op::AllToAll => Theirs::AllToAll,
        Op::Sendrecv => Theirs::SendRecv,
    };
    peer.submit(dev, op, src, dst, calls)
}

#[cfg(not(feature = "cuda"))]
pub fn submit<T: Number>(
    (peer, _): (&Peer, &Device),
    _: &Case,
    _: Option<&DeviceBuffer<T>>,
    _: &mut DeviceBuffer<T>,
    _: u32,
) -> Result<()> {
    match *peer {}
}
