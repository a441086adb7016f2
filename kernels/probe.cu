// Verifies peer access: one side of a link writes a pattern, and the other side checks it.
//
//   probe_write  (u32* dst, u64 n, u32 seed)                          dst[i] = pattern(i, seed)
//   probe_check  (const u32* src, u64 n, u32 seed, u32* mismatches)   *mismatches += words that differ
//
// Peer stores: `probe_write` with `dst` on the peer, `probe_check` there. Peer loads: `probe_check` with `src` on the
// peer. Copy engine: write, copy, check. Each probe has a new seed, so that old data is not mistaken for new data.
// `mismatches` starts at 0, in memory of the checking device.
#include "common.cuh"

// The finaliser of MurmurHash3 (Appleby, public domain) over index and seed: every bit of the index reaches every bit
// of the word, so shifted, repeated, stale or zeroed memory is detected. The software GPU has the same function in
// Rust.
__device__ inline u32 pattern(u64 i, u32 seed) {
    u32 h = (u32)i * 0x9e3779b9u + (u32)(i >> 32) + seed;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    return h;
}

extern "C" __global__ void probe_write(u32* __restrict__ dst, u64 n, u32 seed) {
    for (u64 i = grid_index(); i < n; i += grid_size()) dst[i] = pattern(i, seed);
}

// `volatile`, since the check is about the link: no word may come from a cache that an earlier check has filled.
extern "C" __global__ void probe_check(const volatile u32* src, u64 n, u32 seed, u32* mismatches) {
    u32 wrong = 0;
    for (u64 i = grid_index(); i < n; i += grid_size()) wrong += src[i] != pattern(i, seed);
    if (wrong != 0) atomicAdd(mismatches, wrong);
}
