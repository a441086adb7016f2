//! What `gpu-pool-cluster` needs: several processes.
