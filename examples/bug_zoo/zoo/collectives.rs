//! Collectives that not everybody calls alike.

use super::exhibit::{Caught, Exhibit, OnCuda, Outcome, Refusal, Seen, Thread};
use super::ground::Ground;
use crate::program;
use gpu_pool::ReduceOp;

const SOURCE: &str = include_str!("collectives.rs");
/// Numbers in a buffer.
const N: usize = 1 << 12;

pub const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        name: "collective-order",
        title: "Collectives in another order",
        mistake: "Device 0 reduces and then meets the others at a barrier, the rest do it the other way round. With kernels \
                  that wait for each other on the devices, both wait for ever.",
        thread: Thread {
            label: "NVIDIA/nccl#296: \"Mismatched collective detected\", and no word on where",
            url: "https://github.com/NVIDIA/nccl/issues/296",
        },
        wrong: Some(program!(collective_order_wrong)),
        right: program!(collective_order_right),
        mended: "Everybody calls the same collectives in the same order.",
        expected: Caught::Error(Refusal::Mismatch("operation")),
        cuda: OnCuda::Runs,
    },
    Exhibit {
        name: "collective-count",
        title: "Collectives of different length",
        mistake: "The last batch is shorter on one device, and so is what it gives to the reduction. NCCL may hang, or end \
                  with wrong numbers.",
        thread: Thread {
            label: "NVIDIA/nccl#1394: tensors of 1 and 2 rows hang, those of 100 and 200 are \"reduced\"",
            url: "https://github.com/NVIDIA/nccl/issues/1394",
        },
        wrong: Some(program!(collective_count_wrong)),
        right: program!(collective_count_right),
        mended: "Sums of equal length are reduced, weighted by rows.",
        expected: Caught::Error(Refusal::Mismatch("count")),
        cuda: OnCuda::Runs,
    },
    Exhibit {
        name: "leaves-early",
        title: "One device runs out of batches",
        mistake: "Seven batches on two devices: device 1 has one less, and ends while the other waits for it in the next \
                  reduction.",
        thread: Thread {
            label: "pytorch/pytorch#33148: with more batches than its peers, a replica hangs",
            url: "https://github.com/pytorch/pytorch/issues/33148",
        },
        wrong: Some(program!(leaves_early_wrong)),
        right: program!(leaves_early_right),
        mended: "All devices go through the same number of steps; who has no batch takes part with an empty one.",
        expected: Caught::Error(Refusal::Mismatch("participation")),
        cuda: OnCuda::Runs,
    },
];

fn collective_order_wrong(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; N])?;
        if dev.rank() == 0 {
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.barrier()?;
        } else {
            dev.barrier()?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
        }
        dev.download(&x)
    })?;
    Ok(Seen::all(&seen.concat(), 2.0))
}

fn collective_order_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; N])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.barrier()?;
        dev.download(&x)
    })?;
    Ok(Seen::all(&seen.concat(), 2.0))
}

fn collective_count_wrong(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, shard| {
        let rows = shard.range(2 * N - 1).len(); // one less on the last device
        let mut x = dev.upload(&vec![1.0f32; rows])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    })?;
    Ok(Seen::all(&seen.concat(), 2.0))
}

fn collective_count_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, shard| {
        let rows = shard.range(2 * N - 1).len();
        let mut sum = dev.sum(&dev.upload(&vec![1.0f32; rows])?)?;
        dev.all_reduce(&mut sum, ReduceOp::Sum)?;
        dev.download(&sum)
    })?;
    Ok(Seen::all(&seen.concat(), (2 * N - 1) as f32))
}

fn leaves_early_wrong(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let batches = vec![1.0f32; 7];
    let sums = pool.run(|dev, shard| {
        let mut sum = dev.zeros::<f32>(1)?;
        for batch in shard.of(&batches) {
            let mut x = dev.upload(&[*batch])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.axpy(1.0, &x, &mut sum)?;
        }
        dev.download(&sum)
    })?;
    Ok(Seen::all(&sums.concat(), 7.0))
}

fn leaves_early_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let batches = vec![1.0f32; 7];
    let sums = pool.run(|dev, shard| {
        let mut sum = dev.zeros::<f32>(1)?;
        let (mine, steps) = (shard.of(&batches), batches.len().div_ceil(shard.count()));
        for step in 0..steps {
            let mut x = dev.upload(&[mine.get(step).copied().unwrap_or(0.0)])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.axpy(1.0, &x, &mut sum)?;
        }
        dev.download(&sum)
    })?;
    Ok(Seen::all(&sums.concat(), 7.0))
}
