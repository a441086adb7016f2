//! Random texts for the tests of parsers, and the number of property test cases.

use proptest::{prelude::*, sample::Index};

/// A configuration with `usual` cases of a property, or a hundred times more with `GPU_POOL_LONG=1`.
pub(crate) fn cases(usual: u32) -> ProptestConfig {
    let long = std::env::var("GPU_POOL_LONG").is_ok_and(|long| long == "1");
    ProptestConfig::with_cases(if long { 100 * usual } else { usual })
}

/// Arbitrary texts, and valid texts with a few changes: characters removed, other characters or parts of a valid text
/// inserted.
pub(crate) fn like(valid: &'static [&'static str]) -> impl Strategy<Value = String> {
    let part = (prop::sample::select(valid), any::<Index>(), any::<Index>()).prop_map(|(text, from, to)| {
        let (from, to) = (from.index(text.len() + 1), to.index(text.len() + 1));
        text.chars().take(to).skip(from).collect::<String>()
    });
    let put = prop_oneof![part, any::<char>().prop_map(String::from), "[-+:;,.>=*0-9a-z]"];
    let changes = prop::collection::vec((any::<Index>(), 0usize..4, put), 0..4);
    let changed = (prop::sample::select(valid), changes).prop_map(|(text, changes)| {
        let mut text: Vec<char> = text.chars().collect();
        for (at, left_out, put) in changes {
            let at = at.index(text.len() + 1);
            let end = text.len().min(at + left_out);
            text.splice(at..end, put.chars());
        }
        text.into_iter().collect()
    });
    prop_oneof![1 => any::<String>(), 4 => changed]
}
