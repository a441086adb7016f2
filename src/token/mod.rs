//! What a program holds of a device thread: the accesses of one operation ([`op`]), and a capture ([`recording`]).

pub(crate) mod op;
pub(crate) mod recording;
