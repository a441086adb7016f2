//! Half types on the wire, and norms.

use crate::{
    on_both,
    rig::{self, SIZES, all, backwards, bits, norm_of, numbers, small, step},
};
use gpu_pool::{ReduceOp, gradients::Wire};

/// Half a unit in the last place of a number near 1, and half the smallest step.
fn rounding(wire: Wire) -> (f64, f64) {
    match wire {
        Wire::Bf16 => (2f64.powi(-8), 2f64.powi(-134)),
        _ => (2f64.powi(-11), 2f64.powi(-25)),
    }
}

on_both! {
    // PyTorch's bf16_compress and fp16_compress hooks.
    2: fn half_types_are_within_their_bounds(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for (wire, op) in [
            (Wire::Bf16, ReduceOp::Avg),
            (Wire::F16, ReduceOp::Avg),
            (Wire::Bf16, ReduceOp::Scaled(1.0)),
            (Wire::F16, ReduceOp::Sum),
        ] {
            let mut state = pool.per_device(|dev, _| small().wire(wire).reduce(op).build(dev, &SIZES)).unwrap();
            for number in 0..3 {
                let found = state.run(|dev, _, exchange| {
                    if matches!(op, ReduceOp::Scaled(_)) {
                        exchange.set_weight(0.5 * (dev.rank() + 1) as f64)?;
                    }
                    step(dev, exchange, &SIZES, number, &backwards(SIZES.len()))?;
                    all(dev, exchange)
                });
                let found = found.unwrap();
                assert!(found.iter().all(|device| bits(device) == bits(&found[0])), "members have different bits");
                let weight = |rank: usize| match op {
                    ReduceOp::Avg => 1.0 / n as f64,
                    ReduceOp::Scaled(_) => 0.5 * (rank + 1) as f64,
                    _ => 1.0,
                };
                let (unit, least) = rounding(wire);
                for (gradient, &len) in SIZES.iter().enumerate() {
                    let theirs: Vec<_> = (0..n).map(|rank| numbers(number, rank, gradient, len)).collect();
                    for i in 0..len {
                        let terms = (0..n).map(|rank| weight(rank) * f64::from(theirs[rank][i]));
                        let (exact, sizes) = terms.fold((0.0, 0.0), |(sum, sizes), x| (sum + x, sizes + f64::abs(x)));
                        // Each term is rounded once, and the result; f32 in between adds a little.
                        let bound = unit * (sizes + exact.abs()) * 1.01 + 1e-6 * sizes + (n + 1) as f64 * least;
                        let got = f64::from(found[0][gradient][i]);
                        assert!(
                            (got - exact).abs() <= bound,
                            "{wire:?} {op}: {got} for {exact}, off by more than {bound}"
                        );
                    }
                }
            }
        }
    }

    // An average in f16 neither overflows in the sum nor underflows by an early division.
    2: fn averages_in_f16_have_the_range_of_f16(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().wire(Wire::F16).build(dev, &[3])?;
            rig::give(dev, &mut exchange, 0, &[60_000.0, 2f32.powi(-24), -0.0])?;
            exchange.finish(dev)?;
            dev.download(&exchange.grad(0)?)
        });
        assert_eq!(found.unwrap(), [[60_000.0, 2f32.powi(-24), -0.0]; 2]);
    }

    2: fn norms_are_right(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        // More than the blocks have elements; and squares beyond what f32 holds.
        for (sizes, scale) in [
            (SIZES.to_vec(), 1.0),
            (vec![700_001, 3, 90_000], 1.0),
            (vec![33], 1e25),
            (vec![33], 1e-25),
            (vec![0], 1.0),
        ] {
            for wire in [Wire::Same, Wire::Bf16] {
                let mut state = pool.per_device(|dev, _| small().wire(wire).build(dev, &sizes)).unwrap();
                let found = state.run(|dev, _, exchange| {
                    for gradient in backwards(sizes.len()) {
                        let x = numbers(0, dev.rank(), gradient, sizes[gradient]);
                        rig::give(dev, exchange, gradient, &x.iter().map(|x| x * scale).collect::<Vec<_>>())?;
                    }
                    let done = exchange.finish(dev)?;
                    let norm = dev.download(&done.norm().unwrap())?[0];
                    Ok((norm, norm_of(&all(dev, exchange)?)))
                });
                let found = found.unwrap();
                for (norm, expected) in &found {
                    assert_eq!(norm.to_bits(), found[0].0.to_bits());
                    let off = (f64::from(*norm) - expected).abs();
                    assert!(off <= 1e-7 * expected, "{norm} for {expected} ({wire:?}, {sizes:?})");
                }
            }
        }
    }

    2: fn no_norm_unless_asked_for(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().norm(false).build(dev, &[3])?;
            rig::give(dev, &mut exchange, 0, &[1.0; 3])?;
            Ok(exchange.finish(dev)?.norm().is_none())
        });
        assert_eq!(found.unwrap(), [true; 2]);
    }
}
