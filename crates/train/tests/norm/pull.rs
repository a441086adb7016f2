//! `all_reduce_norm` by the kernel that reads the rows of all members where they are (`kernels/norm_pull.cu`): it is
//! asked for. Where kernels do not meet on the devices the same calls go in another way.

use super::*;

/// A pool that reads rows where they are.
fn pulling(gpus: Gpus, n: usize) -> GpuPool {
    let pool = rig::builder(gpus, n).algorithm(Algorithm::Direct).build().unwrap();
    let ask = |dev: &Device| dev.world()?.explain_norm(DType::BF16, 3, 4096);
    let how = pool.run(|dev, _| ask(dev)).unwrap().remove(0);
    // On GPUs whose kernels meet this is what is tested.
    let pulls = how.reason.contains("it reads the rows of all members");
    assert_eq!(pulls, how.reason.starts_with("one kernel for sum") && how.meets == "flags", "{how}");
    let meets = ["flags", "packets"].contains(&pool.explain(DType::BF16, ReduceOp::Sum, 64).unwrap().meets);
    assert_eq!(pulls, gpus.is_cuda() && meets, "{how}");
    pool
}

on_both! {
    // The same of the kernel that reads the rows of all members where they are. One member may work in place beside one
    // that does not.
    2: fn pulled_rows_have_the_bits_of_the_three_calls(gpus) {
        for n in [2, 3, gpus.up_to(8)] {
            if n > gpus.up_to(8) {
                continue;
            }
            let pool = pulling(gpus, n);
            pool.run(|dev, _| {
                for rows in shapes(gpus) {
                    same_bits::<f32>(dev, rows)?;
                    same_bits::<f16>(dev, rows)?;
                    same_bits::<bf16>(dev, rows)?;
                }
                Ok(())
            })
            .unwrap();
        }
    }

    // Late members, one after the other; rows that are written again as soon as the call is over; in graphs that are
    // launched again; by turns with sums that go other ways, and as counters begin again.
    2: fn pulled_rows_are_free_after_the_call(gpus) {
        let n = gpus.up_to(4);
        let (rows, cols) = if gpus.is_cuda() { (1500, 4096) } else { (5, 64) };
        let pool = pulling(gpus, n);
        let by_turns = |dev: &Device| {
            let mut late = dev.zeros::<u32>(1)?;
            let (mut x, mut y) = (dev.zeros::<f32>(rows * cols)?, dev.zeros::<f32>(rows * cols)?);
            let (mut residual, gamma) = (dev.zeros::<f32>(rows * cols)?, dev.upload(&vec![2.0f32; cols])?);
            let norm = RowNorm::rms(&gamma, 0.0);
            let (graph, _) = dev.capture(|dev| {
                dev.all_reduce_norm(&mut x, &mut residual, norm)?;
                dev.copy(&x, &mut y)?;
                dev.fill(&mut x, f32::NAN)
            })?;
            for round in 0..24 {
                if round % n == dev.rank() {
                    slow_add(dev, &mut late, 1, 500)?;
                }
                // The sums are those of the numbers from `round` on.
                let sum = (n * round + n * (n + 1) / 2) as f32;
                dev.fill(&mut x, (round + dev.rank() + 1) as f32)?;
                dev.fill(&mut residual, -2.0 * sum)?;
                match round % 3 {
                    0 => drop(dev.all_reduce_norm(&mut x, &mut residual, norm)?),
                    1 => drop(dev.all_reduce_norm_into(&x, &mut residual, norm, &mut y)?),
                    _ => dev.launch_graph(&graph)?,
                }
                if round % 3 == 0 {
                    dev.copy(&x, &mut y)?;
                }
                dev.fill(&mut x, f32::NAN)?;
                assert!(dev.download(&y)?.iter().all(|y| (y + 2.0).abs() < 1e-6), "round {round}");
                assert!(dev.download(&residual)?.iter().all(|left| *left == -sum), "round {round}");
                if round % 5 == 0 {
                    dev.fill(&mut y.slice_mut(..33), 1.0)?;
                    dev.all_reduce(&mut y.slice_mut(..33), ReduceOp::Avg)?;
                }
            }
            Ok(())
        };
        pool.run(|dev, _| by_turns(dev)).unwrap();
        rig::run_as_counters_wrap(&pool, &[0, 1, 7], by_turns);
        rig::assert_nothing_kept(&pool);
    }

    // A member fails while the others' kernels are in the call or wait for it: they are told, and the pool goes on.
    2: fn pulled_rows_and_a_failure_in_the_middle(gpus) {
        let n = gpus.up_to(4);
        fails_in_the_middle(&pulling(gpus, n), if gpus.is_cuda() { (300, 4096) } else { (3, 64) });
    }
}
