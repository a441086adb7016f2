//! Exhibits: collectives that not all devices call alike.

use super::prelude::*;
use gpu_pool::ReduceOp;

/// Numbers in a buffer.
const N: usize = 1 << 12;

exhibits! { "collectives.rs"

"collective-order": "Collectives in another order" {
    "Device 0 reduces and then meets the others at a barrier, the rest do it the other way round. With kernels that \
     wait for each other on the devices, both wait for ever."
    seen "NVIDIA/nccl" issues 296: "\"Mismatched collective detected\", and no word on where"
    wrong collective_order_wrong => Caught::Error(Refusal::Mismatch("operation")), Runs
    right collective_order_right => "Everybody calls the same collectives in the same order."
}

"collective-count": "Collectives of different length" {
    "The last batch is shorter on one device, and so is what it gives to the reduction. NCCL may hang, or end with \
     wrong numbers."
    seen "NVIDIA/nccl" issues 1394: "tensors of 1 and 2 rows hang, those of 100 and 200 are \"reduced\""
    wrong collective_count_wrong => Caught::Error(Refusal::Mismatch("count")), Runs
    right collective_count_right => "Sums of equal length are reduced, weighted by rows."
}

"leaves-early": "One device runs out of batches" {
    "Seven batches on two devices: device 1 has one less, and ends while the other waits for it in the next \
     reduction."
    seen "pytorch/pytorch" issues 33148: "with more batches than its peers, a replica hangs"
    wrong leaves_early_wrong => Caught::Error(Refusal::Mismatch("participation")), Runs
    right leaves_early_right =>
        "All devices go through the same number of steps; who has no batch takes part with an empty one."
}

}

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
