//! Tensor parallel on two devices, in `bf16`: a product and its exchange, one after the other and in blocks that
//! overlap, against PyTorch (`peers/tensor.py`): a product and NCCL, and the fused operations on symmetric memory.
//!
//! * `.../tensor/<what>/<rows>x<width>x<own>`: microseconds of a call. `width` columns are on all devices, `own`
//!   columns on each. The calls: `row_forward` and `row_forward_to_rows` of `RowLinear`; `gather_product`, which is
//!   `ColumnLinear::forward_from_rows`; `column_backward` of `ColumnLinear`.
//! * `.../tensor_blocks/<what>/..`: the library's choice of blocks against others: a ratio below 1 means that the other
//!   blocks are faster
//!
//! Each call needs a number of the last one's result, so that no call overlaps with the next one. Before a case is
//! measured, some elements of its result are compared with sums on the host. Targets: 1.25 times as fast as torch with
//! NCCL at 8192 rows and 4096 own columns, and nowhere slower.

use std::{cell::RefCell, time::Instant};

use gpu_pool::{AsView, Device, DeviceBuffer, Group, PerDevice, Result};
use gpu_pool_train::{ColumnLinear, RowLinear, prelude::*};
use half::bf16;

use crate::{
    Machine,
    machine::uninit,
    support::{Bench, MICROSECONDS, Side, child::Torch},
};

const DEVICES: usize = 2;
const WHAT: [&str; 4] = ["row_forward", "row_forward_to_rows", "gather_product", "column_backward"];
const ONE: &[u16] = &[1];
/// How long a side's turn takes, in microseconds, if a few calls are shorter.
const TURN: f64 = 15_000.0;

/// The layers of a device with `own` columns, and their data for `most` rows.
struct Rig {
    width: usize,
    own: usize,
    row: RowLinear<bf16>,
    column: ColumnLinear<bf16>,
    /// Own columns, all columns, and all columns of the own rows.
    h: DeviceBuffer<bf16>,
    x: DeviceBuffer<bf16>,
    part: DeviceBuffer<bf16>,
}

/// A call on so many rows.
#[derive(Clone, Copy)]
struct Call {
    what: &'static str,
    rows: usize,
    blocks: Option<&'static [u16]>,
}

/// A member's numbers for an element of the result: the result, its part of the sum, and the bias, if there is one.
struct Element {
    found: f64,
    part: f64,
    bias: f64,
}

fn group(dev: &Device) -> Result<Group<'_>> {
    dev.group(&[0, 1])
}

fn wide(dev: &Device, x: &impl AsView<Elem = bf16>) -> Result<Vec<f64>> {
    Ok(dev.download(x)?.into_iter().map(|x| f64::from(x.to_f32())).collect())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Rig {
    fn new(dev: &Device, most: usize, width: usize, own: usize, zeros: &[bf16]) -> Result<Self> {
        let (group, me) = (group(dev)?, dev.rank() as u64);
        let mut row = RowLinear::new(&group, zeros, &zeros[..width])?;
        let mut column = ColumnLinear::new(&group, zeros, &zeros[..own * DEVICES])?;
        let spread = |inputs: usize| 1.0 / (inputs as f32).sqrt();
        dev.normal(&mut row.part.weight, 0.0, spread(own * DEVICES), 1 + 10 * me, 0)?;
        dev.normal(&mut column.part.weight, 0.0, spread(width), 2 + 10 * me, 0)?;
        // The same on both.
        dev.normal(&mut row.part.bias, 0.0, 1.0, 3, 0)?;
        dev.normal(&mut column.part.bias, 0.0, 1.0, 4 + 10 * me, 0)?;
        let noise = |len, seed| {
            let mut x = uninit(dev, len)?;
            dev.normal(&mut x, 0.0, 1.0, seed + 10 * me, 0)?;
            Ok(x)
        };
        let (h, x, part) = (noise(most * own, 5)?, noise(most * width, 6)?, noise(most / DEVICES * width, 7)?);
        Ok(Rig { width, own, row, column, h, x, part })
    }

    /// The result of a call, and all rows of x of `gather_product`.
    fn call(
        &mut self,
        dev: &Device,
        Call { what, rows, blocks }: Call,
    ) -> Result<(DeviceBuffer<bf16>, Option<DeviceBuffer<bf16>>)> {
        let group = group(dev)?;
        (self.row.part.blocks, self.column.part.blocks) = (blocks, blocks);
        let h = self.h.slice(..rows * self.own);
        Ok(match what {
            "row_forward" => (self.row.forward(&group, &h, rows)?, None),
            "row_forward_to_rows" => (self.row.forward_to_rows(&group, &h, rows)?, None),
            "gather_product" => {
                let part = self.part.slice(..rows / DEVICES * self.width);
                let (x, y) = self.column.forward_from_rows(&group, &part, rows)?;
                (y, Some(x))
            }
            _ => (self.column.backward(&group, &self.x.slice(..rows * self.width), &h, rows, false)?, None),
        })
    }

    /// Microseconds of a call.
    fn time(&mut self, dev: &Device, call: Call, calls: usize) -> Result<f64> {
        dev.synchronize()?;
        dev.barrier()?;
        let clock = Instant::now();
        for _ in 0..calls {
            let (y, _) = self.call(dev, call)?;
            let input = if call.what == "gather_product" { &mut self.part } else { &mut self.h };
            dev.copy(&y.slice(y.len() - 1..), &mut input.slice_mut(..1))?;
        }
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6 / calls as f64)
    }

    /// Column `col` of a matrix.
    fn column_of(dev: &Device, matrix: &DeviceBuffer<bf16>, cols: usize, col: usize) -> Result<Vec<f64>> {
        let rows = matrix.len() / cols;
        let mut found = uninit::<bf16>(dev, rows)?;
        dev.copy_2d(&matrix.slice(col..), cols, &mut found, 1, rows, 1)?;
        wide(dev, &found)
    }

    /// Some elements of the result.
    fn sample(&mut self, dev: &Device, call: Call) -> Result<Vec<Element>> {
        let (y, all) = self.call(dev, call)?;
        let (rows, width, own) = (call.rows, self.width, self.own);
        let (cols, first, count) = match call.what {
            "gather_product" => (own, 0, rows),
            "row_forward_to_rows" => (width, rows / DEVICES * dev.rank(), rows / DEVICES),
            _ => (width, 0, rows),
        };
        assert_eq!(y.len(), count * cols);
        let mut elements = Vec::new();
        // In each block, at its begin and its end; each member needs the others' parts of its rows.
        for row in (0..16).flat_map(|i| [i * rows / 16, (i + 1) * rows / 16 - 1]) {
            let col = (row * 7 + 3) % cols;
            let is_here = (first..first + count).contains(&row);
            let found = if is_here {
                wide(dev, &y.slice((row - first) * cols + col..(row - first) * cols + col + 1))?[0]
            } else {
                f64::NAN
            };
            let h = || wide(dev, &self.h.slice(row * own..(row + 1) * own));
            let (part, bias) = match call.what {
                "gather_product" => {
                    let x = wide(dev, &all.as_ref().expect("x").slice(row * width..(row + 1) * width))?;
                    let weight = Self::column_of(dev, &self.column.part.weight, own, col)?;
                    let sum = dot(&x, &weight) + wide(dev, &self.column.part.bias.slice(col..col + 1))?[0];
                    // Own columns are no sum over the members.
                    assert!((sum - found).abs() < 0.06, "row {row}, column {col}: {found}, not {sum}");
                    let here = rows / DEVICES * dev.rank()..rows / DEVICES * (dev.rank() + 1);
                    let own_row = if here.contains(&row) {
                        let at = (row - here.start) * width;
                        wide(dev, &self.part.slice(at..at + width))?
                    } else {
                        vec![]
                    };
                    // The row came from its owner: the two halves of this sum are equal.
                    elements.push(Element { found: x.iter().sum(), part: own_row.iter().sum(), bias: 0.0 });
                    continue;
                }
                "column_backward" => {
                    let weight = wide(dev, &self.column.part.weight.slice(col * own..(col + 1) * own))?;
                    (dot(&h()?, &weight), 0.0)
                }
                _ => {
                    let weight = Self::column_of(dev, &self.row.part.weight, width, col)?;
                    (dot(&h()?, &weight), wide(dev, &self.row.part.bias.slice(col..col + 1))?[0])
                }
            };
            elements.push(Element { found, part, bias });
        }
        Ok(elements)
    }
}

/// Compares some elements with the members' sums.
fn check(rig: &RefCell<PerDevice<Rig>>, case: &str, call: Call) {
    let members = rig.borrow_mut().run(|dev, _, rig| rig.sample(dev, call)).expect("a call");
    for i in 0..members[0].len() {
        let sum: f64 = members.iter().map(|elements| elements[i].part).sum::<f64>() + members[0][i].bias;
        let found: Vec<f64> = members.iter().map(|elements| elements[i].found).filter(|x| !x.is_nan()).collect();
        assert!(!found.is_empty());
        for found in found {
            assert!((found - sum).abs() < 0.06, "{case}, {:?}, sample {i}: {found}, not {sum}", call.blocks);
        }
    }
}

/// Other blocks than the library's: name and weights.
fn others(what: &str) -> &'static [(&'static str, &'static [u16])] {
    match what {
        "row_forward" | "row_forward_to_rows" => &[
            ("gpu-pool, 1 block", ONE),
            ("gpu-pool, 2 blocks", &[1, 1]),
            ("gpu-pool, 3 blocks", &[1, 1, 1]),
            ("gpu-pool, 3 blocks, 2:1:1", &[2, 1, 1]),
            ("gpu-pool, 4 blocks", &[1, 1, 1, 1]),
            ("gpu-pool, 4 blocks, 4:2:1:1", &[4, 2, 1, 1]),
        ],
        "gather_product" => &[("gpu-pool, gather, then product", ONE), ("gpu-pool, own rows first", &[1, 1])],
        _ => &[],
    }
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    if machine.devices < DEVICES {
        return;
    }
    let (width, owns, all_rows): (_, &[usize], &[usize]) = match machine.software {
        true => (24, &[16], &[32]),
        false => (8192, &[4096, 14336], &[256, 512, 1024, 2048, 4096, 8192]),
    };
    let case = |part: &str, what: &str, rows: usize, own: usize| {
        format!("{}/{part}/{what}/{rows}x{width}x{own}", machine.kind)
    };
    let mut torch: Option<Option<Torch>> = None;
    for &own in owns {
        let cases: Vec<_> = all_rows.iter().flat_map(|&rows| WHAT.map(|what| (what, rows))).collect();
        let wanted = |part: &str, what, rows| bench.wants(&case(part, what, rows, own));
        let cases: Vec<_> = cases
            .into_iter()
            .map(|(what, rows)| (what, rows, wanted("tensor", what, rows), wanted("tensor_blocks", what, rows)))
            .filter(|&(what, _, all, blocks)| all || blocks && !others(what).is_empty())
            .collect();
        let Some(most) = cases.iter().map(|case| case.1).max() else { continue };
        let pool = machine.pool(DEVICES);
        let zeros = vec![bf16::ZERO; width * own * DEVICES];
        let rig =
            RefCell::new(pool.per_device(|dev, _| Rig::new(dev, most, width, own, &zeros)).expect("memory for it"));
        bench.set_turns(1, bench.size(9, 3));
        for (what, rows, all, blocks) in cases {
            let time = |blocks, calls| {
                let call = Call { what, rows, blocks };
                let times = rig.borrow_mut().run(|dev, _, rig| rig.time(dev, call, calls)).expect("calls");
                times.into_iter().fold(0.0, f64::max)
            };
            let name = case("tensor", what, rows, own);
            check(&rig, &name, Call { what, rows, blocks: None });
            time(None, 2);
            let calls = (TURN / time(None, 3)).clamp(3.0, 60.0) as usize;
            let side = |name, blocks| Side::new(name, move || time(blocks, calls));
            let mut peers = Vec::new();
            if all {
                if !others(what).is_empty() {
                    peers.push(side("gpu-pool, not overlapped", Some(ONE)));
                }
                let torch = torch.get_or_insert_with(|| machine.torch("tensor.py", DEVICES)).as_ref();
                let forms = match what {
                    "column_backward" => [("torch, NCCL", "nccl"), ("torch, NCCL beside", "async")],
                    _ => [("torch, NCCL", "nccl"), ("torch, symm_mem.fused", "fused")],
                };
                for (form, order) in forms {
                    let order = format!("{what}:{order}:{rows}:{width}:{own}");
                    match torch {
                        Some(torch) if torch.ask(&order, 0).is_finite() => peers.push(torch.side(form, order, calls)),
                        Some(_) => println!("{form} has no {name}, see above"),
                        None => {}
                    }
                }
                bench.compare(&name, MICROSECONDS, side("gpu-pool", None), peers);
            }
            if blocks && !others(what).is_empty() {
                let name = case("tensor_blocks", what, rows, own);
                let mut peers = Vec::new();
                for &(title, weights) in others(what) {
                    check(&rig, &name, Call { what, rows, blocks: Some(weights) });
                    peers.push(side(title, Some(weights)));
                }
                bench.compare(&name, MICROSECONDS, side("gpu-pool", None), peers);
            }
        }
    }
}
