// Rows of bytes, moved in the largest units that their addresses and lengths allow.
#pragma once
#include "common.cuh"

// Returns CALL<unit>(..) for the largest unit of 1 to 16 bytes that divides all numbers that `bits` is the union of.
#define BY_UNIT(bits, CALL, ...)                                \
    if ((bits) % 16 == 0) return CALL<uint4>(__VA_ARGS__);      \
    if ((bits) % 8 == 0) return CALL<u64>(__VA_ARGS__);         \
    if ((bits) % 4 == 0) return CALL<u32>(__VA_ARGS__);         \
    if ((bits) % 2 == 0) return CALL<u16>(__VA_ARGS__);         \
    return CALL<u8>(__VA_ARGS__);

// Calls `f(row, at)` for each unit of each of `rows` rows of `width` bytes: `at` is its first byte within the row.
template <class U, class F> __device__ inline void each_unit(u64 rows, u64 width, F f) {
    const u64 across = width / sizeof(U), total = rows * across;
    if (total >> 32 == 0) {
        // A division of 64 bits takes longer than the memory does.
        for (u64 i = grid_index(); i < total; i += grid_size())
            f((u32)i / (u32)across, (u64)((u32)i % (u32)across) * sizeof(U));
    } else {
        for (u64 i = grid_index(); i < total; i += grid_size()) f(i / across, i % across * sizeof(U));
    }
}
