//! Every ordering site, with the model that fails without it. `loom_tests/sites.rs` compares this with the source.

use Death::{Assertion, Deadlock, Race};

/// How a mutant fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// loom saw two unordered accesses to a cell.
    Race,
    /// All threads wait.
    Deadlock,
    /// An assertion of the model or of the code.
    Assertion,
}

/// One model and its mutants: sites, named as for `GPU_POOL_MUTANT`.
pub struct Tooth {
    /// The test file.
    pub file: &'static str,
    /// The model in it.
    pub model: &'static str,
    /// The mutants, each on its own.
    pub mutants: &'static [(&'static str, Death)],
}

/// The model `model` of `file` must fail with each of `mutants`.
const fn kills(file: &'static str, model: &'static str, mutants: &'static [(&'static str, Death)]) -> Tooth {
    Tooth { file, model, mutants }
}

/// All models, with the mutants that each must kill.
pub const TEETH: &[Tooth] = &[
    kills(
        "ring",
        "one_slot",
        &[
            ("ring.tail.store", Race),
            ("ring.tail.load", Race),
            ("ring.head.store", Race),
            ("ring.head.load", Race),
            ("ring.publishes_before_writing", Race),
            ("ring.frees_before_reading", Race),
        ],
    ),
    kills(
        "ring",
        "two_slots_wrapping",
        &[("ring.tail.store", Race), ("ring.tail.load", Race), ("ring.head.store", Race), ("ring.head.load", Race)],
    ),
    kills("ring", "batches", &[("ring.tail.store_batch", Race), ("ring.head.store_batch", Race)]),
    kills(
        "ring",
        "the_last_element_is_not_lost",
        &[("ring.producer_gone.store", Assertion), ("ring.producer_gone.load", Assertion)],
    ),
    kills("ring", "the_consumer_leaves", &[("ring.consumer_gone.store", Race), ("ring.consumer_gone.load", Race)]),
    kills(
        "publication",
        "data_follows_its_descriptor_there_and_back",
        &[
            ("ring.tail.store", Race),
            ("ring.tail.load", Race),
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
        ],
    ),
    kills(
        "publication",
        "room_is_told_too",
        &[("event.notify_all.fence", Deadlock), ("model.publication.room_is_not_told", Deadlock)],
    ),
    kills(
        "inbox",
        "two_senders_one_taker",
        &[("inbox.push", Race), ("inbox.take", Race), ("inbox.push.load_then_store", Assertion)],
    ),
    kills("inbox", "two_takers_share", &[("inbox.push", Race), ("inbox.take", Race)]),
    kills(
        "event_count",
        "one_waiter",
        &[
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
            ("event.wait.no_second_look", Deadlock),
            ("event.notify.no_lock", Deadlock),
        ],
    ),
    kills(
        "event_count",
        "two_waiters_two_epochs",
        &[("event.notify.one", Deadlock), ("event.take_back.always", Assertion)],
    ),
    kills(
        "event_count",
        "one_call_for_two",
        &[("event.notify_all.fence", Deadlock), ("model.event_count.notifies_between", Deadlock)],
    ),
    kills(
        "event_count",
        "who_waits_for_room_has_woken_whom_it_told",
        &[("model.event_count.waits_before_waking", Deadlock)],
    ),
    kills("event_count", "two_notifiers", &[("event.notify.fence", Deadlock), ("event.wait.fence", Deadlock)]),
    kills("event_count", "ping_pong", &[("event.notify.fence", Deadlock), ("event.wait.fence", Deadlock)]),
    kills(
        "latch",
        "nobody_touches_the_frame_after_the_last_set",
        &[("latch.set", Race), ("latch.is_set", Race), ("latch.touches_after_set", Race)],
    ),
    kills(
        "gate",
        "shutdown_against_submission",
        &[
            ("gate.enter", Race),
            ("gate.close", Race),
            ("gate.leave", Race),
            ("gate.drained", Race),
            ("gate.looks_before_adding", Race),
            ("gate.leave.silent", Deadlock),
        ],
    ),
    kills("gate", "a_look_at_the_closed_gate_shows_why", &[("gate.close", Race), ("gate.is_closed", Race)]),
    kills(
        "launch_gate",
        "a_window_against_a_blocking_call",
        &[
            ("launch_gate.open", Race),
            ("launch_gate.close", Race),
            ("launch_gate.block", Race),
            ("launch_gate.wait", Race),
            ("launch_gate.unblock", Race),
            ("launch_gate.open.ignores_blocking", Race),
            ("launch_gate.block.looks_before_adding", Race),
            ("launch_gate.close.silent", Deadlock),
            ("launch_gate.unblock.silent", Deadlock),
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
        ],
    ),
    kills(
        "launch_gate",
        "each_member_closes_for_itself",
        &[
            ("launch_gate.close", Race),
            ("launch_gate.block", Race),
            ("launch_gate.wait", Race),
            ("launch_gate.close.silent", Deadlock),
        ],
    ),
    kills(
        "launch_gate",
        "two_openers_one_blocking_call",
        &[("launch_gate.unblock.silent", Deadlock), ("event.notify.one", Deadlock)],
    ),
    kills(
        "launch_gate",
        "two_blocking_calls_one_opener",
        &[
            ("launch_gate.unblock", Race),
            ("launch_gate.close.silent", Deadlock),
            ("launch_gate.unblock.silent", Deadlock),
        ],
    ),
    kills(
        "launch_gate",
        "a_call_inside_a_call_does_not_wait_for_itself",
        &[("launch_gate.block.waits_for_others", Deadlock), ("launch_gate.unblock.silent", Deadlock)],
    ),
    kills("launch_gate", "no_window_opens_past_a_call_that_waits", &[("launch_gate.open.overtakes", Assertion)]),
    kills(
        "commit",
        "members_agree_where_the_abort_fell",
        &[
            ("commit.load", Race),
            ("commit.abort", Race),
            ("commit.load_then_store", Assertion),
            ("commit.ignores_abort", Assertion),
        ],
    ),
    kills("commit", "a_look_at_the_abort_shows_its_cause", &[("commit.abort", Race), ("commit.is_aborted", Race)]),
    kills("commit", "a_commit_shows_what_came_before", &[("commit.cas", Race), ("commit.committed", Race)]),
    kills(
        "turnstile",
        "start_against_withdraw",
        &[
            ("turnstile.start", Race),
            ("turnstile.start.lost", Race),
            ("turnstile.withdraw", Race),
            ("turnstile.withdraw.lost", Race),
            ("turnstile.load_then_store", Assertion),
        ],
    ),
    kills("sequence", "raise_to", &[("sequence.raise_to", Race), ("sequence.get", Race)]),
    kills("sequence", "flag", &[("flag.raise", Race), ("flag.is_raised", Race)]),
    kills(
        "sequence",
        "fetch_advance",
        &[("sequence.fetch_advance=acquire", Race), ("sequence.fetch_advance=release", Race)],
    ),
    kills(
        "job",
        "the_caller_waits_for_all_members",
        &[("latch.set", Race), ("latch.is_set", Race), ("event.notify.fence", Deadlock)],
    ),
    kills("job", "a_withdrawn_entry_never_touches_the_body", &[("turnstile.load_then_store", Race)]),
    kills(
        "dispatch",
        "two_gangs_reach_two_devices_in_one_order",
        &[("event.wait.fence", Deadlock), ("inbox.push", Race)],
    ),
    kills(
        "gang",
        "the_first_failure_wins_and_nobody_waits_for_ever",
        &[("commit.ignores_abort", Assertion), ("event.notify.fence", Deadlock)],
    ),
    kills(
        "memory_returns",
        "two_senders_share_a_lane",
        &[("returns.push", Race), ("returns.take", Race), ("returns.push.load_then_store", Assertion)],
    ),
    kills(
        "memory_returns",
        "two_senders_have_lanes",
        &[("returns.push", Race), ("returns.take", Race), ("returns.take.first_lane_only", Assertion)],
    ),
    kills("memory_returns", "what_was_done_before_is_seen", &[("returns.push", Race), ("returns.take", Race)]),
    kills(
        "memory_returns",
        "a_box_goes_round_under_a_push",
        &[("returns.push", Race), ("returns.take", Race), ("returns.push.load_then_store", Assertion)],
    ),
    kills(
        "memory_returns",
        "a_push_against_the_close",
        &[
            ("returns.close=acquire", Race),
            ("returns.close=release", Race),
            ("returns.push.closed", Race),
            ("returns.close.load_then_store", Assertion),
        ],
    ),
    kills("memory_returns", "a_take_against_the_close", &[("returns.take.reopens", Assertion)]),
    kills(
        "memory_returns",
        "what_a_parked_peer_has_freed_is_there",
        &[("model.returns.batches_at_the_sender", Assertion), ("flag.raise", Assertion)],
    ),
    kills(
        "memory_returns",
        "an_owner_that_waits_for_a_free_wakes_up",
        &[
            ("model.returns.batches_at_the_sender", Deadlock),
            ("returns.take.first_lane_only", Deadlock),
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
        ],
    ),
    kills(
        "memory_handles",
        "one_of_two_is_the_last",
        &[
            ("refs.release", Race),
            ("refs.release.alone", Race),
            ("refs.release.fence", Race),
            ("refs.release.load_then_store", Assertion),
        ],
    ),
    kills("memory_handles", "a_new_handle_against_a_drop", &[("refs.release.load_then_store", Assertion)]),
    kills(
        "memory_handles",
        "an_event_is_recorded_anew_only_after_the_wait",
        &[("model.spares.gives_before_the_wait", Race)],
    ),
    kills(
        "broadcast_slot",
        "members_in_step_miss_nothing",
        &[("broadcast_slot.one_page", Assertion), ("mirror.write.store", Assertion), ("mirror.read.load", Assertion)],
    ),
    kills(
        "memory_handles",
        "the_mirror_shows_whole_writes",
        &[
            ("mirror.write.fence", Assertion),
            ("mirror.write.store", Assertion),
            ("mirror.read.load", Assertion),
            ("mirror.read.fence", Assertion),
        ],
    ),
    kills(
        "memory_handles",
        "the_region_is_released_once_at_the_end",
        &[
            ("refs.release", Race),
            ("refs.release.alone", Race),
            ("refs.release.fence", Race),
            ("returns.close.load_then_store", Assertion),
        ],
    ),
];
