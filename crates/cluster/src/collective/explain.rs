//! The answer of [`Group::explain`](gpu_pool::Group::explain) for a group of several processes: by the same cut and the
//! same steps as [`rail::run`](super::rail::run).

use super::hierarchical::{Carrier, HierarchicalCall};
use super::native::Direct;
use super::plan::Plan;
use super::relay::Relay;
use super::{device_rail, host_rail};
use crate::runtime::{Call, Hierarchy, Shape};
use gpu_pool::{DType, Group, ReduceOp, Result};

#[track_caller]
pub(super) fn hierarchy(group: &Group<'_>, (dtype, op): (DType, ReduceOp), len: usize) -> Result<Hierarchy> {
    let call = Call::new("explain").elements(dtype, len).reducing(op);
    let hier = HierarchicalCall::new(group, &call, false)?;
    let shape = Shape::AllReduce { len };
    let Some(plan) = Plan::new(&hier, (dtype, op), &shape) else { unreachable!("an all_reduce has a plan") };
    let (transport, sums, pieces, overlapped) = match hier.carrier()? {
        Carrier::Host(transport) => {
            let sums = "in the memory of the hosts, in the order of processes";
            let pieces = host_rail::cuts(&plan);
            let overlapped = pieces.len() > 1;
            (transport.name(), sums.to_owned(), pieces, overlapped)
        }
        Carrier::Device(transport) => {
            let (cuts, overlapped) = device_rail::cuts(&plan, &*transport);
            let relay = Relay::new(&hier, transport.clone(), overlapped)?;
            let native = plan.job.sum().and_then(|outer| relay.native(dtype, outer));
            let sums = match (relay.direct(&plan, op, false), native) {
                (Some(Direct::Own(_)), _) => "by own kernels between the GPUs, in the order of ranks",
                (Some(_), _) => "by the transport, in the members' own memory",
                (None, Some(_)) => "by the transport",
                (None, None) => "by kernels, in the order of processes",
            };
            match relay.pad(dtype, len) {
                Ok(_) => ("inbox", sums.to_owned(), cuts, overlapped),
                Err(why) if why.is_empty() => (transport.name(), sums.to_owned(), cuts, overlapped),
                Err(why) => (transport.name(), format!("{sums}; not by own kernels: {why}"), cuts, overlapped),
            }
        }
    };
    // All pieces but the last one are equal.
    let largest = &pieces[0];
    let slice = (0..hier.here.count()).map(|here| largest.slice(here).len()).max().unwrap_or(0);
    Ok(Hierarchy {
        processes: hier.across.hosts.len(),
        rails: hier.rail_map.all.len(),
        transport,
        sums,
        pieces: pieces.len(),
        piece: slice * dtype.size(),
        overlapped,
        inner: plan.inner.unwrap_or(op),
        scatter: plan.before(largest),
        gather: plan.after(largest),
    })
}
