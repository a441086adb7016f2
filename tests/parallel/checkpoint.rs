//! Checkpoints: what is saved is loaded bit for bit.
