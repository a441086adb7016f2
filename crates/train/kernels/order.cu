// Sums of all elements before one, and elements in order.
//
//   scan_sums_N  (const N* x, A* sums, u64 n)                    sums[tile] = the sum of a tile
//   scan_N       (const N* x, const A* offsets, N* y, u64 n, u32 exclusive)
//                                            y[i] = offsets[tile] + the sum of the tile up to i, with x[i] or without
//   digits_W     (const W* x, u32* counts, u64 n, u32 shift, u32 kind)
//                                            counts[digit][tile] = how often 4 bits of the keys are `digit`
//   scatter_W    (const W* x, W* y, const u32* places, u64 n, u32 shift, u32 kind)
//                                            the elements of a tile, by digits, from places[digit][tile] on; those of
//                                            one digit stay in order
//
// A tile is 2048 elements, for a block of 256 THREADS. N are the ten types. A is N, but f32 for f16 and bf16, whose
// results are rounded once; integers wrap. W is u8, u16, u32 or u64: the bits of a type, of which `kind` says what they
// are. The order of additions is fixed, so each run gives the same bits. A radix sort is digits, a scan of the counts,
// and scatter, for each 4 bits (Satish, Harris and Garland, 2009).
#include "words.cuh"

const u32 THREADS = 256, ITEMS = 8, TILE = THREADS * ITEMS, DIGITS = 16;

// The sum of `x` over all threads before this one; `total` becomes that of all. A fixed tree.
template <class A> __device__ inline A before(A x, A& total) {
    __shared__ A sums[2][THREADS];
    u32 from = 0;
    sums[0][threadIdx.x] = x;
    for (u32 step = 1; step < THREADS; step *= 2, from = 1 - from) {
        __syncthreads();
        const A own = sums[from][threadIdx.x];
        sums[1 - from][threadIdx.x] = threadIdx.x < step ? own : (A)(sums[from][threadIdx.x - step] + own);
    }
    __syncthreads();
    total = sums[from][THREADS - 1];
    const A sum = threadIdx.x == 0 ? A() : sums[from][threadIdx.x - 1];
    // The next call writes the same memory.
    __syncthreads();
    return sum;
}

// Integers wrap: their sums are those of the bits.
template <class N> struct Summed {
    typedef BitsOf<N> Type;
    static __device__ Type of(N x) { return to_bits(x); }
    static __device__ N back(Type x) { return from_bits<N>(x); }
};
template <class T, class A> struct Float {
    typedef A Type;
    static __device__ A of(T x) { return wide(x); }
    static __device__ T back(A x) { return narrow<T>(x); }
};
template <> struct Summed<f32> : Float<f32, f32> {};
template <> struct Summed<f64> : Float<f64, f64> {};
template <> struct Summed<f16> : Float<f16, f32> {};
template <> struct Summed<bf16> : Float<bf16, f32> {};

// Calls `f(tile, item)` for the tiles of this block; `item` is the first of this thread's.
template <class F> __device__ inline void each_tile(u64 n, F f) {
    for (u64 tile = blockIdx.x; tile * TILE < n; tile += gridDim.x) f(tile, tile * TILE + threadIdx.x * ITEMS);
}

template <class N, class A> __device__ inline void scan_sums(const N* x, A* sums, u64 n) {
    each_tile(n, [&](u64 tile, u64 item) {
        typename Summed<N>::Type own = 0, total;
        for (u64 i = item; i < item + ITEMS && i < n; i++) own += Summed<N>::of(x[i]);
        before(own, total);
        if (threadIdx.x == 0) sums[tile] = (A)total;
    });
}

template <class N, class A> __device__ inline void scan(const N* x, const A* offsets, N* y, u64 n, bool exclusive) {
    typedef typename Summed<N>::Type Sum;
    each_tile(n, [&](u64 tile, u64 item) {
        Sum own = 0, total;
        for (u64 i = item; i < item + ITEMS && i < n; i++) own += Summed<N>::of(x[i]);
        Sum sum = (Sum)offsets[tile] + before(own, total);
        for (u64 i = item; i < item + ITEMS && i < n; i++) {
            const Sum next = sum + Summed<N>::of(x[i]);
            y[i] = Summed<N>::back(exclusive ? sum : next);
            sum = next;
        }
    });
}

// How often each digit occurs: at most 2048 times, 16 bits each.
struct Counts {
    u64 four[DIGITS / 4];

    __device__ u32 at(u32 digit) const {
        u64 word = four[0];
        each<DIGITS / 4>([&](u32 k) { word = digit / 4 == k ? four[k] : word; });
        return (u32)(word >> 16 * (digit % 4)) & 0xffffu;
    }
    __device__ void count(u32 digit) {
        each<DIGITS / 4>([&](u32 k) { four[k] += digit / 4 == k ? 1ull << 16 * (digit % 4) : 0; });
    }
};
__device__ inline Counts operator+(Counts a, const Counts& b) {
    each<DIGITS / 4>([&](u32 k) { a.four[k] += b.four[k]; });
    return a;
}

template <class W> __device__ inline u32 digit_of(W x, u32 shift, u32 kind) {
    return (u32)(key(x, kind) >> shift) % DIGITS;
}

template <class W> __device__ inline void digits(const W* x, u32* counts, u64 n, u32 shift, u32 kind) {
    const u64 tiles = (n + TILE - 1) / TILE;
    each_tile(n, [&](u64 tile, u64 item) {
        Counts own = {}, total;
        for (u64 i = item; i < item + ITEMS && i < n; i++) own.count(digit_of(x[i], shift, kind));
        before(own, total);
        if (threadIdx.x < DIGITS) counts[threadIdx.x * tiles + tile] = total.at(threadIdx.x);
    });
}

template <class W> __device__ inline void scatter(const W* x, W* y, const u32* places, u64 n, u32 shift, u32 kind) {
    __shared__ W sorted[TILE];
    __shared__ u32 begin[DIGITS];
    const u64 tiles = (n + TILE - 1) / TILE;
    each_tile(n, [&](u64 tile, u64 item) {
        Counts own = {}, total;
        for (u64 i = item; i < item + ITEMS && i < n; i++) own.count(digit_of(x[i], shift, kind));
        Counts rank = before(own, total);
        if (threadIdx.x < DIGITS) {
            u32 sum = 0;
            for (u32 digit = 0; digit < threadIdx.x; digit++) sum += total.at(digit);
            begin[threadIdx.x] = sum;
        }
        __syncthreads();
        for (u64 i = item; i < item + ITEMS && i < n; i++) {
            const u32 digit = digit_of(x[i], shift, kind);
            sorted[begin[digit] + rank.at(digit)] = x[i];
            rank.count(digit);
        }
        __syncthreads();
        // In order, so that neighbours are written together.
        for (u32 i = threadIdx.x; i < TILE && tile * TILE + i < n; i += THREADS) {
            const u32 digit = digit_of(sorted[i], shift, kind);
            const u32 place = places[digit * tiles + tile] + (i - begin[digit]);
            // A graph of another device may have written x since its digits were counted.
            if (place < n) y[place] = sorted[i];
        }
        __syncthreads();
    });
}

#define SCAN(N, A)                                                                                             \
    extern "C" __global__ void scan_sums_##N(const N* x, A* sums, u64 n) { scan_sums(x, sums, n); }            \
    extern "C" __global__ void scan_##N(const N* x, const A* offsets, N* y, u64 n, u32 exclusive) {            \
        scan(x, offsets, y, n, exclusive);                                                                     \
    }
#define SORT(W)                                                                                                \
    extern "C" __global__ void digits_##W(const W* x, u32* counts, u64 n, u32 shift, u32 kind) {               \
        digits(x, counts, n, shift, kind);                                                                     \
    }                                                                                                          \
    extern "C" __global__ void scatter_##W(const W* x, W* y, const u32* places, u64 n, u32 shift, u32 kind) {  \
        scatter(x, y, places, n, shift, kind);                                                                 \
    }

SCAN(f32, f32) SCAN(f64, f64) SCAN(f16, f32) SCAN(bf16, f32)
SCAN(i8, i8) SCAN(u8, u8) SCAN(i32, i32) SCAN(u32, u32) SCAN(i64, i64) SCAN(u64, u64)
SORT(u8) SORT(u16) SORT(u32) SORT(u64)
