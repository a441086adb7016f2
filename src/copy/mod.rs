//! How bytes travel: the procedures of copies. The methods of `Device` are in [`device`](crate::device).
//!

pub(crate) mod host;
pub(crate) mod peer;
