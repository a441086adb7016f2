//! Words in memory that streams raise and wait for.

use crate::rig::*;
use gpu_pool_lab::check::Kind;

#[test]
fn a_flag_raised_before_the_wait() {
    for order in [true, false] {
        let gpu = &gpus(1)[0];
        let (x, flag, s, t) = (memory(gpu), pinned(gpu), stream(gpu), stream(gpu));
        if order {
            fill(gpu, x, 1, s).unwrap();
        }
        raise(gpu, flag, 1, s).unwrap();
        if !order {
            fill(gpu, x, 1, s).unwrap();
        }
        wait_flag(gpu, flag, 1, t);
        race_unless(order, fill(gpu, x, 2, t));
        idle(gpu, t);
        idle(gpu, s);
    }
}

/// The one who waits is submitted first, on another device; so are an event's and a third stream's share in that.
#[test]
fn a_flag_raised_after_the_wait() {
    for order_it in [true, false] {
        let [a, b] = &two_gpus();
        let (x, to, to2, flag) = (memory(a), pinned(a), pinned(a), pinned(a));
        let (s, t, u) = (stream(a), stream(b), stream(b));
        wait_flag(b, flag, 7, t);
        down(b, to, x, t).unwrap();
        order(b, t, b, u);
        down(b, to2, x, u).unwrap();
        raise(a, flag, 6, s).unwrap();
        if order_it {
            fill(a, x, 9, s).unwrap();
            raise(a, flag, 7, s).unwrap();
            caught(fill(a, x, 1, s), Kind::Race);
            idle(b, u);
            assert_eq!((look(to), look(to2)), (9, 9));
        } else {
            let report = caught(raise(a, flag, 7, s), Kind::UninitializedRead);
            assert_eq!((report.now.op, report.now.device), ("copy_to_host", Some(1)));
            // It did not run: nobody was let go.
            assert!(!b.stream_query(t).unwrap());
            fill(a, x, 9, s).unwrap();
            raise(a, flag, 7, s).unwrap();
            idle(b, u);
            assert_eq!(look(to), 9);
        }
        idle(a, s);
        idle(b, t);
    }
}

/// A conflict that a flag might have ordered, but does not, is found when the flag is raised.
#[test]
fn a_flag_that_does_not_order_what_it_was_hoped_to() {
    let gpu = &gpus(1)[0];
    let (x, flag, s, t, u) = (memory(gpu), pinned(gpu), stream(gpu), stream(gpu), stream(gpu));
    fill(gpu, x, 1, u).unwrap();
    wait_flag(gpu, flag, 1, t);
    fill(gpu, x, 2, t).unwrap();
    let report = caught(raise(gpu, flag, 1, s), Kind::Race);
    assert_eq!((report.now.stream, report.before.as_ref().unwrap().stream), (Some(1), Some(2)));
    order(gpu, u, gpu, s);
    raise(gpu, flag, 1, s).unwrap();
    idle(gpu, t);
    caught(fill(gpu, x, 3, stream(gpu)).and(fill(gpu, x, 4, s)), Kind::Race);
}

#[test]
fn flags_race_with_plain_accesses() {
    let gpu = &gpus(1)[0];
    let (flag, s, t) = (pinned(gpu), stream(gpu), stream(gpu));
    raise(gpu, flag, 1, s).unwrap();
    raise(gpu, flag, 2, t).unwrap();
    caught(fill(gpu, flag, 0, s), Kind::Race);
    idle(gpu, t);
    fill(gpu, flag, 0, s).unwrap();
    caught(raise(gpu, flag, 1, t), Kind::Race);
    idle(gpu, s);
}

/// Two streams hand one buffer back and forth by a counter, each round submitted in the "wrong" order.
#[test]
fn a_counter_that_goes_back_and_forth() {
    let [a, b] = &two_gpus();
    let (shared, flag, s, t) = (pinned(a), pinned(a), stream(a), stream(b));
    for round in 0..50 {
        wait_flag(b, flag, 2 * round + 1, t);
        fill(b, shared, 2, t).unwrap();
        raise(b, flag, 2 * round + 2, t).unwrap();
        if round > 0 {
            wait_flag(a, flag, 2 * round, s);
        }
        fill(a, shared, 1, s).unwrap();
        raise(a, flag, 2 * round + 1, s).unwrap();
    }
    idle(b, t);
    assert_eq!(look(shared), 2);
    idle(a, s);
}
