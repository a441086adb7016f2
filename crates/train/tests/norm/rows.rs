//! `all_reduce_norm`: the bits of an all-reduce, an addition and a norm, one after the other, for any number of rows;
//! called and captured. vllm#51290, vllm#52998, sglang#24629, sglang#34159: elsewhere the bits of a row depend on how
//! many others there are, so such kernels are switched off where results must not depend on the batch.

use crate::{
    on_both, rig,
    rig::{assert_works, ways},
    support::{Gpus, failure, slow_add},
};
use gpu_pool::{
    AsView, DType, Device, DeviceBuffer, Element, Error, GpuPool, ReduceOp, Result, collective::Algorithm,
    kernel::Float,
};
use gpu_pool_train::{NormSaved, RowNorm, prelude::*};
use half::{bf16, f16};
use proptest::{prelude::*, test_runner::TestRunner};

#[path = "pull.rs"]
mod pull;

/// A type of the operations. Its factors and its `eps` have a type of their own.
trait Type: Float + Element {
    fn eps(x: f64) -> Self::Acc;
}
macro_rules! types {
    ($($T:ty, $A:ty;)+) => {$(
        impl Type for $T {
            fn eps(x: f64) -> $A { x as $A }
        }
    )+};
}
types! { f32, f32; f64, f64; f16, f32; bf16, f32; }

const EPS: f64 = 1e-5;

fn bytes<V: AsView>(dev: &Device, x: &V) -> Result<Vec<u8>> {
    Ok(bytemuck::cast_slice(&dev.download(x)?).to_vec())
}

/// How many rows of how many elements, and how many elements behind a multiple of 16 bytes the buffers begin.
type Rows = (usize, usize, usize);

/// One member's buffers.
struct Own<T: Type> {
    x: DeviceBuffer<T>,
    residual: DeviceBuffer<T>,
    gamma: DeviceBuffer<T>,
    beta: DeviceBuffer<T>,
    skip: usize,
}

/// `y`, the residual, and what the step back needs.
type Found = [Vec<u8>; 4];

impl<T: Type> Own<T> {
    /// The members' partial sums differ. The other buffers do not, unless the residuals are each member's own.
    fn new(dev: &Device, rank: usize, (rows, cols, skip): Rows, own_residual: bool) -> Result<Self> {
        let random = |len: usize, seed: usize| {
            let mut x = dev.zeros::<T>(len + skip)?;
            dev.uniform(&mut x, T::eps(-2.0)..T::eps(2.0), seed as u64, 0)?;
            Ok::<_, Error>(x)
        };
        let residual = random(rows * cols, if own_residual { 100 + rank } else { 1 })?;
        Ok(Own { x: random(rows * cols, 10 + rank)?, residual, gamma: random(cols, 2)?, beta: random(cols, 3)?, skip })
    }

    /// The three calls.
    fn one_by_one(mut self, dev: &Device, layer: bool) -> Result<Found> {
        let skip = self.skip;
        let (mut x, mut residual) = (self.x.slice_mut(skip..), self.residual.slice_mut(skip..));
        let (gamma, beta) = (self.gamma.slice(skip..), self.beta.slice(skip..));
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.add_in_place(&mut residual, &x)?;
        let (y, mean, rstd) = match layer {
            true => {
                dev.layer_norm(&residual, &gamma, &beta, T::eps(EPS)).map(|(y, mean, rstd)| (y, Some(mean), rstd))?
            }
            false => dev.rms_norm(&residual, &gamma, T::eps(EPS)).map(|(y, rstd)| (y, None, rstd))?,
        };
        found(dev, &y, &residual, &NormSaved { mean, rstd })
    }

    /// The one call, called or `captured`, in place or `into` another buffer.
    fn together(mut self, dev: &Device, layer: bool, captured: bool, into: bool) -> Result<Found> {
        let skip = self.skip;
        let (mut x, mut residual) = (self.x.slice_mut(skip..), self.residual.slice_mut(skip..));
        let (gamma, beta) = (self.gamma.slice(skip..), self.beta.slice(skip..));
        let mut y = dev.zeros::<T>(x.len() + skip)?;
        let mut y = y.slice_mut(skip..);
        let mut call = |dev: &Device| {
            let norm = match layer {
                true => RowNorm::layer(&gamma, &beta, T::eps(EPS)),
                false => RowNorm::rms(&gamma, T::eps(EPS)),
            };
            match into {
                true => dev.all_reduce_norm_into(&x, &mut residual, norm, &mut y),
                false => dev.all_reduce_norm(&mut x, &mut residual, norm),
            }
        };
        let saved = match captured {
            true => {
                let (graph, saved) = dev.capture(&mut call)?;
                dev.launch_graph(&graph)?;
                saved
            }
            false => call(dev)?,
        };
        if into { found(dev, &y, &residual, &saved) } else { found(dev, &x, &residual, &saved) }
    }
}

fn found<T: Type>(
    dev: &Device,
    y: &impl AsView<Elem = T>,
    residual: &impl AsView<Elem = T>,
    saved: &NormSaved<T>,
) -> Result<Found> {
    let mean = saved.mean.as_ref().map_or(Ok(Vec::new()), |mean| bytes(dev, mean))?;
    Ok([bytes(dev, y)?, bytes(dev, residual)?, mean, bytes(dev, &saved.rstd)?])
}

/// The bits of the three calls, on all members, called and captured, in place and out of place.
fn same_bits<T: Type>(dev: &Device, rows: Rows) -> Result<()> {
    for (layer, own_residual) in [(false, false), (true, false), (false, true)] {
        let own = || Own::<T>::new(dev, dev.rank(), rows, own_residual);
        let wanted = own()?.one_by_one(dev, layer)?;
        for (captured, into) in [(false, false), (true, true), (false, true), (true, false)] {
            let got = own()?.together(dev, layer, captured, into)?;
            let differs = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
            let what = differs.map(|at| ["y", "residual", "mean", "rstd"][at]);
            let n = dev.count();
            assert_eq!(what, None, "{:?} {rows:?}, {n} members, layer {layer} captured {captured}", T::DTYPE);
        }
        if !own_residual {
            // All members have the bits of the first one.
            let (mut first, own) = (dev.upload(&wanted[0])?, dev.upload(&wanted[0])?);
            dev.broadcast(&mut first, 0)?;
            assert!(dev.download(&first)? == dev.download(&own)?);
        }
    }
    Ok(())
}

/// On GPUs all rows of the table; software GPUs take a few.
fn shapes(gpus: Gpus) -> Vec<Rows> {
    match gpus.is_cuda() {
        true => vec![
            (1, 4096, 0),
            (3, 1024, 0),
            (64, 2048, 1),
            (1000, 4096, 0),
            (4096, 1024, 0),
            // Rows of several blocks; some of their threads have nothing.
            (1, 16384, 0),
            (3, 12_288, 0),
            (9, 6144, 0),
            (31, 16384, 0),
            (65, 16384, 0),
            (7, 8192, 3),
            (129, 5120, 0),
            (5, 1000, 0),
            (2, 20_000, 0),
            (33, 96, 0),
            (0, 1024, 0),
        ],
        false => vec![(1, 64, 0), (3, 96, 1), (17, 130, 0), (2, 1025, 3), (0, 5, 0), (300, 1, 0)],
    }
}

on_both! {
    2: fn the_bits_of_the_three_calls(gpus) {
        for n in [2, 3, gpus.up_to(8)] {
            if n > gpus.up_to(8) {
                continue;
            }
            rig::run(gpus, n, |dev| {
                for rows in shapes(gpus) {
                    same_bits::<f32>(dev, rows)?;
                    same_bits::<f16>(dev, rows)?;
                    same_bits::<bf16>(dev, rows)?;
                }
                same_bits::<f64>(dev, (9, 70, 0))
            });
        }
    }

    // Where kernels meet on the devices it is one kernel; software GPUs make the three calls.
    2: fn what_is_chosen(gpus) {
        let pool = gpus.unwatched(2).build().unwrap();
        pool.run(|dev, _| {
            let group = dev.group(&[0, 1])?;
            // Large sums go other ways, also where kernels meet on the devices.
            let sum = group.explain(DType::BF16, ReduceOp::Sum, 64 << 10)?;
            // (`GPU_POOL_ALGORITHM=direct`: by the kernel that reads.)
            let direct = ["flags", "packets"].contains(&sum.meets) && sum.algorithm == Algorithm::Direct;
            let by_one = sum.meets == "data" || direct;
            let meets_on_devices = gpus.is_cuda() && by_one;
            for (dtype, rows, cols) in [(DType::BF16, 1, 4096), (DType::BF16, 4096, 4096), (DType::F32, 64, 16384)] {
                let how = group.explain_norm(dtype, rows, cols)?;
                assert_eq!(how.reason.starts_with("one kernel for sum"), meets_on_devices, "{how}");
            }
            let (all, none) = (usize::MAX, 0);
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::U8] {
                for (rows, cols) in [(all, all), (all, 2), (2, all), (all, 1), (1, all), (none, all), (all / 2, 2)] {
                    assert!(!group.explain_norm(dtype, rows, cols)?.reason.starts_with("one kernel for sum"));
                }
                for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
                    for bytes in [all, all - 1, all / 2 + 1, none] {
                        let limits = group.explain(dtype, op, bytes)?.limits;
                        assert_eq!(limits, pool.explain(dtype, op, bytes)?.limits);
                    }
                }
            }
            for (dtype, rows, cols) in [(DType::F64, 1, 64), (DType::BF16, 1, 1001), (DType::BF16, 1, 40_000)] {
                assert!(!group.explain_norm(dtype, rows, cols)?.reason.starts_with("one kernel for sum"));
            }
            Ok(())
        })
        .unwrap();
    }

    // A row's bits depend neither on how many rows there are, nor on where it stands.
    2: fn rows_do_not_depend_on_the_batch(gpus) {
        let (rows, cols) = if gpus.is_cuda() { (1000, 4096) } else { (40, 96) };
        rig::run(gpus, 2, |dev| {
            let batch = Own::<bf16>::new(dev, dev.rank(), (rows, cols, 0), false)?;
            let [y, residual, ..] = Own::<bf16>::new(dev, dev.rank(), (rows, cols, 0), false)?
                .together(dev, false, false, false)?;
            for (first, count) in [(0, 1), (rows - 1, 1), (5, 3), (rows / 2, rows / 3)] {
                let part = |x: &DeviceBuffer<bf16>| {
                    let mut part = dev.zeros(count * cols)?;
                    dev.copy(&x.slice(first * cols..(first + count) * cols), &mut part)?;
                    Ok::<_, Error>(part)
                };
                let whole = |x: &DeviceBuffer<bf16>| {
                    let mut whole = dev.zeros(cols)?;
                    dev.copy(x, &mut whole)?;
                    Ok::<_, Error>(whole)
                };
                let (x, of_part) = (part(&batch.x)?, part(&batch.residual)?);
                let (gamma, beta) = (whole(&batch.gamma)?, whole(&batch.beta)?);
                let own = Own { x, residual: of_part, gamma, beta, skip: 0 };
                let [part_y, part_residual, ..] = own.together(dev, false, false, false)?;
                let at = first * cols * 2..(first + count) * cols * 2;
                assert!(part_y == y[at.clone()] && part_residual == residual[at], "{count} rows from {first}");
            }
            Ok(())
        });
    }

    // A NaN in a partial sum is one in the row's residual, and so in its norm; other rows are as they would be.
    2: fn a_nan_stays_in_its_row(gpus) {
        rig::run(gpus, 2, |dev| {
            for bits in [f32::NAN.to_bits(), u32::MAX, 0xffff_fffe, f32::INFINITY.to_bits()] {
                let mut x = dev.upload(&vec![1.0f32; 3 * 1024])?;
                if dev.rank() == 1 {
                    dev.copy(&dev.upload(&[f32::from_bits(bits)])?, &mut x.slice_mut(1024..1025))?;
                }
                let mut residual = dev.zeros::<f32>(3 * 1024)?;
                let gamma = dev.upload(&vec![1.0f32; 1024])?;
                dev.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 0.0))?;
                let (y, residual) = (dev.download(&x)?, dev.download(&residual)?);
                assert!(!residual[1024].is_finite() && !y[1024].is_finite());
                assert!(residual.iter().enumerate().all(|(i, x)| i == 1024 || *x == 2.0));
                assert!(y.iter().enumerate().all(|(i, y)| i / 1024 == 1 || *y == 1.0));
            }
            Ok(())
        });
    }

    // Late members, one after the other, many calls in a row, plain and in graphs, on what the call before has left.
    2: fn a_hundred_in_a_row(gpus) {
        let n = gpus.up_to(4);
        let (rows, cols) = if gpus.is_cuda() { (37, 16384) } else { (5, 64) };
        rig::run(gpus, n, |dev| {
            let run = |together: bool| {
                let mut own = Own::<f32>::new(dev, dev.rank(), (rows, cols, 0), false)?;
                let mut late = dev.zeros::<u32>(1)?;
                let Own { x, residual, gamma, .. } = &mut own;
                for round in 0..100 {
                    if round % (3 * n) == dev.rank() {
                        slow_add(dev, &mut late, 1, 200)?;
                    }
                    // Sizes by turns, so that ways of carrying it out follow each other.
                    let len = [rows, 1, rows / 2 + 1][round % 3] * cols;
                    let (mut x, mut residual) = (x.slice_mut(..len), residual.slice_mut(..len));
                    if together {
                        dev.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(gamma, 1e-5))?;
                    } else {
                        dev.all_reduce(&mut x, ReduceOp::Sum)?;
                        dev.add_in_place(&mut residual, &x)?;
                        let (y, _) = dev.rms_norm(&residual, gamma, 1e-5)?;
                        dev.copy(&y, &mut x)?;
                    }
                    if round % 10 == 9 {
                        dev.all_reduce(&mut x, ReduceOp::Avg)?;
                    }
                }
                Ok::<_, Error>((bytes(dev, x)?, bytes(dev, residual)?))
            };
            assert!(run(true)? == run(false)?);
            Ok(())
        });
    }

    2: fn every_way_of_carrying_it_out(gpus) {
        for (way, pool) in ways(gpus, gpus.up_to(3)) {
            let done = pool.run(|dev, _| {
                let whole = |x: f32| dev.upload(&vec![x; 2 * 1024]);
                let (mut x, mut residual, gamma) = (whole(1.5)?, whole(0.5)?, dev.upload(&vec![2.0f32; 1024])?);
                dev.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 0.0))?;
                let sum = 1.5 * dev.count() as f32 + 0.5;
                Ok(dev.download(&x)? == [2.0; 2048] && dev.download(&residual)? == [sum; 2048])
            });
            assert!(done.unwrap().into_iter().all(|right| right), "{way:?}");
        }
    }

    // A member of a group has its rank there, and others are not disturbed.
    3: fn in_a_group(gpus) {
        rig::run(gpus, 3, |dev| {
            if dev.rank() == 1 {
                return Ok(());
            }
            let group = dev.group(&[2, 0])?;
            let (mut x, mut residual) = (dev.upload(&[3.0f32, -3.0])?, dev.upload(&[-2.0f32, 2.0])?);
            let gamma = dev.upload(&[1.0f32, 2.0])?;
            group.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 0.0))?;
            assert_eq!((dev.download(&x)?, dev.download(&residual)?), (vec![1.0, -2.0], vec![4.0, -4.0]));
            Ok(())
        });
    }

    2: fn what_does_not_fit_is_refused(gpus) {
        let pool = rig::pool(gpus, 2);
        pool.run(|dev, _| {
            let (gamma, short) = (dev.upload(&[1.0f32; 4])?, dev.upload(&[1.0f32; 3])?);
            let (mut x, mut residual) = (dev.upload(&[5.0f32; 8])?, dev.upload(&[6.0f32; 8])?);
            let rms = || RowNorm::rms(&gamma, 0.0);
            let errors = [
                dev.all_reduce_norm(&mut x.slice_mut(1..), &mut residual.slice_mut(1..), rms()).err(),
                dev.all_reduce_norm(&mut x, &mut residual.slice_mut(4..), rms()).err(),
                dev.all_reduce_norm(&mut x, &mut residual, RowNorm::layer(&gamma, &short, 0.0)).err(),
                dev.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma.slice(..0), 0.0)).err(),
                dev.all_reduce_norm_into(&short, &mut residual, rms(), &mut x).err(),
            ];
            for error in errors {
                assert!(matches!(&error, Some(Error::InvalidArgument { .. })), "{error:?}");
            }
            assert_eq!((dev.download(&x)?, dev.download(&residual)?), (vec![5.0; 8], vec![6.0; 8]));
            dev.all_reduce_norm(&mut x, &mut residual, rms())?;
            assert_eq!(dev.download(&residual)?, [16.0; 8]);
            Ok(())
        })
        .unwrap();
    }

    // All of a row's length, the kind and `eps` must agree: nothing is touched, and the scope goes on.
    2: fn norms_that_differ_are_a_mismatch(gpus) {
        let pool = rig::pool(gpus, 2);
        pool.run(|dev, _| {
            let gamma = dev.upload(&vec![1.0f32; 1024])?;
            let (mut x, mut residual) = (dev.upload(&vec![5.0f32; 2048])?, dev.upload(&vec![6.0f32; 2048])?);
            let half = gamma.slice(..512);
            let first = RowNorm::rms(&gamma, 1e-5);
            for other in [RowNorm::rms(&half, 1e-5), RowNorm::layer(&gamma, &gamma, 1e-5), RowNorm::rms(&gamma, 1e-6)] {
                let norm = if dev.rank() == 0 { first } else { other };
                let found = rig::mismatch(dev.all_reduce_norm(&mut x, &mut residual, norm).map(|_| ()));
                assert!(found.what == "norm" && found.text.contains("RMS norm of rows of 1024, eps 1e-5"), "{found:?}");
                assert_eq!((dev.download(&x)?, dev.download(&residual)?), (vec![5.0; 2048], vec![6.0; 2048]));
            }
            let found = rig::mismatch(match dev.rank() {
                0 => dev.all_reduce_norm(&mut x, &mut residual, first).map(|_| ()),
                _ => dev.all_reduce(&mut x, ReduceOp::Sum),
            });
            assert_eq!(found.what, "operation");
            Ok(())
        })
        .unwrap();
        assert_works(&pool);
    }

    // The others' kernels wait for one that fails: they are told, and the pool goes on with the right sums.
    2: fn a_failure_in_the_middle_is_told(gpus) {
        let n = gpus.up_to(4);
        let shapes: &[_] = if gpus.is_cuda() { &[(300, 4096), (3, 16384)] } else { &[(3, 64)] };
        shapes.iter().for_each(|shape| fails_in_the_middle(&rig::pool(gpus, n), *shape));
    }
}

fn fails_in_the_middle(pool: &GpuPool, (rows, cols): (usize, usize)) {
    let n = pool.device_count();
    let norm_works = |dev: &Device| {
        let (mut x, mut residual) = (dev.upload(&vec![1.0f32; rows * cols])?, dev.zeros::<f32>(rows * cols)?);
        let gamma = dev.upload(&vec![3.0f32; cols])?;
        dev.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&gamma, 0.0))?;
        let right = dev.download(&x)?.iter().all(|y| *y == 3.0);
        assert!(right && dev.download(&residual)?.iter().all(|sum| *sum == n as f32));
        Ok::<_, Error>(())
    };
    for round in 0..3 {
        let error = failure(pool.run(|dev, _| {
            norm_works(dev)?;
            if dev.rank() == round % n {
                return Err(Error::custom("in the middle"));
            }
            norm_works(dev)
        }));
        assert!(error.to_string().contains("in the middle"), "{error}");
        pool.run(|dev, _| norm_works(dev)).unwrap();
    }
}

/// Against sums in `f32` and a norm in `f64`, for any shape.
#[test]
fn as_a_plain_model() {
    let shapes = (2usize..5, 0usize..6, 1usize..40, any::<bool>(), any::<u64>());
    let config = ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new(config)
        .run(&shapes, |(n, rows, cols, layer, seed)| {
            let numbers = |rank: usize| -> Vec<f32> {
                (0..rows * cols).map(|i| ((seed.rotate_left(i as u32 % 64) ^ rank as u64) % 41) as f32 - 20.0).collect()
            };
            let sums: Vec<f64> = (0..rows * cols)
                .map(|i| (0..n).map(|rank| f64::from(numbers(rank)[i])).sum::<f64>() + i as f64 / 8.0)
                .collect();
            let found = rig::pool(Gpus::software(), n)
                .run(|dev, _| {
                    let mut x = dev.upload(&numbers(dev.rank()))?;
                    let mut residual = dev.upload(&(0..rows * cols).map(|i| i as f32 / 8.0).collect::<Vec<_>>())?;
                    let (gamma, beta) = (dev.upload(&vec![2.0f32; cols])?, dev.upload(&vec![0.5f32; cols])?);
                    let norm = match layer {
                        true => RowNorm::layer(&gamma, &beta, 0.5),
                        false => RowNorm::rms(&gamma, 0.5),
                    };
                    dev.all_reduce_norm(&mut x, &mut residual, norm)?;
                    Ok((dev.download(&x)?, dev.download(&residual)?))
                })
                .unwrap();
            for (y, residual) in found {
                prop_assert!(residual.iter().zip(&sums).all(|(got, want)| f64::from(*got) == *want));
                for (y, sums) in y.chunks(cols).zip(sums.chunks(cols)) {
                    let mean = if layer { sums.iter().sum::<f64>() / cols as f64 } else { 0.0 };
                    let squares: f64 = sums.iter().map(|x| (x - mean).powi(2)).sum();
                    let rstd = 1.0 / (squares / cols as f64 + 0.5).sqrt();
                    for (y, x) in y.iter().zip(sums) {
                        let want = (x - mean) * rstd * 2.0 + if layer { 0.5 } else { 0.0 };
                        prop_assert!((f64::from(*y) - want).abs() < 1e-4 * (1.0 + want.abs()), "{y} instead of {want}");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}
