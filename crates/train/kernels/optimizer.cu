// Optimizers: the steps from gradients to parameters, one launch for each bucket of gradients.
//
//   squares_<T>  (const T* g, f64* partial, u64 n)
//       partial[c] = the sum of the squares of g[2048 c .. 2048 (c + 1)), up to n
//   update_<T>   (T* g, f32* first, f32* second, f32* master, const f32* norm, u64 begin, u32 count, Rule rule,
//                 const Rule* later, Column s0..s7, l0..l7, a0..a7)
//       for each segment of the table, for j < l:  a[j] becomes the new parameter, from the gradient g[s + j]
//
// T is the parameters' type: f32 f16 bf16. Computations are in f32: see optimizer.cuh. `first` and `second` are the
// moments, `master` the parameters in f32; each has an element for the elements of g from `begin` on, or is null. With
// `Rule.gather` the new parameters are also written to g. The rule is in memory if `later` is not null: for graphs.
//
// A host launch may have further arguments: the memory of the segments, for software GPUs.
#include "optimizer.cuh"

// Elements that a thread handles at once. Segments begin at multiples.
const u32 PACK = 4;

template <class T>
__device__ inline void update(T* g, const State& state, f32 norm, const Table& table, u32 count, const Rule& rule) {
    const bool changing = changes(rule, norm);
    const f32 scale = scale_of(rule, norm);
    const u64 from = table.start[0], end = table.start[count - 1] + table.len[count - 1], step = PACK * grid_size();
    for (u64 i = from + PACK * grid_index(); i < end; i += step) {
        const u32 k = segment_of(table, count, i);
        const u64 j = i - table.start[k], len = table.len[k];
        if (j >= len) continue;
        const u32 most = len - j < PACK ? (u32)(len - j) : PACK;
        T grad[PACK], own[PACK];
        load(g + i, most, grad);
        update_pack(state, rule, changing, scale, i, most, reinterpret_cast<T*>(table.place[k]) + j, grad, own);
        if (rule.gather) store(g + i, most, own);
    }
}

// A warp has a chunk.
template <class T> __device__ inline void squares(const T* g, f64* partial, u64 n) {
    const u32 W = 16 / sizeof(T), warps = blockDim.x / 32;
    const bool whole = (u64)g % 16 == 0;
    for (u64 chunk = (u64)(threadIdx.x / 32) * gridDim.x + blockIdx.x; chunk * CHUNK < n; chunk += warps * gridDim.x) {
        f64 batch[BATCHES] = {};
#pragma unroll
        for (u32 r = 0; r < CHUNK / (32 * W); r++) {
            f64& sum = batch[r * 32 * W / BATCH];
            const u64 i = chunk * CHUNK + (r * 32 + threadIdx.x % 32) * W;
            if (whole && i + W <= n) {
                sum = add_squares<T>(sum, *reinterpret_cast<const uint4*>(g + i));
                continue;
            }
            for (u64 k = i; k < i + W && k < n; k++) {
                const f64 x = (f64)wide(g[k]);
                sum += x * x;
            }
        }
#pragma unroll
        for (u32 k = 0; k < BATCHES; k++) batch[k] = warp_sum(batch[k]);
        const f64 sum = tree_of(batch);
        if (threadIdx.x % 32 == 0) partial[chunk] = sum;
    }
}

#define OPTIMIZER(T)                                                                                               \
    extern "C" __global__ void squares_##T(const T* g, f64* partial, u64 n) { squares<T>(g, partial, n); }         \
    extern "C" __global__ void update_##T(T* g, f32* first, f32* second, f32* master, const f32* norm, u64 begin,  \
                                          u32 count, Rule rule, const Rule* later, EIGHTS(s), EIGHTS(l),           \
                                          EIGHTS(a)) {                                                             \
        __shared__ Table table;                                                                                    \
        fill_table(table, count, LIST(s), LIST(l), LIST(a));                                                       \
        __syncthreads();                                                                                           \
        if (later != nullptr) rule = *later;                                                                       \
        update<T>(g, State{first, second, master, begin}, *norm, table, count, rule);                              \
    }

OPTIMIZER(f32)
OPTIMIZER(f16)
OPTIMIZER(bf16)
