//! The lock-free parts on real threads. loom checks them in all orders of a few threads: `loom_tests`.

mod broadcast_slot;
mod byte_ring;
mod commit;
mod event_count;
mod gate;
mod inbox;
#[cfg(target_os = "linux")]
mod journal;
mod latch;
mod mirror;
mod refs;
mod returns;
mod ring;
mod sequence;
mod spares;
mod turnstile;
mod word;

/// The number of rounds of a test. Under Miri few rounds are enough, since Miri sees every access; and it is a thousand
/// times slower.
const fn rounds(usual: usize) -> usize {
    match cfg!(miri) {
        true if usual > 30_000 => 300,
        true if usual > 500 => usual / 100,
        true => 5,
        false => usual,
    }
}
