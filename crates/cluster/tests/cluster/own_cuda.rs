//! Small sums by own kernels between processes, each with a GPU of its own. Two GPUs at least.

use crate::{
    fleet::{Fleet, GUARD, HEARTBEAT_TIMEOUT, pool, say},
    gpus,
    support::{MODULE, cases, cuda_devices, slow_add},
};
use gpu_pool::{Builder, DType, Device, Error, Group, ReduceOp, collective::Element};
use half::{bf16, f16};
use std::time::{Duration, Instant};

fn fleet(what: &str, most: usize) -> Option<Fleet> {
    gpus::fleet(&format!("own {what}"), if what == "alone" { "nccl" } else { "auto" }, most)
}

/// Every process says that all is right.
fn all_right(what: &str, most: usize) {
    let Some(fleet) = fleet(what, most) else { return };
    for said in fleet.said() {
        println!("{said:?}");
        assert!(said.iter().any(|line| line == "right"), "{said:?}");
    }
}

#[test]
fn sums_of_every_size_and_type() {
    all_right("sizes", 2);
    all_right("sizes", 8);
}

/// Sums by own kernels and by NCCL, one after another and on two streams.
#[test]
fn sums_alternate_with_those_of_nccl() {
    all_right("mixed", 8);
}

#[test]
fn a_thousand_sums_in_a_row() {
    all_right("row", 8);
}

/// The epochs are of pairs, so groups of some processes do not disturb the others.
#[test]
fn sums_of_groups() {
    all_right("groups", 4);
}

/// One asks for NCCL alone, and gets it.
#[test]
fn nccl_alone() {
    all_right("alone", 2);
}

/// A closure fails between two sums; the next scope sums up again.
#[test]
fn a_failed_scope_leaves_the_pads_usable() {
    all_right("fails", 2);
}

/// In mid-collective: its peers know of it within the limit of silence.
#[test]
fn a_process_is_killed() {
    for victim in [1, 0, 1] {
        let Some(mut fleet) = fleet("forever", 4) else { return };
        let size = cuda_devices().min(4);
        (0..size).for_each(|rank| drop(fleet.until(rank, "ready")));
        std::thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        fleet.signal(victim, libc::SIGKILL);
        for rank in (0..size).filter(|rank| *rank != victim) {
            let (at, error) = fleet.until(rank, "error ");
            let took = at - start;
            println!("process {rank} knows after {took:?}: {error}");
            assert!(error.starts_with(&format!("lost {victim}: ")), "{error}");
            assert!(took < HEARTBEAT_TIMEOUT + Duration::from_secs(1), "{took:?}");
            assert_eq!(fleet.until(rank, "local work ").1, "true");
            assert!(!fleet.ends(rank));
        }
    }
}

/// A process whose kernel waits for a stopped one: the loss, after the limit of silence.
#[test]
fn a_process_is_stopped() {
    let Some(mut fleet) = fleet("forever", 2) else { return };
    (0..2).for_each(|rank| drop(fleet.until(rank, "ready")));
    let start = Instant::now();
    fleet.signal(1, libc::SIGSTOP);
    let (at, error) = fleet.until(0, "error ");
    println!("process 0 knows after {:?}: {error}", at - start);
    assert!(error.starts_with("lost 1: "), "{error}");
    assert!(at - start < HEARTBEAT_TIMEOUT * 3, "{:?}", at - start);
    assert!(!fleet.ends(0));
}

/// The kernel of one process comes after the deadline of the others'.
#[test]
fn a_late_kernel_ends_the_others() {
    let Some(mut fleet) = fleet("late", 2) else { return };
    let said = (0..2).map(|rank| fleet.until(rank, "error ").1).collect::<Vec<_>>();
    println!("{said:?}");
    assert!(said[0].starts_with("late [1], 2s"), "{said:?}");
    assert!(said[1].starts_with("aborted by 0: "), "{said:?}");
    assert!((0..2).all(|rank| !fleet.ends(rank)));
}

/// The elements of these tests.
trait Number: Element {
    /// Twice the distance of 1 from the next number.
    const STEP: f64;
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
}

macro_rules! number {
    ($($t:ident $step:literal $of:expr, $wide:expr;)*) => {$(
        impl Number for $t {
            const STEP: f64 = $step;
            fn of(x: f64) -> Self { $of(x) }
            fn wide(self) -> f64 { $wide(self) }
        }
    )*};
}
number! {
    f32 2.4e-7 |x| x as f32, f64::from;
    f64 4.5e-16 |x| x, f64::from;
    f16 2e-3 f16::from_f64, f16::to_f64;
    bf16 1.6e-2 bf16::from_f64, bf16::to_f64;
    i32 0.0 |x| x as i32, f64::from;
}

/// Small whole numbers: all types have their sums and means exactly, up to 8 processes.
fn value(rank: usize, i: usize, round: usize) -> f64 {
    ((i * 7 + round * 5 + rank * 3) % 9) as f64
}

/// One sum of `n` elements that begin at element `skip` of a buffer, checked on the host.
fn sum<T: Number>(dev: &Device, group: &Group<'_>, n: usize, op: ReduceOp, round: usize) -> Result<(), Error> {
    let (me, count, skip) = (group.rank(), group.count(), round % 3);
    let own: Vec<T> = (0..n + skip).map(|i| T::of(value(me, i, round))).collect();
    let mut x = dev.upload(&own)?;
    group.all_reduce(&mut x.slice_mut(skip..), op)?;
    let found = dev.download(&x)?;
    let values = |i: usize| (0..count).map(move |rank| value(rank, i, round));
    let expected = |i: usize| match op {
        _ if i < skip => value(me, i, round),
        ReduceOp::Sum => values(i).sum(),
        ReduceOp::Avg => values(i).sum::<f64>() / count as f64,
        ReduceOp::Max => values(i).fold(f64::MIN, f64::max),
        ReduceOp::Min => values(i).fold(f64::MAX, f64::min),
        // Each member's factor is its own: a power of two.
        ReduceOp::Scaled(_) => values(i).zip(0..).map(|(x, rank)| x * factor(rank)).sum(),
        other => unreachable!("{other:?}"),
    };
    // A mean is rounded.
    let step = if op == ReduceOp::Avg { T::STEP } else { 0.0 };
    let wrong = |(i, x): &(usize, f64)| (x - expected(*i)).abs() > expected(*i).abs() * step;
    match found.iter().map(|x| x.wide()).enumerate().find(wrong) {
        Some((i, x)) => {
            let why = format!("{:?} {op:?} of {n}, round {round}: [{i}] is {x}, not {}", T::DTYPE, expected(i));
            Err(Error::custom(why))
        }
        None => Ok(()),
    }
}

fn factor(rank: usize) -> f64 {
    [1.0, 0.5, 2.0, 4.0][rank % 4]
}

/// Whether the sum goes by own kernels.
fn is_own(group: &Group<'_>, dtype: DType, bytes: usize) -> Result<bool, Error> {
    let how = group.explain(dtype, ReduceOp::Sum, bytes)?;
    Ok(how.rails.is_some_and(|rails| rails.transport == "inbox"))
}

/// The most bytes of an own kernel: it is asked for, and halved.
fn limit(group: &Group<'_>) -> Result<usize, Error> {
    let (mut least, mut above) = (0, 16 << 20);
    while above - least > 8 {
        let middle = (least + above) / 2 / 8 * 8;
        match is_own(group, DType::F32, middle)? {
            true => least = middle,
            false => above = middle,
        }
    }
    Ok(least)
}

fn sizes<T: Number>(dev: &Device, world: &Group<'_>, most: usize) -> Result<(), Error> {
    let (size, mut round) = (T::DTYPE.size(), 0);
    let small = (0..40).chain([63, 64, 65, 255, 1000, 1023, 1024, 4095, 4096, 4097, 8191, 50_000, 65_537]);
    let most = most / size;
    let large = [most / 2, most / 2 + 1, most - 17, most - 1, most, most + 1, most + 17, 3 * most];
    for n in small.chain(large) {
        sum::<T>(dev, world, n, ReduceOp::Sum, round)?;
        round += 1;
    }
    let own = ReduceOp::Scaled(factor(world.rank()));
    let scaled = world.explain(T::DTYPE, own, 4096)?.rails.expect("several processes");
    assert_eq!(scaled.transport, if T::DTYPE == DType::I32 { "nccl" } else { "inbox" });
    for n in [1, 3, 7, 1000, 4096, 30_001] {
        for op in [ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, own] {
            sum::<T>(dev, world, n, op, round)?;
            round += 1;
        }
    }
    Ok(())
}

/// Sums on both sides of the limit, of several types, one after another on two streams.
fn mixed(dev: &Device, world: &Group<'_>, most: usize) -> Result<(), Error> {
    let stream = dev.stream()?;
    let side = dev.on(&stream);
    let beside = side.world()?;
    for round in 0..cases(200, 5000) {
        let n = [100, most / 4, most / 4 + 4, 3000, 2 * most / 4, 20_000][round * 7 % 6];
        let (dev, group) = if round % 4 < 2 { (dev, world) } else { (&*side, &beside) };
        match round % 3 {
            0 => sum::<f32>(dev, group, n, ReduceOp::Sum, round)?,
            1 => sum::<f64>(dev, group, n / 2, ReduceOp::Avg, round)?,
            _ => sum::<bf16>(dev, group, n, ReduceOp::Sum, round)?,
        }
    }
    // None waits for the one before on the host.
    let mut all = Vec::new();
    for round in 0..40 {
        let n = if round % 2 == 0 { 2000 } else { most / 4 + 100 };
        all.push(dev.upload(&vec![round as f32; n])?);
    }
    for (round, x) in all.iter_mut().enumerate() {
        let group = if round % 3 == 0 { &beside } else { world };
        group.all_reduce(x, ReduceOp::Sum)?;
    }
    for (round, x) in all.iter().enumerate() {
        let expected = (round * world.count()) as f32;
        if dev.download(x)?.iter().any(|x| *x != expected) {
            return Err(Error::custom(format!("round {round} of two streams")));
        }
    }
    out_of_place(dev, world)
}

fn out_of_place(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let source = dev.upload(&vec![world.rank() as f32 + 1.0; 3001])?;
    let mut sums = dev.zeros::<f32>(3001)?;
    world.all_reduce_into(&source, &mut sums, ReduceOp::Sum)?;
    let (n, own) = (world.count() as f32, world.rank() as f32 + 1.0);
    let right = dev.download(&sums)?.iter().all(|x| *x == n * (n + 1.0) / 2.0);
    let kept = dev.download(&source)?.iter().all(|x| *x == own);
    if right && kept { Ok(()) } else { Err(Error::custom("a sum out of place")) }
}

/// Sums of which none is waited for.
fn row(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    const SUMS: usize = 1000;
    for each in [1, 64, 1500] {
        let own: Vec<f32> = (0..SUMS * each).map(|i| value(world.rank(), i, each) as f32).collect();
        let mut x = dev.upload(&own)?;
        let start = Instant::now();
        for k in 0..SUMS {
            world.all_reduce(&mut x.slice_mut(k * each..(k + 1) * each), ReduceOp::Sum)?;
        }
        dev.synchronize()?;
        say(format!("{SUMS} sums of {} bytes: {:?} each", each * 4, start.elapsed() / SUMS as u32));
        let expected = |i: usize| (0..world.count()).map(|rank| value(rank, i, each) as f32).sum::<f32>();
        if let Some((i, x)) = dev.download(&x)?.iter().enumerate().find(|(i, x)| **x != expected(*i)) {
            return Err(Error::custom(format!("sum {}: {x}, not {}", i / each, expected(i))));
        }
    }
    Ok(())
}

fn groups(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let (count, me) = (world.count(), world.rank());
    let turned = world.group(&(0..count).rev().collect::<Vec<_>>())?;
    // Pairs, and the last one alone if it has none.
    let pair = world.group(&(me / 2 * 2..count.min(me / 2 * 2 + 2)).collect::<Vec<_>>())?;
    for round in 0..100 {
        sum::<f32>(dev, &turned, 700 + round, ReduceOp::Avg, round)?;
        // Some pairs meet more often than others.
        for more in 0..1 + me / 2 {
            sum::<f64>(dev, &pair, 100 + round, ReduceOp::Sum, round + more)?;
        }
        sum::<f32>(dev, world, 5000 + round, ReduceOp::Sum, round)?;
    }
    Ok(())
}

/// A kernel of the last process comes too late for those of the others.
fn late(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let mut x = dev.upload(&vec![1.0f32; 1000])?;
    world.all_reduce(&mut x, ReduceOp::Sum)?;
    dev.synchronize()?;
    if world.rank() + 1 == world.count() {
        slow_add(dev, &mut dev.zeros::<u32>(1)?, 1, 5_000_000)?;
    }
    world.all_reduce(&mut x, ReduceOp::Sum)?;
    // Not by a wait for the stream, which has a deadline, too.
    let start = Instant::now();
    while start.elapsed() < GUARD / 2 {
        dev.check()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Runs until another process is gone.
fn forever(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let mut x = dev.upload(&vec![0.0f32; 20_000])?;
    for round in 0.. {
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        world.all_reduce(&mut x, ReduceOp::Avg)?;
        dev.synchronize()?;
        if round == 10 {
            say("ready");
        }
    }
    Ok(())
}

pub fn child(builder: Builder, what: &str) -> Result<(), Error> {
    let builder = if what == "late" { builder.timeout(Duration::from_secs(2)) } else { builder };
    let pool = pool(builder.module(&MODULE))?;
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        let how = world.explain(DType::F32, ReduceOp::Sum, 1024)?;
        let rails = how.rails.as_ref().expect("several processes");
        say(format!("explained {}: {}", rails.transport, rails.sums));
        if what == "alone" {
            let why = "not by own kernels: process 0: NCCL alone was asked for";
            assert!(rails.transport == "nccl" && rails.sums.contains(why), "{rails:?}");
            return sum::<f32>(dev, &world, 1000, ReduceOp::Sum, 0);
        }
        if rails.transport != "inbox" {
            return Err(Error::custom(format!("no own kernels: {}", rails.sums)));
        }
        let most = limit(&world)?;
        say(format!("limit {most}"));
        match what {
            "sizes" => {
                sizes::<f32>(dev, &world, most)?;
                sizes::<f64>(dev, &world, most)?;
                sizes::<f16>(dev, &world, most)?;
                sizes::<bf16>(dev, &world, most)?;
                // Never by own kernels.
                sum::<i32>(dev, &world, 1000, ReduceOp::Sum, 0)?;
            }
            "mixed" => mixed(dev, &world, most)?,
            "row" => row(dev, &world)?,
            "groups" => groups(dev, &world)?,
            "late" => late(dev, &world)?,
            "forever" => forever(dev, &world)?,
            _ => sum::<f32>(dev, &world, 5000, ReduceOp::Sum, 1)?,
        }
        world.barrier()
    });
    if let Err(error) = &found {
        gpus::tell(&pool, error);
    }
    if what == "fails" {
        let failed = pool.run(|dev, _| {
            let world = dev.world()?;
            let mut x = dev.upload(&vec![1.0f32; 3000])?;
            for round in 0.. {
                world.all_reduce(&mut x, ReduceOp::Avg)?;
                if round == 10 && world.rank() == 1 {
                    return Err(Error::custom("a closure has had enough"));
                }
            }
            Ok(())
        });
        assert!(failed.is_err());
        for round in 0..20 {
            pool.run(|dev, _| sum::<f32>(dev, &dev.world()?, 3000 + round, ReduceOp::Sum, round))?;
        }
    }
    found?;
    say("right");
    pool.close()
}
