// Random numbers by Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
//
//   random_u32  (u32* x, u64 n, u64 seed, u64 offset)
//   uniform_T   (T* x, u64 n, u64 seed, u64 offset, A low, A span)       x = low + u * span, u in [0, 1)
//   normal_T    (T* x, u64 n, u64 seed, u64 offset, A mean, A deviation)
//   dropout_T   (const T* x, T* y, u64 n, u64 seed, u64 offset, u64 threshold, A scale)
//                                                                        y = word < threshold ? 0 : x * scale
//
// T is f32, f64, f16 or bf16; A is f64 for f64, else f32.
//
// The key is the seed. The counter is the number of a block of four words. Element i of a call is element offset + i of
// the seed's sequence. So a sequence that is cut into calls, on one device or several, has the numbers of one call.
// Element e takes word e % 4 of block e / 4. A uniform or normal f64 takes two words of block e / 2: the first two, or
// the last two.
//
// u has as many bits as T has (24, 53, 11, 8), so it is exact and never 1. Normal numbers are Box and Muller's pairs:
// two uniform numbers of one block make two neighbours.
#include "lanes.cuh"

__device__ inline uint4 philox(u64 block, u64 seed) {
    u32 x = (u32)block, y = (u32)(block >> 32), z = 0, w = 0, a = (u32)seed, b = (u32)(seed >> 32);
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        const u64 p = (u64)0xd2511f53u * x, q = (u64)0xcd9e8d57u * z;
        x = (u32)(q >> 32) ^ y ^ a;
        y = (u32)q;
        z = (u32)(p >> 32) ^ w ^ b;
        w = (u32)p;
        a += 0x9e3779b9u;
        b += 0xbb67ae85u;
    }
    return make_uint4(x, y, z, w);
}

// Calls `f(words, at, begin, end)` for each block of PER elements that has some of `offset .. offset + n`. Elements
// `begin .. end` of the block belong to the call. `at` is the place of the block's first element, from `offset`;
// it wraps around where that element does not belong to the call.
template <u32 PER, class F> __device__ inline void each_block(u64 n, u64 seed, u64 offset, F f) {
    if (n == 0) return;
    const u64 first = offset / PER, last = (offset + n - 1) / PER;
    for (u64 i = grid_index(); i <= last - first; i += grid_size()) {
        const u64 block = first + i, at = block * PER;
        const u32 begin = at < offset ? (u32)(offset - at) : 0;
        const u32 end = offset + n - at < PER ? (u32)(offset + n - at) : PER;
        f(philox(block, seed), at - offset, begin, end);
    }
}

// Stores `f(k)` for the elements `begin .. end` of a block.
template <u32 PER, class T, class F> __device__ inline void store_block_of(T* x, u64 at, u32 begin, u32 end, F f) {
    if (begin == 0 && end == PER && (u64)(x + at) % (sizeof(T) * PER) == 0 && sizeof(T) * PER <= 16) {
        Chunk<T, PER> chunk;
#pragma unroll
        for (u32 k = 0; k < PER; k++) chunk.lane[k] = f(k);
        *(Chunk<T, PER>*)(x + at) = chunk;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < PER; k++)
        if (k >= begin && k < end) x[at + k] = f(k);
}

__device__ inline u32 word(uint4 words, u32 k) { return lane<u32>(words, k); }
__device__ inline u64 two_words(uint4 words, u32 k) { return lane<u64>(words, k); }

// A uniform number in [0, 1), exact in T.
template <class T> __device__ inline Acc<T> unit(uint4 words, u32 k) {
    if constexpr (sizeof(T) == 8) return (f64)(two_words(words, k) >> 11) * 0x1p-53;
    else if constexpr (sizeof(T) == 4) return (f32)(word(words, k) >> 8) * 0x1p-24f;
    else return 0;
}
template <> __device__ inline f32 unit<f16>(uint4 words, u32 k) { return (f32)(word(words, k) >> 21) * 0x1p-11f; }
template <> __device__ inline f32 unit<bf16>(uint4 words, u32 k) { return (f32)(word(words, k) >> 24) * 0x1p-8f; }

// sin(pi t) for t in [0, 2], by the series around the next multiple of 1/2: CUDA's own needs a table in a variable.
__device__ inline f64 sin_pi(f64 t, u32 quadrants) {
    const f64 k = rint(2.0 * t), y = (t - 0.5 * k) * 3.14159265358979323846, z = -(y * y);
    f64 sine = 1.0, cosine = 1.0;
#pragma unroll
    for (u32 i = 18; i > 0; i -= 2) {
        sine = 1.0 + sine * z / (f64)(i * (i + 1));
        cosine = 1.0 + cosine * z / (f64)(i * (i - 1));
    }
    const u32 quadrant = ((u32)k + quadrants) % 4;
    const f64 x = quadrant % 2 ? cosine : y * sine;
    return quadrant < 2 ? x : -x;
}

// A normal number of two uniform ones: the cosine's of a pair, or the sine's.
__device__ inline f32 normal(f32 u, f32 v, bool odd) {
    const f32 r = sqrtf(-2.0f * logf(u + 0x1p-24f));
    return r * (odd ? sinpif(2.0f * v) : cospif(2.0f * v));
}
__device__ inline f64 normal(f64 u, f64 v, bool odd) {
    return sqrt(-2.0 * log(u + 0x1p-53)) * sin_pi(2.0 * v, odd ? 0 : 1);
}

template <class T> constexpr u32 PER = sizeof(T) == 8 ? 2 : 4;

template <class T> __device__ inline void fill_uniform(T* x, u64 n, u64 seed, u64 offset, Acc<T> low, Acc<T> span) {
    each_block<PER<T>>(n, seed, offset, [&](uint4 words, u64 at, u32 begin, u32 end) {
        store_block_of<PER<T>>(x, at, begin, end, [&](u32 k) { return narrow<T>(low + unit<T>(words, k) * span); });
    });
}

template <class T>
__device__ inline void fill_normal(T* x, u64 n, u64 seed, u64 offset, Acc<T> mean, Acc<T> deviation) {
    typedef Acc<T> A;
    each_block<PER<T>>(n, seed, offset, [&](uint4 words, u64 at, u32 begin, u32 end) {
        store_block_of<PER<T>>(x, at, begin, end, [&](u32 k) {
            const A u = unit<A>(words, k & ~1u), v = unit<A>(words, k | 1u);
            return narrow<T>(mean + normal(u, v, k & 1) * deviation);
        });
    });
}

template <class T>
__device__ inline void dropout(const T* x, T* y, u64 n, u64 seed, u64 offset, u64 threshold, Acc<T> scale) {
    each_block<4>(n, seed, offset, [&](uint4 words, u64 at, u32 begin, u32 end) {
        T in[4];
        if (begin == 0 && end == 4 && (u64)(x + at) % (4 * sizeof(T)) == 0 && sizeof(T) < 8) {
            const Chunk<T, 4> chunk = *(const Chunk<T, 4>*)(x + at);
#pragma unroll
            for (u32 k = 0; k < 4; k++) in[k] = chunk.lane[k];
        } else {
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                if (k >= begin && k < end) in[k] = x[at + k];
        }
        store_block_of<4>(y, at, begin, end, [&](u32 k) {
            return word(words, k) < threshold ? from_bits<T>(0) : narrow<T>(wide(in[k]) * scale);
        });
    });
}

extern "C" __global__ void random_u32(u32* x, u64 n, u64 seed, u64 offset) {
    each_block<4>(n, seed, offset, [&](uint4 words, u64 at, u32 begin, u32 end) {
        store_block_of<4>(x, at, begin, end, [&](u32 k) { return word(words, k); });
    });
}

#define RANDOM(T, A)                                                                                               \
    extern "C" __global__ void uniform_##T(T* x, u64 n, u64 seed, u64 offset, A low, A span) {                     \
        fill_uniform(x, n, seed, offset, low, span);                                                               \
    }                                                                                                              \
    extern "C" __global__ void normal_##T(T* x, u64 n, u64 seed, u64 offset, A mean, A deviation) {                \
        fill_normal(x, n, seed, offset, mean, deviation);                                                          \
    }                                                                                                              \
    extern "C" __global__ void dropout_##T(const T* x, T* y, u64 n, u64 seed, u64 offset, u64 threshold, A scale) { \
        dropout(x, y, n, seed, offset, threshold, scale);                                                          \
    }

RANDOM(f32, f32)
RANDOM(f64, f64)
RANDOM(f16, f32)
RANDOM(bf16, f32)
