//! The sizes from which on collectives of GPUs go another way, for people: `GpuPool::explain` and reports show them.

use super::{
    Bulk,
    algorithm::{eager, exchange, fused, inbox, ring, slots},
};
use crate::fabric::layout::{LL_BYTES, eager_bytes, inbox_bytes, ll_bytes_per_peer};
use std::fmt::{self, Write};

pub(crate) fn sizes(members: usize) -> String {
    let members = members.max(2);
    let mut text = String::new();
    write(&mut text, members).expect("a string takes everything");
    text
}

fn write(f: &mut impl Write, n: usize) -> fmt::Result {
    let ll = (LL_BYTES / (n - 1)).min(ll_bytes_per_peer(n));
    let eager_whole = eager::most_whole(n).min(eager_bytes(n));
    write!(f, "pushed up to {}, ", Bytes(ll))?;
    if eager_whole > ll {
        write!(f, "sent eagerly up to {}, ", Bytes(eager_whole))?;
    }
    if eager_bytes(n) > eager_whole {
        write!(f, "by parts up to {}, ", Bytes(eager_bytes(n)))?;
    }
    let from = [
        ("sums exchanged by copies", Bulk::Sums.engines(n, false)),
        ("sums exchanged by kernels", exchange::least(n)),
        ("beside other work", Bulk::Sums.engines(n, true)),
        ("moved by copies", Bulk::Moves.engines(n, false)),
        ("a ring of kernels", ring::cut::least(n)),
    ];
    for (what, bytes) in from.into_iter().filter(|(_, bytes)| *bytes < usize::MAX) {
        write!(f, "{what} from {} on, ", Bytes(bytes))?;
    }
    write!(f, "a block for {}, at most {}", Bytes(fused::PER_BLOCK), fused::BLOCKS)?;
    let (large, few) = fused::large(n);
    if few != fused::BLOCKS {
        write!(f, ", {few} for sums in parts of {}", Bytes(large))?;
    }
    let whole = inbox::most_whole(n).min(inbox_bytes(n));
    write!(f, "; sums of floats as data that are flags up to {}", Bytes(whole))?;
    let pieces = slots::most(Bulk::Sums, n);
    if pieces > whole {
        write!(f, ", in pieces up to {}", Bytes(pieces))?;
    }
    if slots::held(n) < usize::MAX {
        write!(f, ", in pieces in graphs from {} on", Bytes(slots::held(n)))?;
    }
    // The limits of inboxes were measured between two and four devices.
    if n > 4 { f.write_str(" (by a model, not measured)") } else { Ok(()) }
}

struct Bytes(usize);

display_as!(Bytes, |self, f| match self.0 {
    bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => write!(f, "{} MB", bytes >> 20),
    bytes if bytes >= 1 << 10 => write!(f, "{} KB", bytes >> 10),
    bytes => write!(f, "{bytes} B"),
});

#[cfg(test)]
#[path = "../../tests/unit/collective/in_words_tests.rs"]
mod tests;
