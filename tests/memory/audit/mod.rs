//! `Check::Memory`: who writes past the end of a buffer is found out, who reads a dropped one finds poison, and who
//! does neither hears nothing. What no ordering can catch: a kernel that writes one element too far is in order with
//! everything.
//!
//! Poisoned frees were asked for in pytorch#58385; tools that watch allocations see one live allocation where a pool
//! has many blocks (RMM's README says so of compute-sanitizer).

mod captures;
mod finds;
mod pinned;
mod rig;
mod silence;
mod subscriber;
