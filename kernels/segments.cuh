// Tables of segments, passed as arguments, and the sum of a block: for kernels over buckets of gradients.
//
// A segment is a part of a bucket: its first element, its length, and the address of the memory that belongs to it.
// Segments are in ascending order and begin at whole grains: 8 elements for half types, else 4.
#pragma once
#include "common.cuh"

const u32 SEGMENTS = 64;
const u32 THREADS = 512;

// A part of a column of the table: as many numbers as one by-value argument of a launch holds.
struct Column {
    u64 at[8];
};

struct Table {
    u64 start[SEGMENTS], len[SEGMENTS], place[SEGMENTS];
};

#define EIGHTS(x) Column x##0, Column x##1, Column x##2, Column x##3, Column x##4, Column x##5, Column x##6, Column x##7
#define LIST(x) {x##0, x##1, x##2, x##3, x##4, x##5, x##6, x##7}

// Whether this thread has this turn of its block's preparations. Turns from 1 on belong to different warps, as far as
// there are some, and not to the first one, which may have to meet others: each warp waits for the parameters that it
// reads.
__device__ inline bool is_turn(u32 turn) {
    const u32 last = (blockDim.x - 1) / 32 * 32;
    return threadIdx.x == (turn * 32 < last ? turn * 32 : last);
}

// The first `count` segments; they are there after the next __syncthreads. Parameters cannot be indexed at run time
// without a copy in local memory; shared memory can.
__device__ inline void fill_table(Table& table, u32 count, const Column (&s)[8], const Column (&l)[8],
                                  const Column (&a)[8]) {
#pragma unroll
    for (u32 c = 0; c < SEGMENTS / 8; c++) {
        if (!is_turn(c + 1) || 8 * c >= count) continue;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            table.start[8 * c + k] = s[c].at[k];
            table.len[8 * c + k] = l[c].at[k];
            table.place[8 * c + k] = a[c].at[k];
        }
    }
}

// The last segment that begins at or before element i. (The first segment begins at 0.)
__device__ inline u32 segment_of(const Table& table, u32 count, u64 i) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (table.start[middle] <= i) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// The type of computations with T.
template <class T> using Accumulator = decltype(wide(T()));

// The block's sum, valid in thread 0.
__device__ inline f64 block_sum(f64 value) {
    __shared__ f64 lane[THREADS];
    lane[threadIdx.x] = value;
    for (u32 width = THREADS / 2; width >= 32; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width && threadIdx.x + width < blockDim.x) lane[threadIdx.x] += lane[threadIdx.x + width];
    }
    value = lane[threadIdx.x];
#pragma unroll
    for (u32 width = 16; width > 0; width /= 2) value += __shfl_xor_sync(~0u, value, width);
    return value;
}
