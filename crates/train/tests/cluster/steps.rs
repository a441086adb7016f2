//! Steps of `ShardedOptimizer` in any group, as one number of all their bits.

use gpu_pool::{Group, ReduceOp, Result, memory::DeviceCopy};
use gpu_pool_train::{Optimizer, Parameter, ShardedOptimizer};
use half::{bf16, f16};
use std::hash::{DefaultHasher, Hash, Hasher};

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
) -> Result<()> {
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
            let mut weights = sizes.iter().enumerate().map(weight).collect::<Result<Vec<_>>>()?;
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
pub fn bits(group: &Group<'_>, calls: bool) -> Result<u64> {
    let mut hash = DefaultHasher::new();
    bits_of::<f32>(group, calls, |x| x, &mut hash)?;
    bits_of::<f16>(group, calls, f16::from_f32, &mut hash)?;
    bits_of::<bf16>(group, calls, bf16::from_f32, &mut hash)?;
    Ok(hash.finish())
}
