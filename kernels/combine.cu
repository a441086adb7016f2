// Folds slices of several devices into one, or copies one to several, in one pass over NVLink: each device computes its
// part and writes the result to its destinations (NCCL's "RSxLD_AGxST", src/device/symmetric/all_reduce.cuh there).
//
//   combine_{f32,f64,f16,bf16,i8,u8,i32,u32,i64,u64}
//           (Meet meet, u64 n, u32 op, u32 sources, u32 destinations, Factors lo, Factors hi,
//            const T* s0, .. s15, T* d0, .. d15)               d[j][i] = fold of s[0][i], s[1][i], ...  for i < n
//   pairs   (Meet meet, u32 count, u32 blocks_per_pair, Sizes lo, Sizes hi,
//            const u8* s0, .. s15, u8* d0, .. d15)             d[k] = s[k], by blocks_per_pair blocks each
//
// fold.cuh defines `op` and the order of a fold, meet.cuh defines meetings. A single source is copied unchanged, for
// every operation but SCALED. A source may also be a destination, element for element: one thread reads and writes an
// element, and reads it from all sources before it writes any destination. Each element is computed separately, so the
// bits do not depend on launch dimensions or alignment.
//
// Kernels that meet have at most BLOCKS blocks, the same number on all members, all resident at once.
#include "combine.cuh"

// Bytes of each pair.
struct Sizes {
    u64 bytes[8];
};

// Data for several destinations move piece by piece, each piece by one block: four packs of 16 bytes for each thread,
// to one destination and then to the next. (4 H200s gathered 256 MB in 581 us with this size. With twice the size,
// which keeps one link waiting while others are busy, they needed 603 us.)
const u64 PIECE = 32 << 10;

template <class T>
__device__ inline void combine(const Table<T>& table, u64 n, u32 op, u32 sources, u32 destinations) {
    if (sources != 1 || op == SCALED) {
        return fold<T, Loops::FAR>({grid_index(), grid_size()}, table, n, op, sources, destinations);
    }
    // All blocks have the same number of pieces.
    const u64 all = n * sizeof(T), rounds = all / (gridDim.x * PIECE + 1) + 1, line = rounds * gridDim.x * 128;
    const u64 piece = (all + line - 1) / line * 128;
#pragma unroll 1
    for (u64 at = blockIdx.x * piece; at < all; at += gridDim.x * piece) {
        const u64 bytes = all - at < piece ? all - at : piece;
        move_elements<T>({threadIdx.x, blockDim.x}, bytes, table.odd, table.source[0] + at, destinations,
                         [&](u32 j) { return table.destination[j] + at; });
    }
}

template <class T>
__device__ inline void fill_table(Table<T>& table, u32 op, u32 sources, u32 destinations, const Factors& lo,
                                  const Factors& hi, const u64 (&s)[MOST], const u64 (&d)[MOST]) {
    u64 odd = 0;
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        table.source[k] = s[k];
        table.destination[k] = d[k];
        if (k < sources) odd |= s[k] ^ s[0];
        if (k < destinations) odd |= d[k] ^ s[0];
    }
    table.odd = odd;
    if (op == SCALED) fill_factors(table.factor, lo, hi);
}

#define SIXTEEN(T, x)                                                                                              \
    T x##0, T x##1, T x##2, T x##3, T x##4, T x##5, T x##6, T x##7, T x##8, T x##9, T x##10, T x##11, T x##12,     \
        T x##13, T x##14, T x##15
#define ADDRESSES(x)                                                                                               \
    {(u64)x##0, (u64)x##1, (u64)x##2,  (u64)x##3,  (u64)x##4,  (u64)x##5,  (u64)x##6,  (u64)x##7,                  \
     (u64)x##8, (u64)x##9, (u64)x##10, (u64)x##11, (u64)x##12, (u64)x##13, (u64)x##14, (u64)x##15}

#define COMBINE(T)                                                                                                 \
    KERNEL combine_##T(Meet meet, u64 n, u32 op, u32 sources, u32 destinations, Factors lo, Factors hi,               \
                    SIXTEEN(const T*, s), SIXTEEN(T*, d)) {                                                        \
        __shared__ Table<T> table;                                                                                 \
        const u64 source[MOST] = ADDRESSES(s), destination[MOST] = ADDRESSES(d);                                   \
        if (threadIdx.x == 0) fill_table(table, op, sources, destinations, lo, hi, source, destination);           \
        Barrier barrier(meet, table.epoch);                                                                        \
        if (barrier.start()) {                                                                                     \
            combine(table, n, op, sources, destinations);                                                          \
            barrier.end();                                                                                         \
        }                                                                                                          \
        barrier.leave();                                                                                           \
    }

EACH_TYPE(COMBINE)

KERNEL pairs(Meet meet, u32 count, u32 blocks_per_pair, Sizes lo, Sizes hi,
                                                           SIXTEEN(const u8*, s), SIXTEEN(u8*, d)) {
    __shared__ u32 epoch[MOST];
    const u64 sources[MOST] = ADDRESSES(s), destinations[MOST] = ADDRESSES(d);
    const u32 pair = blockIdx.x / blocks_per_pair;
    u64 source = 0, destination = 0, bytes = 0;
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        if (k == pair && k < count) {
            source = sources[k];
            destination = destinations[k];
            bytes = k < 8 ? lo.bytes[k % 8] : hi.bytes[k % 8];
        }
    }
    Barrier barrier(meet, epoch);
    if (barrier.start()) {
        const u64 first = (u64)(blockIdx.x % blocks_per_pair) * blockDim.x + threadIdx.x;
        move_bytes({first, (u64)blocks_per_pair * blockDim.x}, bytes, source ^ destination, source, 1,
                   [&](u32) { return destination; });
        barrier.end();
    }
    barrier.leave();
}
