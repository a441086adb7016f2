// The elements of a unit of memory: a pack of 16 bytes, or one element. Every index is a constant after unrolling, so
// units stay in registers.
#pragma once
#include "fold.cuh"

template <class T, class Unit> __device__ inline T lane(const Unit& unit, u32 i) {
    static_assert(sizeof(Unit) == sizeof(T), "one element");
    return from_bits<T>(unit);
}
template <class T, class Unit> __device__ inline void set_lane(Unit& unit, u32 i, T x) {
    static_assert(sizeof(Unit) == sizeof(T), "one element");
    unit = to_bits(x);
}

// Bits `8 * sizeof(T) * i` and up of four words. The words that a later lane shares must be set in ascending order.
template <class T> __device__ inline T lane(const uint4& unit, u32 i) {
    const u32 byte = i * sizeof(T);
    const u32 word = byte < 4 ? unit.x : byte < 8 ? unit.y : byte < 12 ? unit.z : unit.w;
    if constexpr (sizeof(T) == 8) {
        return from_bits<T>(i == 0 ? (u64)unit.y << 32 | unit.x : (u64)unit.w << 32 | unit.z);
    } else {
        return from_bits<T>((BitsOf<T>)(word >> (8 * (byte % 4))));
    }
}
template <class T> __device__ inline void set_lane(uint4& unit, u32 i, T x) {
    const u32 byte = i * sizeof(T);
    if constexpr (sizeof(T) == 8) {
        u64 bits = to_bits(x);
        if (i == 0) {
            unit.x = (u32)bits;
            unit.y = (u32)(bits >> 32);
        } else {
            unit.z = (u32)bits;
            unit.w = (u32)(bits >> 32);
        }
    } else {
        u32& word = byte < 4 ? unit.x : byte < 8 ? unit.y : byte < 12 ? unit.z : unit.w;
        const u32 bits = (u32)to_bits(x) << (8 * (byte % 4));
        word = byte % 4 == 0 ? bits : word | bits;
    }
}

// Lane `i` in the type that arithmetic uses. A bf16 is the upper half of an f32: one shift or one mask.
template <class T> __device__ inline Acc<T> wide_lane(const uint4& unit, u32 i) { return wide(lane<T>(unit, i)); }
template <> __device__ inline f32 wide_lane<bf16>(const uint4& unit, u32 i) {
    const u32 word = i < 2 ? unit.x : i < 4 ? unit.y : i < 6 ? unit.z : unit.w;
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

// The elements of 8 bytes. They are set in ascending order.
template <class T> __device__ inline T lane(const u64& unit, u32 i) {
    return from_bits<T>((BitsOf<T>)(unit >> (8 * sizeof(T) * i)));
}
template <class T> __device__ inline void set_lane(u64& unit, u32 i, T x) {
    const u64 bits = (u64)to_bits(x) << (8 * sizeof(T) * i);
    unit = i == 0 ? bits : unit | bits;
}

// Some elements that are moved at once.
template <class T, u32 COUNT> struct alignas(sizeof(T) * COUNT) Chunk {
    T lane[COUNT];
};

// y[i] = f(x[i]) for `n` elements, four at once where the addresses allow that.
template <class F, class T, class Map> __device__ inline void by_fours(const F* x, T* y, u64 n, Map f) {
    const bool whole = (u64)x % (4 * sizeof(F)) == 0 && (u64)y % (4 * sizeof(T)) == 0;
    for (u64 g = grid_index(); g * 4 < n; g += grid_size()) {
        const u64 at = g * 4;
        if (whole && at + 4 <= n) {
            const Chunk<F, 4> in = *(const Chunk<F, 4>*)(x + at);
            Chunk<T, 4> out;
#pragma unroll
            for (u32 k = 0; k < 4; k++) out.lane[k] = f(in.lane[k]);
            *(Chunk<T, 4>*)(y + at) = out;
        } else {
#pragma unroll 1
            for (u64 i = at; i < at + 4 && i < n; i++) y[i] = f(x[i]);
        }
    }
}
