//! The device thread: what it owns ([`worker`]), and how it waits for a peer ([`wait`]).
//!
//! Above it stands the token, by which a program gives it work; below it the gang, by which work reaches it.

pub(crate) mod wait;
pub(crate) mod worker;
