//! `all_reduce_norm` between processes with a device each. On GPUs of one host it is one kernel, by the processes'
//! signal pads; on software GPUs, and where the rows are too many, it is three calls. The bits are the same.

use crate::{
    fleet::{Fleet, GUARD, pool, say},
    gpus,
    support::{MODULE, cases, cuda_devices, slow_add},
};
use gpu_pool::{AsView, Builder, DType, Device, DeviceBuffer, Element, Error, GpuPool, Group, ReduceOp, kernel::Float};
use gpu_pool_lab::{Check, prelude::*};
use gpu_pool_train::{NormSaved, RowNorm, prelude::*};
use half::{bf16, f16};
use std::{
    hash::{DefaultHasher, Hasher},
    time::{Duration, Instant},
};

fn fleet(what: &str, most: usize) -> Option<Fleet> {
    gpus::fleet(&format!("norm {what}"), "auto", most)
}

/// All members hold the same bits, and so does a pool of as many devices in one process, with its own kernels.
fn same_bits(fleet: Fleet, pool: &GpuPool) {
    let said = fleet.said();
    let here = pool.run(|dev, _| bits(dev, &dev.world()?)).unwrap();
    for said in said {
        println!("{said:?}");
        for hash in &here {
            assert!(said.iter().any(|line| *line == format!("bits {hash:x}")), "{hash:x} {said:?}");
        }
    }
}

#[test]
fn norms_of_software_gpus_have_the_bits_of_one_process() {
    same_bits(Fleet::start("norm bits", &[1, 1]), &GpuPool::builder().host(2).build().unwrap());
}

#[test]
fn norms_by_own_kernels_have_the_bits_of_one_process() {
    for most in [2, 4] {
        let Some(fleet) = fleet("bits", most) else { return };
        let devices: Vec<usize> = (0..cuda_devices().min(most)).collect();
        let pool = GpuPool::builder().check(Check::Off).cuda().devices(&devices).build().unwrap();
        same_bits(fleet, &pool);
    }
}

/// Norms and sums by own kernels, and sums by NCCL, in a row and on two streams.
#[test]
fn norms_alternate_with_sums_of_both_kinds() {
    let Some(fleet) = fleet("mixed", 8) else { return };
    assert!(fleet.said().iter().all(|said| said.iter().any(|line| line == "right")));
}

#[test]
fn a_process_is_killed_or_stopped_in_a_norm() {
    gpus::kill_and_stop("norm forever");
}

/// The kernel of one process comes after the deadline of the other's.
#[test]
fn a_late_norm_ends_the_others() {
    let Some(mut fleet) = fleet("late", 2) else { return };
    let said = (0..2).map(|rank| fleet.until(rank, "error ").1).collect::<Vec<_>>();
    assert!(said[0].starts_with("late [1], 2s") && said[1].starts_with("aborted by 0: "), "{said:?}");
}

/// A member with another `eps`: an error on all, and the next scope works.
#[test]
fn norms_that_differ_are_a_mismatch() {
    let Some(fleet) = fleet("differ", 2) else { return };
    assert!(fleet.said().iter().all(|said| said.iter().any(|line| line == "right")));
}

trait Type: Float + Element {
    fn eps(x: f64) -> Self::Acc;
}
macro_rules! types {
    ($($T:ty)+) => {$(
        impl Type for $T {
            fn eps(x: f64) -> f32 { x as f32 }
        }
    )+};
}
types! { f32 f16 bf16 }

/// One member's buffers, which begin `skip` elements behind a multiple of 16 bytes.
struct Own<T: Type> {
    x: DeviceBuffer<T>,
    residual: DeviceBuffer<T>,
    gamma: DeviceBuffer<T>,
    beta: DeviceBuffer<T>,
    skip: usize,
}

impl<T: Type> Own<T> {
    /// The members' partial sums differ, and the other buffers do not.
    fn new(dev: &Device, rank: usize, (rows, cols, skip): (usize, usize, usize)) -> Result<Self, Error> {
        let random = |len: usize, seed: usize| {
            let mut x = dev.zeros::<T>(len + skip)?;
            dev.uniform(&mut x, T::eps(-2.0)..T::eps(2.0), seed as u64, 0)?;
            Ok::<_, Error>(x)
        };
        let (x, residual) = (random(rows * cols, 10 + rank)?, random(rows * cols, 1)?);
        Ok(Own { x, residual, gamma: random(cols, 2)?, beta: random(cols, 3)?, skip })
    }

    fn norm(mut self, group: &Group<'_>, layer: bool, into: bool) -> Result<Vec<u8>, Error> {
        let (dev, skip) = (group.device(), self.skip);
        let (mut x, mut residual) = (self.x.slice_mut(skip..), self.residual.slice_mut(skip..));
        let (gamma, beta) = (self.gamma.slice(skip..), self.beta.slice(skip..));
        let norm = match layer {
            true => RowNorm::layer(&gamma, &beta, T::eps(1e-5)),
            false => RowNorm::rms(&gamma, T::eps(1e-5)),
        };
        let mut y = dev.zeros::<T>(x.len() + skip)?;
        if into {
            let saved = group.all_reduce_norm_into(&x, &mut residual, norm, &mut y.slice_mut(skip..))?;
            return found(dev, &y.slice(skip..), &residual, &saved);
        }
        let saved = group.all_reduce_norm(&mut x, &mut residual, norm)?;
        found(dev, &x, &residual, &saved)
    }

    fn three_calls(mut self, group: &Group<'_>, layer: bool) -> Result<Vec<u8>, Error> {
        let (dev, skip) = (group.device(), self.skip);
        let (mut x, mut residual) = (self.x.slice_mut(skip..), self.residual.slice_mut(skip..));
        let (gamma, beta) = (self.gamma.slice(skip..), self.beta.slice(skip..));
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.add_in_place(&mut residual, &x)?;
        let (y, mean, rstd) = match layer {
            true => dev.layer_norm(&residual, &gamma, &beta, T::eps(1e-5)).map(|(y, mean, s)| (y, Some(mean), s))?,
            false => dev.rms_norm(&residual, &gamma, T::eps(1e-5)).map(|(y, s)| (y, None, s))?,
        };
        found(dev, &y, &residual, &NormSaved { mean, rstd })
    }
}

fn found<T: Type>(
    dev: &Device,
    y: &impl AsView<Elem = T>,
    residual: &impl AsView<Elem = T>,
    saved: &NormSaved<T>,
) -> Result<Vec<u8>, Error> {
    let mut all = bytemuck::cast_slice(&dev.download(y)?).to_vec();
    all.extend_from_slice(bytemuck::cast_slice(&dev.download(residual)?));
    all.extend_from_slice(bytemuck::cast_slice(&dev.download(&saved.rstd)?));
    if let Some(mean) = &saved.mean {
        all.extend_from_slice(bytemuck::cast_slice(&dev.download(mean)?));
    }
    Ok(all)
}

/// Whether one kernel does it.
fn is_own(group: &Group<'_>, dtype: DType, rows: usize, cols: usize) -> Result<bool, Error> {
    let how = group.explain_norm(dtype, rows, cols)?;
    Ok(how.reason.starts_with("one kernel for sum") && how.rails.is_none_or(|rails| rails.transport == "inbox"))
}

fn shapes(group: &Group<'_>) -> Vec<(usize, usize, usize)> {
    if group.device().info().compute_capability == (0, 0) {
        return vec![(1, 64, 0), (3, 96, 1), (17, 130, 0)];
    }
    let all = [(1, 4096, 0), (3, 1024, 0), (7, 8192, 3), (5, 1000, 0), (33, 96, 0), (64, 2048, 1), (100, 4096, 0)];
    // Larger sums of more members go by NCCL, in an order of its own.
    all[..if group.count() > 2 { 5 } else { 7 }].to_vec()
}

fn bits_of<T: Type>(dev: &Device, world: &Group<'_>, hash: &mut DefaultHasher) -> Result<(), Error> {
    for shape in shapes(world) {
        for (layer, into) in [(false, false), (true, false), (false, true), (true, true)] {
            let own = || Own::<T>::new(dev, world.rank(), shape);
            let (one, three) = (own()?.norm(world, layer, into)?, own()?.three_calls(world, layer)?);
            if one != three {
                return Err(Error::custom(format!("{:?} {shape:?}, layer {layer}, into {into}", T::DTYPE)));
            }
            hash.write(&one);
        }
    }
    Ok(())
}

/// A number of all bits of all shapes and types.
fn bits(dev: &Device, world: &Group<'_>) -> Result<u64, Error> {
    let mut hash = DefaultHasher::new();
    bits_of::<f32>(dev, world, &mut hash)?;
    bits_of::<f16>(dev, world, &mut hash)?;
    bits_of::<bf16>(dev, world, &mut hash)?;
    Ok(hash.finish())
}

/// Each result against the three calls: the sums of other sizes go other ways in between.
fn mixed(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let stream = dev.stream()?;
    let side = dev.on(&stream);
    let beside = side.world()?;
    let mut large = dev.upload(&vec![1.0f32; 3 << 20])?;
    let members = world.count() as f32;
    for round in 0..cases(40, 1000) {
        let (dev, group) = if round % 4 < 2 { (dev, world) } else { (&*side, &beside) };
        let shape = [(1, 4096, 0), (16, 2048, 0), (3, 1000, 1)][round % 3];
        let own = || Own::<bf16>::new(dev, world.rank(), shape);
        let one = own()?.norm(group, round % 2 == 0, false)?;
        if round % 5 == 0 {
            world.all_reduce(&mut large, ReduceOp::Avg)?;
        }
        let mut small = dev.upload(&[1.0f32; 33])?;
        group.all_reduce(&mut small, ReduceOp::Sum)?;
        let three = own()?.three_calls(group, round % 2 == 0)?;
        if one != three || dev.download(&small)?.iter().any(|x| *x != members) {
            return Err(Error::custom(format!("round {round}")));
        }
    }
    let right = dev.download(&large)?.iter().all(|x| *x == 1.0);
    if right { Ok(()) } else { Err(Error::custom("sums of NCCL in between")) }
}

/// Runs until another process is gone.
fn forever(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let gamma = dev.upload(&vec![0.5f32; 4096])?;
    let (mut x, mut residual) = (dev.zeros::<f32>(20 * 4096)?, dev.zeros::<f32>(20 * 4096)?);
    for round in 0.. {
        for _ in 0..20 {
            world.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 1e-5))?;
        }
        dev.synchronize()?;
        if round == 3 {
            say("ready");
        }
    }
    Ok(())
}

/// A kernel of the last process comes too late for that of the other.
fn late(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let gamma = dev.upload(&vec![0.5f32; 1024])?;
    let (mut x, mut residual) = (dev.zeros::<f32>(1024)?, dev.zeros::<f32>(1024)?);
    world.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 1e-5))?;
    dev.synchronize()?;
    if world.rank() + 1 == world.count() {
        slow_add(dev, &mut dev.zeros::<u32>(1)?, 1, 5_000_000)?;
    }
    world.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 1e-5))?;
    let start = Instant::now();
    while start.elapsed() < GUARD / 2 {
        dev.check()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn differ(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let gamma = dev.upload(&vec![1.0f32; 1024])?;
    let (mut x, mut residual) = (dev.upload(&vec![1.0f32; 1024])?, dev.zeros::<f32>(1024)?);
    let eps = if world.rank() == 0 { 1e-5 } else { 1e-6 };
    let differs = world.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, eps));
    assert!(matches!(differs, Err(Error::WorldMismatch { .. })), "{differs:?}");
    differs.map(drop)
}

fn alike(dev: &Device, world: &Group<'_>) -> Result<(), Error> {
    let gamma = dev.upload(&vec![1.0f32; 1024])?;
    let (mut x, mut residual) = (dev.upload(&vec![1.0f32; 1024])?, dev.zeros::<f32>(1024)?);
    world.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 0.0))?;
    assert_eq!(dev.download(&residual)?, [world.count() as f32; 1024]);
    assert_eq!(dev.download(&x)?, [1.0; 1024]);
    Ok(())
}

pub fn child(builder: Builder, what: &str) -> Result<(), Error> {
    let builder = if what == "late" { builder.timeout(Duration::from_secs(2)) } else { builder };
    let pool = pool(builder.module(&MODULE))?;
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        let gpu = dev.info().compute_capability != (0, 0);
        assert_eq!(is_own(&world, DType::BF16, 3, 4096)?, gpu, "{}", world.explain_norm(DType::BF16, 3, 4096)?);
        // More than an inbox takes: three calls.
        assert!(!is_own(&world, DType::BF16, 1024, 4096)?);
        match what {
            "bits" => say(format!("bits {:x}", bits(dev, &world)?)),
            "mixed" => mixed(dev, &world)?,
            "late" => late(dev, &world)?,
            "differ" => differ(dev, &world)?,
            _ => forever(dev, &world)?,
        }
        world.barrier()
    });
    if what == "differ" {
        assert!(matches!(found, Err(Error::WorldMismatch { .. })), "{found:?}");
        pool.run(|dev, _| alike(dev, &dev.world()?))?;
        say("right");
        return pool.close();
    }
    if let Err(error) = &found {
        gpus::tell(&pool, error);
    }
    found?;
    say("right");
    pool.close()
}
