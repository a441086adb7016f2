//! mismatch
