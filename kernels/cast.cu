// Conversions from and to integers, by the rules of Rust's `as`. Those between floating-point types are in
// elementwise.cu.
//
//   cast_<from>_<to>  (const F* x, T* y, u64 n)    y[i] = x[i] as T
//
// A floating-point number is cut towards zero; what is too large becomes the largest integer, what is too small the
// smallest, a NaN becomes 0. An integer keeps the low bits of another integer. An integer becomes the nearest
// floating-point number, ties to even, rounded once; in f16 one of magnitude 65520 or more becomes an infinity.
#include "lanes.cuh"

// An integer in f64. Of 64 bits, those that f64 has no room for leave a trace in the last bit kept: so rounding the
// result to a half type gives what rounding the integer would.
template <class F> __device__ inline f64 with_trace(F x) {
    if constexpr (sizeof(F) < 8) {
        return (f64)x;
    } else {
        const bool negative = F(-1) < F(0) && x < F(0);
        u64 m = negative ? 0 - (u64)x : (u64)x;
        if (m >> 53) m = (m & ~0x7ffull) | (u64)((m & 0x7ff) != 0) << 11;
        return negative ? -(f64)m : (f64)m;
    }
}

template <class T, class F> __device__ inline T cast(F x) {
    if constexpr (Type<F>::FLOAT) {
        return factor_as<T>((f64)wide(x));
    } else if constexpr (!Type<T>::FLOAT) {
        return (T)x;
    } else if constexpr (sizeof(T) == 2) {
        return narrow<T>(with_trace(x));
    } else {
        return (T)x;
    }
}

#define CAST(F, T)                                                                                  \
    extern "C" __global__ void cast_##F##_##T(const F* __restrict__ x, T* __restrict__ y, u64 n) {  \
        by_fours(x, y, n, [](F x) { return cast<T>(x); });                                          \
    }
// Between a floating-point type and all integers, both ways.
#define FLOAT(F)                                                                                      \
    CAST(F, i8) CAST(F, u8) CAST(F, i32) CAST(F, u32) CAST(F, i64) CAST(F, u64)                       \
    CAST(i8, F) CAST(u8, F) CAST(i32, F) CAST(u32, F) CAST(i64, F) CAST(u64, F)

FLOAT(f32)
FLOAT(f64)
FLOAT(f16)
FLOAT(bf16)
CAST(i8, u8) CAST(i8, i32) CAST(i8, u32) CAST(i8, i64) CAST(i8, u64)
CAST(u8, i8) CAST(u8, i32) CAST(u8, u32) CAST(u8, i64) CAST(u8, u64)
CAST(i32, i8) CAST(i32, u8) CAST(i32, u32) CAST(i32, i64) CAST(i32, u64)
CAST(u32, i8) CAST(u32, u8) CAST(u32, i32) CAST(u32, i64) CAST(u32, u64)
CAST(i64, i8) CAST(i64, u8) CAST(i64, i32) CAST(i64, u32) CAST(i64, u64)
CAST(u64, i8) CAST(u64, u8) CAST(u64, i32) CAST(u64, u32) CAST(u64, i64)
