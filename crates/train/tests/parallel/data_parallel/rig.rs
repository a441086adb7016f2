//! What the tests of data parallel share: models of nothing but parameters, whose gradients are known numbers.

use crate::support::failure;
use gpu_pool::{Device, DeviceBuffer, DeviceCopy, Error, GpuPool, Result};
use gpu_pool_train::{DataParallel, Gradients, Model, Optimizer, Parameter};
use half::{bf16, f16};

/// Parameters and nothing else.
pub struct Bag<T: DeviceCopy = f32>(pub Vec<DeviceBuffer<T>>);

impl<T: Parameter> Model<T> for Bag<T> {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>> {
        self.0.iter_mut().collect()
    }
}

/// A type of parameters, for these tests.
pub trait Real: Parameter {
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    /// A unit in the last place of 1.
    const EPSILON: f64;
}
impl Real for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }
    fn wide(self) -> f64 {
        self.into()
    }
    const EPSILON: f64 = f32::EPSILON as f64;
}
macro_rules! half {
    ($($T:ty, $epsilon:literal;)+) => {$(
        impl Real for $T {
            fn of(x: f64) -> Self {
                <$T>::from_f64(x)
            }
            fn wide(self) -> f64 {
                self.to_f64()
            }
            const EPSILON: f64 = $epsilon;
        }
    )+};
}
half! { f16, 0.000_976_562_5; bf16, 0.007_812_5; }

/// Numbers from -1 to 1, in quarters of a thousandth: exact sums in `f64`.
pub fn number(seed: u64, i: usize) -> f64 {
    let mut x = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 32;
    (x % 8001) as f64 / 4000.0 - 1.0
}

/// Lengths with all the corners: none, one, odd, whole grains, several chunks of the norm.
pub const SIZES: [usize; 6] = [7, 0, 64, 1, 2503, 33];

pub fn bag<T: Real>(dev: &Device, sizes: &[usize], seed: u64) -> Result<Bag<T>> {
    let parameter = |(k, len): (usize, &usize)| {
        let x: Vec<T> = (0..*len).map(|i| T::of(number(seed + k as u64, i))).collect();
        dev.upload(&x)
    };
    Ok(Bag(sizes.iter().enumerate().map(parameter).collect::<Result<_>>()?))
}

/// A bag on every device of a pool.
pub fn bags<T: Real>(pool: &GpuPool, optimizer: Optimizer, sizes: &[usize], seed: u64) -> DataParallel<Bag<T>, T> {
    DataParallel::new(pool, optimizer, |dev| bag(dev, sizes, seed)).unwrap()
}

/// With sharded state, or without.
pub fn either(optimizer: Optimizer, sharded: bool) -> Optimizer {
    if sharded { optimizer.sharded() } else { optimizer }
}

/// Writes this device's share of the gradients of a step, the last first: each row has the gradient `number(..)`.
pub fn backward<T: Real>(
    gradients: &mut Gradients<'_, T>,
    dev: &Device,
    sizes: &[usize],
    step: u64,
    rows: usize,
) -> Result<()> {
    let share = rows as f64 * f64::from(gradients.scale);
    for (k, len) in sizes.iter().enumerate().rev() {
        let g: Vec<T> = (0..*len).map(|i| T::of(share * number(1000 * (step + 1) + k as u64, i))).collect();
        gradients.write(k, |own| dev.upload_into(&g, own))?;
    }
    Ok(())
}

/// One step of a bag on `rows` rows.
pub fn step<T: Real>(model: &mut DataParallel<Bag<T>, T>, sizes: &[usize], number: u64, rows: usize) -> Result<()> {
    model
        .step(rows, |dev, shard, _, gradients| backward(gradients, dev, sizes, number, shard.range(rows).len()))
        .map(drop)
}

/// The parameters of every replica, as bits.
pub fn weights<T: Real>(model: &mut DataParallel<Bag<T>, T>) -> Result<Vec<Vec<T>>> {
    model.each(|dev, bag| Ok(bag.0.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>>>()?.concat()))
}

/// The text of an error that names a call of this test as invalid.
#[track_caller]
pub fn refused<R: std::fmt::Debug>(result: Result<R>) -> String {
    let error = failure(result);
    let Error::InvalidArgument { site, .. } = &error else { panic!("{error}") };
    assert!(site.file().starts_with("crates/train/tests"), "{error}");
    error.to_string()
}

pub fn bits<T: DeviceCopy>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}
