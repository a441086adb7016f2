use super::*;
use std::mem::offset_of;

/// nccl.h of 2.19.1: `sizeof(ncclConfig_t)` and the offsets of its fields on 64-bit machines.
#[test]
fn the_structs_are_those_of_the_header() {
    assert_eq!((size_of::<Config>(), align_of::<Config>()), (48, 8));
    let offsets = [
        offset_of!(Config, size),
        offset_of!(Config, magic),
        offset_of!(Config, version),
        offset_of!(Config, blocking),
        offset_of!(Config, cga_cluster_size),
        offset_of!(Config, min_ctas),
        offset_of!(Config, max_ctas),
        offset_of!(Config, net_name),
        offset_of!(Config, split_share),
    ];
    assert_eq!(offsets, [0, 8, 12, 16, 20, 24, 28, 32, 40]);
    assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
    let config = Config::blocking();
    assert_eq!((config.size, config.magic, config.version, config.blocking), (48, 0xcafe_beef, 21901, 1));
}

#[test]
fn the_version_is_checked() {
    for (version, good) in
        [(2804, false), (21800, false), (21805, false), (21900, false), (21901, true), (22809, true), (30000, true)]
    {
        assert_eq!(new_enough("x", version).is_ok(), good, "{version}");
    }
    let error = new_enough("/a/libnccl.so.2", 21805).unwrap_err();
    assert!(matches!(error, Error::Cluster { op: "transport", .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        ["/a/libnccl.so.2", "2.18.5", "2.19.1", "install", VARIABLE].iter().all(|word| text.contains(word)),
        "{text}"
    );
    assert_eq!([2804, 2407, 21901, 22809].map(readable), ["2.8.4", "2.4.7", "2.19.1", "2.28.9"]);
}

/// A process without NCCL: the error says what to install, and nothing panics.
#[test]
fn what_is_missing_is_named() {
    let error = |name: &str| Library::open(Some(name.into())).err().expect("no NCCL").to_string();
    let text = error("/nonexistent/libnccl.so.2");
    for word in ["/nonexistent/libnccl.so.2", "libnccl2", "nvidia-nccl-cu12", VARIABLE, "2.19.1"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    // Libraries, but not this one.
    #[cfg(target_os = "linux")]
    for name in ["libm.so.6", "libc.so.6"] {
        let text = error(name);
        assert!(text.contains(name) && text.contains("is no NCCL"), "{text}");
    }
    // No library at all.
    assert!(error(env!("CARGO_MANIFEST_DIR")).contains("NCCL was not found as"));
    assert!(error(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).contains("NCCL was not found as"));
    assert!(error("a\0b").contains("NCCL was not found as"));
}

/// Needs no GPU, but the library. `GPU_POOL_NCCL` or `LD_LIBRARY_PATH` may name one from PyPI.
#[test]
fn a_library_that_is_there_has_every_symbol() {
    match Library::get() {
        Ok(library) => {
            println!("NCCL {}", library.version());
            let error = library.error("ncclGroupEnd", 99, "device 3");
            assert!(matches!(error, Error::Transport { library: "nccl", op: "ncclGroupEnd", code: 99, .. }));
            assert!(error.to_string().contains("device 3"), "{error}");
            if let Err(error) = library.unique_id() {
                assert!(matches!(error, Error::Transport { op: "ncclGetUniqueId", .. }), "{error:?}");
                println!("{error}");
            }
        }
        Err(error) => println!("skipped: no libnccl ({error})"),
    }
}
