//! State and plans of collectives that do not know `Device`: the floor below the device threads.

pub(crate) mod tiling;
