use super::{super::site::site, *};

/// A short history: two chunks, one of them given back; a block from before the recording, one that came and went,
/// one that was freed and is pending, one that stays; a refused request.
pub(crate) fn example() -> MemorySnapshot {
    use EventKind::*;
    const MIB: u64 = 1 << 20;
    let event = |micros, kind, address, bytes, who: Option<CallSite>| {
        let requested = if who.is_some() { bytes - 1 } else { 0 };
        MemoryEvent { micros, kind, address, bytes, requested, stream: 2, site: who }
    };
    let block = |address, bytes, state, site| BlockInfo { address, bytes, state, site, ..BlockInfo::default() };
    let (a, b) = (site("upload", 10), site("Vec<f32>::zeros & co \"quoted\"", 20));
    MemorySnapshot {
        device: 1,
        taken_at: 5000,
        recorded: true,
        stats: MemoryStats { in_use: 5 * MIB, reserved: 8 * MIB, peak_reserved: 40 * MIB, ..Default::default() },
        chunks: vec![ChunkInfo { address: 64 * MIB, bytes: 8 * MIB }],
        blocks: vec![
            block(64 * MIB, MIB, BlockState::Live, None),
            block(65 * MIB, 4 * MIB, BlockState::Live, Some(b.clone())),
            block(69 * MIB, 2 * MIB, BlockState::Pending, None),
            block(71 * MIB, MIB, BlockState::Free, None),
        ],
        events: vec![
            event(100, Mapped, 256 * MIB, 32 * MIB, None),
            event(200, Allocated, 256 * MIB, 16 * MIB, Some(a.clone())),
            event(900, Allocated, 65 * MIB, 4 * MIB, Some(b.clone())),
            event(1000, FreedRemotely, 256 * MIB, 16 * MIB, Some(a.clone())),
            event(1100, Unmapped, 256 * MIB, 32 * MIB, None),
            event(1200, Trimmed, 0, 32 * MIB, None),
            event(1300, OutOfMemory, 0, 1 << 40, Some(a.clone())),
            event(1400, Freed, 69 * MIB, 2 * MIB, Some(a)),
        ],
        dropped_events: 3,
    }
}

#[test]
fn in_words() {
    let text = example().to_string();
    assert!(text.starts_with("device 1, 5.00 ms after the pool was built\nin use          5.0 MiB"), "{text}");
    let holders = "\n     4.0 MiB in 1 block      Vec<f32>::zeros & co \"quoted\" at src/train.rs:20:9\
                   \n     1.0 MiB in 1 block      call site not recorded";
    assert!(text.ends_with(holders), "{text}");
}
