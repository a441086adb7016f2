//! The arguments against the compiled kernels, and the twins against arithmetic that is written another way.

use super::*;
use crate::{GpuPool, memory::AsView};

/// The sizes of an entry's parameters, from the PTX.
fn parameters(entry: &str) -> Vec<usize> {
    let ptx = builtin::GRADIENTS.image.ptx.unwrap();
    let (_, rest) = ptx.split_once(&format!(".entry {entry}(")).unwrap_or_else(|| panic!("no entry {entry}"));
    let (list, _) = rest.split_once(")\n").unwrap();
    let number = |text: &str| text.trim_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().unwrap();
    let size = |line: &str| match line.split_once('[') {
        Some((_, bytes)) => number(bytes),
        None => number(line.split_whitespace().nth(1).unwrap()) / 8,
    };
    list.lines().map(str::trim).filter(|line| !line.is_empty()).map(size).collect()
}

fn sizes(args: &Arguments) -> Vec<usize> {
    let size = |arg: &KernelArg| match arg {
        KernelArg::Slice { .. } => 8,
        KernelArg::Value(value) => value.as_bytes().len(),
    };
    args.iter().map(size).collect()
}

fn fit<T: OnWire>(dev: &Device) -> Result<()> {
    let (wire, memory, partial) = (dev.zeros::<T>(8)?, dev.zeros::<f32>(4)?, dev.zeros::<f64>(1)?);
    let segment = |memory| Segment { start: 0, len: 4, memory };
    let (full, empty) = (segment(Some(memory.view())), segment(None));
    let wire = wire.view();
    assert_eq!(sizes(&pack_args(&[empty; SEGMENTS], 1.0, &wire)), parameters(T::PACK.0));
    let more = pack_args(&[full, empty, full], 1.0, &wire);
    assert_eq!(more.len(), parameters(T::PACK.0).len() + 2, "the slices come behind what a GPU looks at");
    for partial in [None, Some(&partial.view())] {
        assert_eq!(sizes(&unpack_args(&wire, (0, 8), &[empty], partial)), parameters(T::UNPACK.0));
    }
    Ok(())
}

/// cuLaunchKernel takes arguments by address and does not know their sizes: a wrong one is garbage in the kernel.
#[test]
fn arguments_fit_the_compiled_kernels() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        fit::<f32>(dev)?;
        fit::<f16>(dev)?;
        fit::<bf16>(dev)?;
        let (partial, out) = (dev.zeros::<f64>(3)?, dev.zeros::<f32>(1)?);
        assert_eq!(sizes(&norm_args(&partial.view(), &out.view())), parameters("gradient_norm"));
        Ok(())
    })
    .unwrap();
    let ptx = builtin::GRADIENTS.image.ptx.unwrap();
    assert!(!ptx.contains(".local"), "a table was copied to local memory");
}

/// Segments with gaps between them, with and without memory, of any length: what is in no segment stays.
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
        unpack(dev, &wire.view(), (4, 12), &places, Some(partial.view()))?;
        let norm_of = dev.zeros::<f32>(1)?;
        norm(dev, &partial.view(), &norm_of.view())?;
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
