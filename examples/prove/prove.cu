// The kernels of examples/prove: a number-theoretic transform over the Goldilocks field, and a Merkle tree of SHA-256.
// Their Rust halves are in prover/, which says how both work.
//
//   ntt_pass(const u64* x, u64* y, const u64* roots, u32 log_n, u32 log_done, u32 log_radix)
//   merkle_leaves(const u64* values, u32* tree, u32 leaves)
//   merkle_fold(u32* tree, u32 parents, u32 levels)
#include "common.cuh"

namespace {

constexpr u64 P = 0xffffffff00000001ull;
constexpr u64 EPSILON = 0xffffffffull; // 2^64 modulo p

__device__ inline u64 canonical(u64 x) { return x < P ? x : x - P; }

__device__ inline u64 add(u64 a, u64 b) {
    const u64 sum = a + b;
    return sum < a || sum >= P ? sum - P : sum;
}

__device__ inline u64 sub(u64 a, u64 b) { return a < b ? a - b + P : a - b; }

__device__ inline u64 mul(u64 a, u64 b) {
    const u64 low = a * b, upper = __umul64hi(a, b);
    const u64 high = upper >> 32, middle = upper & EPSILON;
    u64 sum = low - high;
    if (low < high) sum -= EPSILON;
    const u64 rest = (middle << 32) - middle;
    sum += rest;
    if (sum < rest) sum += EPSILON;
    return canonical(sum);
}

constexpr u32 LOG_MOST = 24, LOG_RADIX = 8, LOG_COLUMNS = 4;
constexpr u32 HALF = 1 << LOG_MOST / 2, RADIX = 1 << LOG_RADIX, COLUMNS = 1 << LOG_COLUMNS;

__device__ inline u64 power(const u64* roots, u32 e) { return mul(roots[e % HALF], roots[HALF + e / HALF]); }

} // namespace

extern "C" __global__ void ntt_pass(const u64* x, u64* y, const u64* roots, u32 log_n, u32 log_done, u32 log_radix) {
    // One more than COLUMNS, so that neither rows nor columns meet in a bank.
    __shared__ u64 tile[RADIX][COLUMNS + 1];
    __shared__ u64 inner[RADIX / 2];
    const u32 radix = 1u << log_radix, done = 1u << log_done, columns = 1u << (log_n - log_radix);
    for (u32 i = threadIdx.x; i < radix / 2; i += blockDim.x) inner[i] = power(roots, i << (LOG_MOST - log_radix));

    for (u32 block = blockIdx.x; block * COLUMNS < columns; block += gridDim.x) {
        const u32 first = block * COLUMNS;
        for (u32 i = threadIdx.x; i < radix * COLUMNS; i += blockDim.x) {
            const u32 row = i / COLUMNS, column = first + i % COLUMNS;
            if (column >= columns) continue;
            u64 value = canonical(x[row * columns + column]);
            const u32 e = row * (column % done);
            if (e != 0) value = mul(value, power(roots, e << (LOG_MOST - log_done - log_radix)));
            tile[__brev(row) >> (32 - log_radix)][i % COLUMNS] = value;
        }
        __syncthreads();
        for (u32 stage = 0; stage < log_radix; stage++) {
            for (u32 i = threadIdx.x; i < radix / 2 * COLUMNS; i += blockDim.x) {
                const u32 pair = i / COLUMNS, inside = pair & ((1u << stage) - 1);
                u64* low = &tile[(pair - inside) * 2 + inside][i % COLUMNS];
                u64* high = low + ((COLUMNS + 1) << stage);
                const u64 a = *low, b = mul(*high, inner[inside << (log_radix - 1 - stage)]);
                *low = add(a, b);
                *high = sub(a, b);
            }
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < radix * COLUMNS; i += blockDim.x) {
            // The results of the first pass are neighbours in a column, those of the others in a row.
            const u32 row = log_done == 0 ? i % radix : i / COLUMNS;
            const u32 at = log_done == 0 ? i / radix : i % COLUMNS, column = first + at;
            if (column >= columns) continue;
            y[column / done * done * radix + row * done + column % done] = tile[row][at];
        }
        __syncthreads();
    }
}

namespace {

struct Digest {
    u32 word[8];
};

__device__ inline u32 rotate(u32 x, u32 by) { return x >> by | x << (32 - by); }

__device__ inline Digest start() {
    return {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

// The loop is unrolled, so the constants and the places in the ring become part of the instructions.
__device__ inline void compress(Digest& state, u32 (&message)[16]) {
    constexpr u32 constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    u32 a = state.word[0], b = state.word[1], c = state.word[2], d = state.word[3];
    u32 e = state.word[4], f = state.word[5], g = state.word[6], h = state.word[7];
#pragma unroll
    for (u32 i = 0; i < 64; i++) {
        if (i >= 16) {
            const u32 far = message[(i + 1) % 16], near = message[(i + 14) % 16];
            message[i % 16] += message[(i + 9) % 16] + (rotate(far, 7) ^ rotate(far, 18) ^ far >> 3) +
                               (rotate(near, 17) ^ rotate(near, 19) ^ near >> 10);
        }
        const u32 first = h + constants[i] + message[i % 16] + (e & f ^ ~e & g) +
                          (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25));
        const u32 second = (a & b ^ a & c ^ b & c) + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22));
        h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const u32 last[8] = {a, b, c, d, e, f, g, h};
#pragma unroll
    for (u32 i = 0; i < 8; i++) state.word[i] += last[i];
}

__device__ inline void store(u32* tree, u32 node, const Digest& digest) {
    uint4* to = (uint4*)tree + 2 * node;
    const u32* word = digest.word;
    to[0] = make_uint4(word[0], word[1], word[2], word[3]);
    to[1] = make_uint4(word[4], word[5], word[6], word[7]);
}

} // namespace

extern "C" __global__ void merkle_leaves(const u64* values, u32* tree, u32 leaves) {
    for (u32 leaf = grid_index(); leaf < leaves; leaf += grid_size()) {
        u32 message[16] = {};
        for (u32 i = 0; i < 4; i++) {
            const u64 value = values[4 * (u64)leaf + i];
            message[2 * i] = __byte_perm((u32)value, 0, 0x0123);
            message[2 * i + 1] = __byte_perm((u32)(value >> 32), 0, 0x0123);
        }
        message[8] = 1u << 31, message[15] = 256;
        Digest digest = start();
        compress(digest, message);
        store(tree, leaves + leaf, digest);
    }
}

extern "C" __global__ void merkle_fold(u32* tree, u32 parents, u32 levels) {
    constexpr u32 WIDTH = 256;
    for (u32 block = blockIdx.x; block * WIDTH < parents; block += gridDim.x) {
        for (u32 level = 0; level < levels; level++) {
            const u32 count = parents >> level, width = WIDTH >> level;
            for (u32 i = threadIdx.x; i < width && block * width + i < count; i += blockDim.x) {
                const u32 node = count + block * width + i;
                const uint4* children = (const uint4*)tree + 4 * node;
                u32 message[16];
                for (u32 j = 0; j < 4; j++) {
                    const uint4 four = children[j];
                    message[4 * j] = four.x, message[4 * j + 1] = four.y;
                    message[4 * j + 2] = four.z, message[4 * j + 3] = four.w;
                }
                Digest digest = start();
                // The second block is the end of every message of 64 bytes.
#pragma unroll 1
                for (u32 part = 0; part < 2; part++) {
                    compress(digest, message);
                    for (u32 j = 0; j < 16; j++) message[j] = j == 0 ? 1u << 31 : j == 15 ? 512 : 0;
                }
                store(tree, node, digest);
            }
            // The children of the next level are this block's.
            __syncthreads();
        }
    }
}
