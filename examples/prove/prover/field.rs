//! The Goldilocks field: the integers modulo p = 2^64 - 2^32 + 1. Its device half is in `prove.cu`.
//!
//! Elements are `u64`. [`canonical`] and [`mul`] take every one of them. Their results, and the arguments of [`add`]
//! and [`sub`], are below p.

pub const P: u64 = 0xffff_ffff_0000_0001;
/// 2^64 modulo p.
const EPSILON: u64 = 0xffff_ffff;
/// Of order 2^32: the one that `winter-math` has.
const ROOT: u64 = 7_277_203_076_849_721_926;

/// 2^64 is less than 2 p.
pub fn canonical(x: u64) -> u64 {
    if x < P { x } else { x - P }
}

pub fn add(a: u64, b: u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    if carry || sum >= P { sum.wrapping_sub(P) } else { sum }
}

pub fn sub(a: u64, b: u64) -> u64 {
    let (difference, borrow) = a.overflowing_sub(b);
    if borrow { difference.wrapping_add(P) } else { difference }
}

/// The product is `low + 2^64 middle + 2^96 high`, and modulo p, 2^96 is -1.
pub fn mul(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let (low, high, middle) = (product as u64, (product >> 96) as u64, (product >> 64) as u64 & EPSILON);
    let (mut sum, borrow) = low.overflowing_sub(high);
    if borrow {
        sum -= EPSILON;
    }
    let (sum, carry) = sum.overflowing_add(middle * EPSILON);
    canonical(if carry { sum + EPSILON } else { sum })
}

/// A root of unity of order `2^log_n`.
pub fn root(log_n: u32) -> u64 {
    (log_n..32).fold(ROOT, |root, _| mul(root, root))
}
