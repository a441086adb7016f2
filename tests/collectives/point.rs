//! point
