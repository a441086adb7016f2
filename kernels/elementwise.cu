// One element in, one element out: fill, scale, axpy, cast.
//
//   fill_{u8,u16,u32,u64}      (T* x, u64 n, T value)          x[i] = value; a dtype uses the width of its bits
//   scale_{f32,f64,f16,bf16}   (T* x, u64 n, A a)              x[i] = a * x[i]
//   axpy_{f32,f64,f16,bf16}    (const T* x, T* y, u64 n, A a)  y[i] = fma(a, x[i], y[i])
//   cast_<from>_<to>           (const F* x, T* y, u64 n)       y[i] = x[i], rounded to nearest even
//
// A is double for f64 and float for the others.
#include "pack.cuh"

// In packs, but for what is before the first whole one and after the last.
template <class T> __device__ inline void fill(T* x, u64 n, T value) {
    const u64 to_pack = (16 - (u64)x % 16) % 16 / sizeof(T), head = to_pack < n ? to_pack : n;
    const u64 packs = (n - head) / LANES<T>, body = packs * LANES<T>;
    const u32 low = sizeof(T) == 1 ? value * 0x01010101u : sizeof(T) == 2 ? value * 0x00010001u : (u32)value;
    const u32 high = sizeof(T) == 8 ? (u32)((u64)value >> 32) : low;
    for (u64 i = grid_index(); i < packs; i += grid_size())
        store((u64)(x + head + i * LANES<T>), make_uint4(low, high, low, high));
    each_other(body, n, [&](u64 i) { x[i - body < head ? i - body : i] = value; });
}

#define FILL(T) \
    extern "C" __global__ void fill_##T(T* __restrict__ x, u64 n, T value) { fill(x, n, value); }

FILL(u8)
FILL(u16)
FILL(u32)
FILL(u64)

template <class T> __device__ inline void scale(T* x, u64 n, Acc<T> a) {
    const u64 tiles = in_tiles<T>(n, (u64)x);
    whole_tiles<false>(x, x, x, tiles, [&](u64, uint4 p, uint4) {
        return pack_of<T>([&](u32 k) { return a * wide_lane<T>(p, k); });
    });
    each_other(tiles, n, [&](u64 i) { x[i] = narrow_one<T>(a * wide(x[i])); });
}

template <class T> __device__ inline void axpy(const T* x, T* y, u64 n, Acc<T> a) {
    const u64 tiles = in_tiles<T>(n, (u64)x | (u64)y);
    whole_tiles<true>(x, y, y, tiles, [&](u64, uint4 p, uint4 q) {
        return pack_of<T>([&](u32 k) { return fused(a, wide_lane<T>(p, k), wide_lane<T>(q, k)); });
    });
    each_other(tiles, n, [&](u64 i) { y[i] = narrow_one<T>(fused(a, wide(x[i]), wide(y[i]))); });
}

#define SCALE_AXPY(T, A)                                                                                            \
    extern "C" __global__ void scale_##T(T* x, u64 n, A a) { scale(x, n, a); }                                      \
    extern "C" __global__ void axpy_##T(const T* __restrict__ x, T* __restrict__ y, u64 n, A a) { axpy(x, y, n, a); }

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
