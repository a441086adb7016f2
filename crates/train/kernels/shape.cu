// Elements in another order: transposes, and parts of matrices.
//
//   transpose_{u8,u16,u32,u64}  (const T* x, T* y, u32 count, u32 rows, u32 cols)
//            y[i][c][r] = x[i][r][c], for each of `count` matrices; by the size of an element
//   copy_2d  (const u8* src, u8* dst, u64 rows, u64 width, u64 src_pitch, u64 dst_pitch)
//            `width` bytes of each of `rows` rows; a pitch is the bytes from one row's begin to the next one's
#include "units.cuh"

const u32 TILE = 32, WARPS = 8;

// A tile of 32 x 32 goes through shared memory, so that a warp reads and writes 32 neighbours. One column more than
// that puts the elements of a column into different banks. Blocks of 32 x 8.
template <class T> __device__ inline void transpose(const T* x, T* y, u32 count, u32 rows, u32 cols) {
    __shared__ T tile[TILE][TILE + 1];
    const u64 across = ((u64)cols + TILE - 1) / TILE, tiles = ((u64)rows + TILE - 1) / TILE * across;
    for (u64 i = blockIdx.x; i < tiles * count; i += gridDim.x) {
        const u64 t = i % tiles, begin = i / tiles * rows * cols;
        const u64 row = t / across * TILE, col = t % across * TILE;
        const u64 from = begin + row * cols + col + threadIdx.x, to = begin + col * rows + row + threadIdx.x;
#pragma unroll
        for (u32 k = threadIdx.y; k < TILE; k += WARPS)
            if (row + k < rows && col + threadIdx.x < cols) tile[k][threadIdx.x] = x[from + (u64)k * cols];
        __syncthreads();
#pragma unroll
        for (u32 k = threadIdx.y; k < TILE; k += WARPS)
            if (col + k < cols && row + threadIdx.x < rows) y[to + (u64)k * rows] = tile[threadIdx.x][k];
        __syncthreads();
    }
}

#define TRANSPOSE(T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) transpose_##T(const T* __restrict__ x, T* __restrict__ y,   \
                                                                    u32 count, u32 rows, u32 cols) {              \
        transpose(x, y, count, rows, cols);                                                                       \
    }

TRANSPOSE(u8)
TRANSPOSE(u16)
TRANSPOSE(u32)
TRANSPOSE(u64)

template <class U>
__device__ inline void copy_rows(const u8* src, u8* dst, u64 rows, u64 width, u64 src_pitch, u64 dst_pitch) {
    each_unit<U>(rows, width, [&](u64 row, u64 at) {
        *(U*)(dst + row * dst_pitch + at) = *(const U*)(src + row * src_pitch + at);
    });
}
extern "C" __global__ void copy_2d(const u8* __restrict__ src, u8* __restrict__ dst, u64 rows, u64 width, u64 src_pitch,
                                   u64 dst_pitch) {
    BY_UNIT((u64)src | (u64)dst | width | src_pitch | dst_pitch, copy_rows, src, dst, rows, width, src_pitch, dst_pitch)
}
