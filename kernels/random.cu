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

// y[i] = f(words, k, x[i]), rounded, for `n` elements: element `offset + i` takes part `k` of the words of its block,
// which has PER parts. Without READS, x is not read. A thread makes a pack at once, from two blocks if need be; the
// elements before the first pack and after the last one are made one at a time.
template <u32 PER, bool READS, class T, class F>
__device__ inline void each_element(const T* x, T* y, u64 n, u64 seed, u64 offset, F f) {
    const u32 STEP = PER < LANES<T> ? PER : LANES<T>;
    const u64 to_pack = (STEP - offset % STEP) % STEP, head = to_pack < n ? to_pack : n;
    const u64 packs = (n - head) / LANES<T>, body = packs * LANES<T>;
    const bool whole = is_aligned(y + head) && (!READS || is_aligned(x + head));
    for (u64 i = grid_index(); i < packs; i += grid_size()) {
        const u64 at = head + i * LANES<T>, element = offset + at;
        uint4 in = make_uint4(0, 0, 0, 0);
        if (READS) in = whole ? *(const uint4*)(x + at) : load_pack(x, at, n, false);
        const uint4 low = philox(element / PER, seed), high = PER < LANES<T> ? philox(element / PER + 1, seed) : low;
        const uint4 out = pack_of<T>([&](u32 k) {
            // Which lane of a block the pack begins at is known but for blocks of more than a pack.
            const u32 part = PER > LANES<T> ? (u32)(element % PER) + k : k % PER;
            return f(k < PER ? low : high, part, lane<T>(in, k));
        });
        if (whole) store((u64)(y + at), out);
        else store_pack(y, at, n, false, out);
    }
    each_other(body, n, [&](u64 i) {
        const u64 at = i - body < head ? i - body : i, element = offset + at;
        y[at] = narrow_one<T>(f(philox(element / PER, seed), (u32)(element % PER), READS ? x[at] : from_bits<T>(0)));
    });
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
    each_element<PER<T>, false>(x, x, n, seed, offset,
                                [=](uint4 words, u32 k, T) { return low + unit<T>(words, k) * span; });
}

template <class T>
__device__ inline void fill_normal(T* x, u64 n, u64 seed, u64 offset, Acc<T> mean, Acc<T> deviation) {
    each_element<PER<T>, false>(x, x, n, seed, offset,
                                [=](uint4 words, u32 k, T) { return mean + normal<T>(words, k) * deviation; });
}

template <class T>
__device__ inline void dropout(const T* x, T* y, u64 n, u64 seed, u64 offset, u64 threshold, Acc<T> scale) {
    // word < threshold, of 32 bits: the threshold may be 2^32.
    const bool some = threshold != 0;
    const u32 last = (u32)(threshold - 1);
    each_element<4, true>(x, y, n, seed, offset, [=](uint4 words, u32 k, T in) {
        return some && word(words, k) <= last ? Acc<T>(0) : wide(in) * scale;
    });
}

extern "C" __global__ void random_u32(u32* x, u64 n, u64 seed, u64 offset) {
    // Words are moved as numbers of the same bits.
    each_element<4, false>((const f32*)x, (f32*)x, n, seed, offset,
                           [](uint4 words, u32 k, f32) { return __uint_as_float(word(words, k)); });
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
