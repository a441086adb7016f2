// The types of the dtype names, and the grid-stride index: used by every family.
//
// Rules for all kernels here:
//   * an entry is named <operation>_<dtype>; slices come first as plain pointers, then scalars by value;
//   * loops stride over the grid with 64-bit indices, so any launch dimensions give the right result;
//   * half types compute in f32 and round once, to nearest even, when they store;
//   * the sources are compiled with --fmad=false: a fused multiply-add happens where the source says fma and
//     nowhere else, so that the software GPU can give the same bits (`f32::mul_add`).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// The half types as bits. f16 converts by the instructions that cuda_fp16.h wraps, so that a build needs only NVRTC.
// compute_75 has no instruction for bf16, but a bf16 is the upper half of an f32.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

// This thread's first element, and the distance to its next one.
__device__ inline u64 grid_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline u64 grid_size() { return (u64)gridDim.x * blockDim.x; }

// From storage to the type that arithmetic uses. Exact.
__device__ inline f32 wide(f32 x) { return x; }
__device__ inline f64 wide(f64 x) { return x; }
__device__ inline f32 wide(f16 x) {
    f32 y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline f32 wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// From the arithmetic type to storage: one rounding, to nearest even.
template <class T> __device__ T narrow(f32 x);
template <class T> __device__ T narrow(f64 x);

template <> __device__ inline f32 narrow<f32>(f32 x) { return x; }
template <> __device__ inline f32 narrow<f32>(f64 x) { return __double2float_rn(x); }
template <> __device__ inline f64 narrow<f64>(f32 x) { return (f64)x; }
template <> __device__ inline f64 narrow<f64>(f64 x) { return x; }
template <> __device__ inline f16 narrow<f16>(f32 x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ inline f16 narrow<f16>(f64 x) {
    f16 y;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
    return y;
}

template <> __device__ inline bf16 narrow<bf16>(f32 x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        // Rounding up could carry a NaN's mantissa into infinity: keep its top bits and make it quiet.
        return bf16{(u16)((bits >> 16) | 0x0040u)};
    }
#if __CUDA_ARCH__ >= 800
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#else
    // Half a unit in the last place, less one unless the kept part is odd: ties go to even.
    return bf16{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <> __device__ inline bf16 narrow<bf16>(f64 x) {
    // Through f32 by round-to-odd, since rounding to nearest twice can go wrong at ties (Boldo and Melquiond,
    // "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008): the inexact
    // part survives in the lowest bit, and f32 has 16 bits more than bf16, where 2 would do.
    f32 chopped = __double2float_rz(x);
    u32 odd = (f64)chopped == x ? 0u : 1u;
    return narrow<bf16>(__uint_as_float(__float_as_uint(chopped) | odd));
}

__device__ inline f32 fused(f32 a, f32 x, f32 y) { return fmaf(a, x, y); }
__device__ inline f64 fused(f64 a, f64 x, f64 y) { return fma(a, x, y); }

// True when both can be read and written in 16-byte pieces. Slices may start at any element.
__device__ inline bool aligned16(const void* a, const void* b) { return (((u64)a | (u64)b) & 15u) == 0; }
