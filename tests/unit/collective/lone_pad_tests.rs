//! The pad on software GPUs, which have no kernels that wait: its memory, and what all processes compute alike.

use super::*;
use crate::{
    driver::{Driver, host::HostGpu},
    fabric::layout::{FLAGS, HEADER},
};
