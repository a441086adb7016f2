//! The kernels of [`fused`] where they cannot wait for each other. Events order them.
//!
//! For software GPUs, for pools with the race checker, for groups of one, and for groups with peer access in a pool
//! without.
//!
//! ```text
//! own stream    earlier work | ready | wait for peers' ready | own part | done | wait for peers' done | later work
//! host                        `-- meet: descriptors with `ready` --'       `-- steps: `done` ----'
//! ```

use super::{super::choose::Case, Algorithm, Matched, Member, Needs, fused};
use crate::error::Result;
use crate::fabric::types;

pub(crate) struct FusedEvents;

impl Algorithm for FusedEvents {
    fn name(&self) -> &'static str {
        "fused_events"
    }

    fn group(&self, _: &Case<'_>) -> types::Algorithm {
        types::Algorithm::Direct
    }

    fn waits_by(&self) -> &'static str {
        "events"
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.direct && !case.meets_on_devices())
            .then_some("all members have peer access: one kernel each, which carries the least over every link")
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::EVENTS
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        fused::combining(case.largest(), case.members, case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let request = member.request;
        member.ordered_by_events(matched, || {
            let work = matched.shape.work(member.count(), member.rank, request.grain());
            if work.is_empty() {
                return Ok(());
            }
            let at = |rank, side| member.remote(matched, rank, side);
            fused::launch(member, matched, &request.job(&work, at, member.factors(matched)))
        })
    }
}
