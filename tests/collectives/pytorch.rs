//! pytorch
