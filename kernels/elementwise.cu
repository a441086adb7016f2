// One element in, one element out: fill, scale, axpy, cast.
//
//   fill_{u8,u16,u32,u64}      (T* x, u64 n, T value)          x[i] = value; a dtype uses the width of its bits
//   scale_{f32,f64,f16,bf16}   (T* x, u64 n, A a)              x[i] = a * x[i]
//   axpy_{f32,f64,f16,bf16}    (const T* x, T* y, u64 n, A a)  y[i] = fma(a, x[i], y[i])
//   cast_<from>_<to>           (const F* x, T* y, u64 n)       y[i] = x[i], rounded to nearest even
//
// A is double for f64 and float for the others.
#include "common.cuh"

#define FILL(T)                                                                        \
    extern "C" __global__ void fill_##T(T* __restrict__ x, u64 n, T value) {           \
        for (u64 i = grid_index(); i < n; i += grid_size()) x[i] = value;              \
    }

FILL(u8)
FILL(u16)
FILL(u32)
FILL(u64)

#define SCALE_AXPY(T, A)                                                                              \
    extern "C" __global__ void scale_##T(T* __restrict__ x, u64 n, A a) {                             \
        for (u64 i = grid_index(); i < n; i += grid_size()) x[i] = narrow<T>(a * wide(x[i]));         \
    }                                                                                                 \
    extern "C" __global__ void axpy_##T(const T* __restrict__ x, T* __restrict__ y, u64 n, A a) {     \
        for (u64 i = grid_index(); i < n; i += grid_size())                                           \
            y[i] = narrow<T>(fused(a, wide(x[i]), wide(y[i])));                                       \
    }

SCALE_AXPY(f32, float)
SCALE_AXPY(f64, double)
SCALE_AXPY(f16, float)
SCALE_AXPY(bf16, float)

#define CAST(F, T)                                                                                     \
    extern "C" __global__ void cast_##F##_##T(const F* __restrict__ x, T* __restrict__ y, u64 n) {     \
        for (u64 i = grid_index(); i < n; i += grid_size()) y[i] = narrow<T>(wide(x[i]));              \
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
