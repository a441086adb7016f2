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

/// The table. A row names a file, a model in it, and the mutants that the model must fail with, by the way it fails.
macro_rules! teeth {
    ($($file:ident $model:ident: $($death:ident [$($mutant:literal)*])*;)*) => {
        &[$(Tooth {
            file: stringify!($file),
            model: stringify!($model),
            mutants: &[$($(($mutant, $death),)*)*],
        }),*]
    };
}

/// All models, with the mutants that each must kill.
pub const TEETH: &[Tooth] = teeth! {
    ring one_slot: Race ["ring.tail.store" "ring.tail.load" "ring.head.store" "ring.head.load"
        "ring.publishes_before_writing" "ring.frees_before_reading"];
    ring two_slots_wrapping: Race ["ring.tail.store" "ring.tail.load" "ring.head.store" "ring.head.load"];
    ring batches: Race ["ring.tail.store_batch" "ring.head.store_batch"];
    byte_ring one_byte: Race ["byte_ring.tail.store" "byte_ring.tail.load" "byte_ring.head.store" "byte_ring.head.load"
        "byte_ring.publishes_before_writing" "byte_ring.frees_before_reading"];
    byte_ring parts_that_wrap: Race ["byte_ring.tail.store" "byte_ring.tail.load" "byte_ring.head.store"
        "byte_ring.head.load"];
    journal all_read_in_one_order: Race ["journal.place.set" "journal.place.load" "journal.takes_its_place_first"];
    journal a_slot_is_used_again_when_all_have_read_it: Race ["journal.read.store" "journal.read.load"
        "journal.counts_before_reading"];
    journal a_late_writer_leaves_no_gap: Assertion ["journal.own_read.load"];
    journal who_waits_is_woken: Deadlock ["journal.bell.fence" "journal.ring.fence"];
    journal an_urgent_record_wakes_whom_a_killed_process_has_not_woken: Deadlock ["journal.rings_once"];
    publication data_follows_its_descriptor_there_and_back: Race ["ring.tail.store" "ring.tail.load"]
        Deadlock ["event.notify.fence" "event.wait.fence"];
    publication room_is_told_too: Deadlock ["event.notify_all.fence" "model.publication.room_is_not_told"];
    inbox two_senders_one_taker: Race ["inbox.push" "inbox.take"] Assertion ["inbox.push.load_then_store"];
    inbox two_takers_share: Race ["inbox.push" "inbox.take"];
    inbox_words a_slot_is_used_again_in_one_kernel: Race ["model.inbox_words.credit_is_relaxed"
        "model.inbox_words.credit_is_not_acquired"] Assertion ["model.inbox_words.sends_without_credit"
        "model.inbox_words.looks_at_one_word" "model.inbox_words.leaves_what_it_has_taken"];
    inbox_words a_slot_is_used_again_in_the_next_kernel: Assertion ["model.inbox_words.ends_before_all_is_taken"];
    inbox_words two_parities_are_enough: Race ["model.inbox_words.kernels_run_into_each_other"]
        Assertion ["model.inbox_words.one_parity"];
    inbox_words a_failed_call_leaves_nothing: Assertion ["model.inbox_words.is_not_emptied"];
    event_count one_waiter: Deadlock ["event.notify.fence" "event.wait.fence" "event.wait.no_second_look"
        "event.notify.no_lock"];
    event_count two_waiters_two_epochs: Deadlock ["event.notify.one"] Assertion ["event.take_back.always"];
    event_count one_call_for_two: Deadlock ["event.notify_all.fence" "model.event_count.notifies_between"];
    event_count who_waits_for_room_has_woken_whom_it_told: Deadlock ["model.event_count.waits_before_waking"];
    event_count two_notifiers: Deadlock ["event.notify.fence" "event.wait.fence"];
    event_count ping_pong: Deadlock ["event.notify.fence" "event.wait.fence"];
    latch nobody_touches_the_frame_after_the_last_set: Race ["latch.set" "latch.is_set" "latch.touches_after_set"];
    gate shutdown_against_submission: Race ["gate.enter" "gate.close" "gate.leave" "gate.drained"
        "gate.looks_before_adding"] Deadlock ["gate.leave.silent"];
    history a_reader_gets_whole_records: Assertion ["history.push.fence" "history.push.store" "history.read.load"
        "history.read.fence" "history.read.torn"];
    history a_late_word_is_of_its_record: Assertion ["history.set.overwritten"];
    gate a_look_at_the_closed_gate_shows_why: Race ["gate.close" "gate.is_closed"];
    launch_gate a_window_against_a_blocking_call: Race ["launch_gate.open" "launch_gate.close" "launch_gate.block"
        "launch_gate.wait" "launch_gate.unblock" "launch_gate.open.ignores_blocking"
        "launch_gate.block.looks_before_adding"] Deadlock ["launch_gate.close.silent" "launch_gate.unblock.silent"
        "event.notify.fence" "event.wait.fence"];
    launch_gate each_member_closes_for_itself: Race ["launch_gate.close" "launch_gate.block" "launch_gate.wait"]
        Deadlock ["launch_gate.close.silent"];
    launch_gate two_openers_one_blocking_call: Deadlock ["launch_gate.unblock.silent" "event.notify.one"];
    launch_gate two_blocking_calls_one_opener: Race ["launch_gate.unblock"] Deadlock ["launch_gate.close.silent"
        "launch_gate.unblock.silent"];
    launch_gate a_call_inside_a_call_does_not_wait_for_itself: Deadlock ["launch_gate.block.waits_for_others"
        "launch_gate.unblock.silent"];
    launch_gate no_window_opens_past_a_call_that_waits: Assertion ["launch_gate.open.overtakes"];
    commit members_agree_where_the_abort_fell: Race ["commit.load" "commit.abort"] Assertion ["commit.load_then_store"
        "commit.ignores_abort"];
    commit a_look_at_the_abort_shows_its_cause: Race ["commit.abort" "commit.is_aborted"];
    commit a_commit_shows_what_came_before: Race ["commit.cas" "commit.committed"];
    turnstile start_against_withdraw: Race ["turnstile.start" "turnstile.start.lost" "turnstile.withdraw"
        "turnstile.withdraw.lost"] Assertion ["turnstile.load_then_store"];
    one_shot a_value_arrives_and_wakes: Assertion ["one_shot.set.wakes_first"] Deadlock ["one_shot.set.silent"];
    one_shot a_value_is_there_when_the_flag_is: Assertion ["one_shot.set.raises_first"];
    one_shot the_last_waker_is_woken: Deadlock ["one_shot.set.silent"];
    one_shot no_job_stays_in_the_queue: Deadlock ["model.jobs.forgets_to_leave" "model.jobs.leaves_with_jobs"];
    sequence raise_to: Race ["sequence.raise_to" "sequence.get"];
    sequence flag: Race ["flag.raise" "flag.is_raised"];
    sequence fetch_advance: Race ["sequence.fetch_advance=acquire" "sequence.fetch_advance=release"];
    job the_caller_waits_for_all_members: Race ["latch.set" "latch.is_set"] Deadlock ["event.notify.fence"];
    job a_withdrawn_entry_never_touches_the_body: Race ["turnstile.load_then_store"];
    dispatch two_gangs_reach_two_devices_in_one_order: Deadlock ["event.wait.fence"] Race ["inbox.push"];
    gang the_first_failure_wins_and_nobody_waits_for_ever: Assertion ["commit.ignores_abort"]
        Deadlock ["event.notify.fence"];
    memory_returns two_senders_share_a_lane: Race ["returns.push" "returns.take"]
        Assertion ["returns.push.load_then_store"];
    memory_returns two_senders_have_lanes: Race ["returns.push" "returns.take"]
        Assertion ["returns.take.first_lane_only"];
    memory_returns what_was_done_before_is_seen: Race ["returns.push" "returns.take"];
    memory_returns a_box_goes_round_under_a_push: Race ["returns.push" "returns.take"]
        Assertion ["returns.push.load_then_store"];
    memory_returns a_push_against_the_close: Race ["returns.close=acquire" "returns.close=release"
        "returns.push.closed"] Assertion ["returns.close.load_then_store"];
    memory_returns a_take_against_the_close: Assertion ["returns.take.reopens"];
    memory_returns what_a_parked_peer_has_freed_is_there: Assertion ["model.returns.batches_at_the_sender"
        "flag.raise"];
    memory_returns an_owner_that_waits_for_a_free_wakes_up: Deadlock ["model.returns.batches_at_the_sender"
        "returns.take.first_lane_only" "event.notify.fence" "event.wait.fence"];
    memory_handles one_of_two_is_the_last: Race ["refs.release" "refs.release.alone" "refs.release.fence"]
        Assertion ["refs.release.load_then_store"];
    memory_handles a_new_handle_against_a_drop: Assertion ["refs.release.load_then_store"];
    memory_handles an_event_is_recorded_anew_only_after_the_wait: Race ["model.spares.gives_before_the_wait"];
    broadcast_slot members_in_step_miss_nothing: Assertion ["broadcast_slot.one_page" "mirror.write.store"
        "mirror.read.load"];
    memory_handles the_mirror_shows_whole_writes: Assertion ["mirror.write.fence" "mirror.write.store"
        "mirror.read.load" "mirror.read.fence"];
    memory_handles the_region_is_released_once_at_the_end: Race ["refs.release" "refs.release.alone"
        "refs.release.fence"] Assertion ["returns.close.load_then_store"];
    world launches_are_in_the_hubs_order: Deadlock ["world.take.silent" "world.close.silent"]
        Assertion ["model.world.turns_at_once"];
    world a_failure_ends_the_wait_of_who_has_no_commit: Deadlock ["world.take.silent"];
    world a_scope_that_has_failed_gives_its_turn_away: Deadlock ["world.forget.silent"];
    world scopes_are_announced_in_their_order: Assertion ["world.post.unordered"];
    world a_broken_connection_ends_every_wait: Deadlock ["world.send.ignores_the_end"];
    world the_end_of_the_cluster_ends_a_wait: Deadlock ["world.take.silent"];
};
