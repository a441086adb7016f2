//! Which tasks may run: variables with one writer or many readers.
//!
//! It is plain data, after MXNet's engine (`ThreadedVar` in src/engine/threaded_engine.h): each variable has a queue of
//! the accesses that were not granted yet. Invariants: a variable is granted to one writer or to any number of readers.
//! Grants of one variable follow the order in which tasks were added; so, if tasks end, every task gets its turn. The
//! reads of a finished task leave no trace but a count.

use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// A variable. The number is used again after the variable is gone.
pub(super) type VarId = usize;
/// A task. The number is used again after the task has finished.
pub(super) type TaskId = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// The variables of a task, without repetitions.
pub(super) type Uses = SmallVec<[(VarId, Access); 6]>;

/// Tasks with a payload `T`, variables with notes `V`.
pub(super) struct Graph<T, V> {
    tasks: Slab<Task<T>>,
    vars: Slab<Var<V>>,
}

struct Task<T> {
    payload: T,
    uses: Uses,
    waits: usize,
}

struct Var<V> {
    notes: V,
    queue: VecDeque<(TaskId, Access)>,
    readers: usize,
    is_written: bool,
    is_held: bool,
}

impl<V> Var<V> {
    /// Grants an access if nothing stands against it. `queued`: the access is the oldest of the queue.
    fn grants(&mut self, access: Access, queued: bool) -> bool {
        let free = match access {
            Access::Read => !self.is_written,
            Access::Write => !self.is_written && self.readers == 0,
        };
        if !free || !queued && !self.queue.is_empty() {
            return false;
        }
        match access {
            Access::Read => self.readers += 1,
            Access::Write => self.is_written = true,
        }
        true
    }

    fn is_over(&self) -> bool {
        !self.is_held && self.readers == 0 && !self.is_written && self.queue.is_empty()
    }
}

impl<T, V: Default> Graph<T, V> {
    pub fn new() -> Self {
        Graph { tasks: Slab::new(), vars: Slab::new() }
    }

    /// A new variable, which tasks may use until it is [released](Self::release).
    pub fn var(&mut self) -> VarId {
        let (notes, queue) = (V::default(), VecDeque::new());
        self.vars.insert(Var { notes, queue, readers: 0, is_written: false, is_held: true })
    }

    /// Adds a task. It waits for the tasks before it that it conflicts with. Two uses of one variable count as one.
    /// Returns whether the task is ready.
    pub fn add(&mut self, payload: T, uses: &[(VarId, Access)]) -> (TaskId, bool) {
        let entry = self.tasks.vacant_entry();
        let task = entry.key();
        let mut own = Uses::new();
        for &(var, access) in uses {
            match own.iter_mut().find(|(known, _)| *known == var) {
                Some((_, known)) if access == Access::Write => *known = Access::Write,
                Some(_) => {}
                None => own.push((var, access)),
            }
        }
        let mut waits = 0;
        for &(var, access) in &own {
            let var = &mut self.vars[var];
            if !var.grants(access, false) {
                var.queue.push_back((task, access));
                waits += 1;
            }
        }
        entry.insert(Task { payload, uses: own, waits });
        (task, waits == 0)
    }

    /// A task has run: its variables are granted to others. Calls `ready` for each task that can run now.
    pub fn finish(&mut self, task: TaskId, mut ready: impl FnMut(TaskId, &T)) -> T {
        let Task { payload, uses, waits } = self.tasks.remove(task);
        debug_assert_eq!(waits, 0, "a task runs when it is ready");
        for (id, access) in uses {
            let var = &mut self.vars[id];
            match access {
                Access::Read => var.readers -= 1,
                Access::Write => var.is_written = false,
            }
            while let Some(&(next, access)) = var.queue.front() {
                if !var.grants(access, true) {
                    break;
                }
                var.queue.pop_front();
                let task = &mut self.tasks[next];
                task.waits -= 1;
                if task.waits == 0 {
                    ready(next, &task.payload);
                }
            }
            if var.is_over() {
                self.vars.remove(id);
            }
        }
        payload
    }

    /// No task will be added that uses the variable. It is gone when its last task has finished.
    pub fn release(&mut self, var: VarId) {
        self.vars[var].is_held = false;
        if self.vars[var].is_over() {
            self.vars.remove(var);
        }
    }

    pub fn is_ready(&self, task: TaskId) -> bool {
        self.tasks[task].waits == 0
    }

    pub fn payload(&mut self, task: TaskId) -> &mut T {
        &mut self.tasks[task].payload
    }

    pub fn each_use(&mut self, task: TaskId, mut f: impl FnMut(Access, &mut V)) {
        let Graph { tasks, vars } = self;
        for &(var, access) in &tasks[task].uses {
            f(access, &mut vars[var].notes);
        }
    }

    pub fn notes(&mut self, var: VarId) -> &mut V {
        &mut self.vars[var].notes
    }

    pub fn vars(&self) -> usize {
        self.vars.len()
    }

    /// Takes all tasks out that have not finished.
    pub fn drain(&mut self) -> Vec<T> {
        self.tasks.drain().map(|task| task.payload).collect()
    }
}

#[cfg(test)]
#[path = "../../tests/unit/tasks/graph_tests.rs"]
mod tests;
