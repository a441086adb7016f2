//! Places in the user's code as values that can be stored in a file, and the sums of memory by place.
//!
//! Out-of-memory reports, leak reports and snapshots of memory contain them.

use super::op_site::OpSite;
use std::{borrow::Cow, fmt};

/// An operation, and where in the user's code it was called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CallSite {
    /// The operation, like `upload`.
    pub op: Cow<'static, str>,
    /// The source file, as the compiler was given it.
    pub file: Cow<'static, str>,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
}

impl From<OpSite> for CallSite {
    fn from(OpSite { op, site }: OpSite) -> Self {
        CallSite { op: op.into(), file: site.file().into(), line: site.line(), column: site.column() }
    }
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}:{}:{}", self.op, self.file, self.line, self.column)
    }
}

/// Live blocks of one call site.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Holder {
    /// Who asked for them; none for what was allocated before recording began.
    pub site: Option<CallSite>,
    /// How many blocks.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use super::units::{Bytes, count};
        write!(f, "{:>10} in {:<12} {}", Bytes(self.bytes), count(self.blocks, "block"), Name(self.site.as_ref()))
    }
}

/// A call site, or that there is none.
pub(crate) struct Name<'a>(pub(crate) Option<&'a CallSite>);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(site) => site.fmt(f),
            None => f.write_str("call site not recorded"),
        }
    }
}

/// Adds blocks up by who asked for them, the most bytes first.
pub(crate) fn holders(blocks: impl Iterator<Item = (Option<CallSite>, u64)>) -> Vec<Holder> {
    let mut sums = std::collections::HashMap::<Option<CallSite>, (usize, u64)>::new();
    for (site, bytes) in blocks {
        let sum = sums.entry(site).or_default();
        *sum = (sum.0 + 1, sum.1.saturating_add(bytes));
    }
    let mut holders: Vec<Holder> =
        sums.into_iter().map(|(site, (blocks, bytes))| Holder { site, blocks, bytes }).collect();
    // By name where the bytes are equal: the same state must give the same text.
    holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
    holders
}

#[cfg(test)]
pub(crate) fn site(op: &'static str, line: u32) -> CallSite {
    CallSite { op: op.into(), file: "src/train.rs".into(), line, column: 9 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::Location;

    #[test]
    fn a_place_keeps_its_line() {
        let here = Location::caller();
        let site = CallSite::from(OpSite { op: "zeros", site: here });
        assert_eq!(site.to_string(), format!("zeros at {here}"));
        assert!(matches!(site.file, Cow::Borrowed(_)), "taking a snapshot copies no names");
    }

    #[test]
    fn the_largest_holder_comes_first() {
        let (a, b) = (Some(site("upload", 1)), Some(site("zeros", 2)));
        let sums = holders([(a.clone(), 10), (b.clone(), 100), (a.clone(), 20), (None, 30)].into_iter());
        let shown: Vec<_> = sums.iter().map(|h| (h.site.clone(), h.blocks, h.bytes)).collect();
        assert_eq!(shown, [(b, 1, 100), (None, 1, 30), (a, 2, 30)]);
    }
}
