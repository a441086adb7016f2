//! Kernel arguments, compared with the compiled kernels; and updates of parts.

use super::*;
use bytemuck::Zeroable;
use gpu_pool::GpuPool;

#[cfg(feature = "cuda")]
mod compiled {
    use super::*;
    use crate::{
        kernels::SHARDED,
        sharded::kernels::{Buckets, OneKernel},
    };
    use gpu_pool::{
        ReduceOp,
        extend::train::{Addresses, DeviceBarrier, KernelArg, MeetingKernel, ModuleInternals},
    };

    fn sizes(args: &Arguments) -> Vec<usize> {
        let size = |arg: &KernelArg| match arg {
            KernelArg::Value(value) => value.as_bytes().len(),
            _ => 8,
        };
        args.iter().map(size).collect()
    }

    fn updates_fit<T: Parameter>(dev: &Device) -> Result<()> {
        let (g, w, x, norm) = (dev.zeros::<T>(8)?, dev.zeros::<T>(8)?, dev.zeros::<f32>(8)?, dev.zeros::<f32>(1)?);
        let segment = Segment { start: 0, len: 8, memory: Some(w.view()) };
        let full = Moments { begin: 0, kept: [Some(x.view()); 3] };
        let expected = OPTIMIZER.parameters(T::UPDATE.0);
        for moments in [full, Moments::default()] {
            let found = sizes(&update_args(&g.view(), &moments, &norm.view(), &[segment], (Rule::zeroed(), None)));
            assert_eq!(found[..expected.len()], expected, "{}", T::UPDATE.0);
            assert_eq!(found.len(), expected.len() + 1, "the slices come behind what a GPU looks at");
        }
        let partial = dev.zeros::<f64>(1)?;
        assert_eq!(sizes(&squares_args(&g.view(), &partial.view())), OPTIMIZER.parameters(T::SQUARES.0));
        let expected = SHARDED.parameters(T::SHARDED);
        let (graph_rule, block_flags) = (dev.zeros::<u32>(14)?, dev.zeros::<u64>(2)?);
        for (norm, graph_rule) in [(None, None), (Some(norm.view()), Some(graph_rule.view()))] {
            let (reduce, rule, moments, segments) = (ReduceOp::Avg, Rule::zeroed(), full, &[segment][..]);
            let block_flags = norm.is_some().then(|| block_flags.view());
            let kernel = OneKernel {
                reduce,
                rule,
                graph_rule,
                moments,
                norm,
                block_flags,
                len: 8,
                part: 0..8,
                largest: 8,
                segments,
            };
            let found = sizes(&kernel.args(DeviceBarrier::NONE, &Addresses::default()));
            assert_eq!(found[..expected.len()], expected, "{}", T::SHARDED);
        }
        let (pieces, of) = (dev.zeros::<u64>(9)?, std::marker::PhantomData::<T>);
        let (rule, norm, pieces) = (Rule::zeroed(), norm.view(), pieces.view());
        for graph_rule in [None, Some(graph_rule.view())] {
            let kernel = Buckets { rule, graph_rule, norm, pieces, count: 1, own: 1, largest: 1, chunks: 2, of };
            let found = sizes(&kernel.args(DeviceBarrier::NONE, &Addresses::default()));
            assert_eq!(found, SHARDED.parameters(T::SHARDED_BUCKETS));
        }
        Ok(())
    }

    #[test]
    fn arguments_fit_the_compiled_optimizers() {
        let pool = GpuPool::builder().host(1).build().unwrap();
        pool.run(|dev, _| {
            updates_fit::<f32>(dev)?;
            updates_fit::<f16>(dev)?;
            updates_fit::<bf16>(dev)
        })
        .unwrap();
        let ptx = OPTIMIZER.ptx_text();
        assert!(!ptx.contains(".local"), "a table or a pack was copied to local memory");
        assert_eq!(ptx.matches(".entry ").count(), 2 * 3, "a kernel that nobody launches");
        let ptx = SHARDED.ptx_text();
        assert!(!ptx.contains(".local"), "a table or a pack was copied to local memory");
        assert_eq!(ptx.matches(".entry ").count(), 2 * 3, "a kernel that nobody launches");
    }
}

/// Parts of a bucket are updated by themselves, by launches of any number of segments, with the same bits. A pack of
/// four elements at the end of a segment has fewer, and what is between segments stays.
#[test]
fn parts_are_updated_by_themselves() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let found = pool.run(|dev, _| {
        let g: Vec<f32> = (0..24).map(|i| i as f32 - 11.5).collect();
        let rule = Rule { kind: ADAM, factor: 0.5, most: 3.0, rest1: 0.1, beta2: 0.9, rest2: 0.1, ..Rule::zeroed() };
        let rule = Rule { shrink: 0.9, rate: 0.3, root: 0.7, eps: 1e-3, gather: 1, ..rule };
        let norm = dev.upload(&[(2.0f32 * 1150.0).sqrt()])?;
        let run = |parts: &[(usize, usize)]| {
            let (bucket, w) = (dev.upload(&g)?, [dev.upload(&[1.0f32; 7])?, dev.upload(&[2.0f32; 13])?]);
            let mut moments = Vec::new();
            for &(start, end) in parts {
                let memory = [dev.zeros::<f32>(end - start)?, dev.zeros::<f32>(end - start)?];
                let views = Moments { begin: start, kept: [Some(memory[0].view()), Some(memory[1].view()), None] };
                let places = [(0, &w[0]), (8, &w[1])].into_iter().filter_map(|(at, w)| {
                    let (from, to) = (start.max(at), end.min(at + w.len()));
                    let memory = (from < to).then(|| w.slice(from - at..to - at))?;
                    Some(Segment { start: from, len: to - from, memory: Some(memory) })
                });
                let places: Vec<_> = places.collect();
                update(dev, &bucket.view(), &views, &norm.view(), &places, (rule, None))?;
                moments.extend([dev.download(&memory[0])?, dev.download(&memory[1])?]);
            }
            let of = |which: usize| moments.iter().skip(which).step_by(2).flatten().copied().collect::<Vec<_>>();
            Ok::<_, gpu_pool::Error>((dev.download(&w[0])?, dev.download(&w[1])?, dev.download(&bucket)?, of(0), of(1)))
        };
        let whole = run(&[(0, 24)])?;
        assert!(run(&[(0, 4), (4, 12), (12, 24)])? == whole && run(&[(0, 16), (16, 24)])? == whole);
        Ok(whole)
    });
    let (a, b, bucket, ..) = found.unwrap().remove(0);
    assert_eq!((&bucket[..7], bucket[7], &bucket[8..21], bucket[21]), (&a[..], -4.5, &b[..], 9.5));
    assert!(a.iter().all(|a| *a > 0.9) && b[12] < 1.8, "parameters go against their gradients: {a:?} {b:?}");
}
