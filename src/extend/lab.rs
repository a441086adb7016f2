//! What `gpu-pool-lab` needs: observers: the checker, fault plans, machines.
