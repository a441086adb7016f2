//! Data parallel: replicas, optimizers, sharded state.
