//! Kernels that are put on the device while the one before them ends (`Launch::early`): chains in which each operation
//! works on what the one before has left, with nothing in between or with kernels, fills and copies. What a chain
//! leaves has the bits that it has when each operation is waited for. cccl#3131 and cutlass#2962: kernels that read
//! ahead of their wait.
//!
//! GPUs without such launches, and software GPUs, show that the chains are right themselves.

use crate::{on_both, rig, rig::assert_nothing_kept, support::slow_add};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, ReduceOp, Result};

/// Elements that are pushed by one block, by several, by more than a push may have if the next is to come beside it,
/// and too many for that.
const LENGTHS: [usize; 5] = [1, 1000, 20_000, 50_000, 300_001];
/// Of a member, in what is scattered and gathered.
const EACH: usize = 151_003;

struct Chain {
    x: DeviceBuffer<u32>,
    y: DeviceBuffer<u32>,
    own: DeviceBuffer<u32>,
}

impl Chain {
    fn new(dev: &Device) -> Result<Self> {
        let len = EACH * dev.count();
        let numbers: Vec<u32> = (0..len as u32).map(|i| (i + 1).wrapping_mul(97 + dev.rank() as u32)).collect();
        Ok(Chain { x: dev.upload(&numbers)?, y: dev.zeros(len)?, own: dev.zeros(EACH)? })
    }

    /// `each` comes after each operation.
    fn run(&mut self, dev: &Device, each: impl Fn(&Device) -> Result<()>) -> Result<()> {
        let Chain { x, y, own } = self;
        let n = dev.count();
        for (k, len) in LENGTHS.into_iter().enumerate() {
            // Who is late keeps the others' kernels waiting, with the next ones beside them.
            if k % n == dev.rank() {
                slow_add(dev, &mut x.slice_mut(..7), k as u32, 300)?;
                each(dev)?;
            }
            // Nothing in between: pushes after pushes, and kernels with barriers before and after them.
            for len in [len, len.div_ceil(2), 7, len, 300_001] {
                dev.all_reduce(&mut x.slice_mut(..len), ReduceOp::Sum)?;
                each(dev)?;
            }
            dev.broadcast(&mut x.slice_mut(..len), k % n)?;
            each(dev)?;
            // With others in between.
            dev.fill(&mut y.slice_mut(..EACH), k as u32)?;
            each(dev)?;
            dev.copy(&x.slice(..EACH), &mut y.slice_mut(EACH..2 * EACH))?;
            each(dev)?;
            dev.reduce_scatter(y, own, ReduceOp::Sum)?;
            each(dev)?;
            slow_add(dev, own, 1 + dev.rank() as u32, 0)?;
            each(dev)?;
            dev.all_gather(own, x)?;
            each(dev)?;
            dev.all_to_all(x, y)?;
            each(dev)?;
            dev.all_reduce(&mut y.slice_mut(..len), ReduceOp::Max)?;
            each(dev)?;
            dev.fill(&mut x.slice_mut(..1), dev.rank() as u32)?;
            each(dev)?;
        }
        Ok(())
    }

    fn found(&self, dev: &Device) -> Result<[Vec<u32>; 3]> {
        Ok([dev.download(&self.x)?, dev.download(&self.y)?, dev.download(&self.own)?])
    }
}

/// `words` of which all members have the same.
fn same<V: AsView<Elem = u64>>(dev: &Device, words: &V) -> Result<bool> {
    let (mut least, mut most) = (dev.upload(&dev.download(words)?)?, dev.upload(&dev.download(words)?)?);
    dev.all_reduce(&mut least.view_mut(), ReduceOp::Min)?;
    dev.all_reduce(&mut most.view_mut(), ReduceOp::Max)?;
    Ok(dev.download(&least)? == dev.download(&most)?)
}

on_both! {
    2: fn a_chain_has_the_bits_of_its_steps(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let rounds = if gpus.is_cuda() { 20 } else { 2 };
        pool.run(|dev, _| {
            let (mut steps, mut plain, mut captured) = (Chain::new(dev)?, Chain::new(dev)?, Chain::new(dev)?);
            let (graph, ()) = dev.capture(|dev| captured.run(dev, |_| Ok(())))?;
            for round in 0..rounds {
                steps.run(dev, Device::synchronize)?;
                plain.run(dev, |_| Ok(()))?;
                dev.launch_graph(&graph)?;
                let expected = steps.found(dev)?;
                assert!(plain.found(dev)? == expected, "round {round}: not the bits of its steps");
                assert!(captured.found(dev)? == expected, "round {round}: not in a graph");
            }
            Ok(())
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }

    // Sums of sums, dozens on the way at once, in graphs of one kernel and of many: a kernel that reads before the one
    // before it has written is one power behind.
    2: fn long_chains_of_small_sums(gpus) {
        let n = gpus.up_to(8);
        let pool = rig::pool(gpus, n);
        let rounds = if gpus.is_cuda() { 80 } else { 2 };
        // So that nothing overflows: of a power of two nothing would be left, whatever was lost before.
        let times = ((56.0 / (n as f64).log2()) as u32 - 5) / 2;
        pool.run(|dev, _| {
            for len in [1, 250, 4096, 15_000] {
                let mut x = dev.zeros::<u64>(len)?;
                let sums = |dev: &Device, x: &mut DeviceBuffer<u64>, times: u32| {
                    (0..times).try_for_each(|_| dev.all_reduce(x, ReduceOp::Sum))
                };
                let (one, ()) = dev.capture(|dev| sums(dev, &mut x, 1))?;
                let (many, ()) = dev.capture(|dev| sums(dev, &mut x, times))?;
                let power = |exponent: u32| (n as u64).pow(exponent);
                for round in 1..=rounds {
                    dev.fill(&mut x, round)?;
                    sums(dev, &mut x, times)?;
                    dev.launch_graph(&many)?;
                    dev.launch_graph(&one)?;
                    dev.launch_graph(&one)?;
                    dev.fill(&mut x.slice_mut(..len / 2), round + 1)?;
                    sums(dev, &mut x, 3)?;
                    let found = dev.download(&x)?;
                    let (first, second) = found.split_at(len / 2);
                    let expected = [(round + 1) * power(3), round * power(2 * times + 5)];
                    assert!(first.iter().all(|x| *x == expected[0]), "{len}, round {round}: {:?}", first.first());
                    assert!(second.iter().all(|x| *x == expected[1]), "{len}, round {round}: {:?}", second.first());
                }
                assert!(same(dev, &x)?);
            }
            Ok(())
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }
}
