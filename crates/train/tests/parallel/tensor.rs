//! Tensor parallel: layers whose weights lie on several devices.
//!
//! Numbers that are small integers make every sum exact: then several devices must have the bits of one.

#![cfg(feature = "blas")]

#[path = "../../../../examples/transformer/block.rs"]
mod block;
#[path = "tensor/blocks.rs"]
mod blocks;
#[path = "tensor/software.rs"]
mod software;

use crate::support::failure;
use block::{Block, SHAPES, TOKENS};
use gpu_pool::{Device, Element, Error, GpuPool, Group, Matrix, ReduceOp, Result, kernel::Float};
use gpu_pool_train::{
    Activation, ColumnLinear, Indices, RowLinear, RowNorm, SequenceNorm, VocabularyEmbedding, gather_rows, part_of,
    prelude::*, scatter_rows, vocabulary_cross_entropy,
};
use half::{bf16, f16};

pub const INPUT: [u32; TOKENS] = [3, 0, 10, 7, 3, 5];
pub const LABELS: [u32; TOKENS] = [0, 10, 7, 3, 5, 1];

/// Numbers between -0.5 and 0.5.
pub fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

/// Integers from -4 to 4.
fn integers(len: usize, seed: u64) -> Vec<f32> {
    numbers(len, seed).iter().map(|x| (x * 9.0).trunc()).collect()
}

fn everyone(dev: &Device) -> Result<Group<'_>> {
    dev.group(&(0..dev.count()).collect::<Vec<_>>())
}

/// Columns, one member's after the other's, as rows again.
fn side_by_side(parts: &[Vec<f32>], rows: usize) -> Vec<f32> {
    (0..rows).flat_map(|r| parts.iter().flat_map(move |p| p[p.len() / rows * r..][..p.len() / rows].to_vec())).collect()
}

fn near(found: &[f64], want: &[f64], bound: f64, what: &str) {
    assert_eq!(found.len(), want.len(), "{what}");
    for (i, (found, want)) in found.iter().zip(want).enumerate() {
        assert!((found - want).abs() <= bound * want.abs().max(1.0), "{what}, {i}: {found}, not {want}");
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// `forward_norm` has the bits of the steps that it takes: the bias to the residual, the sum, the norm.
#[test]
fn a_norm_behind_a_row_parallel_layer() {
    let (rows, inputs, outputs) = (3, 7, 8);
    let pool = GpuPool::builder().host(3).build().unwrap();
    let found = pool.run(|dev, _| {
        let group = everyone(dev)?;
        let down = RowLinear::new(&group, &numbers(inputs * outputs, 1), &numbers(outputs, 2))?;
        let own = part_of(&group, group.rank(), inputs, 1)?;
        let x = dev.upload(&numbers(rows * own.len(), 3 + group.rank() as u64))?;
        let weight = dev.upload(&numbers(outputs, 9))?;
        let (mut residual, mut wanted) = (dev.upload(&numbers(rows * outputs, 10))?, dev.zeros(rows * outputs)?);
        dev.copy(&residual, &mut wanted)?;
        let norm = RowNorm::rms(&weight, 1e-5);
        let (y, saved) = down.forward_norm(&group, &x, rows, &mut residual, norm)?;
        dev.activation_in_place(Activation::Identity.biased(&down.part.bias), &mut wanted)?;
        let mut sum = dev.zeros(rows * outputs)?;
        dev.gemm(
            1.0,
            Matrix::new(&x, rows, own.len())?,
            Matrix::new(&down.part.weight, own.len(), outputs)?,
            0.0,
            &mut sum,
        )?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        dev.add_in_place(&mut wanted, &sum)?;
        let (normed, rstd) = dev.rms_norm(&wanted, &weight, 1e-5)?;
        assert_eq!(dev.download(&residual)?, dev.download(&wanted)?);
        assert_eq!(dev.download(&y)?, dev.download(&normed)?);
        assert_eq!(dev.download(&saved.rstd)?, dev.download(&rstd)?);
        let error = down.forward_norm(&group, &x, rows, &mut residual.slice_mut(1..), norm).err();
        assert!(matches!(error, Some(Error::InvalidArgument { .. })), "{error:?}");
        dev.download(&y)
    });
    let found = found.unwrap();
    assert!(found.iter().all(|y| *y == found[0]));
}

/// Column, ReLU, row; twice with accumulated gradients. `sequence`: each member has its rows of `x` and `dy`. Returns
/// y, dx, and the gradients of the weights.
fn perceptron(pool: &GpuPool, [rows, inputs, hidden, outputs]: [usize; 4], sequence: bool) -> Vec<Vec<f32>> {
    let (x, dy) = (integers(rows * inputs, 1), integers(rows * outputs, 6));
    let (w1, b1) = (integers(inputs * hidden, 2), integers(hidden, 3));
    let (w2, b2) = (integers(hidden * outputs, 4), integers(outputs, 5));
    let parts = pool.run(|dev, _| {
        let group = everyone(dev)?;
        let own = part_of(&group, dev.rank(), rows, 1)?;
        let (mut first, mut second) = (ColumnLinear::new(&group, &w1, &b1)?, RowLinear::new(&group, &w2, &b2)?);
        let mut last = None;
        for accumulate in [false, true] {
            let (y, dx) = if sequence {
                let x = dev.upload(&x[own.start * inputs..own.end * inputs])?;
                let dy = dev.upload(&dy[own.start * outputs..own.end * outputs])?;
                let x = gather_rows(&group, &x, rows, inputs)?;
                let pre = first.forward(&group, &x, rows)?;
                let h = dev.activation(Activation::Relu, &pre)?;
                let y = second.forward_to_rows(&group, &h, rows)?;
                let mut dh = second.backward_from_rows(&group, &h, &dy, rows, accumulate)?;
                dev.activation_backward_in_place(Activation::Relu, &mut dh, &pre)?;
                let dx = first.backward_to_rows(&group, &x, &dh, rows, accumulate)?;
                (gather_rows(&group, &y, rows, outputs)?, gather_rows(&group, &dx, rows, inputs)?)
            } else {
                let (x, dy) = (dev.upload(&x)?, dev.upload(&dy)?);
                let pre = first.forward(&group, &x, rows)?;
                let h = dev.activation(Activation::Relu, &pre)?;
                let y = second.forward(&group, &h, rows)?;
                let mut dh = second.backward(&group, &h, &dy, rows, accumulate)?;
                dev.activation_backward_in_place(Activation::Relu, &mut dh, &pre)?;
                (y, first.backward(&group, &x, &dh, rows, accumulate)?)
            };
            last = Some((y, dx));
        }
        let (y, dx) = last.unwrap();
        let (a, b) = (first.part, second.part);
        let all = [&y, &dx, &a.weight_gradient, &a.bias_gradient, &b.weight_gradient, &b.bias_gradient];
        all.into_iter().map(|x| dev.download(x)).collect::<Result<Vec<_>>>()
    });
    let parts = parts.unwrap();
    let of = |i: usize| parts.iter().map(|part| part[i].clone()).collect::<Vec<_>>();
    for i in [0, 1, 5] {
        assert!(parts.iter().all(|part| part[i] == parts[0][i]), "all members have the same bits");
    }
    let (dw1, db1, dw2) = (side_by_side(&of(2), inputs), of(3).concat(), of(4).concat());
    vec![parts[0][0].clone(), parts[0][1].clone(), dw1, db1, dw2, parts[0][5].clone()]
}

/// Losses and gradients of some steps of training, and the loss after them.
fn trained(pool: &GpuPool, ranks: &[usize], steps: usize) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let parts = pool.run(|dev, _| {
        if !ranks.contains(&dev.rank()) {
            return Ok(None);
        }
        let group = dev.group(ranks)?;
        let mut block = Block::new(&group, &block::weights())?;
        let mut losses = Vec::new();
        for step in 0..steps {
            let loss = block.step(&group, &INPUT, &LABELS)?;
            losses.push(dev.download(&loss)?);
            if step + 1 < steps {
                block.descend(&dev.group(&[dev.index()])?, 0.2)?;
            }
        }
        let gradients = block.pairs().into_iter().map(|(_, gradient)| dev.download(gradient));
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        Ok(Some((group.rank(), losses, gradients)))
    });
    let mut parts: Vec<_> = parts.unwrap().into_iter().flatten().collect();
    parts.sort_by_key(|part| part.0);
    assert!(parts.iter().all(|part| part.1 == parts[0].1), "all members have the same bits of the loss");
    let gradients: Vec<_> = parts.iter().map(|part| part.2.clone()).collect();
    (parts[0].1.clone(), whole(&gradients))
}

crate::on_both! {
    // Sizes that nothing divides, and parts without a column.
    4: fn split_layers_have_the_bits_of_whole_ones(gpus) {
        for sizes in [[3, 5, 7, 4], [5, 3, 2, 1], [2, 1, 3, 6], [0, 3, 5, 2]] {
            let one = perceptron(&gpus.pool(1), sizes, false);
            for n in [2, 3, 4] {
                for sequence in [false, true] {
                    assert_eq!(perceptron(&gpus.pool(n), sizes, sequence), one, "{sizes:?}, {n} devices");
                }
            }
        }
    }

    // Also of half types: the sums are exact in them.
    3: fn layers_of_all_types(gpus) {
        fn of<T: Float + Element + PartialEq + std::fmt::Debug>(pool: &GpuPool, to: fn(f32) -> T) {
            let small = |len, seed| numbers(len, seed).iter().map(|x| to((x * 3.0).trunc())).collect::<Vec<T>>();
            let (x, dy, w, b) = (small(4 * 5, 1), small(4 * 7, 2), small(5 * 7, 3), small(7, 4));
            let run = |ranks: &[usize]| {
                let found = pool.run(|dev, _| {
                    if !ranks.contains(&dev.rank()) {
                        return Ok(None);
                    }
                    let group = dev.group(ranks)?;
                    let (mut first, second) = (ColumnLinear::new(&group, &w, &b)?, RowLinear::new(&group, &w, &b)?);
                    let (x, dy) = (dev.upload(&x)?, dev.upload(&dy)?);
                    let own = part_of(&group, group.rank(), 7, 1)?;
                    let mut part = dev.zeros::<T>(4 * own.len())?;
                    dev.copy_2d(&dy.slice(own.start..), 7, &mut part, own.len(), 4, own.len())?;
                    let dx = first.backward(&group, &x, &part, 4, false)?;
                    let own = part_of(&group, group.rank(), 5, 1)?;
                    let mut part = dev.zeros::<T>(4 * own.len())?;
                    dev.copy_2d(&x.slice(own.start..), 5, &mut part, own.len(), 4, own.len())?;
                    let y = second.forward(&group, &part, 4)?;
                    Ok(Some((dev.download(&dx)?, dev.download(&y)?)))
                });
                found.unwrap().into_iter().flatten().next().unwrap()
            };
            assert_eq!(run(&[0, 1, 2]), run(&[1]));
        }
        let pool = gpus.pool(3);
        of::<f64>(&pool, f64::from);
        of::<f16>(&pool, f16::from_f32);
        of::<bf16>(&pool, bf16::from_f32);
    }

    // What a capture records is what the calls do.
    3: fn a_step_in_a_graph(gpus) {
        let (w, b) = (integers(5 * 7, 1), integers(7, 2));
        let found = gpus.pool(3).run(|dev, _| {
            let group = everyone(dev)?;
            let mut layer = ColumnLinear::new(&group, &w, &b)?;
            let (x, dy) = (dev.upload(&integers(4 * 5, 3))?, dev.upload(&integers(4 * layer.part.shape().1, 4))?);
            let dx = layer.backward(&group, &x, &dy, 4, false)?;
            let want = [dev.download(&dx)?, dev.download(&layer.part.weight_gradient)?];
            dev.fill(&mut layer.part.weight_gradient, f32::NAN)?;
            let (graph, dx) = dev.capture(|dev| layer.backward(&everyone(dev)?, &x, &dy, 4, false))?;
            (0..2).try_for_each(|_| dev.launch_graph(&graph))?;
            assert_eq!([dev.download(&dx)?, dev.download(&layer.part.weight_gradient)?], want);
            Ok(())
        });
        found.unwrap();
    }

    4: fn a_transformer_block_learns_as_on_one_device(gpus) {
        let one = trained(&gpus.pool(1), &[0], 4);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(mean(&one.0[3]) < mean(&one.0[0]) - 0.1, "{:?}", one.0);
        // The last: a group of some of the devices, in another order.
        for (n, ranks) in [(2, &[0usize, 1][..]), (3, &[0, 1, 2]), (4, &[0, 1, 2, 3]), (4, &[3, 1])] {
            let found = trained(&gpus.pool(n), ranks, 4);
            near(&found.0.concat(), &one.0.concat(), 1e-12, "losses");
            for ((found, want), (name, ..)) in found.1.iter().zip(&one.1).zip(SHAPES) {
                near(found, want, 1e-12, name);
            }
        }
    }

    // Against `cross_entropy` of one device; with words that are masked out, and more devices than words.
    4: fn the_loss_over_a_split_vocabulary(gpus) {
        for (rows, words) in [(5, 7), (3, 300), (2, 2)] {
            let mut logits = numbers(rows * words, 8).iter().map(|x| x * 40.0).collect::<Vec<_>>();
            if words > 2 {
                (0..rows).for_each(|r| logits[r * words + 1] = f32::NEG_INFINITY);
            }
            let labels: Vec<u32> = (0..rows).map(|r| [0, 2, words as u32 - 1][r % 3].min(words as u32 - 1)).collect();
            let one = gpus.pool(1).run(|dev, _| {
                let (loss, dx) = dev.cross_entropy(&dev.upload(&logits)?, &dev.upload(&labels)?, 0.25)?;
                Ok((dev.download(&loss)?, dev.download(&dx)?))
            });
            let one = one.unwrap().remove(0);
            for n in 1..=4 {
                let parts = gpus.pool(n).run(|dev, _| {
                    let group = everyone(dev)?;
                    let own = part_of(&group, dev.rank(), words, 1)?;
                    let part: Vec<f32> = logits.chunks(words).flat_map(|row| &row[own.clone()]).copied().collect();
                    let (mut part, labels) = (dev.upload(&part)?, Indices::new(&group, &labels, words)?);
                    let loss = vocabulary_cross_entropy(&group, &mut part, &labels, 0.25)?;
                    Ok((dev.download(&loss)?, dev.download(&part)?))
                });
                let parts = parts.unwrap();
                assert!(parts.iter().all(|part| part.0 == parts[0].0), "all members have the same bits");
                let gradient = side_by_side(&parts.iter().map(|part| part.1.clone()).collect::<Vec<_>>(), rows);
                near(&wide(&parts[0].0), &wide(&one.0), 1e-6, "loss");
                near(&wide(&gradient), &wide(&one.1), 1e-6, "gradient");
            }
        }
    }

    3: fn a_loss_of_no_rows(gpus) {
        let found = gpus.pool(3).run(|dev, _| {
            let group = everyone(dev)?;
            let (none, mut logits) = (Indices::new(&group, &[], 9)?, dev.zeros::<bf16>(0)?);
            let loss = vocabulary_cross_entropy(&group, &mut logits, &none, 1.0)?;
            Ok((dev.download(&loss)?, logits.len()))
        });
        assert_eq!(found.unwrap(), [(Vec::<f32>::new(), 0), (vec![], 0), (vec![], 0)]);
    }

    // Equal terms: a sum from left to right is off by per cents.
    2: fn the_loss_over_a_long_vocabulary(gpus) {
        let words = 1 << 19;
        let low = 0.7408f32.ln();
        let want = (1.0 + (words - 1) as f64 * f64::from(low).exp()).ln();
        let found = gpus.pool(2).run(|dev, _| {
            let group = everyone(dev)?;
            let own = part_of(&group, dev.rank(), words, 1)?;
            let mut logits = vec![low; own.len()];
            if dev.rank() == 0 {
                logits[0] = 0.0;
            }
            let (mut logits, labels) = (dev.upload(&logits)?, Indices::new(&group, &[0], words)?);
            dev.download(&vocabulary_cross_entropy(&group, &mut logits, &labels, 1.0)?)
        });
        for loss in found.unwrap() {
            near(&wide(&loss), &[want], 1e-6, "loss");
        }
    }

    2: fn a_row_of_no_number_has_no_loss(gpus) {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let losses = gpus.pool(2).run(|dev, _| {
                let group = everyone(dev)?;
                let all_bad = bad == f64::NEG_INFINITY || dev.rank() == 1;
                let second = if all_bad { bad } else { 0.0 };
                let mut logits = dev.upload(&[1.0, 2.0, second, second])?;
                let loss = vocabulary_cross_entropy(&group, &mut logits, &Indices::new(&group, &[3, 0], 4)?, 1.0)?;
                Ok((dev.download(&loss)?, dev.download(&logits)?))
            });
            for (loss, gradient) in losses.unwrap() {
                assert!(loss[0].is_finite() && loss[1].is_nan(), "{loss:?}");
                assert!(gradient[..2].iter().all(|x| x.is_finite()) && gradient[2].is_nan(), "{gradient:?}");
            }
        }
    }

    4: fn an_embedding_has_the_bits_of_a_whole_one(gpus) {
        let (words, cols, input) = (5, 3, [4, 0, 0, 2, 4, 4]);
        let (table, dy) = (numbers(words * cols, 1), integers(input.len() * cols, 2));
        for n in [1, 2, 3, 4] {
            let found = gpus.pool(n).run(|dev, _| {
                let group = everyone(dev)?;
                let mut embedding = VocabularyEmbedding::new(&group, &table, cols)?;
                let input = Indices::new(&group, &input, words)?;
                let y = embedding.forward(&group, &input)?;
                let dy = dev.upload(&dy)?;
                embedding.backward(&group, &input, &dy, false)?;
                embedding.backward(&group, &input, &dy, true)?;
                Ok((dev.download(&y)?, dev.download(&embedding.gradient)?))
            });
            let mut want = vec![0.0; words * cols];
            for (i, &word) in input.iter().enumerate() {
                (0..cols).for_each(|c| want[word as usize * cols + c] += 2.0 * dy[i * cols + c]);
            }
            let found = found.unwrap();
            let row = |&word: &u32| table[word as usize * cols..][..cols].to_vec();
            let rows: Vec<f32> = input.iter().flat_map(row).collect();
            assert!(found.iter().all(|(y, _)| *y == rows));
            assert!(found.iter().all(|(_, g)| g[g.len() - cols..].iter().all(|&x| x == 0.0)), "the row of no word");
            assert_eq!(found.iter().flat_map(|(_, g)| g[..g.len() - cols].to_vec()).collect::<Vec<_>>(), want);
        }
    }

    // In half types sums of ones stop at 256 or 2048: the first gradients are that large, and then come ones. What the
    // program writes to a gradient counts.
    1: fn gradients_of_half_types_add_up(gpus) {
        fn ones<T: Float<Acc = f32> + Element>(gpus: crate::support::Gpus, of: fn(f64) -> T, stop: f64) {
            const CALLS: usize = 21;
            let found = gpus.pool(gpus.up_to(2)).run(|dev, _| {
                let (group, n, one) = (everyone(dev)?, dev.count(), of(1.0));
                let mut column = ColumnLinear::new(&group, &vec![one; 6 * n], &vec![one; 3 * n])?;
                let mut row = RowLinear::new(&group, &vec![one; 6 * n], &[one; 2])?;
                let mut embedding = VocabularyEmbedding::new(&group, &vec![one; 3 * n], 3)?;
                let mut norm = SequenceNorm::layer(dev, &[one; 4], &[one; 4], 0.0)?;
                let full = |value: f64, len: usize| dev.upload(&vec![of(value); len]);
                let (two, three) = (full(1.0, 2)?, full(1.0, 3)?);
                let words = Indices::new(&group, &[dev.rank() as u32], n)?;
                // A row whose norm is 1, -1, 1, -1, on one member.
                let x = dev.upload(&[1.0, -1.0, 1.0, -1.0].map(of))?;
                let (_, saved) = norm.forward(dev, &x)?;
                let nothing = dev.zeros::<T>(4)?;
                let mut seen = Vec::new();
                for call in 0..CALLS {
                    if call == CALLS - 2 {
                        // Back to 0 in one of them.
                        dev.fill(&mut column.part.bias_gradient, of(0.0))?;
                    }
                    let add = call > 0;
                    let dy = |len| full(if add { 1.0 } else { stop }, len);
                    column.backward(&group, &two, &dy(3)?, 1, add)?;
                    row.backward(&group, &three, &dy(2)?, 1, add)?;
                    embedding.backward(&group, &words, &dy(3)?, add)?;
                    let dx = if dev.rank() == 0 { &dy(4)? } else { &nothing };
                    norm.backward(&group, &x, &saved, dx, add)?;
                }
                let beta = norm.beta_gradient.as_ref().expect("a layer norm");
                for buffer in [
                    &column.part.weight_gradient,
                    &column.part.bias_gradient,
                    &row.part.weight_gradient,
                    &row.part.bias_gradient,
                    &embedding.gradient,
                    &norm.gamma_gradient,
                    beta,
                ] {
                    seen.push(dev.download(buffer)?.into_iter().map(|x| f64::from(T::wide(x))).collect::<Vec<_>>());
                }
                Ok(seen)
            });
            let all = stop + (CALLS - 1) as f64;
            for found in found.unwrap() {
                let table = [vec![all; 3], vec![0.0; 3]].concat();
                let gamma = vec![all, -all, all, -all];
                let wanted =
                    [vec![all; 6], vec![2.0; 3], vec![all; 6], vec![all; 2], table, gamma, vec![all; 4]];
                assert_eq!(found, wanted);
            }
        }
        ones(gpus, bf16::from_f64, 256.0);
        ones(gpus, f16::from_f64, 2048.0);
    }

    // The sum in f32 of a step says nothing of the next one, though its first piece may be the old sum, rounded.
    1: fn gradients_of_half_types_begin_anew(gpus) {
        let found = gpus.pool(1).run(|dev, _| {
            let (group, of) = (everyone(dev)?, bf16::from_f64);
            let mut column = ColumnLinear::new(&group, &[of(1.0)], &[of(1.0)])?;
            let mut embedding = VocabularyEmbedding::new(&group, &[of(1.0)], 1)?;
            let (one, small) = (dev.upload(&[of(1.0)])?, dev.upload(&[of(0.001_953_125)])?);
            let words = Indices::new(&group, &[0], 1)?;
            let mut seen = Vec::new();
            for _ in 0..5 {
                for (dy, add) in [(&one, false), (&small, true)] {
                    column.backward(&group, &one, dy, 1, add)?;
                    embedding.backward(&group, &words, dy, add)?;
                }
                let part = &column.part;
                for buffer in [&part.weight_gradient, &part.bias_gradient, &embedding.gradient] {
                    seen.push(dev.download(buffer)?[0]);
                }
            }
            Ok(seen)
        });
        assert_eq!(found.unwrap(), [[bf16::from_f64(1.0); 15]]);
    }

    1: fn gradients_of_another_length_are_refused(gpus) {
        gpus.run(1, |dev| {
            let (group, one) = (everyone(dev)?, bf16::from_f64(1.0));
            let mut norm = SequenceNorm::rms(dev, &[one; 8], 1e-5)?;
            let x = dev.upload(&[one; 8])?;
            let (_, saved) = norm.forward(dev, &x)?;
            norm.backward(&group, &x, &saved, &x, true)?;
            norm.gamma_gradient = dev.zeros(4096)?;
            let error = crate::support::failure(norm.backward(&group, &x, &saved, &x, true));
            assert!(matches!(error, gpu_pool::Error::InvalidArgument { .. }), "{error}");
            let error = crate::support::failure(SequenceNorm::layer(dev, &[one; 8], &[one; 4], 1e-5));
            assert!(matches!(error, gpu_pool::Error::InvalidArgument { .. }), "{error}");
            Ok(())
        });
    }

    // Also fewer rows than devices. Rows are normalized alone, so they have the bits of one device.
    4: fn norms_of_own_rows(gpus) {
        let cols = 6;
        for rows in [5, 2] {
            let (x, dy) = (numbers(rows * cols, 1), numbers(rows * cols, 2));
            let (gamma, beta) = (numbers(cols, 3), numbers(cols, 4));
            for layer in [true, false] {
                let run = |n: usize| {
                    let found = gpus.pool(n).run(|dev, _| {
                        let group = everyone(dev)?;
                        let own = part_of(&group, dev.rank(), rows, 1)?;
                        let mut norm = match layer {
                            true => SequenceNorm::layer(dev, &gamma, &beta, 1e-5)?,
                            false => SequenceNorm::rms(dev, &gamma, 1e-5)?,
                        };
                        let own = own.start * cols..own.end * cols;
                        let (x, dy) = (dev.upload(&x[own.clone()])?, dev.upload(&dy[own])?);
                        let (y, saved) = norm.forward(dev, &x)?;
                        norm.backward(&group, &x, &saved, &dy, false)?;
                        let dx = norm.backward(&group, &x, &saved, &dy, true)?;
                        let beta = norm.beta_gradient.as_ref().map(|beta| dev.download(beta)).transpose()?;
                        let weights = [dev.download(&norm.gamma_gradient)?, beta.unwrap_or_default()].concat();
                        Ok((dev.download(&y)?, dev.download(&dx)?, weights))
                    });
                    let found = found.unwrap();
                    assert!(found.iter().all(|f| f.2 == found[0].2), "all members have the same bits");
                    let y: Vec<f32> = found.iter().flat_map(|f| f.0.clone()).collect();
                    let dx: Vec<f32> = found.iter().flat_map(|f| f.1.clone()).collect();
                    (y, dx, found[0].2.clone())
                };
                let one = run(1);
                for n in [2, 3, 4] {
                    let found = run(n);
                    assert_eq!((&found.0, &found.1), (&one.0, &one.1));
                    near(&wide(&found.2), &wide(&one.2), 1e-6, "weights");
                }
            }
        }
    }

    3: fn bad_shapes_name_device_and_place(gpus) {
        let pool = gpus.pool(3);
        let refused = |f: &(dyn Fn(&Group<'_>) -> Result<()> + Sync)| {
            let error = failure(pool.run(|dev, _| f(&everyone(dev)?)));
            let Error::InvalidArgument { device: Some(_), site, .. } = &error else { panic!("{error}") };
            assert!(site.to_string().contains("tensor.rs"), "{error}");
            error.to_string()
        };
        let zeros = [0.0f32; 12];
        refused(&|group| ColumnLinear::new(group, &zeros[..7], &zeros[..3]).map(drop));
        refused(&|group| RowLinear::in_units(group, &zeros, &zeros[..3], 3).map(drop));
        refused(&|group| {
            let layer = ColumnLinear::new(group, &zeros, &zeros[..3])?;
            layer.forward(group, &group.device().zeros(9)?, 2).map(drop)
        });
        refused(&|group| {
            let layer = RowLinear::new(group, &zeros, &zeros[..3])?;
            layer.forward(group, &group.device().zeros(9)?, 2).map(drop)
        });
        refused(&|group| gather_rows(group, &group.device().zeros::<f32>(5)?, 6, 2).map(drop));
        refused(&|group| scatter_rows(group, &group.device().zeros::<f32>(5)?, 6, 2).map(drop));
        let why = refused(&|group| Indices::new(group, &[1, 2, 9], 9).map(drop));
        assert!(why.contains("index 2 is 9: less than 9 are possible"), "{why}");
        // More elements than can be counted, also where the own part has none.
        refused(&|group| gather_rows(group, &group.device().zeros::<f32>(5)?, usize::MAX, 2).map(drop));
        refused(&|group| gather_rows(group, &group.device().zeros::<f32>(0)?, 2, usize::MAX).map(drop));
        refused(&|group| scatter_rows(group, &group.device().zeros::<f32>(5)?, usize::MAX, 2).map(drop));
        refused(&|group| part_of(group, 0, usize::MAX, 2).map(drop));
        let huge = pool.run(|dev, _| VocabularyEmbedding::new(&everyone(dev)?, &zeros[..0], usize::MAX).map(drop));
        assert!(matches!(failure(huge), Error::OutOfMemory { .. }));
        refused(&|group| {
            // Members 1 and 2 have no inputs, whatever the rows are.
            let layer = RowLinear::new(group, &zeros[..3], &zeros[..3])?;
            layer.forward(group, &group.device().zeros(0)?, usize::MAX).map(drop)
        });
        refused(&|group| {
            let mut layer = ColumnLinear::new(group, &zeros[..3], &zeros[..1])?;
            let none = group.device().zeros(0)?;
            layer.backward(group, &none, &none, usize::MAX, false).map(drop)
        });
        refused(&|group| {
            let (labels, mut logits) = (Indices::new(group, &[1], 9)?, group.device().zeros::<f32>(4)?);
            vocabulary_cross_entropy(group, &mut logits, &labels, 1.0).map(drop)
        });
        // Indices of all members, used in a group of one.
        refused(&|group| {
            let (labels, mut logits) = (Indices::new(group, &[1], 9)?, group.device().zeros::<f32>(9)?);
            let alone = group.device().group(&[group.device().rank()])?;
            vocabulary_cross_entropy(&alone, &mut logits, &labels, 1.0).map(drop)
        });
    }
}

/// The members' parts of gradients, as whole ones.
fn whole(parts: &[Vec<Vec<f64>>]) -> Vec<Vec<f64>> {
    let one = |i: usize| -> Vec<f64> {
        let own = |member: usize| &parts[member][i];
        let all = 0..parts.len();
        match SHAPES[i] {
            // The last row is no word.
            ("table", _, cols) => all.flat_map(|m| own(m)[..own(m).len() - cols].to_vec()).collect(),
            ("out" | "down", ..) => all.flat_map(|m| own(m).clone()).collect(),
            ("query" | "key" | "value" | "up" | "head", rows, _) => {
                let row = |r: usize| {
                    all.clone().flat_map(move |m| own(m)[own(m).len() / rows * r..][..own(m).len() / rows].to_vec())
                };
                (0..rows).flat_map(row).collect()
            }
            ("query bias" | "key bias" | "value bias" | "up bias" | "head bias", ..) => {
                all.flat_map(|m| own(m).clone()).collect()
            }
            (name, ..) => {
                assert!(parts.iter().all(|part| part[i] == parts[0][i]), "{name} differs between members");
                own(0).clone()
            }
        }
    };
    (0..parts[0].len()).map(one).collect()
}
