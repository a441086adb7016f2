//! Random programs that are correct: all processes make the same one from a seed, and every result is compared with
//! plain arithmetic. Groups cross, two scopes with names run at once, members are slow at random, and some calls block.
//!
//! The task is `<devices> random <seed> <seconds>`.

use crate::{
    fleet::{Fleet, GPU_VARIABLES, GUARD, free_port, pool, say},
    support::{cases, cuda_devices, task},
};
use gpu_pool::{Builder, Device, DeviceBuffer, Error, Group, ReduceOp, collective::Transfer};
use gpu_pool_cluster::prelude::*;
use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// What the stress does unless told otherwise, without and with GPUs.
const STRESS: [&str; 2] = ["2 random 1 240", "cuda2 random 1 240"];

/// A generator of a few lines (splitmix64): the same numbers in all processes.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    /// Some ranks in any order, two at least.
    fn ranks(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|at| all.swap(at, self.below(at + 1)));
        if self.below(3) > 0 {
            all.truncate(2 + self.below(n - 1));
        }
        all
    }
}

#[derive(Debug)]
enum What {
    Sum,
    Most,
    Gather,
    Broadcast(usize),
    Scatter,
    Exchange,
    Message,
    Values,
    Block,
    Barrier,
}

/// A step, of the members with these ranks in the world.
#[derive(Debug)]
struct Step {
    ranks: Vec<usize>,
    what: What,
    len: usize,
    /// A member that is late.
    late: usize,
}

fn program(seed: u64, n: usize) -> Vec<Step> {
    let mut random = Random(seed);
    let step = |_| {
        let ranks = random.ranks(n);
        let what = match random.below(11) {
            0 | 1 => What::Sum,
            2 => What::Most,
            3 => What::Gather,
            4 => What::Broadcast(random.below(ranks.len())),
            5 => What::Scatter,
            6 => What::Exchange,
            7 => What::Message,
            8 => What::Block,
            9 => What::Values,
            _ => What::Barrier,
        };
        let len = [0, 1, 33, 1000, 20_000][random.below(5)];
        Step { late: random.below(3 * n), ranks, what, len }
    };
    (0..12).map(step).collect()
}

/// Element `i` of the member with this rank in a step: sums of them are exact.
fn number(step: usize, rank: usize, i: usize) -> f32 {
    ((step * 7 + rank * 13 + i * 3) % 101) as f32
}

fn numbers(step: usize, rank: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    range.map(|i| number(step, rank, i)).collect()
}

fn carry_out(dev: &Device, world: &Group<'_>, at: usize, step: &Step) -> Result<(), Error> {
    let me = world.rank();
    if step.late == me {
        dev.blocking(|| thread::sleep(Duration::from_millis(3)));
    }
    if !step.ranks.contains(&me) {
        return Ok(());
    }
    let group = world.group(&step.ranks)?;
    let (n, rank, len) = (group.count(), group.rank(), step.len);
    let own = dev.upload(&numbers(at, rank, 0..len))?;
    let combined = |combine: fn(f32, f32) -> f32, range: std::ops::Range<usize>| -> Vec<f32> {
        range.map(|i| (0..n).map(|rank| number(at, rank, i)).reduce(combine).unwrap()).collect()
    };
    let check = |found: Vec<f32>, wanted: Vec<f32>| match found == wanted {
        true => Ok(()),
        false => Err(Error::custom(format!("step {at}, {step:?}: wrong numbers on rank {rank}"))),
    };
    match step.what {
        What::Sum | What::Block => {
            let mut x = own;
            if matches!(step.what, What::Block) {
                dev.blocking(|| thread::sleep(Duration::from_millis(1)));
            }
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            check(dev.download(&x)?, combined(|a, b| a + b, 0..len))
        }
        What::Most => {
            let mut x = dev.zeros::<f32>(len)?;
            group.all_reduce_into(&own, &mut x, ReduceOp::Max)?;
            check(dev.download(&x)?, combined(f32::max, 0..len))
        }
        What::Gather => {
            let mut all = dev.zeros::<f32>(n * len)?;
            group.all_gather(&own, &mut all)?;
            check(dev.download(&all)?, (0..n).flat_map(|rank| numbers(at, rank, 0..len)).collect())
        }
        What::Broadcast(root) => {
            let mut x = own;
            group.broadcast(&mut x, root)?;
            check(dev.download(&x)?, numbers(at, root, 0..len))
        }
        What::Scatter => {
            let (all, mut part) = (dev.upload(&numbers(at, rank, 0..n * len))?, dev.zeros::<f32>(len)?);
            group.reduce_scatter(&all, &mut part, ReduceOp::Sum)?;
            check(dev.download(&part)?, combined(|a, b| a + b, rank * len..(rank + 1) * len))
        }
        What::Exchange => {
            let all = group.exchange_serde(&(rank, len))?;
            let wanted: Vec<_> = (0..n).map(|rank| (rank, len)).collect();
            if all == wanted { Ok(()) } else { Err(Error::custom(format!("step {at}: {all:?}"))) }
        }
        What::Message => {
            group.send(&own, (rank + 1) % n)?;
            let (from, mut x) = ((rank + n - 1) % n, dev.zeros::<f32>(len)?);
            group.recv(&mut x, from)?;
            check(dev.download(&x)?, numbers(at, from, 0..len))
        }
        What::Values => {
            // To everybody, and each takes them in an order of its own.
            for to in 0..n {
                for tag in 0..3 {
                    let x = dev.upload(&numbers(at, rank + tag, 0..len))?;
                    group.give((x, dev.upload(&[rank as u32])?), to, tag as u64)?;
                }
            }
            for from in (0..n).map(|k| (k + rank) % n) {
                for tag in [2, 0, 1].map(|tag| (tag + rank) % 3) {
                    let both: (DeviceBuffer<f32>, DeviceBuffer<u32>) = group.take(from, tag as u64)?;
                    let (x, giver) = both.transfer(dev)?;
                    check(dev.download(&x)?, numbers(at, from + tag, 0..len))?;
                    assert_eq!(dev.download(&giver)?, [from as u32]);
                }
            }
            Ok(())
        }
        What::Barrier => group.barrier(),
    }
}

/// Programs until the seconds are over, as rank 0 sees it: two threads, each with scopes of its own name.
pub fn child(builder: Builder, more: &[&str]) -> Result<(), Error> {
    let [seed, seconds] = [more[0], more[1]].map(|number| number.parse::<u64>().unwrap());
    let pool = pool(builder)?;
    let limit = Duration::from_secs(seconds);
    let start = Instant::now();
    let run = |name: &str, seed: u64| -> Result<usize, Error> {
        let mut told = Instant::now();
        for round in 0.. {
            let goes_on = pool.named(name).run(|dev, _| {
                let world = dev.world()?;
                for (at, step) in program(seed.wrapping_add(round), world.count()).iter().enumerate() {
                    carry_out(dev, &world, at, step)?;
                }
                Ok(world.exchange_serde(&(start.elapsed() < limit))?[0])
            })?;
            if !goes_on[0] {
                return Ok(round as usize + 1);
            }
            if told.elapsed() > GUARD / 6 {
                told = Instant::now();
                println!("{name}: {} programs after {:.0?}", round + 1, start.elapsed());
            }
        }
        unreachable!("it does not end by itself")
    };
    let programs = thread::scope(|scope| {
        let other = scope.spawn(|| run("evaluate", seed ^ 0xffff_0000));
        let own = run("train", seed);
        Ok::<_, Error>([own?, other.join().unwrap()?])
    })?;
    say(format!("{programs:?} programs"));
    pool.close()
}

#[test]
fn correct_programs_end_with_the_right_numbers() {
    let seconds = cases(2, 10);
    let short = &[(1, &[2, 2][..]), (2, &[1, 2, 1]), (3, &[2, 1])][..];
    for (seed, devices) in cases(short, &[(4, &[2, 1, 2]), (5, &[2, 2]), (6, &[2, 2, 1])]) {
        let meeting = ["hub", "auto", "mesh"][seed % 3];
        let set = |_, process: &mut Command| {
            process.env("GPU_POOL_MEETING", meeting);
        };
        let said = Fleet::start_with(&format!("random {seed} {seconds}"), devices, free_port(), set).said();
        println!("seed {seed}, {devices:?}: {}", said[0][0]);
        assert!(said.iter().all(|lines| *lines == said[0]), "{said:?}");
    }
}

/// Two processes with this task: on GPUs as hosts of their own.
fn two(task: &str) {
    let fleet = Fleet::of(&[task.to_owned(), task.to_owned()], free_port(), |rank, process| {
        process.env("GPU_POOL_SILENCE", "30s");
        if task.starts_with("cuda") {
            process.envs(GPU_VARIABLES).env("NCCL_HOSTID", format!("gpu-pool-{rank}"));
        }
    });
    let said = fleet.said();
    println!("{task}: {}", said[0][0]);
    assert_eq!(said[0], said[1]);
}

#[test]
#[cfg(feature = "nccl")]
fn cuda_correct_programs_over_nccl() {
    if cuda_devices() == 0 {
        return println!("skipped: no CUDA device");
    }
    for devices in [1, 2] {
        two(&format!("cuda{devices} random {devices} {}", cases(3, 20)));
    }
}

/// The task of the environment: guide/testing.md has the command.
#[test]
#[ignore = "takes four minutes"]
fn stress() {
    two(&task().unwrap_or_else(|| STRESS[usize::from(cuda_devices() > 0)].to_owned()));
}
