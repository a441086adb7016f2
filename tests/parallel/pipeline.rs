//! Pipelines: the executor against one device.
