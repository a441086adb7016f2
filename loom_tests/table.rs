//! Every ordering site, with the model that dies without it. `loom_tests/sites.rs` holds this against the source.

use Death::{Assertion, Deadlock, Race};

/// How a mutant dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// loom saw two accesses to a cell that nothing orders.
    Race,
    /// Everybody waits.
    Deadlock,
    /// An assertion of the model or of the code.
    Assertion,
}

/// One mutant: the site (as for `GPU_POOL_MUTANT`), and the test that must die of it.
pub struct Tooth {
    /// The test file.
    pub file: &'static str,
    /// The model in it.
    pub model: &'static str,
    /// The mutants, each on its own.
    pub mutants: &'static [(&'static str, Death)],
}

/// All of them.
pub const TEETH: &[Tooth] = &[
    Tooth {
        file: "ring",
        model: "one_slot",
        mutants: &[
            ("ring.tail.store", Race),
            ("ring.tail.load", Race),
            ("ring.head.store", Race),
            ("ring.head.load", Race),
            ("ring.publishes_before_writing", Race),
            ("ring.frees_before_reading", Race),
        ],
    },
    Tooth {
        file: "ring",
        model: "two_slots_wrapping",
        mutants: &[
            ("ring.tail.store", Race),
            ("ring.tail.load", Race),
            ("ring.head.store", Race),
            ("ring.head.load", Race),
        ],
    },
    Tooth {
        file: "ring",
        model: "batches",
        mutants: &[("ring.tail.store_batch", Race), ("ring.head.store_batch", Race)],
    },
    Tooth {
        file: "ring",
        model: "the_last_element_is_not_lost",
        mutants: &[("ring.producer_gone.store", Assertion), ("ring.producer_gone.load", Assertion)],
    },
    Tooth {
        file: "ring",
        model: "the_consumer_leaves",
        mutants: &[("ring.consumer_gone.store", Race), ("ring.consumer_gone.load", Race)],
    },
    Tooth {
        file: "publication",
        model: "data_follows_its_descriptor_there_and_back",
        mutants: &[
            ("ring.tail.store", Race),
            ("ring.tail.load", Race),
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
        ],
    },
    Tooth {
        file: "publication",
        model: "room_is_told_too",
        mutants: &[("event.notify_all.fence", Deadlock), ("model.publication.room_is_not_told", Deadlock)],
    },
    Tooth {
        file: "inbox",
        model: "two_senders_one_taker",
        mutants: &[("inbox.push", Race), ("inbox.take", Race), ("inbox.push.load_then_store", Assertion)],
    },
    Tooth { file: "inbox", model: "two_takers_share", mutants: &[("inbox.push", Race), ("inbox.take", Race)] },
    Tooth {
        file: "event_count",
        model: "one_waiter",
        mutants: &[
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
            ("event.wait.no_second_look", Deadlock),
            ("event.notify.no_lock", Deadlock),
        ],
    },
    Tooth {
        file: "event_count",
        model: "two_waiters_two_epochs",
        mutants: &[("event.notify.one", Deadlock), ("event.take_back.always", Assertion)],
    },
    Tooth {
        file: "event_count",
        model: "one_call_for_two",
        mutants: &[("event.notify_all.fence", Deadlock), ("model.event_count.notifies_between", Deadlock)],
    },
    Tooth {
        file: "event_count",
        model: "who_waits_for_room_has_woken_whom_it_told",
        mutants: &[("model.event_count.waits_before_waking", Deadlock)],
    },
    Tooth {
        file: "event_count",
        model: "two_notifiers",
        mutants: &[("event.notify.fence", Deadlock), ("event.wait.fence", Deadlock)],
    },
    Tooth {
        file: "event_count",
        model: "ping_pong",
        mutants: &[("event.notify.fence", Deadlock), ("event.wait.fence", Deadlock)],
    },
    Tooth {
        file: "latch",
        model: "nobody_touches_the_frame_after_the_last_set",
        mutants: &[("latch.set", Race), ("latch.is_set", Race), ("latch.touches_after_set", Race)],
    },
    Tooth {
        file: "gate",
        model: "shutdown_against_submission",
        mutants: &[
            ("gate.enter", Race),
            ("gate.close", Race),
            ("gate.leave", Race),
            ("gate.drained", Race),
            ("gate.looks_before_adding", Race),
            ("gate.leave.silent", Deadlock),
        ],
    },
    Tooth {
        file: "gate",
        model: "a_look_at_the_closed_gate_shows_why",
        mutants: &[("gate.close", Race), ("gate.is_closed", Race)],
    },
    Tooth {
        file: "launch_gate",
        model: "a_window_against_a_blocking_call",
        mutants: &[
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
    },
    Tooth {
        file: "launch_gate",
        model: "each_member_closes_for_itself",
        mutants: &[
            ("launch_gate.close", Race),
            ("launch_gate.block", Race),
            ("launch_gate.wait", Race),
            ("launch_gate.close.silent", Deadlock),
        ],
    },
    Tooth {
        file: "launch_gate",
        model: "two_openers_one_blocking_call",
        mutants: &[("launch_gate.unblock.silent", Deadlock), ("event.notify.one", Deadlock)],
    },
    Tooth {
        file: "launch_gate",
        model: "two_blocking_calls_one_opener",
        mutants: &[
            ("launch_gate.unblock", Race),
            ("launch_gate.close.silent", Deadlock),
            ("launch_gate.unblock.silent", Deadlock),
        ],
    },
    Tooth {
        file: "launch_gate",
        model: "a_call_inside_a_call_does_not_wait_for_itself",
        mutants: &[("launch_gate.block.waits_for_others", Deadlock), ("launch_gate.unblock.silent", Deadlock)],
    },
    Tooth {
        file: "launch_gate",
        model: "no_window_opens_past_a_call_that_waits",
        mutants: &[("launch_gate.open.overtakes", Assertion)],
    },
    Tooth {
        file: "commit",
        model: "members_agree_where_the_abort_fell",
        mutants: &[
            ("commit.load", Race),
            ("commit.abort", Race),
            ("commit.load_then_store", Assertion),
            ("commit.ignores_abort", Assertion),
        ],
    },
    Tooth {
        file: "commit",
        model: "a_look_at_the_abort_shows_its_cause",
        mutants: &[("commit.abort", Race), ("commit.is_aborted", Race)],
    },
    Tooth {
        file: "commit",
        model: "a_commit_shows_what_came_before",
        mutants: &[("commit.cas", Race), ("commit.committed", Race)],
    },
    Tooth {
        file: "turnstile",
        model: "start_against_withdraw",
        mutants: &[
            ("turnstile.start", Race),
            ("turnstile.start.lost", Race),
            ("turnstile.withdraw", Race),
            ("turnstile.withdraw.lost", Race),
            ("turnstile.load_then_store", Assertion),
        ],
    },
    Tooth { file: "sequence", model: "raise_to", mutants: &[("sequence.raise_to", Race), ("sequence.get", Race)] },
    Tooth { file: "sequence", model: "flag", mutants: &[("flag.raise", Race), ("flag.is_raised", Race)] },
    Tooth {
        file: "sequence",
        model: "fetch_advance",
        mutants: &[("sequence.fetch_advance=acquire", Race), ("sequence.fetch_advance=release", Race)],
    },
    Tooth {
        file: "job",
        model: "the_caller_waits_for_all_members",
        mutants: &[("latch.set", Race), ("latch.is_set", Race), ("event.notify.fence", Deadlock)],
    },
    Tooth {
        file: "job",
        model: "a_withdrawn_entry_never_touches_the_body",
        mutants: &[("turnstile.load_then_store", Race)],
    },
    Tooth {
        file: "dispatch",
        model: "two_gangs_reach_two_devices_in_one_order",
        mutants: &[("event.wait.fence", Deadlock), ("inbox.push", Race)],
    },
    Tooth {
        file: "gang",
        model: "the_first_failure_wins_and_nobody_waits_for_ever",
        mutants: &[("commit.ignores_abort", Assertion), ("event.notify.fence", Deadlock)],
    },
    Tooth {
        file: "memory_returns",
        model: "two_senders_share_a_lane",
        mutants: &[("returns.push", Race), ("returns.take", Race), ("returns.push.load_then_store", Assertion)],
    },
    Tooth {
        file: "memory_returns",
        model: "two_senders_have_lanes",
        mutants: &[("returns.push", Race), ("returns.take", Race), ("returns.take.first_lane_only", Assertion)],
    },
    Tooth {
        file: "memory_returns",
        model: "what_was_done_before_is_seen",
        mutants: &[("returns.push", Race), ("returns.take", Race)],
    },
    Tooth {
        file: "memory_returns",
        model: "a_box_goes_round_under_a_push",
        mutants: &[("returns.push", Race), ("returns.take", Race), ("returns.push.load_then_store", Assertion)],
    },
    Tooth {
        file: "memory_returns",
        model: "a_push_against_the_close",
        mutants: &[
            ("returns.close=acquire", Race),
            ("returns.close=release", Race),
            ("returns.push.closed", Race),
            ("returns.close.load_then_store", Assertion),
        ],
    },
    Tooth {
        file: "memory_returns",
        model: "a_take_against_the_close",
        mutants: &[("returns.take.reopens", Assertion)],
    },
    Tooth {
        file: "memory_returns",
        model: "what_a_parked_peer_has_freed_is_there",
        mutants: &[("model.returns.batches_at_the_sender", Assertion), ("flag.raise", Assertion)],
    },
    Tooth {
        file: "memory_returns",
        model: "an_owner_that_waits_for_a_free_wakes_up",
        mutants: &[
            ("model.returns.batches_at_the_sender", Deadlock),
            ("returns.take.first_lane_only", Deadlock),
            ("event.notify.fence", Deadlock),
            ("event.wait.fence", Deadlock),
        ],
    },
    Tooth {
        file: "memory_handles",
        model: "one_of_two_is_the_last",
        mutants: &[
            ("refs.release", Race),
            ("refs.release.alone", Race),
            ("refs.release.fence", Race),
            ("refs.release.load_then_store", Assertion),
        ],
    },
    Tooth {
        file: "memory_handles",
        model: "a_new_handle_against_a_drop",
        mutants: &[("refs.release.load_then_store", Assertion)],
    },
    Tooth {
        file: "memory_handles",
        model: "an_event_is_recorded_anew_only_after_the_wait",
        mutants: &[("model.spares.gives_before_the_wait", Race)],
    },
    Tooth {
        file: "broadcast_slot",
        model: "members_in_step_miss_nothing",
        mutants: &[
            ("broadcast_slot.one_page", Assertion),
            ("mirror.write.store", Assertion),
            ("mirror.read.load", Assertion),
        ],
    },
    Tooth {
        file: "memory_handles",
        model: "the_mirror_shows_whole_writes",
        mutants: &[
            ("mirror.write.fence", Assertion),
            ("mirror.write.store", Assertion),
            ("mirror.read.load", Assertion),
            ("mirror.read.fence", Assertion),
        ],
    },
    Tooth {
        file: "memory_handles",
        model: "the_region_is_released_once_at_the_end",
        mutants: &[
            ("refs.release", Race),
            ("refs.release.alone", Race),
            ("refs.release.fence", Race),
            ("returns.close.load_then_store", Assertion),
        ],
    },
];
