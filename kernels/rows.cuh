// Rows of a row-major matrix, in the registers of the threads that work on them: for rows.cu and norm.cuh.
//
// A row belongs to one warp, or to a power of two of warps: blockDim.x is the threads of a row, and blockDim.y the rows
// of a block. src/collective/algorithm/norm.rs chooses the threads of a row by its width alone. Thread t of T takes the
// packs t, t + T, ..; it keeps the first four in registers, and reads further ones again in each pass. Norms add up
// each pack by itself, then the packs of a thread, then the threads by butterflies. So the bits of a row depend on its
// elements, its width and its type: not on the number of rows, its place, or its alignment.
#pragma once
#include "pack.cuh"

const u32 ALL = 0xffffffffu;
const u32 KEPT = 4;

template <class A> __device__ inline A infinity();
template <> __device__ inline f32 infinity<f32>() { return __int_as_float(0x7f800000); }
template <> __device__ inline f64 infinity<f64>() { return __longlong_as_double(0x7ff0000000000000ll); }
template <class A> __device__ inline A nan() { return infinity<A>() - infinity<A>(); }
__device__ inline f32 larger(f32 a, f32 b) { return fmaxf(a, b); }
__device__ inline f64 larger(f64 a, f64 b) { return fmax(a, b); }

// A barrier of the threads of a row of several warps. Only kernels with ROWS_SHARE_BLOCKS may have several such rows in
// a block: a barrier without a fixed number takes all 16 barriers of a block, so fewer blocks fit on a multiprocessor.
// With it, kernels of rows.cu took up to twice as long on an H200.
__device__ inline void sync_row() {
#ifdef ROWS_SHARE_BLOCKS
    if (blockDim.y == 1) __syncthreads();
    else sync_some(1 + threadIdx.y, blockDim.x);
#else
    __syncthreads();
#endif
}

// `op` over the threads of a row, the same bits in all. `op` is commutative. With fewer `threads` their values come
// again in each further `threads` of the row.
template <class V, class Op> __device__ inline V across(V v, Op op, u32 threads) {
    __shared__ V all_warps[32];
    __syncwarp();
#pragma unroll
    for (u32 far = 16; far > 0; far /= 2) v = op(v, v.from(far));
    if (threads > 32) {
        const u32 count = threads / 32;
        V* warps = all_warps + threadIdx.y * count;
        sync_row();  // The values of the last call have been read.
        if (threadIdx.x % 32 == 0 && threadIdx.x < threads) warps[threadIdx.x / 32] = v;
        sync_row();
        v = warps[threadIdx.x % count];
        for (u32 far = count / 2; far > 0; far /= 2) v = op(v, v.from(far));
    }
    return v;
}

template <class V, class Op> __device__ inline V across(V v, Op op) { return across(v, op, blockDim.x); }

template <class A> struct One {
    A a;
    __device__ One from(u32 far) const { return {__shfl_xor_sync(ALL, a, far)}; }
};
template <class A> struct Two {
    A a, b;
    __device__ Two from(u32 far) const { return {__shfl_xor_sync(ALL, a, far), __shfl_xor_sync(ALL, b, far)}; }
};
template <class A> struct Found {
    A value;
    u32 at;
    __device__ Found from(u32 far) const {
        return {__shfl_xor_sync(ALL, value, far), __shfl_xor_sync(ALL, at, far)};
    }
};

template <class A> __device__ inline A sum_across(A a) {
    return across(One<A>{a}, [](One<A> p, One<A> q) { return One<A>{p.a + q.a}; }).a;
}
template <class A> __device__ inline Two<A> sums_across(A a, A b) {
    return across(Two<A>{a, b}, [](Two<A> p, Two<A> q) { return Two<A>{p.a + q.a, p.b + q.b}; });
}
template <class A> __device__ inline A max_across(A a) {
    return across(One<A>{a}, [](One<A> p, One<A> q) { return One<A>{larger(p.a, q.a)}; }).a;
}

// Calls `f(p, k)` for each of this thread's packs: `p` is the first element of the k-th one.
template <class T, bool FITS, class F> __device__ inline void each_pack(u32 cols, F f) {
    const u32 step = blockDim.x * LANES<T>;
    u32 p = threadIdx.x * LANES<T>;
    if constexpr (FITS) {
#pragma unroll
        for (u32 k = 0; k < KEPT; k++, p += step)
            if (p < cols) f(p, k);
    } else {
#pragma unroll 1
        for (u32 k = 0; p < cols; p += step, k++) f(p, k);
    }
}

// One row. This thread's first packs are in registers, if they are whole and aligned.
template <class T, bool FITS> struct Row {
    const T* at;
    u32 cols;
    bool whole;
    uint4 kept[KEPT];

    __device__ Row(const T* x, u64 row, u32 cols) : at(x + row * cols), cols(cols), whole(FITS || is_aligned(at)) {
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            const u32 p = (threadIdx.x + k * blockDim.x) * LANES<T>;
            kept[k] = whole && p + LANES<T> <= cols ? *(const uint4*)(at + p) : make_uint4(0, 0, 0, 0);
        }
    }

    // A row that is in registers already.
    __device__ Row(const uint4 (&packs)[KEPT], u32 cols) : at(nullptr), cols(cols), whole(true) {
        static_assert(FITS, "nothing is read again");
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) kept[k] = packs[k];
    }

    __device__ uint4 pack(u32 p, u32 k) const {
        if (!FITS && (k >= KEPT || !whole || p + LANES<T> > cols)) return load_pack(at, p, cols, whole);
        // By selects, where `k` is no constant: registers cannot be indexed.
        const uint4 low = k == 0 ? kept[0] : kept[1], high = k == 2 ? kept[2] : kept[3];
        return k < 2 ? low : high;
    }

    // Whether lane `i` of the pack at `p` is an element of the row.
    __device__ bool has(u32 p, u32 i) const { return FITS || p + i < cols; }
};

// Calls `f(row)` for each row of this thread's, the same in all threads of the row.
template <class F> __device__ inline void each_row(u64 rows, F f) {
    const u64 step = (u64)gridDim.x * blockDim.y;
    for (u64 row = (u64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += step) f(row);
}

// The mean of a row (0 without MEAN) and 1 / sqrt(variance + eps), in two passes over the row. MEAN: of the layer norm;
// the RMS norm has no mean.
template <bool MEAN, bool FITS, class T>
__device__ inline Two<Acc<T>> norm_stats(const Row<T, FITS>& in, Acc<T> eps) {
    typedef Acc<T> A;
    A mean = 0;
    if (MEAN) {
        A sum = 0;
        each_pack<T, FITS>(in.cols, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
            A part = 0;
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++) part += wide(lane<T>(pack, i));
            sum += part;
        });
        mean = sum_across(sum) / A(in.cols);
    }
    A squares = 0;
    each_pack<T, FITS>(in.cols, [&](u32 p, u32 k) {
        const uint4 pack = in.pack(p, k);
        A part = 0;
#pragma unroll
        for (u32 i = 0; i < LANES<T>; i++) {
            const A v = wide(lane<T>(pack, i)) - mean;
            if (in.has(p, i)) part += v * v;
        }
        squares += part;
    });
    return {mean, A(1) / sqrt_of(sum_across(squares) / A(in.cols) + eps)};
}

// A pack of (x - mean) * rstd * gamma + beta; the RMS norm has no beta.
template <bool MEAN, class T>
__device__ inline uint4 normed(const uint4& x, const Two<Acc<T>>& stats, const uint4& gamma, const uint4& beta) {
    return pack_of<T>([&](u32 i) {
        const Acc<T> v = (wide(lane<T>(x, i)) - stats.a) * stats.b * wide(lane<T>(gamma, i));
        return MEAN ? v + wide(lane<T>(beta, i)) : v;
    });
}
