// Moves bytes from one source to one or more destinations.
#pragma once
#include "access.cuh"
#include "fold.cuh"

// This thread's share of a loop: unit `first`, then every `step`-th.
struct Share {
    u64 first, step;
};

// Distributes `count` tasks over the warps in turn: calls work(k, the thread's share of task k). `all` is this thread's
// share of everything; its number of threads is a multiple of 32.
template <class F> __device__ inline void by_warps(Share all, u32 count, F work) {
    const u32 warps = (u32)all.step / 32, warp = (u32)all.first / 32;
    const u32 each = warps / count > 0 ? warps / count : 1;
    if (warps > count && warp >= each * count) return;
    const Share share = {(u64)(warp / count % each) * 32 + (u32)all.first % 32, each * 32};
#pragma unroll 1
    for (u32 k = warp % count; k < count; k += warps) work(k, share);
}

// `at(j)` is the address of the j-th destination. The source may be one of them.
template <class Unit, class At>
__device__ inline void move_units(Share share, u64 offset, u64 units, u64 source, u32 destinations, At at) {
    const u32 U = sizeof(Unit) == 16 ? 8 : 4; // units of a thread in flight
#pragma unroll 1
    for (u64 i = share.first; i < units; i += U * share.step) {
        Unit unit[U];
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (i + u * share.step < units) unit[u] = load<Unit>(source + offset + (i + u * share.step) * sizeof(Unit));
        }
#pragma unroll 1
        for (u32 j = 0; j < destinations; j++) {
            const u64 to = at(j);
            if (to == source) continue;
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                if (i + u * share.step < units) store(to + offset + (i + u * share.step) * sizeof(Unit), unit[u]);
            }
        }
    }
}

// Moves in units of the largest size at which source and destinations have equal alignment; the ends byte by byte.
template <class Unit, class At>
__device__ inline void move_by(Share share, u64 bytes, u64 source, u32 destinations, At at) {
    const u64 to_aligned = (0 - source) & (sizeof(Unit) - 1);
    const u64 head = bytes < to_aligned ? bytes : to_aligned;
    const u64 units = (bytes - head) / sizeof(Unit);
    move_units<Unit>(share, head, units, source, destinations, at);
    if constexpr (sizeof(Unit) > 1) {
        const u64 done = head + units * sizeof(Unit);
#pragma unroll 1
        for (u64 i = share.first; i < head + (bytes - done); i += share.step) {
            const u64 byte = i < head ? i : done + (i - head);
            const u8 x = load<u8>(source + byte);
#pragma unroll 1
            for (u32 j = 0; j < destinations; j++) store(at(j) + byte, x);
        }
    }
}

// `odd` has a bit set where the addresses differ in that bit.
template <class At>
__device__ inline void move_bytes(Share share, u64 bytes, u64 odd, u64 source, u32 destinations, At at) {
    if (odd % 16 == 0) {
        move_by<uint4>(share, bytes, source, destinations, at);
    } else if (odd % 8 == 0) {
        move_by<u64>(share, bytes, source, destinations, at);
    } else if (odd % 4 == 0) {
        move_by<u32>(share, bytes, source, destinations, at);
    } else if (odd % 2 == 0) {
        move_by<u16>(share, bytes, source, destinations, at);
    } else {
        move_by<u8>(share, bytes, source, destinations, at);
    }
}

// The same of elements of one type: in packs or one by one.
template <class T, class At>
__device__ inline void move_elements(Share share, u64 bytes, u64 odd, u64 source, u32 destinations, At at) {
    if (odd % 16 == 0) {
        move_by<uint4>(share, bytes, source, destinations, at);
    } else {
        move_by<BitsOf<T>>(share, bytes, source, destinations, at);
    }
}
