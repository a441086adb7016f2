//! Tests that need a process of their own: for its environment, for libraries that it loads, for signals and forks, or
//! because a GPU is lost in it. Each such test starts this binary again with [`support::again`].

#[path = "../support/mod.rs"]
mod support;

mod crowd;
mod env;
#[cfg(unix)]
mod fork;
mod hang;
#[cfg(feature = "cuda")]
mod lost_gpu;
#[cfg(feature = "cuda")]
mod no_cuda;
#[cfg(unix)]
mod stopped;
