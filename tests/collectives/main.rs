//! The collectives, from outside: what nccl-tests, PyTorch's and MPICH's suites ask of theirs, and what has bitten the
//! users of other libraries. `README.md` maps each of those to a test here.
//!
//! Nearly every test runs on software GPUs and on CUDA, and nothing asserts wall time. Three variables run all of it in
//! another way: `GPU_POOL_ALGORITHM=copies|ring|staged|host|direct|inbox`, `GPU_POOL_SEED=1` (software GPUs take
//! one operation at a time), and `GPU_POOL_TEST_PEERS=off` (no access to peers' memory). And `GPU_POOL_SHARE=4
//! CUDA_DEVICE_MAX_CONNECTIONS=32` makes each GPU four devices, for the tests that want more of them than there are.

#[path = "../support/mod.rs"]
mod support;

mod basics;
mod bits;
mod cases;
#[path = "../support/checklist.rs"]
mod checklist;
mod checklist_tests;
mod eager;
mod early;
mod exchange;
mod graph_failures;
mod graphs;
mod groups;
mod hand_over;
mod hosted;
mod inbox;
mod liveness;
mod load;
mod many;
mod meetings;
mod mismatch;
mod mpich;
mod nccl;
mod numbers;
mod places;
mod point;
mod pytorch;
mod rig;
mod rings;
mod staged;
mod two_trips;
