//! Proxy threads in the search: they stand behind the scope's devices in its list. Each process arrives when all of its
//! proxy threads have.

use super::{Arrive, Class, Device, Member, Op, Search, State};
use std::sync::Arc;

impl Search {
    /// A step of a proxy thread that carries collective `number` of these members.
    pub(super) fn carry(
        &self,
        state: &State,
        (at, which, thread): (usize, usize, usize),
        (members, number): (&'static [Member], u64),
        stack: &mut Vec<State>,
    ) -> Result<(), String> {
        let mut next = state.clone();
        let host = &mut *next.hosts[at];
        let runner = &mut host.runners[which];
        let (scripts, devices) = (self.program.hosts[at][which][runner.scope].1, &mut runner.devices);
        if devices[thread].failed {
            return Ok(());
        }
        let key = (runner.id, Arc::from(members), number);
        if !devices[thread].arrived {
            let arrive = Arrive {
                arrival: 0,
                scope: runner.id,
                members: members.into(),
                number,
                device: members.iter().find(|member| member.0 as usize == at).map_or(0, |member| member.1),
                known: None,
                behind: None,
                proxied: true,
                call: "".into(),
                site: "".into(),
                note: Vec::new(),
            };
            devices[thread].arrived = true;
            let told = host.process.arrive(&key, Some(arrive));
            next.tell(at, told);
            stack.push(next);
            return Ok(());
        }
        match host.process.committed(&key) {
            None => return Ok(()),
            Some(Err(_)) => devices[thread].failed = true,
            Some(Ok(taken)) => {
                host.process.close(Class::Collective, taken.window);
                let staged = |(script, device): (&&[Op], &Device)| {
                    let place = script.iter().position(|op| *op == Op::Carry(members, number));
                    place.is_some_and(|place| device.at > place || device.at == place && device.arrived)
                };
                let staged = scripts.iter().zip(&*devices).filter(|both| staged(*both)).count();
                if staged < members.iter().filter(|member| member.0 as usize == at).count() {
                    return Err(format!("host {at} has committed what not all of its members have staged"));
                }
                devices[thread] = Device { at: devices[thread].at + 1, ..Device::default() };
            }
        }
        stack.push(next);
        Ok(())
    }
}
