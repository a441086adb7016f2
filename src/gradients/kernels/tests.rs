//! Kernel arguments, compared with the compiled kernels; and host kernels, compared with arithmetic written in another
//! way.

use super::{
    sharded::{Buckets, OneKernel},
    update::{ADAM, Moments, Parameter, Rule, squares_args, update_args},
    *,
};
use crate::{GpuPool, ReduceOp, fabric::layout::DeviceBarrier, memory::AsView};
use bytemuck::Zeroable;
use half::{bf16, f16};

fn sizes(args: &Arguments) -> Vec<usize> {
    let size = |arg: &KernelArg| match arg {
        KernelArg::Slice { .. } | KernelArg::Words { .. } => 8,
        KernelArg::Value(value) => value.as_bytes().len(),
    };
    args.iter().map(size).collect()
}

fn fit<G: Gradient, W: Element>(dev: &Device) -> Result<()> {
    let (wire, memory, partial) = (dev.zeros::<W>(16)?, dev.zeros::<G>(8)?, dev.zeros::<f64>(1)?);
    let segment = |memory| Segment { start: 0, len: 8, memory };
    let (full, empty) = (segment(Some(memory.view())), segment(None));
    let (wire, Between { pack, unpack }) = (wire.view(), between::<G, W>()?);
    let packed = |segments: &[_]| pack_args(segments, G::factor(1.0).unwrap(), &wire);
    assert_eq!(sizes(&packed(&[empty; SEGMENTS])), builtin::GRADIENTS.parameters(pack.0));
    let more = packed(&[full, empty, full]);
    assert_eq!(
        more.len(),
        builtin::GRADIENTS.parameters(pack.0).len() + 2,
        "the slices come behind what a GPU looks at"
    );
    for partial in [None, Some(&partial.view())] {
        assert_eq!(sizes(&unpack_args(&wire, (0, 16), &[empty], partial)), builtin::GRADIENTS.parameters(unpack.0));
    }
    let out = dev.zeros::<G::Norm>(1)?;
    assert_eq!(sizes(&norm_args(&partial.view(), &out.view())), builtin::GRADIENTS.parameters(G::NORM_KERNEL.0));
    Ok(())
}

/// cuLaunchKernel takes arguments by address and does not know their sizes: a wrong size gives garbage in the kernel.
#[test]
fn arguments_fit_the_compiled_kernels() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        fit::<f32, f32>(dev)?;
        fit::<f32, f16>(dev)?;
        fit::<f32, bf16>(dev)?;
        fit::<f64, f64>(dev)?;
        fit::<f64, f32>(dev)?;
        fit::<f16, f16>(dev)?;
        fit::<bf16, bf16>(dev)?;
        assert!(fit::<f16, f32>(dev).is_err() && fit::<bf16, f16>(dev).is_err() && fit::<f64, u64>(dev).is_err());
        Ok(())
    })
    .unwrap();
    let ptx = builtin::GRADIENTS.ptx_text();
    assert!(!ptx.contains(".local"), "a table was copied to local memory");
    assert_eq!(ptx.matches(".entry ").count(), 2 * 7 + 2, "a kernel that nobody launches");
}

fn updates_fit<T: Parameter>(dev: &Device) -> Result<()> {
    let (g, w, x, norm) = (dev.zeros::<T>(8)?, dev.zeros::<T>(8)?, dev.zeros::<f32>(8)?, dev.zeros::<f32>(1)?);
    let segment = Segment { start: 0, len: 8, memory: Some(w.view()) };
    let full = Moments { begin: 0, first: Some(x.view()), second: Some(x.view()), master: Some(x.view()) };
    let expected = builtin::OPTIMIZER.parameters(T::UPDATE.0);
    for moments in [full, Moments::default()] {
        let found = sizes(&update_args(&g.view(), &moments, &norm.view(), &[segment], (Rule::zeroed(), None)));
        assert_eq!(found[..expected.len()], expected, "{}", T::UPDATE.0);
        assert_eq!(found.len(), expected.len() + 1, "the slices come behind what a GPU looks at");
    }
    let partial = dev.zeros::<f64>(1)?;
    assert_eq!(sizes(&squares_args(&g.view(), &partial.view())), builtin::OPTIMIZER.parameters(T::SQUARES.0));
    let expected = builtin::SHARDED.parameters(T::SHARDED);
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
        let found = sizes(&kernel.args(DeviceBarrier::NONE, Default::default()));
        assert_eq!(found[..expected.len()], expected, "{}", T::SHARDED);
    }
    let (pieces, of) = (dev.zeros::<u64>(9)?, std::marker::PhantomData::<T>);
    let (rule, norm, pieces) = (Rule::zeroed(), norm.view(), pieces.view());
    let kernel = Buckets { rule, norm, pieces, count: 1, own: 1, largest: 1, chunks: 2, of };
    let found = sizes(&kernel.args(DeviceBarrier::NONE, &Default::default()));
    assert_eq!(found, builtin::SHARDED.parameters(T::SHARDED_BUCKETS));
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
    let ptx = builtin::OPTIMIZER.ptx_text();
    assert!(!ptx.contains(".local"), "a table or a pack was copied to local memory");
    assert_eq!(ptx.matches(".entry ").count(), 2 * 3, "a kernel that nobody launches");
    let ptx = builtin::SHARDED.ptx_text();
    assert!(!ptx.contains(".local"), "a table or a pack was copied to local memory");
    assert_eq!(ptx.matches(".entry ").count(), 2 * 3, "a kernel that nobody launches");
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
                let views = Moments {
                    begin: start,
                    first: Some(memory[0].view()),
                    second: Some(memory[1].view()),
                    master: None,
                };
                let places = [(0, &w[0]), (8, &w[1])].into_iter().filter_map(|(at, w)| {
                    let (from, to) = (start.max(at), end.min(at + w.len()));
                    let memory = (from < to).then(|| w.slice(from - at..to - at))?;
                    Some(Segment { start: from, len: to - from, memory: Some(memory) })
                });
                let places: Vec<_> = places.collect();
                update::update(dev, &bucket.view(), &views, &norm.view(), &places, (rule, None))?;
                moments.extend([dev.download(&memory[0])?, dev.download(&memory[1])?]);
            }
            let of = |which: usize| moments.iter().skip(which).step_by(2).flatten().copied().collect::<Vec<_>>();
            Ok::<_, crate::Error>((dev.download(&w[0])?, dev.download(&w[1])?, dev.download(&bucket)?, of(0), of(1)))
        };
        let whole = run(&[(0, 24)])?;
        assert!(run(&[(0, 4), (4, 12), (12, 24)])? == whole && run(&[(0, 16), (16, 24)])? == whole);
        Ok(whole)
    });
    let (a, b, bucket, ..) = found.unwrap().remove(0);
    assert_eq!((&bucket[..7], bucket[7], &bucket[8..21], bucket[21]), (&a[..], -4.5, &b[..], 9.5));
    assert!(a.iter().all(|a| *a > 0.9) && b[12] < 1.8, "parameters go against their gradients: {a:?} {b:?}");
}

/// On a wire of its own type every value is unchanged, with zeros up to whole grains. Products are rounded once.
fn grains<G: Gradient>(dev: &Device, expected: usize, from: fn(f32) -> G) -> Result<()> {
    let a = dev.upload(&[1.0, -2.0, 3.0].map(from))?;
    let wire = dev.upload(&[from(9.0); 16])?;
    pack(dev, &[Segment { start: 0, len: 3, memory: Some(a.view()) }], 0.5, &wire.view())?;
    let mut wanted = vec![from(9.0); 16];
    wanted[..expected].fill(from(0.0));
    wanted[..3].copy_from_slice(&[0.5, -1.0, 1.5].map(from));
    let found = dev.download(&wire)?;
    assert_eq!(bytemuck::cast_slice::<_, u8>(&found), bytemuck::cast_slice::<_, u8>(&wanted));
    Ok(())
}

#[test]
fn segments_are_rounded_up_to_grains() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let found = pool.run(|dev, _| {
        grains::<f32>(dev, 4, |x| x)?;
        grains::<f64>(dev, 4, f64::from)?;
        grains(dev, 8, f16::from_f32)?;
        grains(dev, 8, bf16::from_f32)
    });
    found.unwrap();
}

/// Segments with gaps between them, with and without memory, of any length. Elements outside of all segments stay.
#[test]
fn segments_go_where_they_belong() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let found = pool.run(|dev, _| {
        let (a, mut b) = (dev.upload(&[1.0f32, -2.0, 3.0])?, dev.zeros::<f32>(5)?);
        let wire = dev.upload(&[bf16::from_f32(9.0); 20])?;
        let segment = |start, len, memory| Segment { start, len, memory };
        let segments = [segment(4, 3, Some(a.view())), segment(8, 4, None), segment(16, 3, Some(a.view()))];
        pack(dev, &segments, 0.5, &wire.view())?;
        let packed = dev.download(&wire)?;
        let partial = dev.zeros::<f64>(1)?;
        let places = [segment(3, 5, Some(b.view())), segment(16, 2, None)];
        unpack::<f32, _>(dev, &wire.view(), (4, 12), &places, Some(partial.view()))?;
        let norm_of = dev.zeros::<f32>(1)?;
        norm::<f32>(dev, &partial.view(), &norm_of.view())?;
        let unpacked = dev.download(&b)?;
        dev.fill(&mut b, 0.0)?;
        Ok((packed, unpacked, dev.download(&norm_of)?[0]))
    });
    let (packed, unpacked, norm) = found.unwrap().remove(0);
    let nine = 9.0;
    let expected =
        [nine, nine, nine, nine, 0.5, -1.0, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0, nine, nine, nine, nine, 0.5, -1.0, 1.5, 0.0];
    assert_eq!(packed, expected.map(bf16::from_f32));
    assert_eq!(unpacked, [9.0, 0.5, -1.0, 1.5, 0.0]);
    assert_eq!(norm, (0.25f32 + 1.0 + 2.25 + 4.0 * 81.0).sqrt());
}
