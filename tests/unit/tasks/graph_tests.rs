//! The graph against a serial execution.
//!
//! Ported from MXNet's tests/cpp/engine/threaded_engine_test.cc: `RandSumExpr` (random workloads give what the naive
//! engine gives) and `VarVersion` (a variable's version counts its writes, and a reader sees the writes before it).

use super::*;
use proptest::prelude::*;

/// One task of a random program: what it reads, and what it writes.
#[derive(Clone, Debug)]
struct Step {
    reads: Vec<usize>,
    writes: Vec<usize>,
}

const VARS: usize = 5;

fn programs() -> impl Strategy<Value = Vec<Step>> {
    let some = || prop::collection::vec(0..VARS, 0..3);
    prop::collection::vec((some(), some()).prop_map(|(reads, writes)| Step { reads, writes }), 1..40)
}

impl Step {
    fn uses(&self, vars: &[VarId]) -> Vec<(VarId, Access)> {
        let reads = self.reads.iter().map(|&var| (vars[var], Access::Read));
        reads.chain(self.writes.iter().map(|&var| (vars[var], Access::Write))).collect()
    }

    /// Adds the sum of all that it uses to all that it writes, with its number, so that no order of steps gives the
    /// values of another one.
    fn apply(&self, number: usize, values: &mut [u64], versions: &mut [u64]) {
        let sum =
            self.reads.iter().chain(&self.writes).fold(number as u64 + 1, |sum, &var| sum.wrapping_add(values[var]));
        let mut writes = self.writes.clone();
        writes.sort_unstable();
        writes.dedup();
        for var in writes {
            values[var] = values[var].wrapping_mul(31).wrapping_add(sum);
            versions[var] += 1;
        }
    }

    fn conflicts(&self, other: &Step) -> bool {
        let touches = |step: &Step, var: &usize| step.reads.contains(var) || step.writes.contains(var);
        self.writes.iter().any(|var| touches(other, var)) || other.writes.iter().any(|var| touches(self, var))
    }
}

proptest! {
    /// Tasks that start and end in any order that the graph allows give what one thread gives. No two that conflict run
    /// at once. Tasks are added while others run.
    #[test]
    fn any_order_that_is_allowed_gives_what_one_thread_gives(
        program in programs(),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 200),
    ) {
        let (mut expected, mut versions) = (vec![1u64; VARS], vec![0u64; VARS]);
        for (number, step) in program.iter().enumerate() {
            step.apply(number, &mut expected, &mut versions);
        }
        let mut graph = Graph::<usize, u64>::new();
        let vars: Vec<VarId> = (0..VARS).map(|_| graph.var()).collect();
        let mut values = vec![1u64; VARS];
        let (mut added, mut ready, mut running) = (0, Vec::new(), Vec::<(TaskId, usize)>::new());
        let mut choices = choices.into_iter().cycle();
        loop {
            let moves = usize::from(added < program.len()) + ready.len() + running.len();
            if moves == 0 {
                break;
            }
            let mut choice = choices.next().unwrap().index(moves);
            if added < program.len() {
                if choice == 0 {
                    let (task, is_ready) = graph.add(added, &program[added].uses(&vars));
                    prop_assert_eq!(graph.is_ready(task), is_ready);
                    if is_ready {
                        ready.push((task, added));
                    }
                    added += 1;
                    continue;
                }
                choice -= 1;
            }
            if choice < ready.len() {
                let (task, number) = ready.swap_remove(choice);
                for &(_, other) in &running {
                    prop_assert!(!program[number].conflicts(&program[other]), "{number} runs beside {other}");
                }
                // A task's effect is that of its start or of its end, as nothing that conflicts runs in between.
                program[number].apply(number, &mut values, &mut [0; VARS]);
                graph.each_use(task, |access, version| *version += u64::from(access == Access::Write));
                running.push((task, number));
            } else {
                let (task, _) = running.swap_remove(choice - ready.len());
                graph.finish(task, |task, &number| ready.push((task, number)));
            }
        }
        prop_assert_eq!(values, expected);
        let found: Vec<u64> = vars.iter().map(|&var| *graph.notes(var)).collect();
        prop_assert_eq!(found, versions);
        for var in vars {
            graph.release(var);
        }
        prop_assert_eq!((graph.vars(), graph.drain().len()), (0, 0));
    }
}

#[test]
fn readers_run_together_and_a_writer_alone() {
    let mut graph = Graph::<(), ()>::new();
    let x = graph.var();
    let (a, first) = graph.add((), &[(x, Access::Read)]);
    let (b, second) = graph.add((), &[(x, Access::Read)]);
    let (w, written) = graph.add((), &[(x, Access::Write)]);
    // A reader after a writer waits for the writer, although others read.
    let (c, third) = graph.add((), &[(x, Access::Read)]);
    assert_eq!((first, second, written, third), (true, true, false, false));
    let mut ready = Vec::new();
    graph.finish(a, |task, ()| ready.push(task));
    assert!(ready.is_empty());
    graph.finish(b, |task, ()| ready.push(task));
    assert_eq!(ready, [w]);
    graph.finish(w, |task, ()| ready.push(task));
    assert_eq!(ready, [w, c]);
}

#[test]
fn a_task_that_reads_and_writes_a_variable_writes_it() {
    let mut graph = Graph::<(), ()>::new();
    let x = graph.var();
    let (task, ready) = graph.add((), &[(x, Access::Read), (x, Access::Write), (x, Access::Read)]);
    assert!(ready, "it does not wait for itself");
    assert!(!graph.add((), &[(x, Access::Read)]).1);
    let mut woken = 0;
    graph.finish(task, |_, ()| woken += 1);
    assert_eq!(woken, 1);
}

/// The prototype kept every reader since the last write.
#[test]
fn what_a_million_tasks_have_read_stays_small() {
    let mut graph = Graph::<(), ()>::new();
    let x = graph.var();
    for _ in 0..1_000_000 {
        let (task, ready) = graph.add((), &[(x, Access::Read)]);
        assert!(ready);
        graph.finish(task, |_, ()| {});
    }
    assert_eq!((graph.vars[x].readers, graph.vars[x].queue.capacity(), graph.tasks.capacity() < 8), (0, 0, true));
}

#[test]
fn a_released_variable_goes_with_its_last_task() {
    let mut graph = Graph::<(), ()>::new();
    let x = graph.var();
    let (a, _) = graph.add((), &[(x, Access::Write)]);
    let (b, _) = graph.add((), &[(x, Access::Read)]);
    graph.release(x);
    graph.finish(a, |_, ()| {});
    assert_eq!(graph.vars(), 1);
    graph.finish(b, |_, ()| {});
    assert_eq!(graph.vars(), 0);
}
