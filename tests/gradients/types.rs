//! Gradients of other types than `f32`.

use crate::{
    on_both,
    rig::{self, Rng, SIZES, all, backwards, give, numbers, refused, small},
    support::{Gpus, failure, long},
};
use gpu_pool::{
    Error, ReduceOp,
    gradients::{Gradient, GradientExchange, Wire},
    kernel::Float,
};
use half::{bf16, f16};
use std::fmt::Debug;

trait Number: Gradient<Norm: Into<f64>> + Debug {
    /// How far norms may be off.
    const NORM: f64;
    fn new(x: f32) -> Self;
    fn get(self) -> f64;
}

macro_rules! number {
    ($($T:ty, $norm:literal, $new:expr, $get:expr;)+) => {$(
        impl Number for $T {
            const NORM: f64 = $norm;
            fn new(x: f32) -> Self {
                $new(x)
            }
            fn get(self) -> f64 {
                $get(self)
            }
        }
    )+};
}
number! {
    f32, 1e-7, |x| x, f64::from;
    // With bits that f32 does not have.
    f64, 1e-14, |x| f64::from(x) * (1.0 + 1e-9), |x| x;
    f16, 1e-7, f16::from_f32, f16::to_f64;
    bf16, 1e-7, bf16::from_f32, bf16::to_f64;
}

fn numbers_of<T: Number>(number: usize, rank: usize, gradient: usize, len: usize) -> Vec<T> {
    numbers(number, rank, gradient, len).into_iter().map(T::new).collect()
}

fn bytes<T: Number>(x: &[Vec<T>]) -> Vec<Vec<u8>> {
    x.iter().map(|x| bytemuck::cast_slice(x).to_vec()).collect()
}

/// Some steps of all operations, with unused gradients and memory of the caller's, against plain all-reduces.
fn is_plain<T: Number>(gpus: Gpus, n: usize) {
    let pool = rig::pool(gpus, n);
    for op in [ReduceOp::Avg, ReduceOp::Sum, ReduceOp::Scaled(1.0)] {
        let mut state = pool.per_device(|dev, _| small().of::<T>().reduce(op).build(dev, &SIZES)).unwrap();
        for number in 0..4 {
            state
                .run(|dev, _, exchange| {
                    let op = match op {
                        ReduceOp::Scaled(_) => {
                            exchange.set_weight(0.3 + dev.rank() as f64)?;
                            ReduceOp::Scaled(0.3 + dev.rank() as f64)
                        }
                        op => op,
                    };
                    let mut order = backwards(SIZES.len());
                    Rng(7 + (number * 4 + dev.rank()) as u64).shuffle(&mut order);
                    // 4 is nobody's in step 1, and rank 0's alone in step 2.
                    let used = |gradient: usize| gradient != 4 || number == 0 || (number == 2 && dev.rank() == 0);
                    for &gradient in order.iter().filter(|gradient| used(**gradient)) {
                        let x = numbers_of::<T>(number, dev.rank(), gradient, SIZES[gradient]);
                        match (gradient + number) % 3 {
                            0 => exchange.ready_from(dev, gradient, dev.upload(&x)?)?,
                            _ => give(dev, exchange, gradient, &x)?,
                        }
                    }
                    let done = exchange.finish(dev)?;
                    assert_eq!(done.unused(), if number % 2 == 1 { &[4][..] } else { &[] });
                    let norm: f64 = dev.download(&done.norm().expect("asked for"))?[0].into();
                    let found = all(dev, exchange)?;
                    let exact = found.iter().flatten().map(|x| x.get().powi(2)).sum::<f64>().sqrt();
                    assert!((norm - exact).abs() <= T::NORM * exact, "{norm} for {exact}");
                    for (gradient, &len) in SIZES.iter().enumerate() {
                        let own = numbers_of::<T>(number, dev.rank(), gradient, len);
                        let mut x = dev.upload(&if used(gradient) { own } else { vec![T::zeroed(); len] })?;
                        dev.all_reduce(&mut x, op)?;
                        let expected = dev.download(&x)?;
                        assert_eq!(bytes(&[found[gradient].clone()]), bytes(&[expected]), "{op} in step {number}");
                        if let Ok(own) = exchange.take(gradient) {
                            assert_eq!(bytes(&[dev.download(&own)?]), bytes(&[found[gradient].clone()]));
                        }
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

on_both! {
    1: fn the_same_bits_as_plain_ones(gpus) {
        for n in [1, gpus.up_to(2), gpus.up_to(4)] {
            is_plain::<f32>(gpus, n);
            is_plain::<f64>(gpus, n);
            is_plain::<f16>(gpus, n);
            is_plain::<bf16>(gpus, n);
        }
    }

    2: fn doubles_on_a_narrower_wire(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for op in [ReduceOp::Avg, ReduceOp::Sum, ReduceOp::Scaled(1.0)] {
            let made = small().of::<f64>().wire(Wire::F32).reduce(op);
            let mut state = pool.per_device(|dev, _| made.build(dev, &SIZES)).unwrap();
            for number in 0..2 {
                let found = state.run(|dev, _, exchange| {
                    if matches!(op, ReduceOp::Scaled(_)) {
                        exchange.set_weight(0.3 + dev.rank() as f64)?;
                    }
                    for gradient in backwards(SIZES.len()) {
                        let x = numbers_of(number, dev.rank(), gradient, SIZES[gradient]);
                        give(dev, exchange, gradient, &x)?;
                    }
                    exchange.finish(dev)?;
                    all(dev, exchange)
                });
                let found = found.unwrap();
                assert!(found.iter().all(|device| bytes(device) == bytes(&found[0])), "members have different bits");
                let weight = |rank: usize| match op {
                    ReduceOp::Avg => 1.0 / n as f64,
                    ReduceOp::Scaled(_) => 0.3 + rank as f64,
                    _ => 1.0,
                };
                for (gradient, &len) in SIZES.iter().enumerate() {
                    let theirs: Vec<Vec<f64>> = (0..n).map(|rank| numbers_of(number, rank, gradient, len)).collect();
                    for i in 0..len {
                        let terms = (0..n).map(|rank| weight(rank) * theirs[rank][i]);
                        let (exact, sizes) = terms.fold((0.0, 0.0), |(sum, sizes), x| (sum + x, sizes + f64::abs(x)));
                        // Each term is rounded once, then n - 1 sums, and the factor of an average and its product.
                        let bound = (n + 2) as f64 * 2f64.powi(-24) * sizes * 1.01 + 1e-44;
                        let got = found[0][gradient][i];
                        assert!((got - exact).abs() <= bound, "{op}: {got} for {exact}, off by more than {bound}");
                        // What went through it has 24 bits.
                        assert_eq!(f64::from(got as f32), got);
                    }
                }
            }
        }
    }

    // 1e300 is no weight in f32; and a sum in f64 needs no detour.
    2: fn doubles_have_their_range(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().of::<f64>().reduce(ReduceOp::Scaled(1e300)).build(dev, &[2])?;
            give(dev, &mut exchange, 0, &[1e-300, 2e-200])?;
            exchange.finish(dev)?;
            assert!(exchange.set_weight(f64::INFINITY).is_err());
            dev.download(&exchange.grad(0)?)
        });
        let once = [1e-300 * 1e300, 2e-200 * 1e300];
        assert_eq!(found.unwrap(), [once.map(|x| x + x); 2]);
    }

    // Halves are added up in f32: what would overflow between is an average that does not.
    2: fn averages_of_halves_do_not_overflow(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().of::<f16>().build(dev, &[3])?;
            give(dev, &mut exchange, 0, &[60_000.0, 2f32.powi(-24), -0.0].map(f16::from_f32))?;
            let norm = exchange.finish(dev)?.norm().map(|norm| dev.download(&norm)).expect("asked for")?[0];
            assert_eq!(norm, f16::from_f32(60_000.0).to_f32());
            dev.download(&exchange.grad(0)?)
        });
        assert_eq!(found.unwrap(), [[60_000.0, 2f32.powi(-24), -0.0].map(f16::from_f32); 2]);
    }

    // DDP's no_sync.
    2: fn halves_accumulate(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().of::<bf16>().reduce(ReduceOp::Sum).build(dev, &[9, 3])?;
            for micro in 0..2 {
                exchange.set_sync(micro == 1)?;
                for (gradient, len) in [(1, 3), (0, 9)] {
                    let one = dev.upload(&vec![bf16::from_f32(1.0 + dev.rank() as f32); len])?;
                    let holds = exchange.holds(gradient);
                    let mut x = exchange.grad_mut(gradient)?;
                    if holds { dev.axpy(1.0, &one, &mut x)? } else { dev.copy(&one, &mut x)? }
                    exchange.ready(dev, gradient)?;
                }
                exchange.finish(dev)?;
            }
            all(dev, &exchange)
        });
        let six = bf16::from_f32(6.0);
        assert_eq!(found.unwrap(), vec![vec![vec![six; 9], vec![six; 3]]; 2]);
    }

    // Sums of ones in half types stop at 256 or 2048; memory that was lent is the caller's.
    2: fn sums_of_halves_go_on(gpus) {
        fn ones<T: Number + Float<Acc = f32> + PartialEq>(gpus: Gpus, steps: usize) {
            let pool = rig::pool(gpus, 2);
            pool.run(|dev, _| {
                let mut exchange = small().of::<T>().reduce(ReduceOp::Sum).build(dev, &[9, 3, 40, 2])?;
                let one = [9, 3, 40].map(|len| dev.upload(&vec![T::new(1.0); len]));
                let one = one.into_iter().collect::<Result<Vec<_>, _>>()?;
                exchange.lend(3, dev.upload(&[T::new(7.0); 2])?)?;
                for round in 0..2 {
                    let steps = if round == 0 { steps } else { 30 };
                    for micro in 0..steps {
                        exchange.set_sync(micro + 1 == steps)?;
                        for (gradient, one) in one.iter().enumerate() {
                            // Gradient 1 is not in the first steps; on one member gradient 2 is not in the last ones.
                            if gradient == 1 && micro < 10 || gradient == 2 && dev.rank() == 1 && micro + 10 > steps {
                                continue;
                            }
                            assert_eq!(exchange.holds(gradient), micro > if gradient == 1 { 10 } else { 0 });
                            let writes = gradient == 0 || !exchange.holds(gradient);
                            let mut x = exchange.grad_mut(gradient)?;
                            match writes {
                                true => dev.copy(one, &mut x)?,
                                false => dev.axpy(1.0, one, &mut x)?,
                            }
                            exchange.ready(dev, gradient)?;
                        }
                        if micro == 3 {
                            exchange.ready(dev, 3)?;
                        }
                        exchange.finish(dev)?;
                    }
                    let found = all(dev, &exchange)?;
                    let value = |x: usize| T::new(x as f32);
                    let lent = [14, 28][round];
                    let wanted = [(2 * steps, 9), (2 * (steps - 10), 3), (2 * steps - 9, 40), (lent, 2)];
                    for (found, (wanted, len)) in found.iter().zip(wanted) {
                        assert_eq!(*found, vec![value(wanted); len], "round {round}");
                    }
                }
                Ok(())
            })
            .unwrap();
        }
        ones::<bf16>(gpus, 300);
        if long() {
            ones::<f16>(gpus, 2500);
        }
    }

    1: fn wires_that_are_of_no_use(gpus) {
        rig::pool(gpus, 1)
            .run(|dev, _| {
                for wire in [Wire::F32, Wire::F16] {
                    assert!(refused(small().of::<bf16>().wire(wire).build(dev, &[1])).contains("BF16"));
                }
                refused(small().of::<f16>().wire(Wire::Bf16).build(dev, &[1]));
                refused(small().of::<f64>().wire(Wire::Bf16).build(dev, &[1]));
                // Their own type by its name.
                let x = numbers(0, 0, 0, 5);
                let mut exchange = small().wire(Wire::F32).build(dev, &[5])?;
                give(dev, &mut exchange, 0, &x)?;
                exchange.finish(dev)?;
                assert_eq!(dev.download(&exchange.grad(0)?)?, x);
                small().of::<f16>().wire(Wire::F16).build(dev, &[1]).map(drop)
            })
            .unwrap();
    }

    2: fn members_of_different_types(gpus) {
        let error = failure(rig::pool(gpus, 2).run(|dev, _| match dev.rank() {
            0 => GradientExchange::builder().build(dev, &[4]).map(drop),
            _ => GradientExchange::builder().of::<f64>().build(dev, &[4]).map(drop),
        }));
        let Error::Mismatch { what: "dtype", b_call, .. } = &error else { panic!("no mismatch: {error}") };
        assert_eq!(b_call, "GradientExchange(F64)");
    }
}
