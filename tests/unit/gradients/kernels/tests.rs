//! Kernel arguments, compared with the compiled kernels; and host kernels, compared with arithmetic written in another
//! way.

use super::*;
use crate::{GpuPool, memory::AsView};
use half::{bf16, f16};

fn sizes(args: &Arguments) -> Vec<usize> {
    let size = |arg: &KernelArg| match arg {
        KernelArg::Slice { .. } => 8,
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
