//! Random histories of a heap of few words in a window, compared with a model.

use super::{
    Backing, Mappings,
    tests::{G, MEMORY, free, machine, wait},
    window_tests::vmm,
};
use crate::driver::{Address, FaultKind};
use proptest::prelude::*;
use std::{collections::BTreeMap, ops::Range};

/// Free and live ranges of one window, by granule: what a heap knows.
#[derive(Default)]
struct Model {
    /// By granule: whether it is live.
    cells: BTreeMap<u64, bool>,
}

impl Model {
    fn run(&self, at: u64, step: i64) -> u64 {
        let mut n = 0;
        while self.cells.get(&at.wrapping_add_signed(step * n as i64)) == Some(&false) {
            n += 1;
        }
        n
    }

    /// A free run of `n` granules.
    fn find(&self, n: u64) -> Option<u64> {
        self.cells.keys().copied().find(|&at| self.run(at, 1) >= n)
    }

    fn add(&mut self, mappings: &Mappings) {
        for mapping in mappings {
            for at in mapping.address / G..(mapping.address + mapping.bytes) / G {
                assert_eq!(self.cells.insert(at, false), None, "two mappings at one place");
            }
        }
    }

    fn remove(&mut self, unit: &Range<Address>) {
        for at in unit.start / G..unit.end / G {
            assert_eq!(self.cells.remove(&at), Some(false));
        }
    }

    /// Units that are wholly free.
    fn free_units(&self, backing: &dyn Backing) -> Vec<(u32, Range<Address>)> {
        let units = backing.units_in(0, 0..u64::MAX).into_iter();
        let is_free = |unit: &Range<Address>| (unit.start / G..unit.end / G).all(|at| !self.cells[&at]);
        units.filter(is_free).map(|unit| (0, unit)).collect()
    }
}

#[derive(Clone, Debug)]
enum Act {
    Take { n: u64, unit: u64 },
    Free { which: usize },
    Trim { which: usize },
    Gather { n: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1u64..9, 1u64..5).prop_map(|(n, unit)| Act::Take { n, unit }),
        4 => any::<usize>().prop_map(|which| Act::Free { which }),
        1 => any::<usize>().prop_map(|which| Act::Trim { which }),
        2 => (1u64..12).prop_map(|n| Act::Gather { n }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// After any history: the window has what the heap was told, all live memory keeps its bytes, and a growth brings
    /// what was asked for.
    #[test]
    fn a_heap_in_a_window(acts in prop::collection::vec(act(), 1..60)) {
        let gpu = machine(1).remove(0);
        let (handle, mut backing) = vmm(&gpu);
        let stream = gpu.stream_create(0).unwrap();
        let host = gpu.host_alloc(8 * 16).unwrap();
        let mut model = Model::default();
        let mut live: Vec<(u64, u64, u8)> = Vec::new();
        for (step, act) in acts.into_iter().enumerate() {
            match act {
                Act::Take { n, unit } => {
                    if model.find(n).is_none() {
                        let free = |_: u32, at: Address| (model.run(at / G - 1, -1) * G, model.run(at / G, 1) * G);
                        match backing.grow(n * G, unit * G, u64::MAX, &free) {
                            Ok(come) => {
                                prop_assert!(!come.is_empty());
                                model.add(&come);
                                prop_assert!(model.find(n).is_some(), "it was said to be enough");
                            }
                            Err(fault) => {
                                prop_assert_eq!(fault.kind, FaultKind::OutOfMemory);
                                let bytes = model.cells.len() as u64 * G;
                                prop_assert!(bytes + n * G > MEMORY, "there was enough");
                            }
                        }
                    }
                    if let Some(at) = model.find(n) {
                        model.cells.extend((at..at + n).map(|cell| (cell, true)));
                        live.push((at, n, step as u8));
                        // Over all edges: the first and last bytes of each granule.
                        // SAFETY: live memory, waited for below.
                        unsafe { gpu.fill_u8(at * G, step as u8, (n * G) as usize, stream) }.unwrap();
                    }
                }
                Act::Free { which } if !live.is_empty() => {
                    let (at, n, value) = live.swap_remove(which % live.len());
                    for i in 0..n {
                        // SAFETY: as above.
                        let copied =
                            unsafe { gpu.copy_to_host(host.add(16 * i as usize), (at + i + 1) * G - 16, 16, stream) };
                        copied.unwrap();
                    }
                    wait(&handle, stream);
                    // SAFETY: zeroed at birth, and nothing is in flight.
                    let seen = unsafe { std::slice::from_raw_parts(host, 16 * n as usize) };
                    prop_assert!(seen.iter().all(|&byte| byte == value));
                    model.cells.extend((at..at + n).map(|cell| (cell, false)));
                }
                Act::Trim { which } => {
                    wait(&handle, stream);
                    let units = model.free_units(&*backing);
                    if let Some((region, unit)) = units.get(which % units.len().max(1)) {
                        // SAFETY: nothing uses it any more.
                        unsafe { backing.unmap(*region, unit.clone()) }.unwrap();
                        model.remove(unit);
                    }
                }
                Act::Gather { n } if model.find(n).is_none() => {
                    wait(&handle, stream);
                    let units = model.free_units(&*backing);
                    let free = |_: u32, at: Address| (model.run(at / G - 1, -1) * G, model.run(at / G, 1) * G);
                    // SAFETY: nothing uses them any more.
                    let moved = unsafe { backing.move_units(&units, n * G, &free) };
                    prop_assert!(moved.fault.is_none());
                    moved.from.iter().for_each(|(_, unit)| model.remove(unit));
                    model.add(&moved.to);
                    prop_assert!(moved.to.is_empty() || model.find(n).is_some());
                }
                _ => {}
            }
            prop_assert_eq!(backing.reserved(), model.cells.len() as u64 * G);
            prop_assert_eq!(MEMORY - free(&gpu), backing.reserved());
        }
        wait(&handle, stream);
    }
}
