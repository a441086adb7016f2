//! Products in blocks of rows, each with its exchange beside the next product: the bits are those of one block.

use super::{everyone, integers, numbers};
use crate::support::{self, Gpus, cases, failure};
use gpu_pool::{Device, DeviceBuffer, Element, Error, GpuPool, Group, Result, kernel::Float};
use gpu_pool_lab::{Explorer, Topology, prelude::*};
use gpu_pool_train::{ColumnLinear, RowLinear, part_of};
use half::bf16;

/// Weights of blocks: many for few rows, none at all, and of no weight.
const BLOCKS: [&[u16]; 6] = [&[1, 1], &[4, 2, 1, 1], &[1; 9], &[], &[0, 0], &[0, 1, 0]];

/// Layers of `inputs x outputs`, and their data on this member.
struct Rig<T: Float + Element> {
    column: ColumnLinear<T>,
    row: RowLinear<T>,
    /// All columns and rows; the own rows; the own columns.
    whole: DeviceBuffer<T>,
    rows: DeviceBuffer<T>,
    columns: DeviceBuffer<T>,
    count: usize,
}

impl<T: Float + Element> Rig<T> {
    fn new(group: &Group<'_>, [count, inputs, outputs]: [usize; 3], to: fn(f32) -> T) -> Result<Self> {
        let dev = group.device();
        let noise = |len, seed| numbers(len, seed).into_iter().map(to).collect::<Vec<T>>();
        let (me, rows) = (group.rank() as u64, part_of(group, group.rank(), count, 1)?.len());
        let own = part_of(group, group.rank(), inputs, 1)?.len();
        Ok(Rig {
            column: ColumnLinear::new(group, &noise(outputs * inputs, 1), &noise(inputs, 2))?,
            row: RowLinear::new(group, &noise(inputs * outputs, 3), &noise(outputs, 4))?,
            whole: dev.upload(&noise(count * outputs, 5))?,
            rows: dev.upload(&noise(rows * outputs, 10 + me))?,
            columns: dev.upload(&noise(count * own, 20 + me))?,
            count,
        })
    }

    /// What each call gives: those that add up over the members, and those that gather.
    fn run(&mut self, group: &Group<'_>, blocks: Option<&'static [u16]>) -> Result<Vec<DeviceBuffer<T>>> {
        (self.column.part.blocks, self.row.part.blocks) = (blocks, blocks);
        let (x, y) = self.column.forward_from_rows(group, &self.rows, self.count)?;
        Ok(vec![
            self.row.forward(group, &self.columns, self.count)?,
            self.row.forward_to_rows(group, &self.columns, self.count)?,
            self.row.backward_from_rows(group, &self.columns, &self.rows, self.count, false)?,
            self.column.backward(group, &self.whole, &self.columns, self.count, false)?,
            self.column.backward_to_rows(group, &x, &self.columns, self.count, false)?,
            x,
            y,
        ])
    }
}

/// All results of a device, and the gradients of the weights.
fn results(dev: &Device, sizes: [usize; 3], blocks: Option<&'static [u16]>) -> Result<Vec<Vec<f32>>> {
    let group = everyone(dev)?;
    let mut rig = Rig::new(&group, sizes, |x| x)?;
    let mut all = rig.run(&group, blocks)?;
    all.extend([rig.column.part.weight_gradient, rig.row.part.weight_gradient]);
    all.iter().map(|result| dev.download(result)).collect()
}

/// How many elements have other bits.
fn differing(dev: &Device, one: &DeviceBuffer<bf16>, other: &DeviceBuffer<bf16>) -> Result<usize> {
    let (one, other) = (dev.download(one)?, dev.download(other)?);
    assert_eq!(one.len(), other.len());
    Ok(one.iter().zip(&other).filter(|(a, b)| a.to_bits() != b.to_bits()).count())
}

crate::on_both! {
    // Rows that no block divides, fewer rows than blocks, no rows, parts without a column; and so many rows that blocks
    // end at tiles. Small integers make the sums of any kernel exact.
    3: fn blocks_have_the_results_of_one_block(gpus) {
        for n in 1..=3 {
            let pool = gpus.pool(n);
            for sizes in [[7, 5, 4], [3, 2, 3], [0, 4, 4], [1, 1, 1], [1300, 3, 2]] {
                let run = |blocks| {
                    pool.run(|dev, _| {
                        let group = everyone(dev)?;
                        let mut rig = Rig::new(&group, sizes, |x| (x * 9.0).trunc())?;
                        rig.run(&group, blocks)?.iter().map(|result| dev.download(result)).collect::<Result<Vec<_>>>()
                    })
                    .unwrap()
                };
                let want = run(Some(&[1]));
                for blocks in BLOCKS {
                    assert_eq!(run(Some(blocks)), want, "{sizes:?}, {n} devices, {blocks:?}");
                }
                // Too small to be cut.
                assert_eq!(run(None), want);
            }
        }
    }

    // A capture has one stream: there nothing is cut.
    3: fn a_graph_has_the_results_of_the_calls(gpus) {
        let found = gpus.pool(3).run(|dev, _| {
            let group = everyone(dev)?;
            let mut rig = Rig::new(&group, [9, 4, 5], |x| (x * 9.0).trunc())?;
            let called = rig.run(&group, Some(&[2, 1, 1]))?;
            let (graph, captured) = dev.capture(|dev| rig.run(&everyone(dev)?, Some(&[2, 1, 1])))?;
            for _ in 0..2 {
                dev.launch_graph(&graph)?;
                for (captured, called) in captured.iter().zip(&called) {
                    assert_eq!(dev.download(captured)?, dev.download(called)?);
                }
            }
            Ok(())
        });
        found.unwrap();
    }

    // The products of some rows by cuBLAS have the bits of the product of all rows. At sizes that are cut by default.
    2: fn blocks_have_the_bits_of_one_block(gpus) {
        let sizes = if gpus.is_cuda() { vec![[2048, 8192, 8192], [8192, 8192, 4096]] } else { vec![[520, 40, 24]] };
        let pool = gpus.unwatched(2).build().unwrap();
        for sizes in sizes {
            let found = pool.run(|dev, _| {
                let group = everyone(dev)?;
                let mut rig = Rig::new(&group, sizes, bf16::from_f32)?;
                let want = rig.run(&group, Some(&[1]))?;
                let mut differ = Vec::new();
                for blocks in [None, Some(&[1, 1][..]), Some(&[4, 2, 1, 1])] {
                    for (i, (found, want)) in rig.run(&group, blocks)?.iter().zip(&want).enumerate() {
                        let differing = differing(dev, found, want)?;
                        if differing > 0 {
                            differ.push(format!("result {i}, {blocks:?}: {differing} of {}", want.len()));
                        }
                    }
                }
                Ok(differ)
            });
            let found = found.unwrap();
            assert!(found.iter().all(Vec::is_empty), "{sizes:?}: {found:#?}");
        }
    }
}

/// In whatever order the devices' operations run.
#[test]
fn every_schedule_of_blocks_gives_the_same_bits() {
    let run = |pool: &GpuPool, blocks| pool.run(|dev, _| results(dev, [6, 4, 3], Some(blocks))).unwrap();
    let want = run(&Gpus::software().pool(3), &[1]);
    let explored = Explorer::new().devices(3).seeds(cases(5, 100)).run(|pool| {
        assert_eq!(run(pool, &[2, 1, 1]), want);
        Ok(())
    });
    if let Err(failed) = explored {
        panic!("{failed}");
    }
}

/// Members that cut otherwise do not match; bad shapes are refused as of one block.
#[test]
fn errors_of_blocks() {
    let pool = support::builder().host(2).build().unwrap();
    let layer = |group: &Group<'_>, blocks| {
        let mut layer = RowLinear::new(group, &integers(6 * 4, 1), &integers(4, 2))?;
        layer.part.blocks = Some(blocks);
        Ok::<_, Error>(layer)
    };
    let differ = failure(pool.run(|dev, _| {
        let group = everyone(dev)?;
        let blocks: &[u16] = if dev.rank() == 0 { &[1, 1] } else { &[1] };
        layer(&group, blocks)?.forward(&group, &dev.zeros(9 * 3)?, 9).map(drop)
    }));
    assert!(matches!(differ, Error::Mismatch { .. }), "{differ}");
    for part in [0, 1, 3] {
        let refused = failure(pool.run(|dev, _| {
            let group = everyone(dev)?;
            let (mut layer, x, dy) = (layer(&group, &[1, 1])?, dev.zeros(9 * 3)?, dev.zeros(part)?);
            layer.backward_from_rows(&group, &x, &dy, 9, false).map(drop)
        }));
        assert!(matches!(refused, Error::InvalidArgument { op: "RowLinear::backward_from_rows", .. }), "{refused}");
    }
    let refused = failure(pool.run(|dev, _| {
        let group = everyone(dev)?;
        layer(&group, &[1, 1])?.forward_to_rows(&group, &dev.zeros(5)?, 9).map(drop)
    }));
    assert!(matches!(refused, Error::InvalidArgument { .. }), "{refused}");
}

/// In virtual time the sums go beside the products, and a gather beside the product of the own rows.
#[test]
fn exchanges_are_beside_the_products() {
    let pool = GpuPool::builder().topology(Topology::nvswitch(2)).dry().build().unwrap();
    let (rows, inputs, outputs) = (8192, 8192, 4096);
    let times = pool.run(|dev, _| {
        let group = everyone(dev)?;
        let (weight, bias) = (vec![0.0f32; inputs * outputs], vec![0.0f32; outputs]);
        let mut layer = RowLinear::new(&group, &weight, &bias)?;
        let (x, dy) = (dev.zeros::<f32>(rows * inputs / 2)?, dev.zeros::<f32>(rows / 2 * outputs)?);
        let mut scratch = dev.zeros::<f32>(1)?;
        let mut time = |layer: &mut RowLinear<f32>, blocks, what: usize| {
            layer.part.blocks = Some(blocks);
            dev.synchronize()?;
            dev.barrier()?;
            let start = dev.record_timed()?;
            let y = match what {
                0 => layer.forward(&group, &x, rows)?,
                1 => layer.forward_to_rows(&group, &x, rows)?,
                _ => layer.backward_from_rows(&group, &x, &dy, rows, false)?,
            };
            // Behind the last block.
            dev.copy(&y.slice(y.len() - 1..), &mut scratch)?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            end.elapsed_since(&start)
        };
        (0..3).map(|what| Ok((time(&mut layer, &[1], what)?, time(&mut layer, &[2, 1, 1], what)?))).collect()
    });
    let times: Vec<Vec<_>> = times.unwrap();
    for (serial, blocks) in times.into_iter().flatten() {
        println!("after each other {serial:?}, in blocks {blocks:?}");
        assert!(blocks < serial, "{blocks:?} in blocks, {serial:?} after each other");
    }
}
