//! Models of `gang::dispatch`: gangs that share devices reach all of them in one order, for any callers and timing.

use super::support::{bite, check, check_within};
use crate::{
    gang::{
        dispatch::{Entry, Order, Queue},
        job::Waiting,
    },
    sync::{
        EventCount,
        shim::{Arc, Mutex, thread},
    },
};
use std::collections::VecDeque;

type Log = Arc<[Mutex<Vec<usize>>; 2]>;

fn dispatch(gang: usize, order: &Order, queues: &[Queue<()>; 2], log: &Log) {
    let body = |_: &(), rank: usize| log[rank].lock().push(gang);
    let waiting = Waiting::new(&body, 2, Arc::new(EventCount::new()));
    order.enter(&waiting.ticket(), &[&queues[0], &queues[1]], |_| 0);
    assert!(waiting.wait(None, std::time::Duration::ZERO));
}

fn device(queues: &[Queue<()>; 2], device: usize, entries: usize) {
    let mut taken = VecDeque::new();
    for _ in 0..entries {
        match queues[device].next(&mut taken) {
            Entry::Gang { ticket, rank, .. } => assert!(ticket.run(&(), rank)),
            Entry::Task(task) => task(&()),
            Entry::Visit { .. } | Entry::Stop => unreachable!(),
        }
    }
}

/// Two callers enter their gangs at once; main drains the queues of both devices afterwards and compares.
#[test]
fn two_gangs_enter_both_queues_in_one_order() {
    check(|| {
        let state = Arc::new((Order::new(), [Queue::<()>::new(), Queue::new()]));
        let callers: Vec<_> = (1..=2)
            .map(|gang| {
                let state = state.clone();
                thread::spawn(move || {
                    // The number marks the gang. No thread runs the entries here, so they are withdrawn.
                    let waiting = Waiting::new(&|_: &(), _| unreachable!(), 2, Arc::new(EventCount::new()));
                    state.0.enter(&waiting.ticket(), &[&state.1[0], &state.1[1]], |_| gang);
                    assert!(waiting.withdraw(0) && waiting.withdraw(1));
                })
            })
            .collect();
        callers.into_iter().for_each(|c| c.join().unwrap());
        let gpu_order = [0, 1].map(|device| {
            let mut taken = VecDeque::new();
            [0, 1].map(|_| match state.1[device].next(&mut taken) {
                Entry::Gang { ticket, rank, turn } => {
                    assert!(rank == device && !ticket.run(&(), rank));
                    turn
                }
                _ => unreachable!(),
            })
        });
        assert_eq!(gpu_order[0], gpu_order[1]);
    });
}

/// Two callers, two devices, everything at once: main is the second caller.
#[test]
fn two_gangs_reach_two_devices_in_one_order() {
    check_within(1, || {
        let state = Arc::new((Order::new(), [Queue::new(), Queue::new()]));
        let log: Log = Arc::new([Mutex::new(Vec::new()), Mutex::new(Vec::new())]);
        let devices: Vec<_> = (0..2)
            .map(|rank| {
                let state = state.clone();
                thread::spawn(move || device(&state.1, rank, 2))
            })
            .collect();
        let caller = thread::spawn({
            let (state, log) = (state.clone(), log.clone());
            move || dispatch(1, &state.0, &state.1, &log)
        });
        dispatch(2, &state.0, &state.1, &log);
        caller.join().unwrap();
        devices.into_iter().for_each(|d| d.join().unwrap());
        let (first, second) = (log[0].lock().clone(), log[1].lock().clone());
        assert_eq!(first, second);
    });
}

#[test]
fn teeth() {
    bite("dispatch");
}
