//! Peer rights, from device to device: a right has a direction.

use super::{config::HostConfig, fault};
use crate::driver::DriverResult;

pub(super) struct Rights {
    possible: Vec<Vec<bool>>,
    enabled: Vec<Vec<bool>>,
}

impl Rights {
    pub fn new(configs: &[HostConfig]) -> Self {
        let n = configs.len();
        let row = |config: &HostConfig| {
            let mut row = vec![config.peers.is_none(); n];
            for &peer in config.peers.iter().flatten().filter(|&&peer| peer < n) {
                row[peer] = true;
            }
            row
        };
        Rights { possible: configs.iter().map(row).collect(), enabled: vec![vec![false; n]; n] }
    }

    /// False for the device itself, as in CUDA.
    pub fn possible(&self, device: usize, peer: usize) -> bool {
        device != peer && self.possible[device][peer]
    }

    pub fn allowed(&self, device: usize, owner: usize) -> bool {
        device == owner || self.enabled[device][owner]
    }

    pub fn enable(&mut self, device: usize, peer: usize) -> DriverResult {
        if device != peer && !self.possible[device][peer] {
            return Err(fault::peer_unsupported(format!("device {device} cannot access device {peer}")));
        }
        self.enabled[device][peer] = true;
        Ok(())
    }

    pub fn disable(&mut self, device: usize, peer: usize) {
        self.enabled[device][peer] = false;
    }
}
