//! The number-theoretic transform: the values of a polynomial at all powers of a root of unity, in their order.
//!
//! A transform of 2^k elements takes k stages. A pass makes up to eight of them and goes through memory once: a block
//! holds 16 columns of up to 256 elements in shared memory. Between passes the order is Stockham's, so that threads of
//! a warp load and store neighbours, and no pass has to reverse bits.

use super::{MODULE, field};
use gpu_pool::{Device, DeviceBuffer, Error, LaunchDims, Result, kernel};

/// The longest transform has 2^24 elements.
pub const LOG_MOST: u32 = 24;
/// Stages of a pass. `prove.cu` has it, too.
const LOG_RADIX: u32 = 8;
/// Columns of a block. `prove.cu` has it, too.
const COLUMNS: usize = 16;
/// Powers in one half of the table.
const HALF: usize = 1 << (LOG_MOST / 2);

/// `w^e` for `e < HALF`, then `w^(HALF e)`, where `w` has the order 2^24: one product gives any power of `w`, and both
/// halves fit into a cache.
pub fn roots() -> Vec<u64> {
    let powers = |w| std::iter::successors(Some(1), move |x| Some(field::mul(*x, w))).take(HALF);
    powers(field::root(LOG_MOST)).chain(powers(field::root(LOG_MOST / 2))).collect()
}

fn power(roots: &[u64], e: usize) -> u64 {
    field::mul(roots[e % HALF], roots[HALF + e / HALF])
}

kernel! {
    /// `log_radix` stages of a transform of `2^log_n` elements, after `log_done` of them.
    static PASS: "ntt_pass" in MODULE,
    fn(x: &[u64], y: &mut [u64], roots: &[u64], log_n: u32, log_done: u32, log_radix: u32) |_dims| {
        let (radix, done, columns) = (1_usize << log_radix, 1_usize << log_done, 1_usize << (log_n - log_radix));
        let inner: Vec<u64> = (0..radix / 2).map(|i| power(roots, i << (LOG_MOST - log_radix))).collect();
        let mut tile = vec![[0; COLUMNS]; radix];
        for first in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - first);
            for row in 0..radix {
                let to = &mut tile[row.reverse_bits() >> (usize::BITS - log_radix)];
                for (column, to) in to[..width].iter_mut().enumerate() {
                    let column = first + column;
                    let twiddle = power(roots, (row * (column % done)) << (LOG_MOST - log_done - log_radix));
                    *to = field::mul(x[row * columns + column], twiddle);
                }
            }
            for stage in 0..log_radix {
                let half = 1 << stage;
                for group in tile.chunks_exact_mut(2 * half) {
                    let (low, high) = group.split_at_mut(half);
                    for (i, (low, high)) in low.iter_mut().zip(high).enumerate() {
                        let twiddle = inner[i << (log_radix - 1 - stage)];
                        for (low, high) in low.iter_mut().zip(high) {
                            let (a, b) = (*low, field::mul(*high, twiddle));
                            (*low, *high) = (field::add(a, b), field::sub(a, b));
                        }
                    }
                }
            }
            for (row, values) in tile.iter().enumerate() {
                for (column, value) in (first..).zip(&values[..width]) {
                    y[column / done * done * radix + row * done + column % done] = *value;
                }
            }
        }
    }
}

/// The transform of `x`, whose length is a power of two from 2 to 2^24, with the table of [`roots`]. Elements need not
/// be canonical; results are. Does not wait.
#[track_caller]
pub fn transform(dev: &Device, roots: &DeviceBuffer<u64>, mut x: DeviceBuffer<u64>) -> Result<DeviceBuffer<u64>> {
    let log_n = x.len().trailing_zeros();
    if !x.len().is_power_of_two() || !(1..=LOG_MOST).contains(&log_n) {
        return Err(Error::custom(format!("a transform of {} elements", x.len())));
    }
    // SAFETY: each pass writes all of it.
    let mut y = unsafe { dev.uninit(x.len()) }?;
    let passes = log_n.div_ceil(LOG_RADIX);
    let mut done = 0;
    for pass in 0..passes {
        let log_radix = (log_n - done).div_ceil(passes - pass);
        let blocks = (x.len() >> log_radix).div_ceil(COLUMNS) as u32;
        let dims = LaunchDims { grid: (blocks, 1, 1), block: (256, 1, 1), shared_bytes: 0 };
        // SAFETY: the kernel fits its signature; `x` and `y` have 2^log_n elements, and the table has its two halves.
        unsafe { dev.launch(&PASS, dims, (&x, &mut y, roots, log_n, done, log_radix)) }?;
        (x, y, done) = (y, x, done + log_radix);
    }
    Ok(x)
}
