//! Call sites as values that can be stored in a file, and sums of memory by call site, for reports and snapshots.

use super::op_site::OpSite;
use std::borrow::Cow;

/// An operation, and its call in the user's code.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CallSite {
    /// The operation, like `upload`.
    pub op: Cow<'static, str>,
    /// The source file, with the path that the compiler got.
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

display_as!(CallSite, |self, f| write!(f, "{} at {}:{}:{}", self.op, self.file, self.line, self.column));

/// Live blocks of one call site.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Holder {
    /// The call that allocated the blocks; `None` if they were allocated before recording began.
    pub site: Option<CallSite>,
    /// Number of blocks.
    pub blocks: usize,
    /// Total bytes.
    pub bytes: u64,
}

display_as!(Holder, |self, f| {
    use super::units::{Bytes, count};
    write!(f, "{:>10} in {:<12} {}", Bytes(self.bytes), count(self.blocks, "block"), Name(self.site.as_ref()))
});

pub(crate) struct Name<'a>(pub(crate) Option<&'a CallSite>);

display_as!(Name<'_>, |self, f| match self.0 {
    Some(site) => write!(f, "{site}"),
    None => f.write_str("call site not recorded"),
});

pub(crate) fn holders(blocks: impl Iterator<Item = (Option<CallSite>, u64)>) -> Vec<Holder> {
    let mut sums = std::collections::HashMap::<Option<CallSite>, (usize, u64)>::new();
    for (site, bytes) in blocks {
        let sum = sums.entry(site).or_default();
        *sum = (sum.0 + 1, sum.1.saturating_add(bytes));
    }
    let mut holders: Vec<Holder> =
        sums.into_iter().map(|(site, (blocks, bytes))| Holder { site, blocks, bytes }).collect();
    // Equal sums are sorted by name, so that the same state gives the same text.
    holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
    holders
}

#[cfg(test)]
pub(crate) fn site(op: &'static str, line: u32) -> CallSite {
    CallSite { op: op.into(), file: "src/train.rs".into(), line, column: 9 }
}

#[cfg(test)]
#[path = "../../tests/unit/error/site_tests.rs"]
mod tests;
