//! Steps of `ShardedOptimizer` between processes with a device each. On GPUs of one host a step is one kernel, in
//! memory that the processes lend each other; on software GPUs it is three collectives. The bits are those of one
//! process.

use crate::{
    fleet::{Fleet, HEARTBEAT_TIMEOUT, free_port, pool, say},
    steps,
    support::cuda_devices,
};
use gpu_pool::{Builder, Device, Error, GpuPool, ReduceOp};
use gpu_pool_lab::{Check, prelude::*};
use gpu_pool_train::{Optimizer, ShardedOptimizer};
use std::time::Duration;

/// Processes with a GPU each. None where there are too few GPUs.
fn fleet(what: &str, most: usize) -> Option<Fleet> {
    let gpus = cuda_devices().min(most);
    if gpus < 2 {
        println!("skipped: {}", if gpus == 0 { "no CUDA device" } else { "one CUDA device" });
        return None;
    }
    let tasks = vec![format!("cuda1 sharded {what}"); gpus];
    Some(Fleet::of(&tasks, free_port(), |_, process| {
        process.env("GPU_POOL_TRANSPORT", "auto").env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    }))
}

fn same_bits(fleet: Fleet, pool: &GpuPool) {
    let here = pool.run(|dev, _| steps::bits(&dev.world()?, false)).unwrap();
    for said in fleet.said() {
        assert!(said.iter().any(|line| *line == format!("bits {:x}", here[0])), "{:x} {said:?}", here[0]);
    }
}

#[test]
fn steps_of_software_gpus_have_the_bits_of_one_process() {
    same_bits(Fleet::start("sharded bits", &[1, 1]), &GpuPool::builder().host(2).build().unwrap());
}

#[test]
fn steps_in_lent_memory_have_the_bits_of_one_process() {
    for most in [2, 4] {
        let Some(fleet) = fleet("bits", most) else { return };
        let devices: Vec<usize> = (0..cuda_devices().min(most)).collect();
        let pool = GpuPool::builder().check(Check::Off).cuda().devices(&devices).build().unwrap();
        same_bits(fleet, &pool);
    }
}

#[test]
fn a_process_is_killed_or_stopped_in_a_step() {
    for (victim, signal) in [(1, libc::SIGKILL), (0, libc::SIGKILL), (1, libc::SIGSTOP)] {
        let Some(mut fleet) = fleet("forever", 2) else { return };
        (0..2).for_each(|rank| drop(fleet.until(rank, "ready")));
        let start = std::time::Instant::now();
        fleet.signal(victim, signal);
        let (at, error) = fleet.until(1 - victim, "error ");
        assert!(error.starts_with(&format!("lost {victim}: ")), "{error}");
        assert!(at - start < HEARTBEAT_TIMEOUT * 3, "{:?}", at - start);
        assert_eq!(fleet.until(1 - victim, "local work ").1, "true");
        assert!(!fleet.ends(1 - victim));
    }
}

/// Runs until another process is gone. Steps take some milliseconds, so it is mostly in one.
fn forever(dev: &Device) -> Result<(), Error> {
    let optimizer = Optimizer::adam_w(0.01).clip(1.0);
    let mut own = ShardedOptimizer::<f32>::new(&dev.world()?, optimizer, ReduceOp::Sum, &[16 << 20])?;
    let (mut grads, weight) = (dev.zeros::<f32>(own.len())?, dev.zeros::<f32>(16 << 20)?);
    let mut weights = [weight];
    for round in 0.. {
        for _ in 0..20 {
            own.step(dev, &mut grads, &mut weights)?;
        }
        dev.synchronize()?;
        if round == 3 {
            say("ready");
        }
    }
    Ok(())
}

pub fn child(builder: Builder, what: &str) -> Result<(), Error> {
    let pool = pool(builder)?;
    if what == "bits" {
        // Memory that is lent in a scope that fails is of no use to the next one, and does it no harm.
        let failed = pool.run(|dev, _| {
            let world = dev.world()?;
            let mut own = ShardedOptimizer::<f32>::new(&world, Optimizer::sgd(0.1), ReduceOp::Sum, &[5000])?;
            let (mut grads, mut weights) = (dev.zeros::<f32>(own.len())?, [dev.zeros::<f32>(5000)?]);
            own.step(dev, &mut grads, &mut weights)?;
            if world.rank() == 1 { Err(Error::custom("a failure")) } else { world.barrier() }
        });
        assert!(failed.is_err(), "{failed:?}");
    }
    let found = pool.run(|dev, _| match what {
        "bits" => {
            let world = dev.world()?;
            let (own, calls) = (steps::bits(&world, false)?, steps::bits(&world, true)?);
            // NCCL adds up more than two in an order of its own; these sums may be rounded.
            assert!(own == calls || world.count() > 2, "{own:x} {calls:x}");
            say(format!("bits {own:x}"));
            world.barrier()
        }
        _ => forever(dev),
    });
    if let Err(error) = &found {
        say(match error {
            Error::HostLost { host, why, .. } => format!("error lost {host}: {why}"),
            other => format!("error other {other}"),
        });
        let local = pool.run(|dev, _| dev.download(&dev.upload(&[3.0f32])?));
        say(format!("local work {}", local.is_ok_and(|x| x == [[3.0]])));
        std::thread::sleep(Duration::from_millis(10));
    }
    found?;
    pool.close()
}
