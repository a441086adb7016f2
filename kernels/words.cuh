// Elements as words of their size: the order of numbers of all ten types by their bits. For `number.cu` and `order.cu`.
#pragma once
#include "lanes.cuh"

// What the bits are.
enum Kind : u32 { UNSIGNED, SIGNED, FLOAT };

template <class W> constexpr W SIGN = (W)((W)1 << (8 * sizeof(W) - 1));

// An unsigned number for each, in the order of the numbers: -0 comes before 0, and NaNs are beyond the infinities.
template <class W> __device__ inline W key(W bits, u32 kind) {
    return kind == UNSIGNED ? bits : kind == SIGNED || !(bits & SIGN<W>) ? (W)(bits ^ SIGN<W>) : (W)~bits;
}

// Calls `f(i)` for 0 <= i < N, unrolled.
template <u32 N, class F> __device__ inline void each(F f) {
#pragma unroll
    for (u32 i = 0; i < N; i++) f(i);
}
