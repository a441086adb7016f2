// One element in, one element out: fill, scale, axpy, cast.
//
//   fill_{u8,u16,u32,u64}      (T* x, u64 n, T value)          x[i] = value; a dtype uses the width of its bits
//   scale_{f32,f64,f16,bf16}   (T* x, u64 n, A a)              x[i] = a * x[i]
//   axpy_{f32,f64,f16,bf16}    (const T* x, T* y, u64 n, A a)  y[i] = fma(a, x[i], y[i])
//   cast_<from>_<to>           (const F* x, T* y, u64 n)       y[i] = x[i], rounded to nearest even
//
// A is double for f64 and float for the others.
#include "pack.cuh"

#define FILL(T)                                                                        \
    extern "C" __global__ void fill_##T(T* __restrict__ x, u64 n, T value) {           \
        for (u64 i = grid_index(); i < n; i += grid_size()) x[i] = value;              \
    }

FILL(u8)
FILL(u16)
FILL(u32)
FILL(u64)

template <class T> __device__ inline void axpy(const T* x, T* y, u64 n, Acc<T> a) {
    const bool whole = aligned16(x, y);
    for (u64 g = grid_index(); g * LANES<T> < n; g += grid_size()) {
        const u64 at = g * LANES<T>;
        const uint4 p = load_pack(x, at, n, whole), q = load_pack(y, at, n, whole);
        store_pack(y, at, n, whole,
                   pack_of<T>([&](u32 k) { return fused(a, wide(lane<T>(p, k)), wide(lane<T>(q, k))); }));
    }
}

#define SCALE_AXPY(T, A)                                                                              \
    extern "C" __global__ void scale_##T(T* x, u64 n, A a) {                                          \
        by_fours(x, x, n, [a](T x) { return narrow<T>(a * wide(x)); });                               \
    }                                                                                                 \
    extern "C" __global__ void axpy_##T(const T* __restrict__ x, T* __restrict__ y, u64 n, A a) {     \
        axpy(x, y, n, a);                                                                             \
    }

SCALE_AXPY(f32, float)
SCALE_AXPY(f64, double)
SCALE_AXPY(f16, float)
SCALE_AXPY(bf16, float)

#define CAST(F, T)                                                                                     \
    extern "C" __global__ void cast_##F##_##T(const F* __restrict__ x, T* __restrict__ y, u64 n) {     \
        by_fours(x, y, n, [](F x) { return narrow<T>(wide(x)); });                                     \
    }

CAST(f32, f64)
CAST(f32, f16)
CAST(f32, bf16)
CAST(f64, f32)
CAST(f64, f16)
CAST(f64, bf16)
CAST(f16, f32)
CAST(f16, f64)
CAST(f16, bf16)
CAST(bf16, f32)
CAST(bf16, f64)
CAST(bf16, f16)
