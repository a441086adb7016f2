// Rows of a table by their numbers, and the gradient of that.
//
//   gather_rows           (const u8* table, const u32* indices, u8* out, u64 n, u64 width, u32 rows)
//                         out[i] = table[indices[i]], rows of `width` bytes
//   embedding_backward_T  (const T* dy, const u32* indices, T* dtable, u64 n, u32 cols, u32 rows)
//                         dtable[v] += the sum of dy[i] over all i with indices[i] == v
//
// An index that is no row of the table: gather_rows gives a row of bytes 0xff, which is NaN in every floating-point
// type; embedding_backward ignores it.
//
// The sum has a fixed order, that of i, so its bits are the same every run: a block per row of the table looks through
// all indices, 1024 at a time, and adds up the rows that are its own. That reads the indices once for each row of the
// table and each 256 packs of its width, mostly from the caches. A row that many indices name is added up by one block.
#include "pack.cuh"
#include "units.cuh"

template <class U> __device__ inline U all_ones() { return (U)~0ull; }
template <> __device__ inline uint4 all_ones<uint4>() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

// A thread takes four units of 16 bytes, whose loads are under way at once, or one smaller one. Rows of `out` follow
// each other, so its units have the numbers of all units.
template <class U>
__device__ inline void gather(const u8* table, const u32* indices, u8* out, u64 n, u64 width, u32 rows) {
    const u32 COUNT = sizeof(U) == 16 ? 4 : 1;
    const u64 across = width / sizeof(U), total = n * across;
    const auto find = [=](u32 row, u64 at) {
        return row < rows ? *(const U*)(table + row * width + at * sizeof(U)) : all_ones<U>();
    };
    // A division of 64 bits takes longer than the memory does.
    if (total >> 32 != 0) {
        for (u64 i = grid_index(); i < total; i += grid_size()) ((U*)out)[i] = find(indices[i / across], i % across);
        return;
    }
    const u32 next = blockDim.x;
    for (u64 begin = (u64)blockIdx.x * COUNT * next + threadIdx.x; begin < total;
         begin += (u64)gridDim.x * COUNT * next) {
        u32 row[COUNT], at[COUNT];
        U unit[COUNT];
#pragma unroll
        for (u32 k = 0; k < COUNT; k++) {
            const u64 i = begin + k * next;
            row[k] = i < total ? indices[(u32)i / (u32)across] : ~0u;
            at[k] = (u32)i % (u32)across;
        }
#pragma unroll
        for (u32 k = 0; k < COUNT; k++) unit[k] = find(row[k], at[k]);
#pragma unroll
        for (u32 k = 0; k < COUNT; k++)
            if (begin + k * next < total) ((U*)out)[begin + k * next] = unit[k];
    }
}
extern "C" __global__ void gather_rows(const u8* __restrict__ table, const u32* __restrict__ indices,
                                       u8* __restrict__ out, u64 n, u64 width, u32 rows) {
    BY_UNIT((u64)table | (u64)out | width, gather, table, indices, out, n, width, rows)
}

// Indices that a thread looks at between two meetings of its block: each meeting costs more than some loads.
const u32 FOURS = 4;

// Blocks of 256 threads; blockIdx.x strides over the table's rows, blockIdx.y over pieces of 256 packs of a row.
template <class T>
__device__ inline void embedding_backward(const T* dy, const u32* indices, T* dtable, u64 n, u32 cols, u32 rows) {
    typedef Acc<T> A;
    __shared__ u32 hits[FOURS * 8];
    const bool whole = aligned16(dy, dtable) && cols % LANES<T> == 0;
    const u64 piece = 256 * LANES<T>;
    for (u64 begin = blockIdx.y * piece; begin < cols; begin += gridDim.y * piece) {
        const u64 c = begin + threadIdx.x * LANES<T>;
        for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
            // A piece of indices by itself, and then the pieces: a row that very many indices name stays exact enough.
            A all[LANES<T>] = {};
            bool any = false;
            for (u64 base = 0; base < n; base += FOURS * 256) {
                bool hit[FOURS], some = false;
#pragma unroll
                for (u32 k = 0; k < FOURS; k++) {
                    const u64 i = base + k * 256 + threadIdx.x;
                    hit[k] = i < n && indices[i] == row;
                    some |= hit[k];
                }
                if (!__syncthreads_or(some)) continue;
                any = true;
#pragma unroll
                for (u32 k = 0; k < FOURS; k++) {
                    const u32 warp = __ballot_sync(0xffffffffu, hit[k]);
                    if (threadIdx.x % 32 == 0) hits[k * 8 + threadIdx.x / 32] = warp;
                }
                __syncthreads();
                A sum[LANES<T>] = {};
                for (u32 w = 0; w < FOURS * 8; w++) {
                    for (u32 left = hits[w]; left; left &= left - 1) {
                        const u64 i = base + w * 32 + __ffs((int)left) - 1;
                        if (c >= cols) continue;
                        const uint4 pack = load_pack(dy + i * cols, c, cols, whole);
#pragma unroll
                        for (u32 k = 0; k < LANES<T>; k++) sum[k] += wide(lane<T>(pack, k));
                    }
                }
#pragma unroll
                for (u32 k = 0; k < LANES<T>; k++) all[k] += sum[k];
            }
            if (any && c < cols) {
                T* at = dtable + (u64)row * cols;
                const uint4 old = load_pack(at, c, cols, whole);
                store_pack(at, c, cols, whole, pack_of<T>([&](u32 k) { return wide(lane<T>(old, k)) + all[k]; }));
            }
        }
    }
}

#define EMBEDDING(T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) embedding_backward_##T(                                   \
        const T* __restrict__ dy, const u32* __restrict__ indices, T* __restrict__ dtable, u64 n, u32 cols,     \
        u32 rows) {                                                                                             \
        embedding_backward(dy, indices, dtable, n, cols, rows);                                                 \
    }

EMBEDDING(f32)
EMBEDDING(f64)
EMBEDDING(f16)
EMBEDDING(bf16)
