//! One suite, two drivers: every case runs on software GPUs and, where there are any, on CUDA devices, and is written
//! against `gpu_pool::extend::driver::Driver` alone. It runs once more on software GPUs with the checker around them,
//! which must neither change anything nor find anything. Where both halves pass, a difference between a laptop and a
//! GPU machine is a bug of the program under test, not of the software GPU.
//!
//! A case that guards against a known upstream problem cites it.

mod brief;
mod copies;
mod events;
mod graphs;
mod kernels;
mod mapped;
mod memory;
mod peers;
mod rig;
#[cfg(target_os = "linux")]
mod shared;
mod software;
mod streams;
mod values;

macro_rules! suite {
    ($($group:ident: $($case:ident)+;)+) => {
        /// On software GPUs.
        mod host {
            use super::*;
            $($(#[test] fn $case() { $group::$case(&rig::Rig::host(3)) })+)+
        }

        /// On software GPUs, checked.
        mod checked {
            use super::*;
            $($(#[test] fn $case() { $group::$case(&rig::Rig::checked(3)) })+)+
        }

        /// On CUDA devices.
        #[cfg(feature = "cuda")]
        mod cuda {
            use super::*;
            $($(#[test] fn $case() { if let Some(rig) = rig::Rig::cuda() { $group::$case(&rig) } })+)+
        }
    };
}

suite! {
    streams: operations_of_a_stream_run_in_order submission_does_not_wait streams_do_not_wait_for_each_other
        waiting_for_a_stream_has_a_limit host_functions_run_in_order a_destroyed_stream_finishes_its_work
        any_priority_is_accepted threads_may_share_a_stream devices_work_from_their_own_threads;
    events: an_unrecorded_event_is_complete an_event_orders_two_streams a_wait_captures_the_latest_record
        a_new_record_replaces_the_old_one a_captured_wait_outlives_its_event waiting_for_an_event_has_a_limit
        events_order_devices a_relay_through_all_devices elapsed_time elapsed_needs_recorded_timing_events;
    copies: odd_sizes_and_offsets empty_copies_do_nothing copies_within fills peer_copies host_memory_is_portable;
    memory: addresses_are_aligned_and_distinct memory_info_moves running_out_of_memory_harms_nothing
        empty_allocations_are_refused host_memory_starts_zeroed managed_memory_is_seen_by_all
        foreign_memory_is_adopted a_foreign_stream_is_adopted;
    mapped: mappings_come_and_go data_survives_a_neighbours_end operands_span_mappings mapping_runs_out_of_memory
        peers_reach_what_is_mapped_before_and_after mappings_copy_to_mappings a_mapping_moves
        a_mapping_that_moves_keeps_its_peers wrong_places_are_refused devices_map_at_once;
    peers: rights_are_directed rights_are_idempotent_and_revocable a_kernel_writes_a_peers_memory
        a_wrong_owner_is_refused;
    kernels: launch_with_slices_and_values launches_follow_their_stream garbage_modules_harm_nothing
        missing_functions_are_reported;
    graphs: a_graph_runs_when_it_is_launched_and_as_often a_launch_follows_its_stream
        what_a_graph_cannot_hold_is_refused
        an_empty_graph_does_nothing one_stream_captures_again_and_again a_graph_copies_between_devices;
    shared: a_mapping_is_shared_by_its_descriptor what_is_no_such_memory_is_refused what_is_shared_does_not_move;
    values: a_value_orders_two_streams values_compare_cyclically the_host_writes_a_value a_value_orders_two_devices
        the_host_looks_at_a_value;
}

#[cfg(feature = "blas")]
mod blas {
    use super::*;

    #[test]
    fn host_gemm_matches_the_naive_product() {
        kernels::gemm_matches_the_naive_product(&rig::Rig::host(1));
    }

    #[test]
    fn checked_gemm_matches_the_naive_product() {
        kernels::gemm_matches_the_naive_product(&rig::Rig::checked(1));
    }

    #[test]
    #[cfg(feature = "cuda")]
    fn cuda_gemm_matches_the_naive_product() {
        if let Some(rig) = rig::Rig::cuda() {
            kernels::gemm_matches_the_naive_product(&rig);
        }
    }
}
