// The kernels of examples/decode: what is between the matrix products and the sums of a word's way through the model.
// Each is of f32 and of bf16. Their Rust halves are in model/kernels.rs, which has the names of the parameters.
#include "common.cuh"

namespace {

// Numbers of a head, heads that share keys and values, and words of a sequence: at most what `attend` has room for.
constexpr u32 DIM = 128, MOST_SHARED = 4, LONGEST = 1024;
constexpr u32 THREADS = 512;
// Threads that look for the largest score of a head together, and groups that add up the values.
constexpr u32 SPAN = 64, GROUPS = THREADS / (DIM / 2);
// Blocks that look for the most likely word of a row.
constexpr u32 PARTS = 32, BEST_THREADS = 256;

template <class T> constexpr u32 UNIT = 16 / sizeof(T);

template <class T> struct alignas(16) Sixteen {
    T lane[UNIT<T>];
};
template <class T> struct alignas(2 * sizeof(T)) Two {
    T x, y;
};

// Chris Wellons' lowbias32: every bit of the number depends on every bit of the place.
__device__ inline u32 scrambled(u32 x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

template <class T>
__device__ void weights(T* w, u32 seed, u32 len, u32 cols, u32 row0, u32 col0, u32 all_cols, f32 largest) {
    for (u64 i = grid_index(); i < len; i += grid_size()) {
        const u32 row = row0 + (u32)i / cols, col = col0 + (u32)i % cols;
        const u32 bits = scrambled(row * all_cols + col + seed * 0x9e3779b9u);
        w[i] = narrow<T>((f32)(int)bits * 0x1p-31f * largest);
    }
}

template <class T>
__device__ void next_word(const u64* best, const T* table, u32* words, const u32* place, T* x, u32 given, u32 width) {
    const u32 row = blockIdx.x, at = place[0] * gridDim.x + row;
    u32 word = 0;
    if (place[0] < given) {
        word = words[at];
    } else {
        u64 most = 0;
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            const u64 found = best[row * PARTS + part];
            most = found > most ? found : most;
        }
        word = ~(u32)most;
        if (threadIdx.x == 0) words[at] = word;
    }
    const T* from = table + (u64)word * width;
    T* to = x + (u64)row * width;
    for (u32 i = threadIdx.x * UNIT<T>; i < width; i += blockDim.x * UNIT<T>)
        *(Sixteen<T>*)(to + i) = *(const Sixteen<T>*)(from + i);
}

// A block for the heads that share keys and values, of one sequence: gridDim = (such groups, sequences).
template <class T>
__device__ void attend(const T* qkv, const f32* angles, const u32* place, T* keys, T* values, T* mixed, u32 shared_by,
                       u32 longest) {
    __shared__ f32 query[MOST_SHARED][DIM];
    __shared__ f32 score[MOST_SHARED][LONGEST];
    __shared__ f32 part[MOST_SHARED][SPAN];
    __shared__ f32 sums[GROUPS][MOST_SHARED][DIM];
    const u32 t = threadIdx.x, half = DIM / 2, groups = gridDim.x, at = place[0], count = at + 1;
    const u32 own = blockIdx.x, heads = groups * shared_by;
    const T* row = qkv + (u64)blockIdx.y * (heads + 2 * groups) * DIM;
    T* const k = keys + ((u64)blockIdx.y * groups + own) * longest * DIM;
    T* const v = values + ((u64)blockIdx.y * groups + own) * longest * DIM;

    // The queries and the key are turned by their place; key and value go to the others.
    for (u32 i = t; i < (shared_by + 1) * half; i += THREADS) {
        const u32 h = i / half, j = i % half;
        const T* from = row + (h < shared_by ? own * shared_by + h : heads + own) * DIM;
        const f32 x = wide(from[j]), y = wide(from[half + j]);
        const f32 cos = angles[at * DIM + j], sin = angles[at * DIM + half + j];
        const f32 a = fused(x, cos, -(y * sin)), b = fused(y, cos, x * sin);
        if (h < shared_by) {
            query[h][j] = a, query[h][half + j] = b;
        } else {
            k[at * DIM + j] = narrow<T>(a), k[at * DIM + half + j] = narrow<T>(b);
        }
    }
    for (u32 i = t; i < DIM; i += THREADS) v[at * DIM + i] = row[(heads + groups + own) * DIM + i];
    __syncthreads();

    // A thread for each place: its scores of all heads.
    for (u32 p = t; p < count; p += THREADS) {
        f32 dot[MOST_SHARED] = {};
#pragma unroll 4
        for (u32 i = 0; i < DIM; i += UNIT<T>) {
            const Sixteen<T> pack = *(const Sixteen<T>*)(k + p * DIM + i);
#pragma unroll
            for (u32 h = 0; h < MOST_SHARED; h++)
                if (h < shared_by)
#pragma unroll
                    for (u32 j = 0; j < UNIT<T>; j++) dot[h] = fused(query[h][i + j], wide(pack.lane[j]), dot[h]);
        }
#pragma unroll
        for (u32 h = 0; h < MOST_SHARED; h++)
            if (h < shared_by) score[h][p] = dot[h] * 0x1.6a09e6p-4f; // 1 / sqrt(128)
    }
    __syncthreads();

    // Shares of the places, without their divisor. SPAN threads for each head.
    const u32 h = t / SPAN, lane = t % SPAN;
    if (h < shared_by) {
        f32 most = score[h][0];
        for (u32 p = lane; p < count; p += SPAN) most = fmaxf(most, score[h][p]);
        part[h][lane] = most;
    }
    __syncthreads();
    f32 sum = 0.0f;
    if (h < shared_by) {
        f32 most = part[h][0];
        for (u32 i = 1; i < SPAN; i++) most = fmaxf(most, part[h][i]);
        for (u32 p = lane; p < count; p += SPAN) {
            score[h][p] = expf(score[h][p] - most);
            sum += score[h][p];
        }
    }
    __syncthreads();
    if (h < shared_by) part[h][lane] = sum;
    __syncthreads();

    // Two numbers of the result for each thread, in GROUPS sums over some of the places.
    const u32 d = t % half * 2, group = t / half;
    f32 acc[MOST_SHARED][2] = {};
#pragma unroll 6
    for (u32 p = group; p < count; p += GROUPS) {
        const Two<T> two = *(const Two<T>*)(v + p * DIM + d);
        const f32 x = wide(two.x), y = wide(two.y);
#pragma unroll
        for (u32 q = 0; q < MOST_SHARED; q++)
            if (q < shared_by) {
                acc[q][0] = fused(score[q][p], x, acc[q][0]);
                acc[q][1] = fused(score[q][p], y, acc[q][1]);
            }
    }
#pragma unroll
    for (u32 q = 0; q < MOST_SHARED; q++)
        if (q < shared_by) sums[group][q][d] = acc[q][0], sums[group][q][d + 1] = acc[q][1];
    __syncthreads();
    for (u32 i = t; i < shared_by * DIM; i += THREADS) {
        const u32 q = i / DIM, j = i % DIM;
        f32 all = 0.0f, divisor = 0.0f;
        for (u32 g = 0; g < GROUPS; g++) all += sums[g][q][j];
        for (u32 s = 0; s < SPAN; s++) divisor += part[q][s];
        mixed[((u64)blockIdx.y * heads + own * shared_by + q) * DIM + j] = narrow<T>(all / divisor);
    }
}

// A row of threads for each row.
template <class T> __device__ void swiglu(const T* gate_up, T* y, u32 inner) {
    const T* row = gate_up + (u64)blockIdx.y * 2 * inner;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < inner; i += gridDim.x * blockDim.x) {
        const f32 gate = wide(row[i]), up = wide(row[inner + i]);
        y[(u64)blockIdx.y * inner + i] = narrow<T>(gate / (1.0f + expf(-gate)) * up);
    }
}

// A number that is larger where the value is, or the value is the same and the word is lower.
__device__ inline u64 ranked(f32 value, u32 word) {
    const u32 bits = __float_as_uint(value);
    return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~word;
}

// gridDim = (PARTS, rows)
template <class T> __device__ void best_word(const T* logits, u64* best, u32* place, u32 words, u32 first) {
    __shared__ u64 mosts[BEST_THREADS];
    const u32 t = threadIdx.x, each = (words + PARTS - 1) / PARTS;
    const u32 begin = blockIdx.x * each, end = begin + each < words ? begin + each : words;
    const T* row = logits + (u64)blockIdx.y * words;
    u64 most = 0;
#pragma unroll 4
    for (u32 i = begin + t; i < end; i += BEST_THREADS) {
        const u64 found = ranked(wide(row[i]), first + i);
        most = found > most ? found : most;
    }
    mosts[t] = most;
    for (u32 step = BEST_THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (t < step && mosts[t + step] > mosts[t]) mosts[t] = mosts[t + step];
    }
    if (t == 0) best[blockIdx.y * PARTS + blockIdx.x] = mosts[0];
    if (t == 0 && blockIdx.x == 0 && blockIdx.y == 0) place[0] += 1;
}

} // namespace

extern "C" __global__ void weights_f32(f32* w, u32 seed, u32 len, u32 cols, u32 row0, u32 col0, u32 all_cols,
                                       f32 largest) {
    weights(w, seed, len, cols, row0, col0, all_cols, largest);
}
extern "C" __global__ void weights_bf16(bf16* w, u32 seed, u32 len, u32 cols, u32 row0, u32 col0, u32 all_cols,
                                        f32 largest) {
    weights(w, seed, len, cols, row0, col0, all_cols, largest);
}

extern "C" __global__ void next_word_f32(const u64* best, const f32* table, u32* words, const u32* place, f32* x,
                                         u32 given, u32 width) {
    next_word(best, table, words, place, x, given, width);
}
extern "C" __global__ void next_word_bf16(const u64* best, const bf16* table, u32* words, const u32* place, bf16* x,
                                          u32 given, u32 width) {
    next_word(best, table, words, place, x, given, width);
}

extern "C" __global__ void attend_f32(const f32* qkv, const f32* angles, const u32* place, f32* keys, f32* values,
                                      f32* mixed, u32 shared_by, u32 longest) {
    attend(qkv, angles, place, keys, values, mixed, shared_by, longest);
}
extern "C" __global__ void attend_bf16(const bf16* qkv, const f32* angles, const u32* place, bf16* keys, bf16* values,
                                       bf16* mixed, u32 shared_by, u32 longest) {
    attend(qkv, angles, place, keys, values, mixed, shared_by, longest);
}

extern "C" __global__ void swiglu_f32(const f32* gate_up, f32* y, u32 inner) { swiglu(gate_up, y, inner); }
extern "C" __global__ void swiglu_bf16(const bf16* gate_up, bf16* y, u32 inner) { swiglu(gate_up, y, inner); }

extern "C" __global__ void best_word_f32(const f32* logits, u64* best, u32* place, u32 words, u32 first) {
    best_word(logits, best, place, words, first);
}
extern "C" __global__ void best_word_bf16(const bf16* logits, u64* best, u32* place, u32 words, u32 first) {
    best_word(logits, best, place, words, first);
}
