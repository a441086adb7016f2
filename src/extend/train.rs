//! What `gpu-pool-train` needs: training: operations, optimizers, models over several devices.
