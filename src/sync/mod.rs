//! The lock-free parts, and the only place in this crate with atomics.
//!
//! | type | is for | who waits |
//! |---|---|---|
//! | [`ring`] | descriptors from one thread to its neighbour | nobody |
//! | [`Headline`] | what one thread says to several at once | nobody |
//! | [`Inbox`] | jobs and frees from anyone to a device thread | nobody |
//! | [`Returns`] | boxes that come home from any thread, by lanes, without allocating | nobody |
//! | [`RefCount`] | who was the last to hold a piece of memory | nobody |
//! | [`Mirror`] | one thread's counters, seen by others all at once | the reader |
//! | [`Spares`] | recycled events | who finds the lock held |
//! | [`load_word`], [`store_word`], [`raise_word`] | words that devices write too | nobody |
//! | [`EventCount`] | sleeping until a condition holds | the condition's reader |
//! | [`CountLatch`] | "all members are done", in the caller's frame | the caller |
//! | [`Rendezvous`] | N parties meeting again and again, or aborting | all parties |
//! | [`Gate`] | shutdown against submission | the one who shuts down |
//! | [`LaunchGate`] | kernels that spin for each other against driver calls that wait for kernels | each class for the other |
//! | [`CommitWord`] | the whole gang carries an operation through, or none of it | nobody |
//! | [`Turnstile`] | who gets a queued job: its thread, or the caller back | nobody |
//! | [`Sequence`], [`Flag`] | progress and switches that only go up | nobody |
//!
//! Each is checked by loom (`cargo loom`), and every memory ordering has a name ([`site`]) and a test that shows that
//! the model fails without it. Atomics, locks and threads come from [`shim`] only. `README.md` beside this file has the
//! protocols with their proofs, and what loom cannot see.

// `cargo loom-lint`: nothing here goes round the shim. The crate's root allows it elsewhere.
#![cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]

/// Rounds of a test. Miri sees every access, so that few rounds are enough; and it is a thousand times slower.
#[cfg(all(test, not(loom)))]
const fn rounds(usual: usize) -> usize {
    match cfg!(miri) {
        true if usual > 30_000 => 300,
        true if usual > 500 => usual / 100,
        true => 5,
        false => usual,
    }
}

mod commit;
mod event_count;
mod full;
mod gate;
mod headline;
mod inbox;
mod latch;
mod launch_gate;
mod linked;
mod mirror;
mod refs;
mod rendezvous;
mod returns;
pub mod ring;
mod sequence;
#[doc(hidden)]
pub mod shim;
#[doc(hidden)]
pub mod site;
mod spares;
mod thread_only;
mod turnstile;
mod word;

pub use commit::CommitWord;
pub use event_count::EventCount;
pub use gate::{Gate, Pass};
pub use headline::Headline;
pub use inbox::{Drain, Inbox};
pub use latch::CountLatch;
pub use launch_gate::{Blocking, LaunchGate};
pub use linked::{Link, Linked, Taken};
pub use mirror::Mirror;
pub use refs::RefCount;
pub use rendezvous::{Broken, Rendezvous};
pub use returns::Returns;
pub use sequence::{Flag, Sequence, unique_id};
pub use spares::Spares;
pub(crate) use thread_only::{NotDeviceThreadOnly, device_thread_only};
pub use turnstile::Turnstile;
pub use word::{load_word, raise_word, store_word};
