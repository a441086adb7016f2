//! What safe code, or bad luck, could do to the library. Each of these attacks once worked.

#[path = "../support/mod.rs"]
mod support;

mod bomb;
mod memory;
#[cfg(feature = "blas")]
mod operations;
mod steps;
mod user_code;
#[cfg(feature = "blas")]
mod views;
