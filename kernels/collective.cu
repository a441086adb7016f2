// The local half of a ring step: adds a received piece to this device's piece.
//
//   add_{f32,f64}        (T* dst, const T* src, u64 n)            dst[i] += src[i]
//   add_scale_{f32,f64}  (T* dst, const T* src, u64 n, T factor)  dst[i] = (dst[i] + src[i]) * factor
//
// `src` may be a peer's memory and `dst` is this device's. `add_scale` is the last step of an average: it divides
// while the sum is still in a register. Every element is computed alone, so the bits do not depend on the launch
// dimensions, on how a buffer is cut into pieces or on its alignment.
#include "common.cuh"

template <class T, class Op>
__device__ inline void combine(T* __restrict__ dst, const T* __restrict__ src, u64 n, Op op) {
    const u32 W = 16 / sizeof(T);
    struct alignas(16) Pack {
        T lane[W];
    };
    u64 packed = 0;
    if (aligned16(dst, src)) {
        packed = n / W;
        Pack* to = reinterpret_cast<Pack*>(dst);
        const Pack* from = reinterpret_cast<const Pack*>(src);
        const u64 step = grid_size();
        u64 i = grid_index();
        // Four packs of the source before the first is used: a load from a peer takes microseconds.
        for (; i + 3 * step < packed; i += 4 * step) {
            Pack theirs[4], ours[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) theirs[j] = from[i + j * step];
#pragma unroll
            for (u32 j = 0; j < 4; j++) ours[j] = to[i + j * step];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
#pragma unroll
                for (u32 k = 0; k < W; k++) ours[j].lane[k] = op(ours[j].lane[k], theirs[j].lane[k]);
                to[i + j * step] = ours[j];
            }
        }
        for (; i < packed; i += step) {
            Pack theirs = from[i], ours = to[i];
#pragma unroll
            for (u32 k = 0; k < W; k++) ours.lane[k] = op(ours.lane[k], theirs.lane[k]);
            to[i] = ours;
        }
    }
    for (u64 i = packed * W + grid_index(); i < n; i += grid_size()) dst[i] = op(dst[i], src[i]);
}

template <class T> struct Add {
    __device__ T operator()(T a, T b) const { return a + b; }
};

template <class T> struct AddScale {
    T factor;
    __device__ T operator()(T a, T b) const { return (a + b) * factor; }
};

#define ADD(T)                                                                                            \
    extern "C" __global__ void add_##T(T* __restrict__ dst, const T* __restrict__ src, u64 n) {           \
        combine(dst, src, n, Add<T>{});                                                                   \
    }                                                                                                     \
    extern "C" __global__ void add_scale_##T(T* __restrict__ dst, const T* __restrict__ src, u64 n,       \
                                             T factor) {                                                  \
        combine(dst, src, n, AddScale<T>{factor});                                                        \
    }

ADD(f32)
ADD(f64)
