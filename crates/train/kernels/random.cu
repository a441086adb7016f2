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
#include "pack.cuh"

// Both halves of a product, in one instruction. (From a product of 64 bits the compiler makes more.)
__device__ inline uint2 product(u32 a, u32 b) {
    uint2 halves;
    asm("{ .reg .u64 t; mul.wide.u32 t, %2, %3; mov.b64 {%0, %1}, t; }"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(a), "r"(b));
    return halves;
}

__device__ inline uint4 philox(u64 block, u64 seed) {
    u32 x = (u32)block, y = (u32)(block >> 32), z = 0, w = 0, a = (u32)seed, b = (u32)(seed >> 32);
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        const uint2 p = product(0xd2511f53u, x), q = product(0xcd9e8d57u, z);
        x = q.y ^ y ^ a;
        y = q.x;
        z = p.y ^ w ^ b;
        w = p.x;
        a += 0x9e3779b9u;
        b += 0xbb67ae85u;
    }
    return make_uint4(x, y, z, w);
}

__device__ inline u32 word(uint4 words, u32 k) { return lane<u32>(words, k); }

// The elements `by` and up of a thread's pack and the next thread's, as one pack. All threads of a warp call it, with
// the same `by`: less than the lanes of a pack. The last thread of a warp has no next one, and gets no such pack.
const u32 WARP = 0xffffffffu;
template <class T> __device__ inline uint4 joined(uint4 pack, u32 by) {
    const u32 words = by * sizeof(T) / 4;
    // The words that a thread has no use for are those that the thread before it needs.
    if (words > 0) pack.x = __shfl_down_sync(WARP, pack.x, 1);
    if (words > 1) pack.y = __shfl_down_sync(WARP, pack.y, 1);
    if (words > 2) pack.z = __shfl_down_sync(WARP, pack.z, 1);
    if (words & 1) pack = make_uint4(pack.y, pack.z, pack.w, pack.x);
    if (words & 2) pack = make_uint4(pack.z, pack.w, pack.x, pack.y);
    if (sizeof(T) == 2 && by % 2 != 0) {
        const u32 next = __shfl_down_sync(WARP, pack.x, 1), halves = 0x5432;
        pack = make_uint4(__byte_perm(pack.x, pack.y, halves), __byte_perm(pack.y, pack.z, halves),
                          __byte_perm(pack.z, pack.w, halves), __byte_perm(pack.w, next, halves));
    }
    return pack;
}

// y[i] = of(f(words, k), x[i]), rounded, for `n` elements: element `offset + i` takes part `k` of the words of its
// block, which has PER parts. Without READS, x is not read, and `of` gives back its first argument.
//
// A thread makes a pack at once, from two blocks if need be. Packs begin where y is aligned; the elements before the
// first pack and after the last one are made one at a time. Where y's packs do not begin with a block, a thread makes
// the elements from the block's beginning on, rounds them, and takes those that it lacks from the next thread. So a
// warp stores 31 packs, not 32. (`f` must give what T has exactly, if `of` does more.) Stores of single elements took
// more than three times as long on an H200.
template <u32 PER, bool READS, class T, class F, class Of>
__device__ inline void each_element(const T* x, T* y, u64 n, u64 seed, u64 offset, F f, Of of) {
    const u32 STEP = PER < LANES<T> ? PER : LANES<T>;
    const u64 to_pack = (16 - (u64)y % 16) % 16 / sizeof(T), head = to_pack < n ? to_pack : n;
    const u32 by = (u32)((offset + head) % STEP), lane_id = threadIdx.x % 32;
    const bool possible = by == 0 || blockDim.x % 32 == 0;
    const u64 body = possible ? (n - head) / LANES<T> * LANES<T> : 0;
    // This thread's first pack, and how far it is to its next one. A warp's threads stay together to the end.
    const u64 first = by == 0 ? grid_index() : grid_index() / 32 * 31 + lane_id;
    const u64 step = by == 0 ? grid_size() : grid_size() / 32 * 31;
    const u64 end = (u64)(y + head + body), last = by == 0 ? end : end + 16 * lane_id;
    u64 to = (u64)(y + head) + 16 * first, element = offset + head - by + LANES<T> * first;
    const bool whole = ((u64)x - (u64)y) % 16 == 0;
    const auto at_of = [&](u64 address) { return (address - (u64)y) / sizeof(T); };
    for (; to < last; to += 16 * step, element += LANES<T> * step) {
        const bool stores = by == 0 || (lane_id < 31 && to < end);
        uint4 in = make_uint4(0, 0, 0, 0);
        if (READS && stores) in = whole ? *(const uint4*)(x + at_of(to)) : load_pack(x, at_of(to), n, false);
        const uint4 low = philox(element / PER, seed), high = PER < LANES<T> ? philox(element / PER + 1, seed) : low;
        const auto made = [&](u32 k) {
            // Which part of a block the pack begins at is known but for blocks of more than a pack.
            return f(k < PER ? low : high, PER > LANES<T> ? (u32)(element % PER) + k : k % PER);
        };
        if (by == 0) {
            store(to, pack_of<T>([&](u32 k) { return of(made(k), lane<T>(in, k)); }));
        } else {
            const uint4 all = joined<T>(pack_of<T>(made), by);
            if (!stores) continue;
            store(to, READS ? pack_of<T>([&](u32 k) { return of(wide_lane<T>(all, k), lane<T>(in, k)); }) : all);
        }
    }
    each_other(body, n, [&](u64 i) {
        const u64 at = i - body < head ? i - body : i, element = offset + at;
        const Acc<T> one = f(philox(element / PER, seed), (u32)(element % PER));
        y[at] = narrow_one<T>(of(one, READS ? x[at] : from_bits<T>(0)));
    });
}

template <u32 PER, class T, class F> __device__ inline void fill(T* x, u64 n, u64 seed, u64 offset, F f) {
    each_element<PER, false>(x, x, n, seed, offset, f, [](Acc<T> one, T) { return one; });
}

// A uniform number in [0, 1), exact in T.
template <class T> __device__ inline Acc<T> unit(uint4 words, u32 k) {
    if constexpr (sizeof(T) == 8) return (f64)(lane<u64>(words, k) >> 11) * 0x1p-53;
    else return (f32)(word(words, k) >> 8) * 0x1p-24f;
}
template <> __device__ inline f32 unit<f16>(uint4 words, u32 k) { return (f32)(word(words, k) >> 21) * 0x1p-11f; }
template <> __device__ inline f32 unit<bf16>(uint4 words, u32 k) {
    // The conversion of a byte is slow: the upper one becomes the lowest bits of 2^23.
    return fmaf(__uint_as_float(__byte_perm(word(words, k), 0x4b000000u, 0x7443)), 0x1p-8f, -0x1p15f);
}

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

// sqrt(-2 ln(u + 2^-24)) for u of 24 bits, off by 2^-22 of the result at most. With u + 2^-24 = 2^e (1 + f) and f from
// -1/3 to 1/3, ln(1 + f) is f + f^2 q(f), off by 3e-8 of it. CUDA's `logf` looks after numbers that cannot occur here.
__device__ inline f32 radius(u32 bits) {
    const f32 x = (f32)(bits + 1) * 0x1p-24f;
    const u32 exponent = (__float_as_uint(x) - 0x3f2aaaabu) & 0xff800000u;
    const f32 f = __uint_as_float(__float_as_uint(x) - exponent) - 1.0f, e = (f32)(i32)exponent * 0x1p-23f;
    f32 q = fmaf(0.140263621f, f, -0.153885383f);
    q = fmaf(q, f, 0.139958065f);
    q = fmaf(q, f, -0.164159611f);
    q = fmaf(q, f, 0.200111687f);
    q = fmaf(q, f, -0.250078189f);
    q = fmaf(q, f, 0.333331981f);
    q = fmaf(q, f, -0.499999361f);
    const f32 square = fmaf(e, -1.38629436f, -2.0f * fmaf(f * f, q, f));
    f32 r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(square));
    return r;
}

// The cosine of 2 pi v, or the sine, for v of 24 bits, off by 2^-22 of the result at most. Integers split v exactly
// into quarters and at most an eighth more or less.
__device__ inline f32 height(u32 bits, bool sine) {
    const u32 circle = bits << 8, quarters = (circle + 0x20000000u) >> 30;
    const f32 y = (f32)(i32)(circle - (quarters << 30)) * 1.46291807926716e-9f, z = y * y;
    f32 s = fmaf(-1.95152830e-4f, z, 8.33216076e-3f);
    s = fmaf(s, z, -0.166666546f);
    s = fmaf(y * z, s, y);
    f32 c = fmaf(2.44384587e-5f, z, -1.38873676e-3f);
    c = fmaf(c, z, 4.16666469e-2f);
    c = fmaf(c, z, -0.5f);
    c = fmaf(c, z, 1.0f);
    const bool swap = (quarters & 1) != sine;
    const u32 negative = (sine ? quarters : quarters + 1) & 2;
    return __uint_as_float(__float_as_uint(swap ? s : c) ^ (negative << 30));
}

// A normal number of two uniform ones: the cosine's of a pair for even `k`, the sine's for odd `k`. They have most of
// their arithmetic in common.
template <class T> __device__ inline Acc<T> normal(uint4 words, u32 k) {
    if constexpr (sizeof(T) == 8) {
        const f64 u = unit<f64>(words, 0), v = unit<f64>(words, 1);
        return sqrt(-2.0 * log(u + 0x1p-53)) * sin_pi(2.0 * v, k % 2 ? 0 : 1);
    } else {
        return radius(word(words, k & ~1u) >> 8) * height(word(words, k | 1u) >> 8, k % 2);
    }
}

template <class T> constexpr u32 PER = sizeof(T) == 8 ? 2 : 4;

template <class T> __device__ inline void fill_uniform(T* x, u64 n, u64 seed, u64 offset, Acc<T> low, Acc<T> span) {
    fill<PER<T>>(x, n, seed, offset, [=](uint4 words, u32 k) { return low + unit<T>(words, k) * span; });
}

template <class T>
__device__ inline void fill_normal(T* x, u64 n, u64 seed, u64 offset, Acc<T> mean, Acc<T> deviation) {
    fill<PER<T>>(x, n, seed, offset, [=](uint4 words, u32 k) { return mean + normal<T>(words, k) * deviation; });
}

template <class T>
__device__ inline void dropout(const T* x, T* y, u64 n, u64 seed, u64 offset, u64 threshold, Acc<T> scale) {
    // word < threshold, of 32 bits: the threshold may be 2^32.
    const bool some = threshold != 0;
    const u32 last = (u32)(threshold - 1);
    each_element<4, true>(
        x, y, n, seed, offset, [=](uint4 words, u32 k) { return Acc<T>(some && word(words, k) <= last ? 0 : 1); },
        [=](Acc<T> keeps, T in) { return keeps == 0 ? Acc<T>(0) : wide(in) * scale; });
}

extern "C" __global__ void random_u32(u32* x, u64 n, u64 seed, u64 offset) {
    // Words are moved as numbers of the same bits.
    fill<4>((f32*)x, n, seed, offset, [](uint4 words, u32 k) { return __uint_as_float(word(words, k)); });
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
