use super::*;

/// `torch.optim.lr_scheduler`, 2.11, with a rate of 0.5, after 0, 1, 5, 10 and 20 steps.
#[test]
fn rates_are_those_of_torch() {
    let expected: [(LearningRate, [f64; 5]); 4] = [
        (LearningRate::Step { every: 5, factor: 0.1 }, [0.5, 0.5, 0.05, 0.005, 0.00005]),
        (LearningRate::Exponential { factor: 0.9 }, [0.5, 0.45, 0.295245, 0.174339220, 0.060788327]),
        (LearningRate::Linear { steps: 10, end: 0.2 }, [0.5, 0.46, 0.3, 0.1, 0.1]),
        (LearningRate::Cosine { steps: 10, end: 0.0 }, [0.5, 0.487764129, 0.25, 0.0, 0.0]),
    ];
    for (schedule, rates) in expected {
        let optimizer = Optimizer::sgd(0.5).schedule(schedule);
        for (step, rate) in [0, 1, 5, 10, 20].into_iter().zip(rates) {
            assert!((optimizer.rate_at(step) - rate).abs() < 1e-9, "{schedule:?} at {step}");
        }
    }
    let warm = Optimizer::sgd(1.0).warm_up(4).schedule(LearningRate::Step { every: 1, factor: 0.5 });
    assert_eq!([0, 1, 3, 4, 5, 6].map(|step| warm.rate_at(step)), [0.25, 0.5, 1.0, 1.0, 0.5, 0.25]);
}

#[test]
fn wrong_settings_are_told() {
    let wrong = [
        Optimizer::sgd(-1.0),
        Optimizer::sgd(f64::NAN),
        Optimizer::sgd(0.1).nesterov(),
        Optimizer::sgd(0.1).momentum(0.9).dampening(0.1).nesterov(),
        Optimizer::sgd(0.1).betas(0.9, 0.9),
        Optimizer::adam(0.1).momentum(0.9),
        Optimizer::adam(0.1).betas(1.0, 0.9),
        Optimizer::adam(0.1).eps(f64::INFINITY),
        Optimizer::adam(0.1).clip(0.0),
        Optimizer::adam(0.1).clip(1e-50), // 0 as an `f32`, which would mean: not clipped.
        Optimizer::adam(0.1).decay(-1.0),
        // Finite, or greater than 0, in `f64` alone.
        Optimizer::adam(0.1).eps(0.0),
        Optimizer::adam(0.1).eps(1e-50),
        Optimizer::sgd(1e300),
        Optimizer::sgd(1e-50),
        Optimizer::sgd(0.1).decay(1e300),
        Optimizer::sgd(0.1).momentum(1e39),
        Optimizer::sgd(0.1).momentum(0.9).dampening(-1e39),
        Optimizer::adam(1e30).betas(1.0 - 1e-12, 0.9), // The first step's rate is over 1 - beta.
        Optimizer::adam_w(1e38).decay(1e38),
        Optimizer::adam(0.1).schedule(LearningRate::Cosine { steps: 0, end: 0.0 }),
    ];
    for optimizer in wrong {
        assert!(matches!(optimizer.check(), Err(Error::InvalidArgument { op: "Optimizer", .. })), "{optimizer:?}");
    }
    assert!(Optimizer::adam_w(0.1).clip(1.0).warm_up(3).sharded().check().is_ok());
    assert!(Optimizer::sgd(0.0).check().is_ok());
    assert!(Optimizer::adam(f32::MAX.into()).betas(0.0, 0.0).eps(1e-40).check().is_ok());
}

/// A rate that grows is refused at the step that cannot use it; the last ones before are used.
#[test]
fn steps_are_counted_and_their_numbers_finite() {
    let growing = Optimizer::sgd(1.0).schedule(LearningRate::Exponential { factor: 10.0 });
    growing.check().unwrap();
    growing.check_step(38).unwrap();
    assert!(growing.check_step(39).unwrap_err().to_string().contains("the rate of step 39 is "));
    for optimizer in [Optimizer::adam(0.1), Optimizer::sgd(0.1).warm_up(u64::MAX)] {
        optimizer.check_step(1 << 53).unwrap();
        for steps in [(1 << 53) + 1, u64::MAX] {
            assert!(matches!(optimizer.check_step(steps), Err(Error::InvalidArgument { .. })));
        }
        optimizer.rate_at(u64::MAX);
    }
    // Of many steps, those at the ends stand for all.
    growing.check_steps(3..39).unwrap();
    growing.check_steps(50..50).unwrap();
    for steps in [39..40, 3..40, 0..u64::MAX] {
        assert!(growing.check_steps(steps).is_err());
    }
    growing.warm_up(10).check_steps(0..49).unwrap();
    assert!(growing.warm_up(10).check_steps(0..50).is_err());
}
