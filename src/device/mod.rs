//! The operations of one device alone: `impl Device` by subject.
//!
//! Programs call these methods in a scope. Each begins an operation ([`Op`](crate::token::op::Op)), which checks and
//! orders its memory. This room may use copies and kernels, and everything below the token; it knows no collectives.
//! The token itself, its identity and its current stream are in [`token`](crate::token).

// In the order in which rustdoc shows the methods: common ones first.
mod copies;
mod memory;

mod launch;
mod streams;

mod adopt;
