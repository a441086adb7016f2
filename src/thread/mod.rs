//! The device thread: what it owns ([`worker`]), and how it waits for a peer ([`wait`]).
//! What all threads of a pool did last is a [`flight_record`].
//!
//! Above it stands the token, by which a program gives it work. Below it stand the gang, by which work reaches it, and
//! the state of collectives and of memory, which it owns.

pub(crate) mod flight_record;
pub(crate) mod graph_exec;
mod modules;
pub(crate) mod streams;
pub(crate) mod wait;
pub(crate) mod worker;
