//! A program's token for a device: [`Device`], the accesses of one operation ([`op`]), and a capture ([`recording`]).

mod device;
pub(crate) mod op;
pub(crate) mod recording;

pub use device::{Device, DeviceThreadOnly, OnStream};
