//! Every ordering site, with the model that dies without it. `loom_tests/sites.rs` holds this against the source.

use super::{
    Death::{Assertion, Deadlock, Race},
    Tooth,
};

/// See the [module docs](self).
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
        file: "rendezvous",
        model: "two_parties_two_rounds",
        mutants: &[("rendezvous.arrive", Race), ("rendezvous.wait", Race), ("rendezvous.leader.silent", Deadlock)],
    },
    Tooth {
        file: "rendezvous",
        model: "three_parties",
        mutants: &[("rendezvous.arrive", Race), ("rendezvous.wait", Race)],
    },
    Tooth {
        file: "rendezvous",
        model: "an_abort_shows_its_cause",
        mutants: &[
            ("rendezvous.abort", Race),
            ("rendezvous.wait", Race),
            ("rendezvous.refused", Race),
            ("rendezvous.abort.silent", Deadlock),
        ],
    },
    Tooth {
        file: "rendezvous",
        model: "a_look_at_the_abort_shows_its_cause",
        mutants: &[("rendezvous.abort", Race), ("rendezvous.is_aborted", Race)],
    },
    Tooth {
        file: "rendezvous",
        model: "all_agree_whether_they_met",
        mutants: &[("rendezvous.abort_first", Assertion)],
    },
    Tooth {
        file: "rendezvous",
        model: "a_withdrawal_counts_as_an_arrival",
        mutants: &[("rendezvous.withdraw", Race), ("rendezvous.withdraw.silent", Deadlock)],
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
    Tooth { file: "sequence", model: "advance", mutants: &[("sequence.advance", Race), ("sequence.get", Race)] },
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
];
