//! Steps of `ShardedOptimizer` between processes with a device each. On GPUs of one host a step is one kernel, in
//! memory that the processes lend each other; on software GPUs it is three collectives. The bits are those of one
//! process.

use crate::{
    fleet::{Fleet, pool, say},
    gpus,
    support::cuda_devices,
};
use gpu_pool::{Builder, Device, Error, GpuPool, Group, ReduceOp, memory::DeviceCopy};
use gpu_pool_lab::{Check, prelude::*};
use gpu_pool_train::{Optimizer, Parameter, ShardedOptimizer};
use half::{bf16, f16};
use std::hash::{DefaultHasher, Hash, Hasher};

fn same_bits(fleet: Fleet, pool: &GpuPool) {
    let here = pool.run(|dev, _| bits(&dev.world()?, false)).unwrap();
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
        let Some(fleet) = gpus::fleet("sharded bits", "auto", most) else { return };
        let devices: Vec<usize> = (0..cuda_devices().min(most)).collect();
        let pool = GpuPool::builder().check(Check::Off).cuda().devices(&devices).build().unwrap();
        same_bits(fleet, &pool);
    }
}

#[test]
fn a_process_is_killed_or_stopped_in_a_step() {
    gpus::kill_and_stop("sharded forever");
}

/// Multiples of 1/64 between -1 and 1.
fn numbers<T>(len: usize, seed: u64, of: fn(f32) -> T) -> Vec<T> {
    let number = |i: u64| (i.wrapping_add(seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as f32 / 64.0 - 1.0;
    (0..len as u64).map(|i| of(number(i))).collect()
}

fn bits_of<T: Parameter + DeviceCopy + bytemuck::Pod>(
    group: &Group<'_>,
    calls: bool,
    of: fn(f32) -> T,
    hash: &mut DefaultHasher,
) -> Result<(), Error> {
    let dev = group.device();
    for sizes in [&[50_000][..], &[1], &[3, 4097, 0, 20_000, 2048]] {
        for (reduce, clip) in [(ReduceOp::Sum, None), (ReduceOp::Avg, Some(0.5)), (ReduceOp::Sum, Some(1e9))] {
            let optimizer = clip.into_iter().fold(Optimizer::adam_w(0.01), Optimizer::clip);
            let mut own = ShardedOptimizer::<T>::new(group, optimizer, reduce, sizes)?;
            if calls {
                own = own.by_calls();
            }
            // Software GPUs, and one member, have no such kernel.
            let gpus = group.count() > 1 && dev.info().compute_capability != (0, 0);
            assert_eq!(format!("{own:?}").contains("one_kernel: true"), gpus && !calls, "{own:?}");
            let weight = |(k, len): (usize, &usize)| dev.upload(&numbers(*len, 100 + k as u64, of));
            let mut weights = sizes.iter().enumerate().map(weight).collect::<Result<Vec<_>, Error>>()?;
            let mut grads = dev.zeros::<T>(own.len())?;
            for step in 0..3 {
                let mut all = vec![of(0.0); own.len()];
                for (k, len) in sizes.iter().enumerate() {
                    let seed = (1000 * step + 100 * group.rank() + k) as u64;
                    all[own.place(k)].copy_from_slice(&numbers(*len, seed, of));
                }
                dev.upload_into(&all, &mut grads)?;
                let norm = own.step(dev, &mut grads, &mut weights)?;
                norm.map(|norm| dev.download(&norm)).transpose()?.map(|norm| norm[0].to_bits()).hash(hash);
            }
            for weight in &weights {
                hash.write(bytemuck::cast_slice(&dev.download(weight)?));
            }
            let state = own.state(dev)?;
            [state.first, state.second, state.master].iter().for_each(|x| hash.write(bytemuck::cast_slice(x)));
        }
    }
    Ok(())
}

/// A number of all bits. `calls`: the steps are three collectives each.
fn bits(group: &Group<'_>, calls: bool) -> Result<u64, Error> {
    let mut hash = DefaultHasher::new();
    bits_of::<f32>(group, calls, |x| x, &mut hash)?;
    bits_of::<f16>(group, calls, f16::from_f32, &mut hash)?;
    bits_of::<bf16>(group, calls, bf16::from_f32, &mut hash)?;
    Ok(hash.finish())
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
            let (own, calls) = (bits(&world, false)?, bits(&world, true)?);
            // NCCL adds up more than two in an order of its own; these sums may be rounded.
            assert!(own == calls || world.count() > 2, "{own:x} {calls:x}");
            say(format!("bits {own:x}"));
            world.barrier()
        }
        _ => forever(dev),
    });
    if let Err(error) = &found {
        gpus::tell(&pool, error);
    }
    found?;
    pool.close()
}
