use super::*;

#[test]
fn in_words() {
    let stats = MemoryStats {
        in_use: 3 << 20,
        peak: 5 << 30,
        requested: 2_900_000,
        reserved: 64 << 20,
        peak_reserved: 6 << 30,
        pending: 512,
        allocations: 1_000_000,
        remote_frees: 7,
        steals: 12,
        waits: 2,
        ladder: 9,
        slabs: 4,
        driver_calls: 11,
        adopted: 4096,
    };
    let expected = "\
in use          3.0 MiB, asked for 2.8 MiB, at most 5.00 GiB
reserved       64.0 MiB, at most 6.00 GiB; slabs: 4
pending           512 B freed, but still used by queued work
allocations     1000000, beyond the own lists: 9; driver calls: 11
other stream         12 allocations, with a wait: 2
other thread          7 frees
adopted         4.0 KiB of other code";
    assert_eq!(stats.to_string(), expected);
}
