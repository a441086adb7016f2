//! Size classes of small blocks.
//!
//! Steps of 256 bytes up to 2 KiB (257 bytes take 512). Then eight steps per doubling up to 128 KiB, which waste at
//! most an eighth. These are 56 classes (jemalloc's table, as RMM's arena has it).

/// The largest small block, in bytes.
pub(super) const SMALL: usize = 128 << 10;
/// The unit of sizes, and the alignment of every block.
pub(super) const ALIGN: usize = 256;
pub(super) const CLASSES: usize = 8 + 6 * 8;

const LINEAR: usize = 2 << 10;

#[inline]
pub(super) fn class(bytes: usize) -> usize {
    debug_assert!(bytes <= SMALL);
    if bytes <= LINEAR {
        return bytes.saturating_sub(1) / ALIGN;
    }
    // 2^k < bytes <= 2^(k+1), k >= 11: eight steps of 2^k / 8 each.
    let k = (bytes - 1).ilog2();
    let step = ((bytes - 1) >> (k - 3)) - 8;
    8 + (k as usize - 11) * 8 + step
}

pub(super) fn bytes(class: usize) -> usize {
    debug_assert!(class < CLASSES);
    if class < 8 {
        return (class + 1) * ALIGN;
    }
    let (k, step) = (11 + (class - 8) / 8, (class - 8) % 8);
    (step + 9) << (k - 3)
}

/// Bytes of a full slab of this class: at least 16 blocks, at most 2 MiB, so that a rare class holds little memory.
pub(super) fn slab_bytes(class: usize) -> usize {
    (bytes(class) * 32).next_power_of_two().clamp(64 << 10, 2 << 20)
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/cache/classes_tests.rs"]
mod tests;
