// Quotients, smaller and larger ones, exponentials and roots, element by element; the smallest or largest of an array.
//
//   divide_N   (const N* x, const N* y, N* z, u64 n)                          z = x / y; of integers cut towards zero,
//                                                                             0 for y = 0, and it wraps
//   select_W   (const W* x, const W* y, W* z, u64 n, u64 infinity, u32 kind, u32 larger)    z = the larger or smaller
//   extreme_W  (const W* x, W* out, u64 n, u64 infinity, u32 kind, u32 larger)   out[block] = that of all in the block;
//                                                                                n > 0, at most 256 threads
//   unary_T    (const T* x, T* y, u64 n, u32 op)                              y = exp(x), sqrt(x) by op
//
// N are the ten types, T is f32, f64, f16 or bf16. W is u8, u16, u32 or u64: the bits of a type, of which `kind` says
// what they are. A float whose magnitude is beyond `infinity` is a NaN: then that is the result. -0 is less than 0. The
// output may be one of the inputs: each thread reads four elements, or a pack, before it writes them.
#include "pack.cuh"
#include "words.cuh"

// z[i] = f(x[i], y[i]), four at once where the addresses allow that.
template <class T, class F> __device__ inline void by_fours(const T* x, const T* y, T* z, u64 n, F f) {
    const bool whole = ((u64)x | (u64)y | (u64)z) % (4 * sizeof(T)) == 0;
    for (u64 at = 4 * grid_index(); at < n; at += 4 * grid_size()) {
        if (whole && at + 4 <= n) {
            const Chunk<T, 4> a = *(const Chunk<T, 4>*)(x + at), b = *(const Chunk<T, 4>*)(y + at);
            Chunk<T, 4> c;
            each<4>([&](u32 k) { c.lane[k] = f(a.lane[k], b.lane[k]); });
            *(Chunk<T, 4>*)(z + at) = c;
        } else {
#pragma unroll 1
            for (u64 i = at; i < at + 4 && i < n; i++) z[i] = f(x[i], y[i]);
        }
    }
}

template <class T> __device__ inline T quotient(T x, T y) {
    if constexpr (Type<T>::FLOAT) return narrow<T>(wide(x) / wide(y));
    else if constexpr (T(-1) < T(0)) return y == 0 ? (T)0 : y == -1 ? (T)((BitsOf<T>)0 - (BitsOf<T>)x) : (T)(x / y);
    else return y == 0 ? (T)0 : (T)(x / y);
}

template <class W> __device__ inline W better(W x, W y, u64 infinity, u32 kind, bool larger) {
    if ((W)(x & (W)~SIGN<W>) > infinity) return x;
    if ((W)(y & (W)~SIGN<W>) > infinity) return y;
    return (key(x, kind) < key(y, kind)) == larger ? y : x;
}

template <class W> __device__ inline void extreme(const W* x, W* out, u64 n, u64 infinity, u32 kind, bool larger) {
    __shared__ W best[256];
    const auto of = [&](W a, W b) { return better(a, b, infinity, kind, larger); };
    W own = x[0];
    const u64 packs = is_aligned(x) ? n / LANES<W> : 0;
    for (u64 i = grid_index(); i < packs; i += grid_size()) {
        const uint4 pack = *(const uint4*)(x + i * LANES<W>);
        each<LANES<W>>([&](u32 k) { own = of(own, lane<W>(pack, k)); });
    }
    each_other(packs * LANES<W>, n, [&](u64 i) { own = of(own, x[i]); });
    best[threadIdx.x] = own;
    for (u32 width = 128; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width && threadIdx.x + width < blockDim.x)
            best[threadIdx.x] = of(best[threadIdx.x], best[threadIdx.x + width]);
    }
    if (threadIdx.x == 0) out[blockIdx.x] = best[0];
}

template <class T> __device__ inline void unary(const T* x, T* y, u64 n, u32 op) {
    const auto result = [op](Acc<T> v) { return op == 0 ? exp_of(v) : sqrt_of(v); };
    const u64 tiles = in_tiles<T>(n, (u64)x | (u64)y);
    whole_tiles<false>(x, x, y, tiles, [&](u64, uint4 p, uint4) {
        return pack_of<T>([&](u32 k) { return result(wide_lane<T>(p, k)); });
    });
    each_other(tiles, n, [&](u64 i) { y[i] = narrow_one<T>(result(wide(x[i]))); });
}

#define DIVIDE(N)                                                                            \
    extern "C" __global__ void divide_##N(const N* x, const N* y, N* z, u64 n) {             \
        by_fours(x, y, z, n, [](N a, N b) { return quotient<N>(a, b); });                    \
    }
#define WORDS(W)                                                                                                    \
    extern "C" __global__ void select_##W(const W* x, const W* y, W* z, u64 n, u64 infinity, u32 kind, u32 larger) { \
        by_fours(x, y, z, n, [=](W a, W b) { return better<W>(a, b, infinity, kind, larger); });                    \
    }                                                                                                               \
    extern "C" __global__ void extreme_##W(const W* x, W* out, u64 n, u64 infinity, u32 kind, u32 larger) {         \
        extreme<W>(x, out, n, infinity, kind, larger);                                                              \
    }
#define UNARY(T) \
    extern "C" __global__ void unary_##T(const T* x, T* y, u64 n, u32 op) { unary(x, y, n, op); }

DIVIDE(f32) DIVIDE(f64) DIVIDE(f16) DIVIDE(bf16)
DIVIDE(i8) DIVIDE(u8) DIVIDE(i32) DIVIDE(u32) DIVIDE(i64) DIVIDE(u64)
WORDS(u8) WORDS(u16) WORDS(u32) WORDS(u64)
UNARY(f32) UNARY(f64) UNARY(f16) UNARY(bf16)
