// The arithmetic of reductions: the values x[0], x[1], ... of one element are folded in rank order.
//
//   acc = wide(x[0]);  acc = op(acc, wide(x[1]));  ...  result = narrow(acc)
//
// Half types accumulate in f32 and round once, at the end; integers wrap. So the bits depend only on the values and the
// order of ranks. (The payload of a NaN may differ from the software GPU's.)
#pragma once
#include "common.cuh"

typedef signed char i8;
typedef int i32;
typedef long long i64;

// The numbers of `ReduceOp`.
enum Op : u32 { SUM, PROD, MIN, MAX, AVG, SCALED };

// Factors of `SCALED`, by rank.
struct Factors {
    f64 f[8];
};

template <class T> struct Type {
    static const bool FLOAT = false;
    typedef T Acc;
};
template <> struct Type<f32> {
    static const bool FLOAT = true;
    typedef f32 Acc;
};
template <> struct Type<f64> {
    static const bool FLOAT = true;
    typedef f64 Acc;
};
template <> struct Type<f16> : Type<f32> {};
template <> struct Type<bf16> : Type<f32> {};
template <class T> using Acc = typename Type<T>::Acc;

// The unsigned type of a size; signed overflow is undefined, unsigned wraps.
template <u32 BYTES> struct Bits;
template <> struct Bits<1> { typedef u8 Type; };
template <> struct Bits<2> { typedef u16 Type; };
template <> struct Bits<4> { typedef u32 Type; };
template <> struct Bits<8> { typedef u64 Type; };
template <class T> using BitsOf = typename Bits<sizeof(T)>::Type;

template <class T> __device__ inline T from_bits(BitsOf<T> bits) { return (T)bits; }
template <> __device__ inline f32 from_bits<f32>(u32 bits) { return __uint_as_float(bits); }
template <> __device__ inline f64 from_bits<f64>(u64 bits) { return __longlong_as_double((i64)bits); }
template <> __device__ inline f16 from_bits<f16>(u16 bits) { return f16{bits}; }
template <> __device__ inline bf16 from_bits<bf16>(u16 bits) { return bf16{bits}; }

template <class T> __device__ inline BitsOf<T> to_bits(T x) { return (BitsOf<T>)x; }
template <> __device__ inline u32 to_bits<f32>(f32 x) { return __float_as_uint(x); }
template <> __device__ inline u64 to_bits<f64>(f64 x) { return (u64)__double_as_longlong(x); }
template <> __device__ inline u16 to_bits<f16>(f16 x) { return x.bits; }
template <> __device__ inline u16 to_bits<bf16>(bf16 x) { return x.bits; }

// `f` as Rust's `as` converts it: towards zero, saturating, NaN to 0. `hi` may be one more than the largest.
template <class T> __device__ inline T saturated(f64 f, f64 lo, T least, f64 hi, T largest) {
    return f != f ? (T)0 : f <= lo ? least : f >= hi ? largest : (T)f;
}
template <class A> __device__ A factor_as(f64 f);
template <> __device__ inline f32 factor_as<f32>(f64 f) { return __double2float_rn(f); }
template <> __device__ inline f64 factor_as<f64>(f64 f) { return f; }
template <> __device__ inline i8 factor_as<i8>(f64 f) { return saturated<i8>(f, -128.0, -128, 127.0, 127); }
template <> __device__ inline u8 factor_as<u8>(f64 f) { return saturated<u8>(f, 0.0, 0, 255.0, 255); }
template <> __device__ inline i32 factor_as<i32>(f64 f) {
    return saturated<i32>(f, -2147483648.0, (i32)0x80000000u, 2147483647.0, 0x7fffffff);
}
template <> __device__ inline u32 factor_as<u32>(f64 f) { return saturated<u32>(f, 0.0, 0, 4294967295.0, ~0u); }
template <> __device__ inline i64 factor_as<i64>(f64 f) {
    return saturated<i64>(f, -9223372036854775808.0, (i64)(1ull << 63), 9223372036854775808.0, (i64)(~0ull >> 1));
}
template <> __device__ inline u64 factor_as<u64>(f64 f) {
    return saturated<u64>(f, 0.0, 0, 18446744073709551616.0, ~0ull);
}

template <class A> __device__ inline void fill_factors(A (&factor)[16], const Factors& lo, const Factors& hi) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        factor[k] = factor_as<A>(lo.f[k]);
        factor[8 + k] = factor_as<A>(hi.f[k]);
    }
}

template <class T> __device__ inline Acc<T> widened(T x) {
    if constexpr (Type<T>::FLOAT) {
        return wide(x);
    } else {
        return x;
    }
}

template <class A> __device__ inline A added(A a, A b) {
    if constexpr (Type<A>::FLOAT) {
        return a + b;
    } else {
        return (A)((BitsOf<A>)a + (BitsOf<A>)b);
    }
}
template <class A> __device__ inline A multiplied(A a, A b) {
    if constexpr (Type<A>::FLOAT) {
        return a * b;
    } else {
        return (A)((BitsOf<A>)a * (BitsOf<A>)b);
    }
}

// One step of one element's fold. `f` is the factor of the rank of `x`, for SCALED.
//
// A NaN stays. Of equal values the value of the lower rank stays (-0.0 and 0.0 are equal).
template <class T, u32 OP> __device__ inline Acc<T> next(Acc<T> a, Acc<T> x, Acc<T> f) {
    if constexpr (OP == PROD) {
        return multiplied(a, x);
    } else if constexpr (OP == MIN) {
        return x < a || x != x ? x : a;
    } else if constexpr (OP == MAX) {
        return x > a || x != x ? x : a;
    } else if constexpr (OP == SCALED) {
        return added(a, multiplied(x, f));
    } else {
        return added(a, x);
    }
}

// The last step of a fold of `count` values. Floats: times 1 / count for an average, else times 1, which changes
// nothing. Integers divide, towards zero.
template <class T> struct Ending {
    Acc<T> by;
    bool average;

    __device__ Ending(u32 op, u32 count) : average(op == AVG) {
        if constexpr (Type<T>::FLOAT) {
            by = average ? (Acc<T>)1 / (Acc<T>)count : (Acc<T>)1;
        } else {
            by = (T)count;
        }
    }
    __device__ T operator()(Acc<T> a) const {
        if constexpr (Type<T>::FLOAT) {
            return narrow<T>(a * by);
        } else {
            return average ? (T)(a / by) : a;
        }
    }
};

template <class T, u32 OP, u32 N> __device__ inline void fold_all(Acc<T> (&acc)[N], const Acc<T> (&x)[N], Acc<T> f) {
#pragma unroll
    for (u32 i = 0; i < N; i++) acc[i] = next<T, OP>(acc[i], x[i], f);
}

// Folds N elements of one rank into N accumulators, by an operation that is looked up once for all of them.
template <class T, u32 N>
__device__ inline void fold_any(u32 op, u32 rank, Acc<T> (&acc)[N], const Acc<T> (&x)[N], const Acc<T>* factor) {
    const Acc<T> f = op == SCALED ? factor[rank] : Acc<T>();
    if (rank == 0) {
#pragma unroll
        for (u32 i = 0; i < N; i++) acc[i] = op == SCALED ? multiplied(x[i], f) : x[i];
        return;
    }
    switch (op) {
    case PROD: return fold_all<T, PROD>(acc, x, f);
    case MIN: return fold_all<T, MIN>(acc, x, f);
    case MAX: return fold_all<T, MAX>(acc, x, f);
    case SCALED: return fold_all<T, SCALED>(acc, x, f);
    default: return fold_all<T, SUM>(acc, x, f);
    }
}

// Selects one of several registers. Registers cannot be indexed by a number that the compiler does not know.
template <class X, u32 N> __device__ inline X pick(const X (&from)[N], u32 at) {
    X x = from[0];
#pragma unroll
    for (u32 i = 1; i < N; i++) {
        if (at == i) x = from[i];
    }
    return x;
}
