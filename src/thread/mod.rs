//! The device thread: its state ([`worker`]), and its waits for a peer ([`wait`]).
//! The last calls of all threads of a pool are a [`flight_record`].
//!
//! Above it stands the token, by which a program gives it work. Below it stand the gang, by which work reaches it, and
//! the state of collectives and of memory, which it owns.

pub(crate) mod flight_record;
pub(crate) mod graph_exec;
mod modules;
pub(crate) mod streams;
pub(crate) mod wait;
pub(crate) mod worker;
