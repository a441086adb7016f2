use super::*;
use crate::memory::insight::snapshot::tests::example;
use serde_json::{Value, json};

/// Field by field what PyTorch's writer has for the same memory.
#[test]
fn a_pickle_has_pytorchs_fields() {
    let pickle = MemorySnapshot::memory_viz(&[example()]);
    let viz: Value = serde_pickle::from_slice(&pickle, Default::default()).unwrap();
    const MIB: u64 = 1 << 20;
    let frame = |op: &str, line: u64| json!([{ "name": op, "filename": "src/train.rs", "line": line }]);
    let (upload, zeros) = (frame("upload", 10), frame("Vec<f32>::zeros & co \"quoted\"", 20));
    let block = |address: u64, size: u64, state: &str, frames: &Value| {
        let (address, size) = (address * MIB, size * MIB);
        json!({ "address": address, "size": size, "requested_size": size, "state": state, "frames": frames })
    };
    let none = json!([]);
    assert_eq!(
        viz["segments"],
        json!([{
            "device": 1, "address": 64 * MIB, "total_size": 8 * MIB, "allocated_size": 5 * MIB,
            "active_size": 7 * MIB, "requested_size": 5 * MIB, "stream": 0, "segment_type": "large",
            "segment_pool_id": [0, 0], "is_expandable": true, "frames": none, "blocks": [
                block(64, 1, "active_allocated", &none),
                block(65, 4, "active_allocated", &zeros),
                block(69, 2, "active_pending_free", &none),
                block(71, 1, "inactive", &none),
            ],
        }])
    );
    let entry = |time: u64, action: &str, addr: u64, size: u64, frames: &Value| {
        let addr = addr * MIB;
        json!({ "action": action, "addr": addr, "size": size, "stream": 2, "time_us": time, "frames": frames })
    };
    let mut oom = entry(1300, "oom", 0, (1 << 40) - 1, &upload);
    oom["device_free"] = json!(0);
    let expected = [
        entry(100, "segment_map", 256, 32 * MIB, &none),
        entry(200, "alloc", 256, 16 * MIB - 1, &upload),
        entry(900, "alloc", 65, 4 * MIB - 1, &zeros),
        entry(1000, "free_requested", 256, 16 * MIB - 1, &upload),
        entry(1000, "free_completed", 256, 16 * MIB - 1, &upload),
        entry(1100, "segment_unmap", 256, 32 * MIB, &none),
        oom,
        entry(1400, "free_requested", 69, 2 * MIB - 1, &upload),
        entry(1400, "free_completed", 69, 2 * MIB - 1, &upload),
    ];
    assert_eq!(viz["device_traces"], json!([[], expected]));
    assert_eq!(viz["allocator_settings"], json!({ "expandable_segments": true }));
}

/// `LONG1` with nine bytes is a `BigInt` in the viewer's script, which adds it to no number. Beyond 2^53 it rounds.
#[test]
fn numbers_are_numbers_in_javascript() {
    let mut snapshot = example();
    for (address, shown) in [(0x7f12_3456_0000, 0x7f12_3456_0000), (0x4000_0c00_0000_0100, 0xc00_0000_0100u64)] {
        snapshot.chunks[0].address = address;
        let pickle = MemorySnapshot::memory_viz(std::slice::from_ref(&snapshot));
        let long = [&[0x8a, 8][..], &shown.to_le_bytes()].concat();
        assert!(pickle.windows(10).any(|part| part == long), "the address has eight bytes");
        assert!(!pickle.windows(2).any(|pair| pair == [0x8a, 9]));
    }
}

/// The fields' names are part of the crate's face: users write snapshots by any format of serde.
#[test]
fn snapshots_are_data() {
    let value = serde_json::to_value(example()).unwrap();
    assert_eq!(value["events"][3]["kind"], "freed_remotely");
    assert_eq!(value["events"][3]["site"]["op"], "upload");
    assert_eq!(value["events"][3]["site"]["line"], 10);
    assert_eq!(value["blocks"][2]["state"], "pending");
    assert_eq!(value["stats"]["in_use"], 5 << 20);
    assert_eq!(serde_json::from_value::<MemorySnapshot>(value).unwrap(), example());
    // Fields that a later version omits or adds do not make the data unreadable.
    let read: MemorySnapshot = serde_json::from_str(r#"{"device": 4, "stats": {"in_use": 7}, "novelty": []}"#).unwrap();
    assert_eq!((read.device, read.stats.in_use, read.blocks.len()), (4, 7, 0));
}
