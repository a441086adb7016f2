// Cross-entropy over rows whose columns (the vocabulary) lie on several devices: Megatron's vocabulary-parallel loss
// (Shoeybi et al., 2019), with one collective between two kernels.
//
//   vocabulary_stats_T  (const T* x, const u32* labels, A* stats, u64 rows, u32 cols)
//   vocabulary_loss_T   (const T* x, const u32* labels, const A* all, T* dx, A* loss, u64 rows, u32 cols, u32 members,
//                        A scale)
//
// `x` is rows of this device's `cols` columns. A label that is one of them is its number among them; any other label
// is `cols` or more. `stats` is four arrays of `rows` numbers: the largest element of each row (-infinity if there are
// no columns), the sum of the exponentials of the differences to it, the element at the label (or 0), and whether the
// label is here (1 or 0). `all` is the stats of all members, one after the other.
//
// The order of additions over members is their order, and over columns it depends on `cols` alone: so all members get
// the same bits of the loss. A row of blockDim.x threads, a power of two. The elements are loaded one by one: on a GPU
// the neighbours' loads are one transaction.
#include "pack.cuh"

template <class A> __device__ inline A infinity();
template <> __device__ inline f32 infinity<f32>() { return __int_as_float(0x7f800000); }
template <> __device__ inline f64 infinity<f64>() { return __longlong_as_double(0x7ff0000000000000ll); }
__device__ inline f32 larger(f32 a, f32 b) { return fmaxf(a, b); }
__device__ inline f64 larger(f64 a, f64 b) { return fmax(a, b); }

// `op` over the threads of the block, the same bits in all. `op` is commutative.
template <class A, class Op> __device__ inline A across(A a, Op op) {
    __shared__ A values[256];
    __syncthreads();  // The values of the last call have been read.
    values[threadIdx.x] = a;
    for (u32 far = blockDim.x / 2; far > 0; far /= 2) {
        __syncthreads();
        if (threadIdx.x < far) values[threadIdx.x] = op(values[threadIdx.x], values[threadIdx.x + far]);
    }
    __syncthreads();
    return values[0];
}

template <class T, class A>
__device__ inline void stats_of(const T* x, const u32* labels, A* stats, u64 rows, u32 cols) {
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* in = x + row * cols;
        A top = -infinity<A>();
        for (u32 c = threadIdx.x; c < cols; c += blockDim.x) top = larger(top, wide(in[c]));
        top = across(top, [](A a, A b) { return larger(a, b); });
        // Differences to -infinity are no numbers; a row of -infinity sums to 0.
        const A shift = top == -infinity<A>() ? A(0) : top;
        A sum = 0;
        for (u32 c = threadIdx.x; c < cols; c += blockDim.x) sum += exp_of(wide(in[c]) - shift);
        sum = across(sum, [](A a, A b) { return a + b; });
        if (threadIdx.x == 0) {
            const bool here = labels[row] < cols;
            stats[row] = top;
            stats[rows + row] = sum;
            stats[2 * rows + row] = here ? wide(in[labels[row]]) : A(0);
            stats[3 * rows + row] = here ? A(1) : A(0);
        }
    }
}

// `dx` may be `x`.
template <class T, class A>
__device__ inline void loss_of(const T* x, const u32* labels, const A* all, T* dx, A* loss, u64 rows, u32 cols,
                               u32 members, A scale) {
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const auto stat = [&](u32 member, u32 which) { return all[((u64)member * 4 + which) * rows + row]; };
        A top = -infinity<A>(), sum = 0, there = 0, here = 0;
        for (u32 m = 0; m < members; m++) top = larger(top, stat(m, 0));
        for (u32 m = 0; m < members; m++) {
            const A own = stat(m, 0);
            // A sum that is no number stays so.
            sum += own == -infinity<A>() ? stat(m, 1) : stat(m, 1) * exp_of(own - top);
            there += stat(m, 2);
            here += stat(m, 3);
        }
        // A label that is nobody's, and a row of -infinity, have no loss.
        const bool known = here == A(1) && top != -infinity<A>();
        const A nan = infinity<A>() - infinity<A>();
        if (threadIdx.x == 0) loss[row] = known ? log_of(sum) - (there - top) : nan;
        const A factor = known ? A(1) / sum : nan;
        const u32 label = labels[row];
        for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
            const A share = exp_of(wide(x[row * cols + c]) - top) * factor;
            dx[row * cols + c] = narrow<T>((c == label ? share - A(1) : share) * scale);
        }
    }
}

#define VOCABULARY(T, A)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) vocabulary_stats_##T(const T* x, const u32* labels, A* stats,    \
                                                                           u64 rows, u32 cols) {                       \
        stats_of(x, labels, stats, rows, cols);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) vocabulary_loss_##T(                                             \
        const T* x, const u32* labels, const A* all, T* dx, A* loss, u64 rows, u32 cols, u32 members, A scale) {       \
        loss_of(x, labels, all, dx, loss, rows, cols, members, scale);                                                 \
    }

VOCABULARY(f32, f32)
VOCABULARY(f64, f64)
VOCABULARY(f16, f32)
VOCABULARY(bf16, f32)
