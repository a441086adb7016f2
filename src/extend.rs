//! The internal interface for the crates of this workspace above this one: `gpu-pool-train`, `gpu-pool-cluster`,
//! `gpu-pool-lab`, `gpu-pool-cli`.
//!
//! **Exempt from semver.** Everything here may change in any release; the crates of one version belong together.
//!
//! **Exempt from soundness, too.** Safe functions here trust their callers: views of other types and lengths, exclusive
//! views of shared memory, raw addresses, and points at which the library itself fails. A program must not call them.
//!
//! It re-exports types of lower rooms, and gives methods that are no part of the public face, as traits.

/// A trait for a type of this crate: `fn name[generics](self: &Self, ..) -> .. = body;`. Without a body, the method
/// calls the inherent one of its name. A function without `self` has a comma in its place.
macro_rules! internals {
    ($(#[$doc:meta])* trait $name:ident [$($bounds:tt)*] ($($param:tt)?) for $type:ty {$(
        $(#[$method_doc:meta])*
        fn $method:ident [$($generics:tt)*] ($($self:ident: $receiver:ty)? $(, $arg:ident: $arg_type:ty)* $(,)?)
            $(-> $result:ty)? $(= $body:expr)?;
    )*}) => {
        $(#[$doc])*
        pub trait $name<$($bounds)*>: Sized {$(
            $(#[$method_doc])*
            #[track_caller]
            #[allow(clippy::too_many_arguments)]
            fn $method<$($generics)*>($($self: $receiver,)? $($arg: $arg_type),*) $(-> $result)?;
        )*}

        impl<$($bounds)*> $name<$($param)?> for $type {$(
            #[track_caller]
            fn $method<$($generics)*>($($self: $receiver,)? $($arg: $arg_type),*) $(-> $result)? {
                internals!(@ [$($body)?] [$($self)?] Self::$method($($arg),*))
            }
        )*}
    };
    (@ [] [] $($call:tt)*) => { $($call)* };
    (@ [] [$self:ident] Self::$method:ident($($arg:tt)*)) => { $self.$method($($arg)*) };
    (@ [$body:expr] [$($self:ident)?] $($call:tt)*) => { $body };
}

/// Drivers, for tests of the driver's contract and for layers over drivers.
pub mod driver {
    pub use crate::driver::*;
}

/// The lock-free parts, for measurements.
pub mod sync {
    pub use crate::sync::*;
}

pub mod cli;
pub mod cluster;
pub mod lab;
pub mod train;

use crate::{Device, Error, GpuPool, Result, error::Site};
pub use crate::{
    contain::contain,
    error::op_site::{OpGuard, OpSite},
    panics::{SilencedPanics, silence_panics},
};
use std::fmt::Display;

/// The frame of the examples in the documentation: a closure on one software GPU.
///
/// # Panics
/// If it fails.
#[track_caller]
pub fn example(f: impl Fn(&Device) -> Result<()> + Sync) {
    GpuPool::builder().host(1).build().and_then(|pool| pool.run(|dev, _| f(dev))).expect("an example works");
}

/// For [`event!`](crate::event): events, which go to the user's `tracing` subscriber or to stderr.
pub mod log {
    pub use crate::log::{has_subscriber, is_wanted, write};
    pub use tracing;
}

internals! {
    /// Errors at the site of the user's call.
    trait ErrorInternals [] () for Error {
        fn invalid[](, op: &'static str, why: impl Display) -> Self;
        /// [`invalid`](Self::invalid) with a known site, because `#[track_caller]` does not work through closures.
        fn invalid_at[](, site: Site, op: &'static str, why: impl Display) -> Self;
        fn wrong_pool[](, op: &'static str, device: usize) -> Self;
        /// Memory of device `device` that is lent to another process.
        fn borrowed[](, op: &'static str, device: usize) -> Self;
        fn wrong_device[](, op: &'static str, buffer: usize, device: usize) -> Self;
    }
}
