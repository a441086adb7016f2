//! The same by crates that people trust: transforms of `winter-math`, and SHA-256 of `sha2`.

use crate::prover::merkle::{Digest, LEAF};
use sha2::{Digest as _, Sha256};
use winter_math::{StarkField, fft, fields::f64::BaseElement};

/// The values of a polynomial at all powers of the root of unity, in their order.
pub fn transform(coefficients: &[u64]) -> Vec<u64> {
    let mut values: Vec<_> = coefficients.iter().copied().map(BaseElement::new).collect();
    fft::evaluate_poly(&mut values, &fft::get_twiddles::<BaseElement>(coefficients.len()));
    values.iter().map(StarkField::as_int).collect()
}

/// All levels of the tree, from the leaves to the root.
pub fn levels(values: &[u64]) -> Vec<Vec<Digest>> {
    let leaf = |values: &[u64]| digest(values.iter().flat_map(|value| value.to_le_bytes()));
    let node = |children: &[Digest]| digest(children.as_flattened().iter().flat_map(|word| word.to_be_bytes()));
    let leaves: Vec<_> = values.chunks(LEAF).map(leaf).collect();
    let above = |level: &Vec<Digest>| (level.len() > 1).then(|| level.chunks(2).map(node).collect());
    std::iter::successors(Some(leaves), above).collect()
}

fn digest(bytes: impl Iterator<Item = u8>) -> Digest {
    let bytes: Vec<u8> = bytes.collect();
    let digest = Sha256::digest(bytes);
    std::array::from_fn(|i| u32::from_be_bytes(std::array::from_fn(|byte| digest[4 * i + byte])))
}

/// The root of the tree over the polynomial's values.
pub fn commit(coefficients: &[u64]) -> Digest {
    levels(&transform(coefficients)).last().expect("there are leaves")[0]
}
