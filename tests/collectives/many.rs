//! `all_reduce_many`: PyTorch's coalesced calls and NCCL's groups (nccl-tests' `-m`), in one call. What must come out
//! is what `all_reduce` of each gives, bit for bit.

use crate::{
    numbers::{Num, OPS, Rng, each_type, own, value},
    on_both,
    rig::{self, WAYS, assert_nothing_kept, assert_works, mismatch, ways},
    support::{self, Gpus, failure},
};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, Error, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};

/// A list of any lengths: none, some that are packed, some that are not.
fn lengths(rng: &mut Rng) -> Vec<usize> {
    let count = rng.pick(&[0, 1, 3, 4, 17, 40]);
    let mut all: Vec<usize> = (0..count).map(|_| rng.pick(&[0, 1, 2, 3, 4, 16, 17, 255, 1000, 4097])).collect();
    if count == 17 {
        all[rng.below(17)] = 300_001;
    }
    all
}

fn filled<T: Num>(dev: &Device, op: ReduceOp, lengths: &[usize]) -> Result<Vec<DeviceBuffer<T>>, Error> {
    let one = |(k, len): (usize, &usize)| {
        let numbers = (0..*len).map(|i| T::of(value::<T>(Some(op), dev.rank(), i, k as u64)));
        dev.upload(&numbers.collect::<Vec<T>>())
    };
    lengths.iter().enumerate().map(one).collect()
}

fn bytes<T: Num>(dev: &Device, x: &DeviceBuffer<T>) -> Result<Vec<u8>, Error> {
    Ok(bytemuck::cast_slice(&dev.download(x)?).to_vec())
}

/// One call, against one for each.
fn check<T: Num>(dev: &Device, op: ReduceOp, lengths: &[usize]) -> Result<(), Error> {
    let op = own(op, dev.rank());
    let (mut many, mut each) = (filled::<T>(dev, op, lengths)?, filled::<T>(dev, op, lengths)?);
    dev.all_reduce_many(&mut many, op)?;
    each.iter_mut().try_for_each(|x| dev.all_reduce(x, op))?;
    for (k, (x, y)) in many.iter().zip(&each).enumerate() {
        let (of, len) = (std::any::type_name::<T>(), x.len());
        assert!(bytes(dev, x)? == bytes(dev, y)?, "{of}, {op}, buffer {k} of {}: {len} elements", lengths.len());
    }
    Ok(())
}

on_both! {
    2: fn every_type_and_operation_in_every_way(gpus) {
        let mut rng = Rng(131);
        for (way, pool) in ways(gpus, gpus.up_to(3)) {
            each_type!(T => {
                let (op, lengths) = (rng.pick(&OPS), lengths(&mut rng));
                pool.run(|dev, _| check::<T>(dev, op, &lengths)).unwrap_or_else(|error| panic!("{way:?}: {error}"));
            });
            assert_nothing_kept(&pool);
        }
    }

    // Sums that depend on their order: around a ring, on the place in the buffer; nothing is packed then.
    2: fn the_bits_of_a_call_for_each(gpus) {
        let n = gpus.up_to(4);
        let lengths: Vec<usize> = (0..30).map(|k| 1 + 97 * k).collect();
        for way in WAYS {
            way.pool(gpus, n)
                .run(|dev, _| {
                    let mut rng = Rng(132 + dev.rank() as u64);
                    let mut one = |len: &usize| {
                        dev.upload(&(0..*len).map(|_| rng.next() as f32 * 1e-19 - 0.9).collect::<Vec<_>>())
                    };
                    let mut many = lengths.iter().map(&mut one).collect::<Result<Vec<_>, Error>>()?;
                    let mut each =
                        many.iter().map(|x| dev.upload(&dev.download(x)?)).collect::<Result<Vec<_>, Error>>()?;
                    dev.all_reduce_many(&mut many, ReduceOp::Avg)?;
                    each.iter_mut().try_for_each(|x| dev.all_reduce(x, ReduceOp::Avg))?;
                    for (x, y) in many.iter().zip(&each) {
                        assert!(bytes(dev, x)? == bytes(dev, y)?, "{way:?}, {} elements", x.len());
                    }
                    Ok(())
                })
                .unwrap();
        }
    }

    // Views of one buffer, at odd places, with what is beside them; in a group, on another stream, and none at all.
    2: fn parts_of_buffers_in_groups_and_on_streams(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let ranks: Vec<usize> = (0..n).rev().collect();
            let side = dev.stream()?;
            let mut y = dev.upload(&(0..100i64).collect::<Vec<_>>())?;
            let (head, tail) = y.view_mut().split_at_mut(51);
            let on = dev.on(&side);
            let group = on.group(&ranks)?;
            let (a, b) = head.slice_mut(1..).split_at_mut(20);
            let mut parts = [a, b, tail.slice_mut(3..4)];
            group.all_reduce_many(&mut parts, ReduceOp::Sum)?;
            group.all_reduce_many(Vec::<DeviceBuffer<u8>>::new(), ReduceOp::Sum)?;
            dev.download(&y)
        });
        let right = (0..100).map(|i| if (1..51).contains(&i) || i == 54 { n as i64 * i } else { i });
        assert_eq!(found.unwrap(), vec![right.collect::<Vec<_>>(); n]);
    }

    // Buffers and views, from wherever they come; items are asked for once.
    2: fn iterators_give_the_list(gpus) {
        struct Layer {
            weights: DeviceBuffer<f32>,
            bias: Option<DeviceBuffer<f32>>,
        }
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let layer = |k: usize| {
                let bias = k.is_multiple_of(2).then(|| dev.upload(&[1.0f32; 3])).transpose()?;
                Ok(Layer { weights: dev.upload(&vec![1.0f32; 100 * k])?, bias })
            };
            let mut model = (0..6).map(layer).collect::<Result<Vec<_>, Error>>()?;
            let mut asked = 0;
            let weights = model.iter_mut().map(|layer| &mut layer.weights).inspect(|_| asked += 1);
            dev.all_reduce_many(weights, ReduceOp::Sum)?;
            assert_eq!(asked, 6);
            let group = dev.group(&(0..n).rev().collect::<Vec<_>>())?;
            group.all_reduce_many(model.iter_mut().filter_map(|layer| layer.bias.as_mut()), ReduceOp::Sum)?;
            let heads = model.iter_mut().filter_map(|layer| Some(layer.bias.as_mut()?.slice_mut(..1)));
            group.all_reduce_many(heads, ReduceOp::Sum)?;
            dev.all_reduce_many(None::<&mut DeviceBuffer<f32>>, ReduceOp::Sum)?;
            let weights = model.iter().map(|layer| dev.download(&layer.weights)).collect::<Result<Vec<_>, Error>>()?;
            let bias = model.iter().filter_map(|layer| layer.bias.as_ref()).map(|bias| dev.download(bias));
            Ok((weights.concat(), bias.collect::<Result<Vec<_>, Error>>()?))
        });
        let sum = n as f32;
        for (weights, bias) in found.unwrap() {
            assert_eq!(weights, vec![sum; 1500]);
            assert_eq!(bias, vec![vec![sum * sum, sum, sum]; 3]);
        }
    }

    // What others that have another list, another operation or none of it are told; and that they are told both lines.
    2: fn lists_that_differ_name_both_calls(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let lists: [(&[usize], &[usize], &str); 4] =
            [(&[5, 7], &[7, 5], "counts"), (&[5; 20], &[5; 21], "count"), (&[], &[1], "count"), (&[0], &[], "counts")];
        for (first, second, what) in lists {
            let found = mismatch(pool.run(|dev, _| {
                let mut xs = filled::<f32>(dev, ReduceOp::Sum, if dev.rank() == 1 { second } else { first })?;
                let told = match dev.rank() {
                    1 => dev.all_reduce_many(&mut xs, ReduceOp::Sum),
                    _ => dev.all_reduce_many(&mut xs, ReduceOp::Sum),
                };
                assert!(told.is_err());
                told
            }));
            assert_eq!(found.what, what, "{}", found.text);
            assert!(found.a.1.contains("all_reduce_many") && found.b.1.contains("all_reduce_many"), "{}", found.text);
            assert!(
                found.a.2.file().ends_with("many.rs") && found.a.2.line() == found.b.2.line() + 1,
                "{}",
                found.text
            );
            assert_works(&pool);
        }
        let found = mismatch(pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(3)?;
            if dev.rank() == 0 {
                dev.all_reduce(&mut x, ReduceOp::Sum)
            } else {
                dev.all_reduce_many(&mut [x], ReduceOp::Sum)
            }
        }));
        assert_eq!(found.what, "operation");
        assert_works(&pool);
    }

    // In a graph, the copies to and fro are the graph's.
    2: fn in_a_graph(gpus) {
        let n = gpus.up_to(3);
        for (way, pool) in ways(gpus, n) {
            pool.run(|dev, _| {
                let mut xs = (1..10).map(|len| dev.upload(&vec![1.0f32; 7 * len])).collect::<Result<Vec<_>, Error>>()?;
                let (graph, ()) = dev.capture(|dev| dev.all_reduce_many(&mut xs, ReduceOp::Sum))?;
                for _ in 0..3 {
                    // Whatever else has the memory that is free meanwhile.
                    drop(dev.upload(&vec![9u8; 4 * 7 * 45])?);
                    dev.launch_graph(&graph)?;
                }
                for x in &xs {
                    assert_eq!(dev.download(x)?, vec![n.pow(3) as f32; x.len()], "{way:?}");
                }
                Ok(())
            })
            .unwrap();
            assert_nothing_kept(&pool);
        }
    }

    // No room for the scratch: whoever is short of it says so, and nothing has been touched.
    2: fn no_room_to_pack(gpus) {
        let pool = rig::builder(gpus, 2).memory_limit(32 << 20).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let mut xs = (0..64).map(|_| dev.zeros::<f32>(16 << 10)).collect::<Result<Vec<_>, Error>>()?;
            let mut fills = Vec::new();
            if dev.rank() == 1 {
                for bytes in [8 << 20, 4 << 20, 2 << 20, 1 << 20, 1 << 19] {
                    while let Ok(fill) = dev.zeros::<u8>(bytes) {
                        fills.push(fill);
                    }
                }
            }
            dev.all_reduce_many(&mut xs, ReduceOp::Sum)
        }));
        assert!(matches!(error, Error::OutOfMemory { device: 1, op: "all_reduce_many", .. }), "{error}");
        assert_works(&pool);
    }
}

/// A hundred small ones: seven launches there, one for the sums, seven back. One more would fail.
#[test]
fn small_ones_go_together() {
    support::guarded(|| {
        for (nth, fired) in [(15, 1), (16, 0)] {
            let plan =
                FaultPlan::new().on(FaultRule::new(Injected::Error).device(1).op(FaultOp::Launch).nth(nth)).paused();
            let builder = rig::builder(Gpus::software(), 2).algorithm(Algorithm::Direct);
            let pool = builder.faults(plan.clone()).build().unwrap();
            plan.resume();
            let done = pool.run(|dev, _| {
                let mut xs = (0..100).map(|_| dev.upload(&[1.0f32; 50])).collect::<Result<Vec<_>, Error>>()?;
                dev.all_reduce_many(&mut xs, ReduceOp::Sum)
            });
            plan.pause();
            assert_eq!((plan.fired().len(), done.is_err()), (fired, fired == 1), "{done:?}");
            assert_works(&pool);
            assert_nothing_kept(&pool);
        }
    });
}
