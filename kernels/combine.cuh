// Folds memory of several sources into several destinations, by all or by some of a kernel's threads.
#pragma once
#include "lanes.cuh"
#include "meet.cuh"
#include "move.cuh"

// The arguments, in shared memory, where they can be indexed.
template <class T> struct Table {
    u64 source[MOST], destination[MOST];
    Acc<T> factor[MOST];
    u32 epoch[MOST];
    u64 odd; // bits in which the addresses in use differ
};

// The offsets of a loop's units: unit i < split is at `base` plus i units, the others are `gap` bytes further.
struct Places {
    u64 units, base, split, gap;
};

template <class Unit> __device__ inline u64 offset_of(const Places& places, u64 i) {
    // Only single elements are in two ranges: before and after the packs.
    const u64 gap = sizeof(Unit) < 16 && i >= places.split ? places.gap : 0;
    return places.base + i * sizeof(Unit) + gap;
}

template <class T, class Unit, u32 U>
__device__ inline void store_all(const Table<T>& table, u32 destinations, const u64 (&offset)[U], const bool (&here)[U],
                                 const Unit (&unit)[U]) {
#pragma unroll 1
    for (u32 j = 0; j < destinations; j++) {
        const u64 to = table.destination[j];
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (here[u]) store(to + offset[u], unit[u]);
        }
    }
}

// Any number of sources and any operation. G sources are loaded together.
template <class T, class Unit>
__device__ inline void fold_units(Share share, const Table<T>& table, u32 op, Ending<T> ending, u32 sources,
                                  u32 destinations, Places places) {
    const u32 W = sizeof(Unit) / sizeof(T);
    const u32 G = 8;
#pragma unroll 1
    for (u64 i = share.first; i < places.units; i += share.step) {
        const u64 offset = offset_of<Unit>(places, i);
        Acc<T> acc[W] = {};
#pragma unroll 1
        for (u32 k = 0; k < sources; k += G) {
            Unit in[G];
#pragma unroll
            for (u32 g = 0; g < G; g++) {
                if (k + g < sources) in[g] = load<Unit>(table.source[k + g] + offset);
            }
#pragma unroll 1
            for (u32 g = 0; g < G && k + g < sources; g++) {
                const Unit unit = pick(in, g);
                Acc<T> x[W];
#pragma unroll
                for (u32 w = 0; w < W; w++) x[w] = widened(lane<T>(unit, w));
                fold_any<T>(op, k + g, acc, x, table.factor);
            }
        }
        Unit out[1];
#pragma unroll
        for (u32 w = 0; w < W; w++) set_lane(out[0], w, ending(acc[w]));
        store_all(table, destinations, {offset}, {true}, out);
    }
}

// Sums of at most K sources. U packs of each are loaded before the first is used: a load from a peer takes
// microseconds, and about 16 packs in flight, by hundreds of threads in each of dozens of blocks, cover the product of
// NVLink's bandwidth and latency.
template <class T, u32 K, u32 U>
__device__ inline void sum_packs(Share share, const Table<T>& table, Ending<T> ending, u32 sources, u32 destinations,
                                 Places places) {
    const u32 W = 16 / sizeof(T);
    const u64 step = share.step;
#pragma unroll 1
    for (u64 i = share.first; i < places.units; i += U * step) {
        u64 offset[U];
        bool here[U];
        uint4 in[K][U], out[U];
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            offset[u] = offset_of<uint4>(places, i + u * step);
            here[u] = i + u * step < places.units;
        }
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (k >= sources) continue;
            const u64 source = table.source[k];
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                if (here[u]) in[k][u] = load<uint4>(source + offset[u]);
            }
        }
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            Acc<T> acc[W];
#pragma unroll
            for (u32 w = 0; w < W; w++) acc[w] = widened(lane<T>(in[0][u], w));
#pragma unroll
            for (u32 k = 1; k < K; k++) {
                if (k >= sources) continue;
#pragma unroll
                for (u32 w = 0; w < W; w++) acc[w] = added(acc[w], widened(lane<T>(in[k][u], w)));
            }
#pragma unroll
            for (u32 w = 0; w < W; w++) {
                // Averages of integers use another loop.
                if constexpr (Type<T>::FLOAT) {
                    set_lane(out[u], w, ending(acc[w]));
                } else {
                    set_lane(out[u], w, acc[w]);
                }
            }
        }
        store_all(table, destinations, offset, here, out);
    }
}

// The division of n elements: packs if all addresses have equal alignment; the ends (or else all elements) element by
// element.
struct Cut {
    Places packs, rest;
};

template <class T> __device__ inline Cut cut(const Table<T>& table, u64 n) {
    const u32 W = 16 / sizeof(T);
    Cut all = {{0, 0, 0, 0}, {n, 0, n, 0}};
    if (table.odd % 16 == 0) {
        const u64 to_aligned = ((0 - table.source[0]) & 15) / sizeof(T);
        const u64 head = n < to_aligned ? n : to_aligned;
        all.packs.units = (n - head) / W;
        all.packs.base = head * sizeof(T);
        all.rest = {n - all.packs.units * W, 0, head, all.packs.units * 16};
    }
    return all;
}

// The loops of a kernel for the common operations of training. FAR: for sources in peers' memory. NEAR: for this
// device's own memory, where one pack of each source in flight is enough. FEW: NEAR in a kernel that has no registers
// left for a loop for two sources.
enum class Loops { FAR, NEAR, FEW };

template <class T, Loops LOOPS>
__device__ inline void fold(Share share, const Table<T>& table, u64 n, u32 op, u32 sources, u32 destinations) {
    const Ending<T> ending(op, sources);
    const auto [packs, rest] = cut(table, n);
    const bool sum = op == SUM || (Type<T>::FLOAT && op == AVG);
    if (!sum || sources > 8) {
        fold_units<T, uint4>(share, table, op, ending, sources, destinations, packs);
    } else if (LOOPS == Loops::NEAR && sources == 2) {
        sum_packs<T, 2, 2>(share, table, ending, sources, destinations, packs);
    } else if (LOOPS != Loops::FAR || !Type<T>::FLOAT) {
        sum_packs<T, 8, 1>(share, table, ending, sources, destinations, packs);
    } else if (sources <= 2) {
        sum_packs<T, 2, 6>(share, table, ending, sources, destinations, packs);
    } else if (sources <= 4) {
        sum_packs<T, 4, 4>(share, table, ending, sources, destinations, packs);
    } else {
        sum_packs<T, 8, 2>(share, table, ending, sources, destinations, packs);
    }
    fold_units<T, BitsOf<T>>(share, table, op, ending, sources, destinations, rest);
}
