// Sum and dot product in two passes, with the same bits every run.
//
//   sum_partial_{f32,f64,f16,bf16}  (const T* x, A* partial, u64 n)              grid 256 x 256
//   dot_partial_{f32,f64,f16,bf16}  (const T* x, const T* y, A* partial, u64 n)  grid 256 x 256
//   sum_final_{f32,f64,f16,bf16}    (const A* partial, T* out, u32 count)        grid 1 x 256, count 256
//
// A, the accumulator, is double for f64 and float for the others. Pass 1 has 256 BLOCKS OF 256 THREADS for every
// n and writes partial[blockIdx.x]; pass 2 finishes both sums and dots. Other dimensions (at most 1024 threads per
// block) are also correct, but the order of the additions, and so the last bits, depend on the dimensions. They do not
// depend on the GPU, on timing or on the alignment of the slices. There are no atomics, since their order is not fixed.
//
// The order. The input is cut into groups of 16 bytes (4 f32, 2 f64, 8 f16 or bf16), missing elements count as 0;
// thread t of T takes the groups t, t + T, t + 2T, ... It adds each group pairwise, four groups pairwise, and these
// leaves of 16 f32 (8 f64, 32 half) one after another; a block is a binary tree in shared memory. So the error grows
// with n / 2^20 f32 additions and the depth of the trees, not with n. Products of two halves are exact in f32.
#include "common.cuh"

const u32 MAX_THREADS = 1024;

template <class T> struct Accumulator { typedef f32 type; };
template <> struct Accumulator<f64> { typedef f64 type; };

// A group in memory.
template <class T> struct alignas(16) Group {
    static const u32 WIDTH = 16 / sizeof(T);
    T lane[WIDTH];
};

// How a group is read: in one load, element by element, or the last one, which may be short.
enum Load { VECTOR, SCALAR, SHORT };

template <Load L, class T> __device__ inline Group<T> load(const T* x, u64 g, u64 n) {
    const u32 W = Group<T>::WIDTH;
    if (L == VECTOR) return *reinterpret_cast<const Group<T>*>(x + g * W);
    Group<T> group;
#pragma unroll
    for (u32 k = 0; k < W; k++) group.lane[k] = L == SCALAR || g * W + k < n ? x[g * W + k] : narrow<T>(0.0f);
    return group;
}

template <class A, u32 N> __device__ inline A pairwise(A* lane) {
#pragma unroll
    for (u32 width = N / 2; width > 0; width /= 2)
#pragma unroll
        for (u32 k = 0; k < width; k++) lane[k] = lane[2 * k] + lane[2 * k + 1];
    return lane[0];
}

template <class T> struct Sum {
    typedef typename Accumulator<T>::type A;
    const T* x;
    u64 n;

    __device__ bool aligned() const { return aligned16(x, x); }

    template <Load L> __device__ A group(u64 g) const {
        const u32 W = Group<T>::WIDTH;
        const Group<T> a = load<L>(x, g, n);
        A lane[W];
#pragma unroll
        for (u32 k = 0; k < W; k++) lane[k] = wide(a.lane[k]);
        return pairwise<A, W>(lane);
    }
};

template <class T> struct Dot {
    typedef typename Accumulator<T>::type A;
    const T* x;
    const T* y;
    u64 n;

    __device__ bool aligned() const { return aligned16(x, y); }

    template <Load L> __device__ A group(u64 g) const {
        const u32 W = Group<T>::WIDTH;
        const Group<T> a = load<L>(x, g, n), b = load<L>(y, g, n);
        A lane[W];
#pragma unroll
        for (u32 k = 0; k < W; k++) lane[k] = wide(a.lane[k]) * wide(b.lane[k]);
        return pairwise<A, W>(lane);
    }
};

// Adds this thread's share of the full groups, four independent groups at a time: 64 bytes in flight per thread
// saturate the memory. `g` becomes the first remaining group.
template <Load L, class Input> __device__ inline typename Input::A full_groups(const Input& input, u64& g, u64 full) {
    typedef typename Input::A A;
    const u64 step = grid_size();
    A total = 0;
    for (; g + 3 * step < full; g += 4 * step) {
        A leaf[4] = {input.template group<L>(g), input.template group<L>(g + step),
                     input.template group<L>(g + 2 * step), input.template group<L>(g + 3 * step)};
        total += pairwise<A, 4>(leaf);
    }
    return total;
}

// The block's total, valid in thread 0.
template <class A> __device__ inline A block_tree(A value) {
    __shared__ A lane[MAX_THREADS];
    lane[threadIdx.x] = value;
    u32 width = 1;
    while (width < blockDim.x) width *= 2;
    for (width /= 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width && threadIdx.x + width < blockDim.x) lane[threadIdx.x] += lane[threadIdx.x + width];
    }
    return lane[0];
}

template <class T, class Input> __device__ inline void reduce_partial(const Input& input, typename Input::A* partial) {
    const u64 full = input.n / Group<T>::WIDTH;
    const u64 groups = full + (input.n % Group<T>::WIDTH != 0);
    u64 g = grid_index();
    typename Input::A total =
        input.aligned() ? full_groups<VECTOR>(input, g, full) : full_groups<SCALAR>(input, g, full);
    for (; g < groups; g += grid_size()) total += input.template group<SHORT>(g);
    total = block_tree(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

#define REDUCE(T, ACC)                                                                                      \
    extern "C" __global__ void sum_partial_##T(const T* __restrict__ x, ACC* __restrict__ partial, u64 n) { \
        reduce_partial<T>(Sum<T>{x, n}, partial);                                          \
    }                                                                                                       \
    extern "C" __global__ void dot_partial_##T(const T* __restrict__ x, const T* __restrict__ y,            \
                                               ACC* __restrict__ partial, u64 n) {                          \
        reduce_partial<T>(Dot<T>{x, y, n}, partial);                                       \
    }                                                                                                       \
    extern "C" __global__ void sum_final_##T(const ACC* __restrict__ partial, T* __restrict__ out,          \
                                             u32 count) {                                                   \
        if (blockIdx.x != 0) return;                                                                        \
        ACC total = 0;                                                                                      \
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) total += partial[i];                          \
        total = block_tree(total);                                                                          \
        if (threadIdx.x == 0) *out = narrow<T>(total);                                                      \
    }

REDUCE(f32, float)
REDUCE(f64, double)
REDUCE(f16, float)
REDUCE(bf16, float)
