// What the kernels use of CUDA, for g++. run.py puts calls of these functions in the place of PTX.
#pragma once
#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#ifdef MEETING
#define __shared__ static thread_local
#else
#define __shared__ static
#endif

// The mutant that run.py wants; 0: none.
inline const int mutant = getenv("MUTANT") ? atoi(getenv("MUTANT")) : 0;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
inline thread_local dim3 blockIdx, threadIdx, blockDim, gridDim;
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline float __double2float_rn(double x) { return (float)x; }
inline float __double2float_rz(double x) {
    const float near = (float)x;
    return std::fabs((double)near) > std::fabs(x) ? std::nextafterf(near, 0.0f) : near;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

inline float half_to_float(unsigned short bits) { return (float)std::bit_cast<_Float16>(bits); }
inline unsigned short half_of(float x) { return std::bit_cast<unsigned short>((_Float16)x); }
inline unsigned short half_of(double x) { return std::bit_cast<unsigned short>((_Float16)x); }

// Approximate instructions, as wrong as PTX allows: `error` is -1, 0 or 1 times the largest relative error.
inline double error = 0;
inline float flushed(double x) { return std::fabs(x) < 0x1p-126 ? 0.0f * (float)x : (float)x; }
inline float exp2_approx(float x) { return flushed(std::exp2((double)flushed(x)) * (1 + error * 0x1p-22)); }
inline float rcp_approx(float x) { return flushed(1 / (double)flushed(x) * (1 + error * 0x1p-23)); }
inline float sqrt_approx(float x) { return flushed(std::sqrt((double)flushed(x)) * (1 + error * 0x1p-23)); }
inline uint2 wide_product(unsigned a, unsigned b) {
    const uint64_t product = (uint64_t)a * b;
    return {(unsigned)product, (unsigned)(product >> 32)};
}

#ifndef MEETING
// A block's threads meet here; only `launch_together` runs them at the same time.
inline std::barrier<>* meeting = nullptr;
inline void __syncthreads() { meeting->arrive_and_wait(); }

// What embedding_backward needs, which is not checked.
inline bool __syncthreads_or(bool) { abort(); }
inline unsigned __ballot_sync(unsigned, bool) { abort(); }
inline int __ffs(int) { abort(); }
#endif

template <class F> void each_block_of(dim3 grid, F f) {
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) f(dim3{x, y, z});
}

// What the thread after this one of its warp has given to each of its calls, and what this one has.
inline std::vector<unsigned> given_by_next, given;
inline unsigned __shfl_down_sync(unsigned mask, unsigned x, unsigned by) {
    if (mask != ~0u || by != 1 || blockDim.x % 32 != 0) abort();
    given.push_back(x);
    return threadIdx.x % 32 == 31 ? x : given_by_next.at(given.size() - 1);
}

// One thread after the other, from the last one on: for kernels without __syncthreads.
template <class F> void launch(unsigned blocks, unsigned threads, F kernel) {
    gridDim = {blocks}, blockDim = {threads};
    each_block_of(gridDim, [&](dim3 block) {
        blockIdx = block;
        for (unsigned t = threads; t-- > 0;) {
            threadIdx = {t, 0, 0};
            given_by_next = std::move(given), given.clear();
            kernel();
            // A warp calls together.
            if (t % 32 != 31 && t + 1 < threads && given.size() != given_by_next.size()) abort();
        }
        given.clear();
    });
}

#ifndef MEETING
// One block after the other, with a thread of the system for each thread of the block.
template <class F> void launch_together(dim3 grid, dim3 block, F kernel) {
    std::barrier<> here(block.x * block.y);
    meeting = &here;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < block.x * block.y; t++)
        threads.emplace_back([&, t] {
            gridDim = grid, blockDim = block, threadIdx = {t % block.x, t / block.x, 0};
            each_block_of(grid, [&](dim3 at) { blockIdx = at, kernel(), __syncthreads(); });
        });
    for (auto& thread : threads) thread.join();
}
#endif
