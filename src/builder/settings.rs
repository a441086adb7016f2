//! Checks for settings that contradict each other. Errors name the settings and their values.

use super::{Backend, Builder};
use crate::error::{Error, Result};
use crate::memory::{DeviceHandle, MemoryLimit};
use crate::thread::flight_record::{Recorder, on_signal};
use crate::{collective::Algorithm, driver::ExecutionOrder, fabric::Processes};
use std::sync::Arc;

impl Builder {
    #[track_caller]
    pub(super) fn check_settings(&self) -> Result<()> {
        let alone = self.machine.dry && self.machine.topology.is_none();
        invalid_if!(alone, "build", "`dry` without `topology`: the pool would neither compute nor tell times");
        if let (Some(_), Some(schedule)) = (&self.machine.topology, &self.schedule)
            && *schedule != ExecutionOrder::Virtual
        {
            let why = format_args!("`topology` with `schedule({schedule:?})`: a topology needs the schedule `Virtual`");
            return Err(Error::invalid("build", why));
        }
        let real = self.machine.topology.is_some() && self.backend == Some(Backend::Cuda);
        invalid_if!(real, "build", "`topology` with `cuda`: a topology is for software GPUs");
        let direct = self.staged && self.algorithm == Some(Algorithm::Direct);
        invalid_if!(direct, "build", "`without_peer_access` with `algorithm(Direct)`: its kernels need peer access");
        if let Some(MemoryLimit::Percent(percent)) = self.memory.limit {
            let possible = (0.0..=100.0).contains(&percent);
            invalid_if!(!possible, "build", "`memory_limit_percent({percent})`: a number from 0 to 100");
        }
        let slack = self.memory.slack.filter(|slack| !(slack.is_finite() && *slack >= 1.0));
        invalid_if!(
            slack.is_some(),
            "build",
            "`memory_slack({:?})`: a number of at least 1",
            slack.unwrap_or_default()
        );
        if let (Some(reserve), Some(MemoryLimit::Bytes(limit))) = (self.memory.reserve, self.memory.limit)
            && reserve > limit
        {
            return Err(beyond(reserve, format_args!("`memory_limit({limit})` allows")));
        }
        Ok(())
    }

    /// The pool's flight recorder.
    #[track_caller]
    pub(super) fn recorder(
        &self,
        handles: &[Arc<DeviceHandle>],
        world: Option<&Arc<dyn Processes>>,
    ) -> Result<Arc<Recorder>> {
        let recorder = Arc::new(Recorder::new(handles, world, self.flight_record.clone()));
        if self.flight_record_on_signal == Some(true)
            && let Err(why) = on_signal(&recorder)
        {
            return Err(Error::invalid("build", format_args!("`flight_record_on_signal`: {why}")));
        }
        Ok(recorder)
    }

    #[track_caller]
    pub(super) fn check_memory(&self, handles: &[Arc<DeviceHandle>]) -> Result<()> {
        let Some(reserve) = self.memory.reserve else { return Ok(()) };
        for handle in handles {
            let (device, total) = (handle.device, handle.driver.info().total_memory / handle.sharers as u64);
            let limit = self.memory.limit.map(|limit| (limit, limit.of(total)));
            match limit {
                Some((MemoryLimit::Percent(percent), most)) if reserve > most => {
                    let why = format_args!("`memory_limit_percent({percent})` allows: {most} on device {device}");
                    return Err(beyond(reserve, why));
                }
                _ if reserve > total => return Err(beyond(reserve, format_args!("device {device} has: {total}"))),
                _ => {}
            }
        }
        Ok(())
    }
}

#[track_caller]
fn beyond(reserve: u64, most: std::fmt::Arguments<'_>) -> Error {
    Error::invalid("build", format_args!("`memory_reserve({reserve})` is more bytes than {most}"))
}
