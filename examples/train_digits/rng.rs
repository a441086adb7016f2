//! A small seeded generator: the same numbers on every machine and in every run, with any version of other crates.

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform from -`limit` to `limit`: 24 bits, so that every value is exact in `f32`.
    pub fn symmetric(&mut self, limit: f32) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u32 << 24) as f32;
        (2.0 * unit - 1.0) * limit
    }

    /// Fisher-Yates shuffle. The bias of the remainder is below 2^-40 for any data that fits in memory here.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.next() % (i as u64 + 1);
            items.swap(i, j as usize);
        }
    }
}
