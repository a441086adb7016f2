//! The rendezvous: all parties of a meeting agree on whether it took place, and see what the others did before it.

mod support;

#[cfg(loom)]
mod models {
    use super::support::{Watched, bite, check, check_within};
    use gpu_pool::sync::{
        Broken, Rendezvous,
        shim::{Arc, thread},
    };

    /// What parties write before they meet and read afterwards.
    struct Table {
        rendezvous: Rendezvous,
        notes: [Watched<usize>; 3],
    }

    impl Table {
        fn new(parties: usize) -> Arc<Self> {
            let notes = [Watched::new(0), Watched::new(0), Watched::new(0)];
            Arc::new(Table { rendezvous: Rendezvous::new(parties), notes })
        }

        fn write(&self, i: usize, value: usize) {
            self.notes[i].set(value);
        }

        fn read(&self, i: usize) -> usize {
            self.notes[i].get()
        }

        fn spawn<R: 'static>(this: &Arc<Self>, party: impl FnOnce(&Self) -> R + 'static) -> thread::JoinHandle<R> {
            let table = this.clone();
            thread::spawn(move || party(&table))
        }
    }

    /// Write, meet, read the other's note, meet, write again: the second meeting keeps the readers from the next round's
    /// writers.
    #[test]
    fn two_parties_two_rounds() {
        fn party(table: &Table, me: usize) -> usize {
            let mut led = 0;
            for round in 1..=2 {
                table.write(me, round);
                led += usize::from(table.rendezvous.arrive(None).unwrap());
                assert_eq!(table.read(1 - me), round);
                led += usize::from(table.rendezvous.arrive(None).unwrap());
            }
            led
        }
        check_within(2, || {
            let table = Table::new(2);
            let other = Table::spawn(&table, |table| party(table, 1));
            assert_eq!(party(&table, 0) + other.join().unwrap(), 4, "each meeting has one leader");
        });
    }

    #[test]
    fn three_parties() {
        fn party(table: &Table, me: usize) -> bool {
            table.write(me, 1);
            let leader = table.rendezvous.arrive(None).unwrap();
            assert_eq!((0..3).map(|i| table.read(i)).sum::<usize>(), 3);
            leader
        }
        check_within(2, || {
            let table = Table::new(3);
            let others: Vec<_> = (1..3).map(|me| Table::spawn(&table, move |table| party(table, me))).collect();
            let leaders = usize::from(party(&table, 0));
            assert_eq!(leaders + others.into_iter().filter_map(|o| o.join().unwrap().then_some(())).count(), 1);
        });
    }

    /// An abort frees everyone, whether he waits already or arrives later, and shows its cause.
    #[test]
    fn an_abort_shows_its_cause() {
        fn party(table: &Table) {
            assert_eq!(table.rendezvous.arrive(None), Err(Broken::Aborted));
            assert_eq!(table.read(0), 7);
        }
        check(|| {
            let table = Table::new(3);
            let parties = [Table::spawn(&table, party), Table::spawn(&table, party)];
            table.write(0, 7);
            table.rendezvous.abort();
            parties.into_iter().for_each(|p| p.join().unwrap());
        });
    }

    /// Who only looks sees the cause too.
    #[test]
    fn a_look_at_the_abort_shows_its_cause() {
        check(|| {
            let table = Table::new(2);
            let looking = Table::spawn(&table, |table| {
                if table.rendezvous.is_aborted() {
                    assert_eq!(table.read(0), 7);
                }
            });
            table.write(0, 7);
            table.rendezvous.abort();
            looking.join().unwrap();
        });
    }

    /// An abort against the last arrival: the parties agree on which came first.
    #[test]
    fn all_agree_whether_they_met() {
        check(|| {
            let table = Table::new(2);
            let other = Table::spawn(&table, |table| table.rendezvous.arrive(None));
            let aborting = Table::spawn(&table, |table| table.rendezvous.abort());
            let mine = table.rendezvous.arrive(None);
            let theirs = other.join().unwrap();
            aborting.join().unwrap();
            assert_eq!(mine.is_ok(), theirs.is_ok(), "{mine:?} {theirs:?}");
        });
    }

    /// A withdrawal stands in for an arrival: it completes the meeting and shows what was done before it.
    #[test]
    fn a_withdrawal_counts_as_an_arrival() {
        check_within(2, || {
            let table = Table::new(3);
            let withdrawing = Table::spawn(&table, |table| {
                table.write(2, 5);
                table.rendezvous.withdraw();
            });
            let party = |table: &Table| {
                let leader = table.rendezvous.arrive(None).unwrap();
                assert_eq!(table.read(2), 5);
                leader
            };
            let other = Table::spawn(&table, party);
            party(&table);
            other.join().unwrap();
            withdrawing.join().unwrap();
        });
    }

    #[test]
    fn teeth() {
        bite("rendezvous");
    }
}
