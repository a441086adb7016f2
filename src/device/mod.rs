//! The operations of one device alone: `impl Device` by subject.
//!
//! Each begins an [`Op`](crate::token::op::Op), which checks and orders its memory. This room knows no collectives.

// In the order in which rustdoc shows the methods: common ones first.
mod copies;
mod memory;

mod launch;
mod streams;

mod adopt;
