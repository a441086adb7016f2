//! The traits with this crate's methods on [`Builder`](gpu_pool::Builder), [`Device`](gpu_pool::Device),
//! [`Group`](gpu_pool::Group) and [`DeviceBuffer`](gpu_pool::DeviceBuffer): `use gpu_pool_cluster::prelude::*;`.

#[cfg(target_os = "linux")]
pub use crate::ipc::{ClusterBuffer, ClusterDevice};
pub use crate::{connect::ClusterBuilder, exchange::ClusterGroup};
