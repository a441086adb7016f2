//! The checker on software GPUs, at the level of the driver: each mistake is caught, and its mended twin is silent.

mod events;
mod flags;
mod hooks;
mod knowledge;
mod memory;
mod pytorch;
mod races;
mod reports;
mod rig;
mod silence;
mod waits;
