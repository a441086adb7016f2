//! Exhibits: missing edges between streams of two devices.

use super::prelude::*;
use gpu_pool::ReduceOp;
use gpu_pool_lab::check::Kind;
use std::sync::Arc;

/// Numbers in a buffer.
const N: usize = 1 << 14;

exhibits! { "order.rs"

"missing-wait": "No event between producer and consumer" {
    "Device 1 copies what device 0 is still computing: streams of two devices are not ordered because one call \
     comes after the other in the program."
    seen "ROCm/rocm-systems" pull 10229: "a peer copy does not wait for the kernel that fills its source"
    wrong missing_wait_wrong => Caught::Report(Kind::Race), Runs
    right missing_wait_right =>
        "Buffers remember who used them last; `copy_to` waits, on the devices, for the neighbour's `fill`."
}

"write-after-read": "The source of a peer copy is overwritten" {
    "The producer waits for nobody before it makes the next batch, while the consumer's copy still reads the last \
     one. The copy was ordered after the producer, but not the producer after the copy."
    seen "torch/cutorch" pull 192: "off the default stream, nothing orders a peer copy with both devices but events"
    wrong write_after_read_wrong => Caught::Report(Kind::Race), Runs
    right write_after_read_right =>
        "A second event: the producer's stream waits for the copy before it overwrites its source."
}

"one-staging-event": "A staging buffer that is refilled too early" {
    "Data goes from device to device through one page-locked buffer. \"It is full\" has an event, \"it is empty \
     again\" has none, so piece 2 overwrites piece 1 on its way. (CUDA Handbook, listing 9.1, needs both.)"
    seen "NVIDIA/warp" issues 1384: "a copy between devices reads a staging buffer that is used anew"
    wrong one_staging_event_wrong => Caught::Report(Kind::Race), Runs
    right one_staging_event_right =>
        "Two events. In a pool, `dev.copy` does this by itself where devices are not peers."
}

"stale-replica": "A replica from before the optimiser's step" {
    "Device 1 fetches the weights for each step from device 0. It waits for the event of the first step; that of \
     the second was recorded, and nobody waited for it again."
    seen "pytorch/pytorch" pull 128975: "the gather of weights must wait for an event after the optimiser's step"
    wrong stale_replica_wrong => Caught::Report(Kind::Race), Runs
    right stale_replica_right =>
        "No weights travel: each device has its replica in a `PerDevice`, and all take the same step with the same \
         reduced gradient."
}

"event-recorded-twice": "One event for two streams" {
    "An event stands for its latest record. Recorded on a second stream, it has forgotten the first, and who waits \
     for it waits for one of the two producers."
    seen "torch/cutorch" pull 222: "one event per GPU, recorded on each stream in turn, waits for the last only"
    wrong event_recorded_twice_wrong => Caught::Report(Kind::Race), Runs
    right event_recorded_twice_right =>
        "An event of its own for each stream. In a pool, `dev.record()` makes a new one each time."
}

"wait-before-record": "A wait for an event that was never recorded" {
    "The consumer is set up before the producer. A wait for an event without a record is no wait: CUDA reports \
     success and orders nothing."
    seen "NVIDIA/cuda-python" pull 559: "a test expects that such a wait never ends, and fails at random"
    wrong wait_before_record_wrong => Caught::Report(Kind::UnrecordedEvent), Runs
    right wait_before_record_right =>
        "An `Event` of a pool exists only once it is recorded, so there is none to wait for too early."
}

}

fn missing_wait_wrong(ground: &Ground) -> Outcome {
    let [producer, consumer] = ground.bare()?;
    consumer.enable_peer(&producer)?;
    let (compute, copies) = (producer.stream()?, consumer.stream()?);
    let (x, y) = (producer.alloc(N)?, consumer.alloc(N)?);
    producer.fill(x, 1.0, compute)?;
    consumer.copy_from_peer(y, &producer, x, copies)?; // after `fill` on paper
    Ok(Seen::all(&consumer.download(y, copies)?, 1.0))
}

fn missing_wait_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(N)?;
        dev.fill(&mut x, 1.0)?;
        let all = dev.exchange(Arc::new(x))?;
        let neighbour = &all[(dev.rank() + 1) % all.len()];
        dev.download(&neighbour.copy_to(dev)?)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

fn write_after_read_wrong(ground: &Ground) -> Outcome {
    let [producer, consumer] = ground.bare()?;
    consumer.enable_peer(&producer)?;
    let (compute, copies) = (producer.stream()?, consumer.stream()?);
    let (x, y) = (producer.alloc(N)?, consumer.alloc(N)?);
    let ready = producer.event()?;
    producer.fill(x, 1.0, compute)?;
    producer.record(ready, compute)?;
    consumer.wait(copies, ready)?;
    consumer.copy_from_peer(y, &producer, x, copies)?;
    producer.fill(x, 2.0, compute)?; // the next batch; is the copy done?
    Ok(Seen::all(&consumer.download(y, copies)?, 1.0))
}

fn write_after_read_right(ground: &Ground) -> Outcome {
    let [producer, consumer] = ground.bare()?;
    consumer.enable_peer(&producer)?;
    let (compute, copies) = (producer.stream()?, consumer.stream()?);
    let (x, y) = (producer.alloc(N)?, consumer.alloc(N)?);
    let (ready, fetched) = (producer.event()?, consumer.event()?);
    producer.fill(x, 1.0, compute)?;
    producer.record(ready, compute)?;
    consumer.wait(copies, ready)?;
    consumer.copy_from_peer(y, &producer, x, copies)?;
    consumer.record(fetched, copies)?;
    producer.wait(compute, fetched)?;
    producer.fill(x, 2.0, compute)?;
    Ok(Seen::all(&consumer.download(y, copies)?, 1.0))
}

fn one_staging_event_wrong(ground: &Ground) -> Outcome {
    let [from, to] = ground.bare()?;
    let (up, down) = (from.stream()?, to.stream()?);
    let (x, y) = (from.alloc(2 * N)?, to.alloc(2 * N)?);
    let (stage, full) = (from.alloc_pinned(N)?, from.event()?);
    from.fill(x.part(0..N), 1.0, up)?;
    from.fill(x.part(N..2 * N), 2.0, up)?;
    for piece in [0..N, N..2 * N] {
        from.copy_to_host(stage, x.part(piece.clone()), up)?; // is the last piece out of it?
        from.record(full, up)?;
        to.wait(down, full)?;
        to.copy_to_device(y.part(piece), stage, down)?;
    }
    Ok(Seen::all(&to.download(y.part(0..N), down)?, 1.0))
}

fn one_staging_event_right(ground: &Ground) -> Outcome {
    let [from, to] = ground.bare()?;
    let (up, down) = (from.stream()?, to.stream()?);
    let (x, y) = (from.alloc(2 * N)?, to.alloc(2 * N)?);
    let (stage, full, empty) = (from.alloc_pinned(N)?, from.event()?, to.event()?);
    from.fill(x.part(0..N), 1.0, up)?;
    from.fill(x.part(N..2 * N), 2.0, up)?;
    to.record(empty, down)?; // it is empty to begin with
    for piece in [0..N, N..2 * N] {
        from.wait(up, empty)?;
        from.copy_to_host(stage, x.part(piece.clone()), up)?;
        from.record(full, up)?;
        to.wait(down, full)?;
        to.copy_to_device(y.part(piece), stage, down)?;
        to.record(empty, down)?;
    }
    Ok(Seen::all(&to.download(y.part(0..N), down)?, 1.0))
}

fn stale_replica_wrong(ground: &Ground) -> Outcome {
    let [owner, worker] = ground.bare()?;
    worker.enable_peer(&owner)?;
    let (optimiser, gather) = (owner.stream()?, worker.stream()?);
    let (weights, gradient, replica) = (owner.alloc(N)?, owner.alloc(N)?, worker.alloc(N)?);
    let (stepped, gathered) = (owner.event()?, worker.event()?);
    owner.fill(weights, 0.0, optimiser)?;
    owner.fill(gradient, 1.0, optimiser)?;
    for step in 0..2 {
        owner.axpy(1.0, gradient, weights, optimiser)?;
        owner.record(stepped, optimiser)?;
        if step == 0 {
            worker.wait(gather, stepped)?; // once is enough, is it not?
        }
        worker.copy_from_peer(replica, &owner, weights, gather)?;
        worker.record(gathered, gather)?;
        owner.wait(optimiser, gathered)?;
    }
    Ok(Seen::all(&worker.download(replica, gather)?, 2.0))
}

fn stale_replica_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let mut replicas = pool.per_device(|dev, _| dev.zeros::<f32>(N))?;
    for _step in 0..2 {
        replicas.run(|dev, _, weights| {
            let mut gradient = dev.zeros::<f32>(N)?;
            dev.fill(&mut gradient, 1.0)?;
            dev.all_reduce(&mut gradient, ReduceOp::Avg)?;
            dev.axpy(1.0, &gradient, weights)
        })?;
    }
    let seen = replicas.run(|dev, _, weights| dev.download(weights))?;
    Ok(Seen::all(&seen.concat(), 2.0))
}

fn event_recorded_twice_wrong(ground: &Ground) -> Outcome {
    let [producer, consumer] = ground.bare()?;
    consumer.enable_peer(&producer)?;
    let (left, right, sums) = (producer.stream()?, producer.stream()?, consumer.stream()?);
    let (x, y, sum) = (producer.alloc(N)?, producer.alloc(N)?, consumer.alloc(N)?);
    consumer.fill(sum, 0.0, sums)?;
    let done = producer.event()?;
    for (part, stream) in [(x, left), (y, right)] {
        producer.fill(part, 1.0, stream)?;
        producer.record(done, stream)?;
    }
    consumer.wait(sums, done)?; // for both?
    consumer.axpy(1.0, x, sum, sums)?;
    consumer.axpy(1.0, y, sum, sums)?;
    Ok(Seen::all(&consumer.download(sum, sums)?, 2.0))
}

fn event_recorded_twice_right(ground: &Ground) -> Outcome {
    let [producer, consumer] = ground.bare()?;
    consumer.enable_peer(&producer)?;
    let (left, right, sums) = (producer.stream()?, producer.stream()?, consumer.stream()?);
    let (x, y, sum) = (producer.alloc(N)?, producer.alloc(N)?, consumer.alloc(N)?);
    consumer.fill(sum, 0.0, sums)?;
    for (part, stream) in [(x, left), (y, right)] {
        let done = producer.event()?;
        producer.fill(part, 1.0, stream)?;
        producer.record(done, stream)?;
        consumer.wait(sums, done)?;
        consumer.axpy(1.0, part, sum, sums)?;
    }
    Ok(Seen::all(&consumer.download(sum, sums)?, 2.0))
}

fn wait_before_record_wrong(ground: &Ground) -> Outcome {
    let [producer, consumer] = ground.bare()?;
    consumer.enable_peer(&producer)?;
    let (compute, copies) = (producer.stream()?, consumer.stream()?);
    let (x, y) = (producer.alloc(N)?, consumer.alloc(N)?);
    let ready = producer.event()?;
    consumer.wait(copies, ready)?; // "whenever it comes"
    consumer.copy_from_peer(y, &producer, x, copies)?;
    producer.fill(x, 1.0, compute)?;
    producer.record(ready, compute)?;
    Ok(Seen::all(&consumer.download(y, copies)?, 1.0))
}

fn wait_before_record_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(N)?;
        dev.fill(&mut x, 1.0)?;
        let ready = dev.record()?; // it had no name before
        let all = dev.exchange((Arc::new(x), ready))?;
        let (theirs, ready) = &all[(dev.rank() + 1) % all.len()];
        dev.wait(ready)?;
        dev.download(&theirs.copy_to(dev)?)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}
