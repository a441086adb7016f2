// Packs of 16 bytes of an array or of a row: the operations of `pointwise.cu`, `rows.cu` and `embedding.cu` load and
// store them.
//
// A pack holds the elements `at .. at + LANES`. It is moved by one instruction where its address allows that, and
// element by element otherwise. Which elements share a pack, and which thread takes it, never depends on the address.
// So the bits of a result do not depend on where an array or a row begins.
#pragma once
#include "access.cuh"
#include "lanes.cuh"

template <class T> constexpr u32 LANES = 16 / sizeof(T);

__device__ inline bool is_aligned(const void* at) { return (u64)at % 16 == 0; }

// A pack that is zero but for lane `k`, which need not be a constant. Loops over lanes that are not unrolled are for
// the ends of arrays and for unaligned ones, where size counts more than speed.
template <class T> __device__ inline uint4 only_lane(u32 k, T x) {
    if constexpr (sizeof(T) == 8) {
        const u32 low = (u32)to_bits(x), high = (u32)(to_bits(x) >> 32);
        return k == 0 ? make_uint4(low, high, 0, 0) : make_uint4(0, 0, low, high);
    } else {
        const u32 word = k * sizeof(T) / 4, bits = (u32)to_bits(x) << (8 * (k * sizeof(T) % 4));
        return make_uint4(word == 0 ? bits : 0, word == 1 ? bits : 0, word == 2 ? bits : 0, word == 3 ? bits : 0);
    }
}
template <class T> __device__ inline T lane_at(uint4 pack, u32 k) {
    if constexpr (sizeof(T) == 8) {
        return k == 0 ? lane<T>(pack, 0) : lane<T>(pack, 1);
    } else {
        const u32 word = k * sizeof(T) / 4, low = word == 0 ? pack.x : pack.y, high = word == 2 ? pack.z : pack.w;
        return from_bits<T>((BitsOf<T>)((word < 2 ? low : high) >> (8 * (k * sizeof(T) % 4))));
    }
}

// The pack at element `at` of `x`; elements from `end` on are zeros. `whole`: `x + at` is aligned to 16 bytes.
template <class T> __device__ inline uint4 load_pack(const T* x, u64 at, u64 end, bool whole) {
    if (whole && at + LANES<T> <= end) return *(const uint4*)(x + at);
    uint4 pack = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (u32 k = 0; k < LANES<T> && at + k < end; k++) {
        const uint4 one = only_lane<T>(k, x[at + k]);
        pack = make_uint4(pack.x | one.x, pack.y | one.y, pack.z | one.z, pack.w | one.w);
    }
    return pack;
}

template <class T> __device__ inline void store_pack(T* x, u64 at, u64 end, bool whole, uint4 pack) {
    if (whole && at + LANES<T> <= end) {
        *(uint4*)(x + at) = pack;
        return;
    }
#pragma unroll 1
    for (u32 k = 0; k < LANES<T> && at + k < end; k++) x[at + k] = lane_at<T>(pack, k);
}

// Two numbers in a half type, each rounded once, in one instruction where there is one: from compute capability 8.0 on.
template <class T> __device__ inline u32 narrow_two(f32 low, f32 high) {
    return (u32)narrow<T>(low).bits | (u32)narrow<T>(high).bits << 16;
}
#if __CUDA_ARCH__ >= 800
template <> __device__ inline u32 narrow_two<f16>(f32 low, f32 high) {
    u32 two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
template <> __device__ inline u32 narrow_two<bf16>(f32 low, f32 high) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
#endif

// A pack of `f(k)` for each lane `k`, each rounded once.
template <class T, class F> __device__ inline uint4 pack_of(F f) {
    if constexpr (sizeof(T) == 2) {
        return make_uint4(narrow_two<T>(f(0), f(1)), narrow_two<T>(f(2), f(3)), narrow_two<T>(f(4), f(5)),
                          narrow_two<T>(f(6), f(7)));
    } else {
        uint4 pack = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (u32 k = 0; k < LANES<T>; k++) set_lane<T>(pack, k, narrow<T>(f(k)));
        return pack;
    }
}

// A number in a half type, with the bits that `narrow_two` gives it.
template <class T> __device__ inline T narrow_one(Acc<T> x) {
    if constexpr (sizeof(T) == 2) return from_bits<T>((u16)narrow_two<T>(x, 0.0f));
    else return narrow<T>(x);
}

// A tile is 512 packs: two for each thread of a block of 256. The elements in whole tiles of `n`, if the addresses that
// `bits` is the union of are aligned; the others are for `each_other`.
const u32 HALF_TILE = 256;
template <class T> __device__ inline u64 in_tiles(u64 n, u64 bits) {
    const u64 tile = 2 * HALF_TILE * LANES<T>;
    return bits % 16 == 0 ? n / tile * tile : 0;
}

// y = f(at, a, b) for the packs of `end` elements; without TWO, `b` is not read. A thread loads both packs before it
// stores one, and has no ends to look after. There is one copy of `f`, which is most of the code. (The
// compiler cuts a store through a pointer in pieces here.)
template <bool TWO, class T, class F> __device__ inline void whole_tiles(const T* a, const T* b, T* y, u64 end, F f) {
    const u32 next = HALF_TILE * LANES<T>;
    for (u64 tile = (u64)blockIdx.x * (2 * next); tile < end; tile += (u64)gridDim.x * (2 * next)) {
        for (u32 in_tile = threadIdx.x * LANES<T>; in_tile < next; in_tile += blockDim.x * LANES<T>) {
            u64 at = tile + in_tile;
            uint4 p = *(const uint4*)(a + at), q = TWO ? *(const uint4*)(b + at) : p;
            const uint4 r = *(const uint4*)(a + at + next), s = TWO ? *(const uint4*)(b + at + next) : r;
#pragma unroll 1
            for (u32 k = 0; k < 2; k++, at += next, p = r, q = s) store((u64)(y + at), f(at, p, q));
        }
    }
}

// Calls f(i) for the elements `begin .. n`, one at a time.
template <class F> __device__ inline void each_other(u64 begin, u64 n, F f) {
#pragma unroll 1
    for (u64 i = begin + grid_index(); i < n; i += grid_size()) f(i);
}

// Those of f64 are calls: inlined, they would be most of the code.
__device__ inline f32 exp_of(f32 x) { return expf(x); }
__device__ inline f32 log_of(f32 x) { return logf(x); }
__device__ inline f32 erf_of(f32 x) { return erff(x); }
__device__ inline f32 sqrt_of(f32 x) { return sqrtf(x); }
__device__ __noinline__ f64 exp_of(f64 x) { return exp(x); }
__device__ __noinline__ f64 log_of(f64 x) { return log(x); }
__device__ __noinline__ f64 erf_of(f64 x) { return erf(x); }
__device__ inline f64 sqrt_of(f64 x) { return sqrt(x); }

// 2^x and 1 / x by one instruction each, off by 2^-22 of the result at most; what is less than 2^-126 counts as zero.
__device__ inline f32 quick_exp2(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline f32 quick_inverse(f32 x) {
    f32 y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
