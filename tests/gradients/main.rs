//! The gradient exchange, from outside: that it gives what a plain all-reduce gives, whatever the order, the buckets
//! and the memory; and what has bitten the users of PyTorch's DDP.
//!
//! | theirs | here |
//! |---|---|
//! | "Expected to have finished reduction in the prior iteration", DDP's best known error; `find_unused_parameters` | `steps::what_is_unused_counts_as_zero`, `steps::a_member_without_rows` |
//! | buckets are rebuilt after the first iteration, in rank 0's order | `steps::buckets_follow_the_order_of_rank_0` |
//! | `no_sync`, and gradients that only its steps have used | `steps::accumulation_exchanges_once` |
//! | `gradient_as_bucket_view`: gradients are flattened and copied back otherwise | `steps::memory_of_the_callers` |
//! | bf16 and fp16 compression hooks (`test_ddp_hooks`) | `wires::half_types_are_within_their_bounds` |
//! | parameters that differ between ranks hang or corrupt (nccl#1417) | `failures::what_members_must_agree_on` |
//! | a rank that fails leaves the others in a hang (pytorch#113281, nccl#829) | `failures::a_member_fails_in_the_backward_pass` |
//! | bits that depend on the run or the rank (nccl#1497, sglang#34159) | `bits::the_same_in_every_run` |
//! | `process_group`: data parallel within a part of the devices, in each dimension of a mesh | `groups::each_group_by_itself`, `groups::a_grid_of_two_dimensions` |
//! | gradients of half types and of `double` | `types::the_same_bits_as_plain_ones` |
//! | a graph that was captured before the buckets were rebuilt (pytorch#89546, #83495: 11 steps before a capture) | `graphs::a_graph_from_before_the_move` |
//! | two exchanges of one group in different orders: buckets of one length match, whoever they are of | `crossed::buckets_of_two_exchanges` |
//! | `join` (pytorch#38174): inputs that end earlier on some ranks hang the others | `uneven::until_all_have_ended` |
//! | parameters and buffers are broadcast at the start; replicas drift apart unnoticed | `uneven::parameters_of_one_member`, `uneven::replicas_that_have_drifted_apart` |
//! | 25 MB buckets are too small on fast links (pytorch#118421) | `bits::bucket_sizes_do_not_matter` |

#[path = "../support/mod.rs"]
mod support;

mod bits;
mod crossed;
mod failures;
mod graphs;
mod groups;
mod parts;
mod rig;
mod steps;
mod types;
mod uneven;
mod wires;
