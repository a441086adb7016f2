// Sums of the columns of a row-major matrix, and the gradients of a norm's weights, which are such sums.
//
//   column_sum_T           (const T* x, A* partial, u64 rows, u32 cols, u32 parts)
//   layer_norm_columns_T   (const T* dy, const T* x, const A* mean, const A* rstd, A* dgamma, A* dbeta,
//                           u64 rows, u32 cols, u32 parts)
//   rms_norm_columns_T     the same without mean and dbeta
//   column_final_T         (const A* partial, T* out, u32 parts, u32 cols)
//   column_finals_T        (const A* first, const A* second, T* first_out, T* second_out, u32 parts, u32 cols)
//                          two at once: blockIdx.z says which
//
// T is f32, f64, f16 or bf16; A is f64 for f64, else f32. All arithmetic is in A, and rounds once when it is stored.
//
// Pass 1 cuts the rows into `parts` equal parts; a block of 32 x 8 threads sums a part of 32 packs of columns,
// warp w taking the rows w, w + 8, ..; pass 2 sums the parts the same way. No atomics: the same bits every run.
#include "pack.cuh"

// What a sum of columns adds up, of each element: the element, or its share in the gradients of a norm's weights.
enum Columns { PLAIN, RMS, LAYER };
const u32 WARPS = 8;

// Blocks that a multiprocessor has at a time. The registers are few on purpose: many warps with the loads of one or two
// rows each are faster than few with more.
template <Columns KIND, class T> constexpr u32 RESIDENT = sizeof(T) != 4 ? 4 : KIND == LAYER ? 6 : 8;

template <bool WHOLE, class T> __device__ inline uint4 load(const T* row, u32 c, u32 cols) {
    return WHOLE ? *(const uint4*)(row + c) : load_pack(row, c, cols, false);
}

// Sums of a pack of columns at `c`, by one warp.
template <Columns KIND, class T> struct Sums {
    Acc<T> first[LANES<T>], second[LANES<T>];

    // Adds one pack.
    __device__ void add(uint4 a, uint4 b, Acc<T> mean, Acc<T> rstd) {
#pragma unroll
        for (u32 i = 0; i < LANES<T>; i++) {
            const Acc<T> d = wide_lane<T>(a, i);
            first[i] += KIND == PLAIN ? d : d * ((wide_lane<T>(b, i) - mean) * rstd);
            if (KIND == LAYER) second[i] += d;
        }
    }

    // Adds the rows `row`, `row + WARPS`, .. up to `end`. WHOLE: without a branch at each load, so that more than one
    // row can be loaded at a time.
    template <bool WHOLE>
    __device__ void add_rows(const T* dy, const T* x, const Acc<T>* mean_of, const Acc<T>* rstd_of, u64 row, u64 end,
                             u32 c, u32 cols) {
        dy += row * cols;
        x += row * cols;
#pragma unroll(WHOLE ? KIND == PLAIN ? 4 : 2 : 1)
        for (; row < end; row += WARPS, dy += WARPS * (u64)cols, x += WARPS * (u64)cols) {
            const uint4 a = load<WHOLE>(dy, c, cols);
            const uint4 b = KIND == PLAIN ? a : load<WHOLE>(x, c, cols);
            add(a, b, KIND == LAYER ? mean_of[row] : 0, KIND == PLAIN ? 1 : rstd_of[row]);
        }
    }
};

template <Columns KIND, class T, class Out>
__device__ inline void columns(const T* dy, const T* x, const Acc<T>* mean_of, const Acc<T>* rstd_of, Out* first_out,
                               Out* second_out, u64 rows, u32 cols, u32 parts) {
    typedef Acc<T> A;
    const u32 TILE = 32 * LANES<T>;
    __shared__ A shared[KIND == LAYER ? 2 : 1][WARPS][TILE];
    const bool whole = aligned16(dy, KIND == PLAIN ? (const void*)dy : (const void*)x) && cols % LANES<T> == 0;
    const u64 chunk = (rows + parts - 1) / parts;
    for (u32 part = blockIdx.y; part < parts; part += gridDim.y) {
        const u64 begin = part * chunk < rows ? part * chunk : rows;
        const u64 end = begin + chunk < rows ? begin + chunk : rows;
        for (u64 tile = blockIdx.x; tile * TILE < cols; tile += gridDim.x) {
            const u64 c = tile * TILE + threadIdx.x * LANES<T>;
            Sums<KIND, T> sums = {};
            const u64 row = begin + threadIdx.y;
            if (c < cols && whole) sums.template add_rows<true>(dy, x, mean_of, rstd_of, row, end, (u32)c, cols);
            else if (c < cols) sums.template add_rows<false>(dy, x, mean_of, rstd_of, row, end, (u32)c, cols);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++) {
                shared[0][threadIdx.y][threadIdx.x * LANES<T> + i] = sums.first[i];
                if (KIND == LAYER)
                    shared[KIND == LAYER][threadIdx.y][threadIdx.x * LANES<T> + i] = sums.second[i];
            }
            __syncthreads();
            for (u32 i = threadIdx.y * 32 + threadIdx.x; i < TILE && tile * TILE + i < cols; i += WARPS * 32) {
                const u64 at = (u64)part * cols + tile * TILE + i;
                A sum = shared[0][0][i];
                for (u32 w = 1; w < WARPS; w++) sum += shared[0][w][i];
                first_out[at] = narrow<Out>(sum);
                if (KIND != LAYER) continue;
                sum = shared[KIND == LAYER][0][i];
                for (u32 w = 1; w < WARPS; w++) sum += shared[KIND == LAYER][w][i];
                second_out[at] = narrow<Out>(sum);
            }
            __syncthreads();
        }
    }
}

#define ENTRY(KIND, T) extern "C" __global__ void __launch_bounds__(256, RESIDENT<KIND, T>)
#define COLUMNS(T, A)                                                                                                  \
    ENTRY(PLAIN, T) column_sum_##T(const T* x, A* partial, u64 rows, u32 cols, u32 parts) {                           \
        columns<PLAIN>(x, x, (const A*)nullptr, (const A*)nullptr, partial, partial, rows, cols, parts);               \
    }                                                                                                                  \
    ENTRY(LAYER, T) layer_norm_columns_##T(const T* dy, const T* x, const A* mean, const A* rstd, A* dgamma,          \
                                            A* dbeta, u64 rows, u32 cols, u32 parts) {                                 \
        columns<LAYER>(dy, x, mean, rstd, dgamma, dbeta, rows, cols, parts);                                           \
    }                                                                                                                  \
    ENTRY(RMS, T) rms_norm_columns_##T(const T* dy, const T* x, const A* rstd, A* dgamma, u64 rows, u32 cols,         \
                                        u32 parts) {                                                                   \
        columns<RMS>(dy, x, (const A*)nullptr, rstd, dgamma, dgamma, rows, cols, parts);                               \
    }                                                                                                                  \
    ENTRY(PLAIN, A) column_final_##T(const A* partial, T* out, u32 parts, u32 cols) {                                 \
        columns<PLAIN>(partial, partial, (const A*)nullptr, (const A*)nullptr, out, out, parts, cols, 1);              \
    }                                                                                                                  \
    ENTRY(PLAIN, A) column_finals_##T(const A* first, const A* second, T* first_out, T* second_out, u32 parts,        \
                                       u32 cols) {                                                                     \
        const A* partial = blockIdx.z ? second : first;                                                                \
        T* out = blockIdx.z ? second_out : first_out;                                                                  \
        columns<PLAIN>(partial, partial, (const A*)nullptr, (const A*)nullptr, out, out, parts, cols, 1);              \
    }

COLUMNS(f32, f32)
COLUMNS(f64, f64)
COLUMNS(f16, f32)
COLUMNS(bf16, f32)
