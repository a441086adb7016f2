//! Members that call something else, or nothing: each is told what differs, and where.

use crate::{
    on_both,
    rig::{assert_works, reduce},
    support::failure,
};
use gpu_pool::{Error, ReduceOp};

on_both! {
    2: fn a_member_that_ends_without_the_collective_is_a_mismatch(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let error = failure(pool.run(|dev, _| if dev.index() == 1 { Ok(()) } else { reduce(dev, 4) }));
        match &error {
            Error::Mismatch { what: "participation", b: 1, a_call, a_site, b_call, .. } => {
                assert!(a_call.contains("all_reduce(4 x F32, Sum)"), "{a_call}");
                assert!(a_site.file() == file!() && b_call.contains("ended"), "{error}");
            }
            other => panic!("{other}"),
        }
        assert_works(&pool);
    }

    // No buffer is touched, both call sites are named, every member gets the same error, and the scope may go on.
    2: fn mismatches_name_both_call_sites_and_touch_nothing(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let all = pool
            .run(|dev, _| {
                let last = dev.index() == n - 1;
                let mut x = dev.upload(&[5.0f32; 6])?;
                let mut wide = dev.upload(&[5.0f64; 6])?;
                let errors = vec![
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.all_reduce(&mut x.slice_mut(1..), ReduceOp::Sum),
                }),
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.all_reduce(&mut wide, ReduceOp::Sum),
                }),
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.all_reduce(&mut x, ReduceOp::Avg),
                }),
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.barrier(),
                }),
                failure(match last {
                    false => dev.exchange(1u32).map(drop),
                    true => dev.exchange(1i32).map(drop),
                }),
                ];
                assert_eq!(dev.download(&x)?, [5.0; 6]);
                assert_eq!(dev.download(&wide)?, [5.0; 6]);
                // The same scope goes on.
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.barrier()?;
                assert_eq!(dev.download(&x)?, [5.0 * n as f32; 6]);
                Ok(errors)
            })
            .unwrap();
        let expected = ["count", "dtype", "reduce op", "operation", "dtype"];
        for errors in &all {
            for ((error, expected), first) in errors.iter().zip(expected).zip(&all[0]) {
                assert_eq!(error.to_string(), first.to_string());
                let Error::Mismatch { what, a: 0, a_site, b, b_site, .. } = error else { panic!("{error}") };
                assert_eq!((*what, *b), (expected, n - 1), "{error}");
                assert!(a_site.file() == file!() && b_site.file() == file!(), "{error}");
                assert_ne!(a_site.line(), b_site.line(), "{error}");
            }
        }
        assert_works(&pool);
    }

    // However often a member asks for those who have left: no ring fills up, nobody waits.
    2: fn those_who_have_left_are_not_waited_for(gpus) {
        let pool = gpus.pool(2);
        for stays in [0, 1] {
            pool.run(|dev, _| {
                for _ in 0..if dev.rank() == stays { 50 } else { 0 } {
                    let error = failure(reduce(dev, 3));
                    assert!(matches!(error, Error::Mismatch { what: "participation", .. }), "{error}");
                }
                Ok(())
            })
            .unwrap();
            assert_works(&pool);
        }
    }
}
