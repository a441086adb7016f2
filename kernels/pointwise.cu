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
    const bool whole = aligned16(x, y) && is_aligned(z);
    for (u64 g = grid_index(); g * LANES<T> < n; g += grid_size()) {
        const u64 at = g * LANES<T>;
        const uint4 a = load_pack(x, at, n, whole), b = load_pack(y, at, n, whole);
        store_pack(z, at, n, whole, pack_of<T>([&](u32 k) {
            const Acc<T> p = wide(lane<T>(a, k)), q = wide(lane<T>(b, k));
            return op == ADD ? p + q : op == SUBTRACT ? p - q : p * q;
        }));
    }
}

// The functions: `at(x)`, and `slope(x)`, its derivative. A is f32 or f64.
struct Identity {
    template <class A> static __device__ A at(A x) { return x; }
    template <class A> static __device__ A slope(A) { return A(1); }
};
struct Relu {
    template <class A> static __device__ A at(A x) { return x < A(0) ? A(0) : x; }
    template <class A> static __device__ A slope(A x) { return x <= A(0) ? A(0) : A(1); }
};
struct Gelu {
    // x * P(X <= x), X standard normal.
    template <class A> static __device__ A at(A x) {
        return A(0.5) * x * (A(1) + erf_of(x * A(0.70710678118654752440)));
    }
    template <class A> static __device__ A slope(A x) {
        const A below = A(0.5) * (A(1) + erf_of(x * A(0.70710678118654752440)));
        return below + x * (A(0.39894228040143267794) * exp_of(A(-0.5) * x * x));
    }
};
struct GeluTanh {
    // The form of Hendrycks and Gimpel (2016) with tanh.
    template <class A> static __device__ A inner(A x) {
        return A(0.79788456080286535588) * (x + A(0.044715) * x * x * x);
    }
    template <class A> static __device__ A at(A x) { return A(0.5) * x * (A(1) + tanh_of(inner(x))); }
    template <class A> static __device__ A slope(A x) {
        const A t = tanh_of(inner(x));
        const A inner_slope = A(0.79788456080286535588) * (A(1) + A(0.134145) * x * x);
        return A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * inner_slope;
    }
};
struct Silu {
    template <class A> static __device__ A at(A x) { return x / (A(1) + exp_of(-x)); }
    template <class A> static __device__ A slope(A x) {
        const A s = A(1) / (A(1) + exp_of(-x));
        return s * (A(1) + x * (A(1) - s));
    }
};

// Returns CALL<function>(..) for the function of number `f`, as `Activation` in src/ops/pointwise.rs counts them.
#define BY_FUNCTION(f, CALL, ...)                        \
    switch (f) {                                         \
    case 0: return CALL<Identity>(__VA_ARGS__);          \
    case 1: return CALL<Relu>(__VA_ARGS__);              \
    case 2: return CALL<Gelu>(__VA_ARGS__);              \
    case 3: return CALL<GeluTanh>(__VA_ARGS__);          \
    default: return CALL<Silu>(__VA_ARGS__);             \
    }

// The biases of a pack of row-major elements.
template <class T> struct Bias {
    const T* b;
    u32 cols;
    bool by_packs, small;

    __device__ Bias(const T* b, u32 cols, u64 n)
        : b(b), cols(cols), by_packs(cols % LANES<T> == 0 && is_aligned(b)), small(n >> 32 == 0) {}

    __device__ uint4 at(u64 at) const {
        // A remainder of 64 bits takes longer than the memory does.
        u32 c = small ? (u32)at % cols : (u32)(at % cols);
        if (by_packs) return *(const uint4*)(b + c);
        uint4 pack = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (u32 k = 0; k < LANES<T>; k++) {
            set_lane<T>(pack, k, b[c]);
            c = c + 1 == cols ? 0 : c + 1;
        }
        return pack;
    }
};

template <class F, class T> __device__ inline void activate_by(const T* x, const T* b, T* y, u64 n, u32 cols) {
    const bool whole = aligned16(x, y);
    const Bias<T> bias(b, cols, n);
    for (u64 g = grid_index(); g * LANES<T> < n; g += grid_size()) {
        const u64 at = g * LANES<T>;
        const uint4 a = load_pack(x, at, n, whole), c = b ? bias.at(at) : make_uint4(0, 0, 0, 0);
        store_pack(y, at, n, whole, pack_of<T>([&](u32 k) {
            const Acc<T> v = wide(lane<T>(a, k));
            return F::at(b ? v + wide(lane<T>(c, k)) : v);
        }));
    }
}
template <class T> __device__ inline void activate(const T* x, const T* b, T* y, u64 n, u32 cols, u32 f) {
    BY_FUNCTION(f, activate_by, x, b, y, n, cols)
}

template <class F, class T>
__device__ inline void backward_by(const T* dy, const T* x, const T* b, T* dx, u64 n, u32 cols) {
    const bool whole = aligned16(dy, x) && is_aligned(dx);
    const Bias<T> bias(b, cols, n);
    for (u64 g = grid_index(); g * LANES<T> < n; g += grid_size()) {
        const u64 at = g * LANES<T>;
        const uint4 d = load_pack(dy, at, n, whole), a = load_pack(x, at, n, whole);
        const uint4 c = b ? bias.at(at) : make_uint4(0, 0, 0, 0);
        store_pack(dx, at, n, whole, pack_of<T>([&](u32 k) {
            const Acc<T> v = wide(lane<T>(a, k));
            return wide(lane<T>(d, k)) * F::slope(b ? v + wide(lane<T>(c, k)) : v);
        }));
    }
}
template <class T>
__device__ inline void activate_backward(const T* dy, const T* x, const T* b, T* dx, u64 n, u32 cols, u32 f) {
    BY_FUNCTION(f, backward_by, dy, x, b, dx, n, cols)
}

#define POINTWISE(T)                                                                                              \
    extern "C" __global__ void binary_##T(const T* x, const T* y, T* z, u64 n, u32 op) { binary(x, y, z, n, op); } \
    extern "C" __global__ void activate_##T(const T* x, const T* b, T* y, u64 n, u32 cols, u32 f) {               \
        activate(x, b, y, n, cols, f);                                                                            \
    }                                                                                                             \
    extern "C" __global__ void activate_backward_##T(const T* dy, const T* x, const T* b, T* dx, u64 n, u32 cols, \
                                                     u32 f) {                                                     \
        activate_backward(dy, x, b, dx, n, cols, f);                                                              \
    }

POINTWISE(f32)
POINTWISE(f64)
POINTWISE(f16)
POINTWISE(bf16)
