//! The kernels of [`fused`] where they cannot wait for each other. Events order them.
//!
//! `choose` picks it on software GPUs, under the race checker, in a group of one, and in a group with peer access whose
//! pool has none.
//!
//! ```text
//! own stream    earlier work | ready | wait for peers' ready | own part | done | wait for peers' done | later work
//! host                        `-- meet: descriptors with `ready` --'       `-- steps: `done` ----'
//! ```

use super::{Algorithm, Case, Matched, Member, Needs, fused};
use crate::error::Result;

pub(crate) struct FusedEvents;

impl Algorithm for FusedEvents {
    about!("fused_events", Direct, "events");

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
        let work = matched.shape.work(member.count(), member.rank, member.request.grain());
        member.carry_out(matched, &work, |job| fused::launch(member, matched, job))
    }
}
