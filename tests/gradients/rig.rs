//! What these tests share: models made of nothing but gradients, and what must come of them.

use crate::support::{Gpus, succeeds};
use gpu_pool::{
    Builder, Device, DeviceBuffer, Error, GpuPool, ReduceOp,
    collective::ReduceOrder,
    gradients::{Exchanged, Gradient, GradientExchange, GradientExchangeBuilder},
};

/// Sums in the order of ranks, however they are made: then a plain all-reduce of each gradient has the same bits. GPUs
/// are not watched unless `GPU_POOL_CHECK` says so: where the checker looks on, kernels do not meet by themselves.
pub fn builder(gpus: Gpus, count: usize) -> Builder {
    gpus.unwatched(count).reduce_order(ReduceOrder::Rank)
}

pub fn pool(gpus: Gpus, count: usize) -> GpuPool {
    builder(gpus, count).build().unwrap()
}

/// Runs `f` on each device of a [`pool`], which must succeed. Returns the pool.
#[track_caller]
pub fn run(gpus: Gpus, count: usize, f: impl Fn(&Device) -> Result<(), Error> + Sync) -> GpuPool {
    succeeds(pool(gpus, count), f)
}

/// Buckets of a few elements, so that there are several.
pub fn small() -> GradientExchangeBuilder {
    GradientExchange::builder().first_bucket_bytes(40).bucket_bytes(160).norm(true)
}

/// Lengths that have all the corners: none, one, odd, a line, more than a bucket.
pub const SIZES: [usize; 9] = [7, 0, 64, 1, 33, 1000, 2, 0, 16];

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn shuffle(&mut self, x: &mut [usize]) {
        (1..x.len()).rev().for_each(|i| x.swap(i, (self.next() % (i as u64 + 1)) as usize));
    }
}

/// What one member adds: numbers of both signs and several sizes.
pub fn numbers(step: usize, rank: usize, gradient: usize, len: usize) -> Vec<f32> {
    let mut rng = Rng(((step * 97 + rank) * 1009 + gradient) as u64 * 2 + 1);
    let any = |_| {
        let unit = (rng.next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
        unit * [1.0, 1e-3, 8.0][(rng.next() % 3) as usize]
    };
    (0..len).map(any).collect()
}

/// Writes a gradient and says so.
#[track_caller]
pub fn give<T: Gradient>(
    dev: &Device,
    exchange: &mut GradientExchange<T>,
    gradient: usize,
    x: &[T],
) -> Result<(), Error> {
    dev.upload_into(x, &mut exchange.grad_mut(gradient)?)?;
    exchange.ready(dev, gradient)
}

/// A whole step of numbers, ready in this order.
#[track_caller]
pub fn step<'a>(
    dev: &Device,
    exchange: &'a mut GradientExchange,
    sizes: &[usize],
    number: usize,
    order: &[usize],
) -> Result<Exchanged<'a>, Error> {
    for &gradient in order {
        let x = numbers(number, dev.rank(), gradient, sizes[gradient]);
        give(dev, exchange, gradient, &x)?;
    }
    exchange.finish(dev)
}

/// All gradients, on the host.
pub fn all<T: Gradient>(dev: &Device, exchange: &GradientExchange<T>) -> Result<Vec<Vec<T>>, Error> {
    (0..exchange.len()).map(|gradient| dev.download(&exchange.grad(gradient)?)).collect()
}

/// What must come of a step: each gradient by a plain all-reduce. What is not `used` by this member is zeros.
pub fn plain(
    dev: &Device,
    sizes: &[usize],
    number: usize,
    op: ReduceOp,
    used: impl Fn(usize) -> bool,
) -> Result<Vec<Vec<f32>>, Error> {
    plain_with(dev, sizes, number, used, |x| dev.all_reduce(x, op))
}

/// [`plain`] by another all-reduce.
pub fn plain_with(
    dev: &Device,
    sizes: &[usize],
    number: usize,
    used: impl Fn(usize) -> bool,
    all_reduce: impl Fn(&mut DeviceBuffer<f32>) -> Result<(), Error>,
) -> Result<Vec<Vec<f32>>, Error> {
    let one = |(gradient, &len): (usize, &usize)| {
        let own = numbers(number, dev.rank(), gradient, len);
        let mut x = dev.upload(&if used(gradient) { own } else { vec![0.0; len] })?;
        all_reduce(&mut x)?;
        dev.download(&x)
    };
    sizes.iter().enumerate().map(one).collect()
}

pub fn bits(x: &[Vec<f32>]) -> Vec<Vec<u32>> {
    x.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

/// The reason of a call that must be refused.
#[track_caller]
pub fn refused<R>(result: Result<R, Error>) -> String {
    match result.map(|_| ()) {
        Err(Error::InvalidArgument { why, .. }) => why,
        other => panic!("not an invalid argument: {other:?}"),
    }
}

/// The norm, in double precision.
pub fn norm_of(x: &[Vec<f32>]) -> f64 {
    x.iter().flatten().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// From the last to the first, as a backward pass has it.
pub fn backwards(count: usize) -> Vec<usize> {
    (0..count).rev().collect()
}
