//! The lock-free parts of this crate: the only place with atomics.
//!
//! loom checks each part (`cargo loom`). Every memory ordering has a name, and a test shows that a model fails without
//! that ordering. Atomics, locks and threads come only from `shim`. `README.md` lists the parts and their protocols
//! with proofs and the limits of loom. This room uses only `contain`.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]
// For `cargo loom-lint`: no code here bypasses the shim. The crate's root allows that elsewhere.
#![cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]

/// The number of rounds of a test: few under Miri, which sees every access, and is a thousand times slower.
#[cfg(all(test, not(loom)))]
pub(crate) const fn rounds(usual: usize) -> usize {
    match cfg!(miri) {
        true if usual > 30_000 => 300,
        true if usual > 500 => usual / 100,
        true => 5,
        false => usual,
    }
}

mod broadcast_slot;
pub mod byte_ring;
mod commit;
mod event_count;
mod gate;
mod history;
mod inbox;
pub mod journal;
mod latch;
mod launch_gate;
mod linked;
mod mirror;
mod one_shot;
mod refs;
mod returns;
pub mod ring;
mod sequence;
pub mod shim;
pub mod site;
mod spares;
mod thread_only;
mod ticks;
mod turnstile;
mod word;

pub use broadcast_slot::BroadcastSlot;
pub use commit::CommitWord;
pub use event_count::EventCount;
pub use gate::Gate;
pub use history::History;
pub use inbox::Inbox;
pub use latch::CountLatch;
#[cfg(feature = "cuda")]
pub(crate) use launch_gate::Blocking;
pub(crate) use launch_gate::LaunchGate;
pub use linked::{Link, Linked, Taken};
pub use mirror::Mirror;
pub(crate) use one_shot::OneShot;
pub use refs::RefCount;
pub use returns::Returns;
#[doc(hidden)]
pub use sequence::unique_id;
pub use sequence::{Flag, Sequence};
pub use spares::Spares;
pub(crate) use thread_only::{NotDeviceThreadOnly, Returned, device_thread_only};
pub(crate) use ticks::{Scale, ticks};
pub use turnstile::Turnstile;
pub use word::{load_word, raise_word, store_word};

default_is_new!(CommitWord, EventCount, Flag, Gate, LaunchGate, RefCount, Sequence, Turnstile);
default_is_new!(BroadcastSlot<N> [const N: usize], Mirror<N> [const N: usize], Spares<T> [T]);
