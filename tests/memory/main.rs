//! The memory pool, from outside: what the suites of other allocators ask of theirs, and what has bitten their users.
//! `README.md` maps each of their tests to ours.
//!
//! Nearly every test runs on software GPUs and on CUDA, over every backing, with the checker on. None asserts wall
//! time: work that must still be going on is held by a [`rig::Gate`].

#[path = "../support/mod.rs"]
mod support;

mod aborts;
mod audit;
mod basics;
mod callbacks;
#[path = "../support/checklist.rs"]
mod checklist;
mod checklist_tests;
mod devices;
mod faults;
mod fragmentation;
mod fuzz;
mod insight;
mod lifetime;
mod limits;
mod oom;
mod pinned;
mod rig;
mod seven;
mod slack;
mod steady;
mod streams;
mod threads;
