//! Merkle trees of SHA-256 over field elements.
//!
//! A leaf is the digest of four elements, as 32 bytes, little-endian. A node is the digest of its two children's
//! digests. The tree is a heap: node 1 is the root, node `i` has the children `2 i` and `2 i + 1`, and the leaves are
//! the last half. A digest is eight words, as SHA-256 computes them.

use super::MODULE;
use gpu_pool::{Device, DeviceBuffer, Error, LaunchDims, Result, kernel};

/// Elements of a leaf.
pub const LEAF: usize = 4;
/// Levels that a block of threads makes in one launch. `prove.cu` has it, too.
const LEVELS: u32 = 9;

pub type Digest = [u32; 8];

const START: Digest = [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];

/// One block of SHA-256 (FIPS 180-4, 6.2.2). `message` is a ring of the last 16 words of the schedule.
fn compress(state: &mut Digest, mut message: [u32; 16]) {
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (i, constant) in CONSTANTS.into_iter().enumerate() {
        if i >= 16 {
            let (far, near) = (message[(i + 1) % 16], message[(i + 14) % 16]);
            let far = far.rotate_right(7) ^ far.rotate_right(18) ^ far >> 3;
            let near = near.rotate_right(17) ^ near.rotate_right(19) ^ near >> 10;
            let sum = message[(i + 9) % 16].wrapping_add(far).wrapping_add(near);
            message[i % 16] = message[i % 16].wrapping_add(sum);
        }
        let choice = e & f ^ !e & g;
        let first = h.wrapping_add(constant).wrapping_add(message[i % 16]).wrapping_add(choice);
        let first = first.wrapping_add(e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25));
        let majority = a & b ^ a & c ^ b & c;
        let second = majority.wrapping_add(a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22));
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
    }
    for (state, word) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *state = state.wrapping_add(word);
    }
}

/// The digest of four elements: 32 bytes, a bit, and the length of 256 bits.
fn leaf(values: &[u64]) -> Digest {
    let mut message = [0; 16];
    for (words, value) in message.chunks_exact_mut(2).zip(values) {
        words.copy_from_slice(&[(*value as u32).swap_bytes(), ((*value >> 32) as u32).swap_bytes()]);
    }
    (message[8], message[15]) = (1 << 31, 256);
    let mut state = START;
    compress(&mut state, message);
    state
}

/// The digest of two digests: 64 bytes, and a block with a bit and the length of 512 bits.
fn node(children: &[u32]) -> Digest {
    let mut state = START;
    compress(&mut state, std::array::from_fn(|i| children[i]));
    let mut end = [0; 16];
    (end[0], end[15]) = (1 << 31, 512);
    compress(&mut state, end);
    state
}

kernel! {
    /// The last half of `tree` from the values.
    static LEAVES: "merkle_leaves" in MODULE, fn(values: &[u64], tree: &mut [u32], leaves: u32) |_dims| {
        let to = tree[8 * leaves as usize..].chunks_exact_mut(8);
        values.chunks_exact(LEAF).zip(to).for_each(|(values, to)| to.copy_from_slice(&leaf(values)));
    }

    /// The nodes `parents..2 * parents` from their children, and those of the next levels, `levels` in all. A block of
    /// threads makes 256 nodes of the first level, and all above them.
    static FOLD: "merkle_fold" in MODULE, fn(tree: &mut [u32], parents: u32, levels: u32) |_dims| {
        for level in 0..levels {
            let parents = (parents >> level) as usize;
            let (above, below) = tree.split_at_mut(16 * parents);
            let to = above[8 * parents..].chunks_exact_mut(8);
            below.chunks_exact(16).zip(to).for_each(|(children, to)| to.copy_from_slice(&node(children)));
        }
    }
}

/// The tree over `values`, whose length is four times a power of two. Does not wait.
#[track_caller]
pub fn tree(dev: &Device, values: &DeviceBuffer<u64>) -> Result<DeviceBuffer<u32>> {
    let leaves = values.len() / LEAF;
    if !values.len().is_multiple_of(LEAF) || !leaves.is_power_of_two() || leaves > 1 << 27 {
        return Err(Error::custom(format!("a tree over {} elements", values.len())));
    }
    let mut tree = dev.zeros::<u32>(16 * leaves)?; // there is no node 0
    // SAFETY: the kernel fits its signature, and the tree has room for twice as many digests as leaves.
    unsafe { dev.launch(&LEAVES, LaunchDims::cover(leaves), (values, &mut tree, leaves as u32)) }?;
    let mut parents = leaves as u32 / 2;
    while parents > 0 {
        let levels = LEVELS.min(parents.ilog2() + 1);
        // SAFETY: as above; the launch before has made the children.
        unsafe { dev.launch(&FOLD, LaunchDims::cover(parents as usize), (&mut tree, parents, levels)) }?;
        parents >>= levels;
    }
    Ok(tree)
}

#[rustfmt::skip]
const CONSTANTS: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];
