//! Asynchronous all-reduce: the inter-process part runs on a proxy thread, during the backward pass.
//!
//! ```text
//! member    begin: the steps up to the rails, staged | backward pass, later buckets | end: the steps behind the rails
//! proxy     waits for the copies, meets, carries each piece, keeps what comes
//! ```
//!
//! Each device has one proxy in a scope ([`WorldLink::run_in_order`]): a thread that takes the sums in the order of the
//! member's calls. So no device waits for a word of the host, and the order of sums is that of the program. Over rails
//! between devices, and inside a process, the streams do this: there `begin` submits everything. Invariants: a member
//! whose step inside was carried out gives its proxy the rest, or fails the scope of all processes. So does a proxy
//! that does not come to the meeting. Else another member's proxy would wait for ever.
//!
//! [`WorldLink::run_in_order`]: crate::link::WorldLink::run_in_order

use super::Hierarchical;
use super::cut::Cut;
use super::hierarchical::{Carrier, HierarchicalCall, headline};
use super::host_rail::{self, HostRail};
use super::plan::Plan;
use super::rail::{self, HostSide, Landed};
use super::shared_rail::SharedRail;
use crate::internals::*;
use crate::runtime::{AcrossProcesses, DeviceHandle, Gang, Handover, PendingReduce, Place, Request};
use crate::traits::{Arrival, WorldScope};
use gpu_pool::{Error, Group, Result, error::Site};
use std::sync::{
    Arc,
    mpsc::{self, Receiver, Sender},
};

/// A sum on its way. It may be ended in a later scope; if it is dropped, its proxy still does its part.
struct Pending<P> {
    request: Request,
    overlapped: bool,
    carried: Receiver<Carried<P>>,
}

/// The answer of a proxy: a piece, or none behind the last one; with a checker's knowledge.
type Carried<P> = (Result<Option<P>>, Option<Box<Handover>>);

struct ProxyTask<R: HostSide> {
    rail: R,
    scope: Arc<dyn WorldScope>,
    gang: Arc<Gang>,
    handle: Arc<DeviceHandle>,
    members: Arc<[Place]>,
    number: u64,
    /// The first member of this process: all of them say the same.
    speaker: Place,
    call: String,
    site: Site,
    told: Option<Box<Handover>>,
    back: Sender<Carried<R::Piece>>,
    over: bool,
}

/// Begins an all_reduce or a reduce_scatter, on the current stream. None: nothing is left to do. Not for captures.
pub(super) fn start(group: &Group<'_>, request: Request, overlapped: bool) -> Result<Option<Box<dyn PendingReduce>>> {
    let whole = |request: Request| Hierarchical.run(group, &request, overlapped).map(|()| None);
    let hier = HierarchicalCall::new(group, &request.call, overlapped)?;
    let Carrier::Host(transport) = hier.carrier()? else { return whole(request) };
    let Some(plan) = plan(&hier, &request) else { return whole(request) };
    let cuts = host_rail::cuts(&plan);
    Ok(Some(match hier.common_memory(&transport) {
        Some(memory) => {
            let carried = start_by(SharedRail::new(&plan, &cuts, memory)?, &plan, &cuts, &request)?;
            Box::new(Pending { request, overlapped, carried })
        }
        None => {
            let carried = start_by(HostRail::new(&plan, transport), &plan, &cuts, &request)?;
            Box::new(Pending { request, overlapped, carried })
        }
    }))
}

fn start_by<R: HostSide>(
    mut rail: R,
    plan: &Plan<'_, '_, '_>,
    cuts: &[Cut<'_>],
    request: &Request,
) -> Result<Receiver<Carried<R::Piece>>> {
    let (hier, dev, across) = (plan.hier, plan.hier.group.device(), plan.hier.across);
    let (back, carried) = mpsc::channel();
    // Not in a closure: errors must name the caller's line.
    let begun = rail::begin(plan, request, cuts, &mut rail);
    let given = begun.and_then(|()| {
        // The proxy waits for the copies, and not for what this stream does next.
        hier.done(dev.core().record_early(request.call.op))?;
        let task = ProxyTask {
            rail,
            scope: hier.scope.clone(),
            gang: dev.own_gang().clone(),
            handle: dev.handle().clone(),
            members: across.places.clone(),
            number: hier.next_number(),
            speaker: across.places[across.hosts[across.me].ranks[0]],
            call: headline(&request.call, None).to_string(),
            site: request.call.site,
            told: dev.handle().hand_over(),
            back,
            over: false,
        };
        hier.done(hier.link.run_in_order(dev.index(), Box::new(move || task.run())))?;
        Ok(())
    });
    match given {
        Ok(()) => Ok(carried),
        Err(error) => {
            // Some failures of a gang are told to nobody, since each process finds them.
            if let Some((by, cause)) = dev.own_gang().cause() {
                hier.scope.fail(Some(by), &cause);
            }
            Err(error)
        }
    }
}

impl<P: Landed + Send> PendingReduce for Pending<P> {
    fn end(self: Box<Self>, group: &Group<'_>) -> Result<()> {
        let Pending { request, overlapped, carried } = *self;
        let hier = HierarchicalCall::new(group, &request.call, overlapped)?;
        let plan = plan(&hier, &request).expect("it was begun");
        let _waits = group.device().note_call(&request.call);
        let mut next = || {
            let (piece, told) = carried.recv().map_err(|_| no_proxy(&request))?;
            group.device().handle().take_over(told.as_deref());
            piece
        };
        rail::end(&plan, &request, &host_rail::cuts(&plan), &mut next)
    }
}

fn plan<'t, 'g, 'd>(hier: &'t HierarchicalCall<'g, 'd>, request: &Request) -> Option<Plan<'t, 'g, 'd>> {
    Plan::new(hier, (request.dtype, request.reduce), request.shape.as_ref()?)
}

fn no_proxy(request: &Request) -> Error {
    Error::invalid_at(request.call.site, request.call.op, "the thread that carried it has ended")
}

impl<R: HostSide> ProxyTask<R> {
    fn run(mut self) {
        // Else a transport's library could make the context of GPU 0 on this thread.
        let _ = self.handle.driver.bind();
        self.handle.take_over(self.told.take().as_deref());
        let carried = self.run_all();
        self.over = true;
        // Of a mismatch every process hears.
        if let Err(error) = &carried
            && !matches!(error, Error::WorldMismatch { .. })
        {
            self.fail(error);
        }
        self.give(carried.map(|()| None));
    }

    fn run_all(&mut self) -> Result<()> {
        self.rail.staged()?;
        let commit = self.scope.meet(Arrival {
            members: &self.members,
            number: self.number,
            place: self.speaker,
            call: &self.call,
            site: self.site,
            leads: true,
            proxied: true,
            note: self.rail.note(),
        })?;
        self.rail.committed(commit, true)?;
        while let Some(piece) = self.rail.carry_next()? {
            self.handle.advance();
            self.give(Ok(Some(piece)));
        }
        Ok(())
    }

    fn fail(&self, error: &Error) {
        self.gang.poison(self.handle.device, error.clone());
        // Another member may have failed first, and this is what came of it.
        let (by, cause) = self.gang.cause().unwrap_or_else(|| (self.handle.device, error.clone()));
        self.scope.fail(Some(by), &cause);
    }

    /// The member may have given it up.
    fn give(&self, carried: Result<Option<R::Piece>>) {
        let _ = self.back.send((carried, self.handle.hand_over()));
    }
}

impl<R: HostSide> Drop for ProxyTask<R> {
    fn drop(&mut self) {
        if !self.over {
            self.fail(&Error::custom("the thread that carries gradients between processes has ended early"));
        }
    }
}
