//! [`Value`]: the data that tasks make, read and write; and the arguments of a task. The engine decides when a task may
//! touch a value ([`super::graph`]), so a lock of a content never waits.

use super::graph::{Access, VarId};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;
use std::sync::Arc;

/// The result of a task. Other tasks take it by `&value`, `&mut value` or `value`; the caller looks at it by
/// [`Tasks::get`](super::Tasks::get).
///
/// The content appears when the task has run. It is dropped when it is not needed any more: the caller has dropped the
/// `Value`, and the last task that uses it has run.
///
/// A value belongs to the call of [`GpuPool::tasks`](crate::GpuPool::tasks) in which it was made. Elsewhere it is an
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) that names the place of its use.
#[must_use = "a value that nobody uses is dropped; `let _ =` says that this is meant"]
pub struct Value<T> {
    pub(super) slot: Arc<Slot<T>>,
}

pub(super) struct Slot<T> {
    pub content: RwLock<Option<T>>,
    pub var: VarId,
    pub home: Arc<Home>,
}

#[derive(Default)]
pub(super) struct Home {
    pub released: Mutex<Vec<VarId>>,
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        self.home.released.lock().push(self.var);
    }
}

impl<T> Slot<T> {
    pub fn new(var: VarId, home: &Arc<Home>) -> Arc<Self> {
        Arc::new(Slot { content: RwLock::new(None), var, home: home.clone() })
    }
}

debug_as!(Value<T> [T], |self| "Value<{}>", std::any::type_name::<T>());

pub struct Uses {
    pub(super) home: Arc<Home>,
    pub(super) list: SmallVec<[(VarId, Access); 6]>,
    pub(super) is_foreign: bool,
}

impl Uses {
    fn add<T>(&mut self, value: &Value<T>, access: Access) {
        match Arc::ptr_eq(&value.slot.home, &self.home) {
            true => self.list.push((value.slot.var, access)),
            false => self.is_foreign = true,
        }
    }
}

/// The arguments of a task: `()`, or a tuple of up to eight [`TaskArg`]s. The task's closure gets a tuple of the
/// contents that they stand for.
pub trait TaskArgs {
    /// The part of the arguments that the library keeps until the task runs.
    type Cells: TaskCells + Send;
    #[doc(hidden)]
    fn cells(self, uses: &mut Uses) -> Self::Cells;
}

/// An argument of a task.
///
/// | argument | the closure gets | |
/// |---|---|---|
/// | `&Value<T>` | `&T` | a read: beside other readers, after the writes before it |
/// | `&mut Value<T>` | `&mut T` | a write: alone, after the reads and writes before it |
/// | `Value<T>` | `T` | the content itself; the caller has the value no more |
/// | `&[Value<T>]`, `Vec<&Value<T>>` | `Vec<&T>` | reads of several |
pub trait TaskArg {
    /// The part of the argument that the library keeps until the task runs.
    type Cell: TaskCell + Send;
    #[doc(hidden)]
    fn cell(self, uses: &mut Uses) -> Self::Cell;
}

/// The contents of [`TaskArgs`], without the caller's borrows.
#[doc(hidden)]
pub trait TaskCells: 'static {
    type Refs<'a>;
    fn call<R>(&self, f: impl for<'a> FnOnce(Self::Refs<'a>) -> R) -> R;
}

/// The content of a [`TaskArg`], without the caller's borrow.
#[doc(hidden)]
pub trait TaskCell: 'static {
    type Guard<'g>;
    type Ref<'a>;
    fn lock(&self) -> Self::Guard<'_>;
    fn get<'a>(guard: &'a mut Self::Guard<'_>) -> Self::Ref<'a>;
}

const THERE: &str = "a task runs after the tasks that make its arguments";

#[doc(hidden)]
pub struct Reads<T>(Arc<Slot<T>>);
#[doc(hidden)]
pub struct Writes<T>(Arc<Slot<T>>);
#[doc(hidden)]
pub struct Takes<T>(Arc<Slot<T>>);
#[doc(hidden)]
pub struct ReadsAll<T>(Vec<Reads<T>>);

/// The cells of one value: `cell: guard, reference, how to lock, how to get`.
macro_rules! cells {
    ($($Cell:ident: $Guard:ty, $Ref:ty, |$content:ident| $lock:expr, $get:ident;)+) => {$(
        impl<T: 'static> TaskCell for $Cell<T> {
            type Guard<'g> = $Guard;
            type Ref<'a> = $Ref;
            fn lock(&self) -> Self::Guard<'_> {
                let $content = &self.0.content;
                $lock
            }
            fn get<'a>(guard: &'a mut Self::Guard<'_>) -> Self::Ref<'a> {
                guard.$get().expect(THERE)
            }
        }
    )+};
}
cells! {
    Reads: RwLockReadGuard<'g, Option<T>>, &'a T, |content| content.read(), as_ref;
    Writes: RwLockWriteGuard<'g, Option<T>>, &'a mut T, |content| content.write(), as_mut;
    Takes: Option<T>, T, |content| content.write().take(), take;
}

impl<T: 'static> TaskCell for ReadsAll<T> {
    type Guard<'g> = Vec<RwLockReadGuard<'g, Option<T>>>;
    type Ref<'a> = Vec<&'a T>;
    fn lock(&self) -> Self::Guard<'_> {
        self.0.iter().map(TaskCell::lock).collect()
    }
    fn get<'a>(guard: &'a mut Self::Guard<'_>) -> Vec<&'a T> {
        guard.iter().map(|content| content.as_ref().expect(THERE)).collect()
    }
}

macro_rules! args {
    ($($Arg:ty: $Cell:ident, $access:ident;)+) => {$(
        impl<T: Send + Sync + 'static> TaskArg for $Arg {
            type Cell = $Cell<T>;
            fn cell(self, uses: &mut Uses) -> $Cell<T> {
                uses.add(&self, Access::$access);
                $Cell(self.slot.clone())
            }
        }
    )+};
}
args! {
    &Value<T>: Reads, Read;
    &mut Value<T>: Writes, Write;
    Value<T>: Takes, Write;
}

impl<T: Send + Sync + 'static> TaskArg for &[Value<T>] {
    type Cell = ReadsAll<T>;
    fn cell(self, uses: &mut Uses) -> ReadsAll<T> {
        ReadsAll(self.iter().map(|value| value.cell(uses)).collect())
    }
}

impl<T: Send + Sync + 'static> TaskArg for Vec<&Value<T>> {
    type Cell = ReadsAll<T>;
    fn cell(self, uses: &mut Uses) -> ReadsAll<T> {
        ReadsAll(self.into_iter().map(|value| value.cell(uses)).collect())
    }
}

impl TaskArgs for () {
    type Cells = ();
    fn cells(self, _: &mut Uses) {}
}

impl TaskCells for () {
    type Refs<'a> = ();
    fn call<R>(&self, f: impl for<'a> FnOnce(()) -> R) -> R {
        f(())
    }
}

macro_rules! tuple {
    ($(($A:ident $C:ident $i:tt))+) => {
        impl<$($A: TaskArg),+> TaskArgs for ($($A,)+) {
            type Cells = ($($A::Cell,)+);
            fn cells(self, uses: &mut Uses) -> Self::Cells {
                ($(self.$i.cell(uses),)+)
            }
        }

        impl<$($C: TaskCell),+> TaskCells for ($($C,)+) {
            type Refs<'a> = ($($C::Ref<'a>,)+);
            fn call<R>(&self, f: impl for<'a> FnOnce(Self::Refs<'a>) -> R) -> R {
                let mut guards = ($(self.$i.lock(),)+);
                f(($($C::get(&mut guards.$i),)+))
            }
        }
    };
}
each_start! { tuple [] (A CA 0) (B CB 1) (C CC 2) (D CD 3) (E CE 4) (F CF 5) (G CG 6) (H CH 7) }
