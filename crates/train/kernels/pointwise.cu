// Arithmetic of two arrays, and activations with their derivatives, with or without a bias for each column.
//
//   binary_T             (const T* x, const T* y, T* z, u64 n, u32 op)         z = x + y, x - y, x * y by op
//   activate_T           (const T* x, const T* b, T* y, u64 n, u32 cols, u32 f)  y = f(x + b[column])
//   activate_backward_T  (const T* dy, const T* x, const T* b, T* dx, u64 n, u32 cols, u32 f)
//                                                                              dx = dy * f'(x + b[column])
//
// T is f32, f64, f16 or bf16; arithmetic is in f32, of f64 in f64, and rounds once. The output may be one of the
// inputs: each thread reads a pack before it writes it. `b` may be null: then there is no bias, and cols does not
// matter. A NaN stays a NaN.
#include "pack.cuh"

enum Binary : u32 { ADD, SUBTRACT, MULTIPLY };

template <class T> __device__ inline void binary(const T* x, const T* y, T* z, u64 n, u32 op) {
    const auto result = [op](Acc<T> p, Acc<T> q) { return op == ADD ? p + q : op == SUBTRACT ? p - q : p * q; };
    const u64 tiles = in_tiles<T>(n, (u64)x | (u64)y | (u64)z);
    whole_tiles<true>(x, y, z, tiles, [&](u64, uint4 a, uint4 b) {
        return pack_of<T>([&](u32 k) { return result(wide_lane<T>(a, k), wide_lane<T>(b, k)); });
    });
    each_other(tiles, n, [&](u64 i) { z[i] = narrow_one<T>(result(wide(x[i]), wide(y[i]))); });
}

// 1 / (1 + exp(-x)). QUICK: in four instructions, for half types.
template <bool QUICK, class A> __device__ inline A sigmoid(A x) {
    if constexpr (QUICK) return quick_inverse(1.0f + quick_exp2(-1.44269504088896340736f * x));
    else return A(1) / (A(1) + exp_of(-x));
}

// Beyond this far from 0 all factors of `x` are 0 or 1, and their slopes 0. As the other factor of such a 0, `x`
// counts as no more than this: infinity times 0 is NaN, where the limit is 0. A NaN becomes a number here, and the
// other factor is NaN.
template <class A> constexpr A FAR = A(1000);
__device__ inline f32 larger(f32 a, f32 b) { return fmaxf(a, b); }
__device__ inline f64 larger(f64 a, f64 b) { return fmax(a, b); }
template <class A> __device__ inline A bounded_below(A x) { return larger(x, -FAR<A>); }
template <class A> __device__ inline A bounded(A x, A far = FAR<A>) { return -larger(-larger(x, -far), -far); }

// The functions: `at(x)`, and `slope(x)`, its derivative. A is f32 or f64. QUICK: the result is rounded to a half type,
// so errors of some roundings of f32 do not count.
struct Identity {
    template <bool, class A> static __device__ A at(A x) { return x; }
    template <bool, class A> static __device__ A slope(A) { return A(1); }
};
struct Relu {
    template <bool, class A> static __device__ A at(A x) { return x < A(0) ? A(0) : x; }
    template <bool, class A> static __device__ A slope(A x) { return x <= A(0) ? A(0) : A(1); }
};
struct Gelu {
    // P(X <= x), X standard normal.
    template <bool QUICK, class A> static __device__ A below(A x) {
        if constexpr (QUICK) {
            // 1 / (1 + exp(-x p(x^2))), with p such that x * below(x) is off by 7e-8 at most, and by 5e-4 of itself
            // for x > -4.
            const f32 z = x * x;
            f32 p = fmaf(3.50752665e-9f, z, -2.61563766e-7f);
            p = fmaf(p, z, 7.83785944e-6f);
            p = fmaf(p, z, -1.09612574e-4f);
            p = fmaf(p, z, -6.97799889e-5f);
            p = fmaf(p, z, 7.26746031e-2f);
            p = fmaf(p, z, 1.59576533f);
            return sigmoid<true>(x * p);
        } else {
            return A(0.5) * (A(1) + erf_of(x * A(0.70710678118654752440)));
        }
    }
    template <bool QUICK, class A> static __device__ A at(A x) { return bounded_below(x) * below<QUICK>(x); }
    template <bool QUICK, class A> static __device__ A slope(A x) {
        A density;
        if constexpr (QUICK) density = quick_exp2(-0.72134752044448170368f * x * x);
        else density = exp_of(A(-0.5) * x * x);
        return below<QUICK>(x) + bounded(x) * (A(0.39894228040143267794) * density);
    }
};
struct GeluTanh {
    // The form of Hendrycks and Gimpel (2016), 0.5 x (1 + tanh u): (1 + tanh u) / 2 = sigmoid(2 u).
    template <class A> static __device__ A twice_inner(A x) {
        return x * (A(1.59576912160573071176) + A(1.59576912160573071176 * 0.044715) * x * x);
    }
    template <bool QUICK, class A> static __device__ A at(A x) {
        return bounded_below(x) * sigmoid<QUICK>(twice_inner(x));
    }
    template <bool QUICK, class A> static __device__ A slope(A x) {
        const A s = sigmoid<QUICK>(twice_inner(x));
        // The quick sigmoid may be 1 and a bit, and `x` is cubed: so its bound is where the sigmoid is 0 in f32.
        x = bounded(x, QUICK ? A(10) : FAR<A>);
        return s + x * (s * (A(1) - s)) * (A(1.59576912160573071176) + A(1.59576912160573071176 * 0.134145) * x * x);
    }
};
struct Silu {
    template <bool QUICK, class A> static __device__ A at(A x) { return bounded_below(x) * sigmoid<QUICK>(x); }
    template <bool QUICK, class A> static __device__ A slope(A x) {
        const A s = sigmoid<QUICK>(x);
        return s * (A(1) + bounded(x) * (A(1) - s));
    }
};

// Calls CALL<function>(..) for the function of number `f`, as `Activation` in src/ops/activation.rs counts them.
#define BY_FUNCTION(f, CALL, ...)                        \
    switch (f) {                                         \
    case 0: CALL<Identity>(__VA_ARGS__); break;          \
    case 1: CALL<Relu>(__VA_ARGS__); break;              \
    case 2: CALL<Gelu>(__VA_ARGS__); break;              \
    case 3: CALL<GeluTanh>(__VA_ARGS__); break;          \
    default: CALL<Silu>(__VA_ARGS__);                    \
    }

// The biases of row-major elements, or none.
template <class T> struct Bias {
    const T* b;
    u32 cols;

    // Whether a pack of columns is a pack of memory, and its place a number of 32 bits: a remainder of 64 bits takes
    // longer than the memory does.
    __device__ bool by_packs(u64 n) const { return !b || (cols % LANES<T> == 0 && is_aligned(b) && n >> 32 == 0); }
    __device__ uint4 pack(u64 at) const { return *(const uint4*)(b + (u32)at % cols); }
    __device__ Acc<T> add(u64 at, Acc<T> x) const { return b ? x + wide(b[at % cols]) : x; }
};

template <class T> constexpr bool QUICK = sizeof(T) == 2;

template <class F, bool BIAS, class T>
__device__ inline void activate_tiles(const T* x, Bias<T> bias, T* y, u64 end) {
    whole_tiles<false>(x, x, y, end, [&](u64 at, uint4 a, uint4) {
        const uint4 c = BIAS ? bias.pack(at) : a;
        return pack_of<T>([&](u32 k) {
            const Acc<T> v = wide_lane<T>(a, k);
            return F::template at<QUICK<T>>(BIAS ? v + wide_lane<T>(c, k) : v);
        });
    });
}
template <class F, class T> __device__ inline void activate_by(const T* x, Bias<T> bias, T* y, u64 n) {
    u64 tiles = 0;
    if constexpr (sizeof(T) < 8) {
        tiles = bias.by_packs(n) ? in_tiles<T>(n, (u64)x | (u64)y) : 0;
        if (bias.b) activate_tiles<F, true>(x, bias, y, tiles);
        else activate_tiles<F, false>(x, bias, y, tiles);
    }
    each_other(tiles, n, [&](u64 i) {
        y[i] = narrow_one<T>(F::template at<QUICK<T>>(bias.add(i, wide(x[i]))));
    });
}

template <class F, bool BIAS, class T>
__device__ inline void backward_tiles(const T* dy, const T* x, Bias<T> bias, T* dx, u64 end) {
    whole_tiles<true>(dy, x, dx, end, [&](u64 at, uint4 d, uint4 a) {
        const uint4 c = BIAS ? bias.pack(at) : a;
        return pack_of<T>([&](u32 k) {
            const Acc<T> v = wide_lane<T>(a, k);
            return wide_lane<T>(d, k) * F::template slope<QUICK<T>>(BIAS ? v + wide_lane<T>(c, k) : v);
        });
    });
}
template <class F, class T>
__device__ inline void backward_by(const T* dy, const T* x, Bias<T> bias, T* dx, u64 n) {
    u64 tiles = 0;
    if constexpr (sizeof(T) < 8) {
        tiles = bias.by_packs(n) ? in_tiles<T>(n, (u64)dy | (u64)x | (u64)dx) : 0;
        if (bias.b) backward_tiles<F, true>(dy, x, bias, dx, tiles);
        else backward_tiles<F, false>(dy, x, bias, dx, tiles);
    }
    each_other(tiles, n, [&](u64 i) {
        dx[i] = narrow_one<T>(wide(dy[i]) * F::template slope<QUICK<T>>(bias.add(i, wide(x[i]))));
    });
}

#define POINTWISE(T)                                                                                              \
    extern "C" __global__ void binary_##T(const T* x, const T* y, T* z, u64 n, u32 op) { binary(x, y, z, n, op); } \
    extern "C" __global__ void activate_##T(const T* x, const T* b, T* y, u64 n, u32 cols, u32 f) {               \
        const Bias<T> bias = {b, cols};                                                                           \
        BY_FUNCTION(f, activate_by, x, bias, y, n)                                                                \
    }                                                                                                             \
    extern "C" __global__ void activate_backward_##T(const T* dy, const T* x, const T* b, T* dx, u64 n, u32 cols, \
                                                     u32 f) {                                                     \
        const Bias<T> bias = {b, cols};                                                                           \
        BY_FUNCTION(f, backward_by, dy, x, bias, dx, n)                                                           \
    }

POINTWISE(f32)
POINTWISE(f64)
POINTWISE(f16)
POINTWISE(bf16)
