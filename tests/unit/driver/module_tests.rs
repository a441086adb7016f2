use super::*;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

#[test]
fn images_are_unpacked_and_end_with_a_nul() {
    for text in [&b""[..], b"12345678", b".version 7.5\n.target sm_75\n.version 7.5\n.target sm_75\n"] {
        let packed = block::compress_prepend_size(text);
        let frame = compress_to_vec(text, CompressionLevel::Fastest);
        for (image, packed) in [(text, false), (&packed[..], true), (&frame[..], true)] {
            let words = unpack(image, packed).unwrap();
            let bytes = bytemuck::cast_slice::<u64, u8>(&words);
            assert!(bytes.starts_with(text) && bytes[text.len()..].iter().all(|byte| *byte == 0));
            assert!(bytes.len() > text.len());
        }
        for damaged in [&packed[..packed.len() - 1], &packed[..3], &frame[..frame.len() - 1], &frame[..5]] {
            assert!(unpack(damaged, true).unwrap_err().contains("damaged"), "{damaged:?}");
        }
    }
}

/// Every form of every module of the crate can be unpacked: a cubin is ELF, and PTX is text for the oldest GPUs.
#[test]
fn the_crates_own_modules() {
    for module in crate::kernel::builtin::MODULES {
        let bytes = |image| bytemuck::cast_slice::<u64, u8>(&unpack(image, module.image.packed).unwrap()).to_vec();
        assert!(module.ptx_text().contains(".target sm_75"));
        assert_eq!(module.image.cubins.len(), 2);
        module.image.cubins.iter().for_each(|(_, cubin)| assert!(bytes(cubin).starts_with(b"\x7fELF")));
    }
}
