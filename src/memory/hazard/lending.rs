//! Which uses a process may make of memory that other processes have, too: the rule of Rust's borrows, over processes.
//!
//! Other processes only read, any number of them, and so does this one; or one other process has the memory alone. So
//! no safe program writes a race between processes.

use super::Access;
use parking_lot::Mutex;

/// The rights of other processes on a block.
#[derive(Default)]
pub struct Lending(Mutex<Lent>);

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Lent {
    #[default]
    Nobody,
    Readers(usize),
    Writer,
}

impl Lending {
    pub(super) fn refuses(&self, access: Access) -> bool {
        match *self.0.lock() {
            Lent::Nobody => false,
            Lent::Readers(_) => access == Access::Write,
            Lent::Writer => true,
        }
    }

    /// Of memory that this process may only read.
    pub fn read_only() -> Self {
        Lending(Mutex::new(Lent::Readers(1)))
    }

    /// Another process may access the memory like this from now on. False if that excludes what others may do.
    pub fn lend(&self, access: Access) -> bool {
        let mut lent = self.0.lock();
        *lent = match (*lent, access) {
            (Lent::Nobody, Access::Write) => Lent::Writer,
            (Lent::Nobody, Access::Read) => Lent::Readers(1),
            (Lent::Readers(n), Access::Read) => Lent::Readers(n + 1),
            _ => return false,
        };
        true
    }

    /// Ends one [`lend`](Self::lend).
    pub fn give_back(&self) {
        let mut lent = self.0.lock();
        *lent = match *lent {
            Lent::Readers(n) if n > 1 => Lent::Readers(n - 1),
            _ => Lent::Nobody,
        };
    }

    /// Whether another process may have the memory.
    pub fn is_lent(&self) -> bool {
        *self.0.lock() != Lent::Nobody
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/hazard/lending_tests.rs"]
mod tests;
