// What the kernels use of CUDA, for g++. run.py puts calls of these functions in the place of PTX.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <sanitizer/asan_interface.h>
#include <setjmp.h>
#include <ucontext.h>
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
// The threads of a block: fibers, of which AddressSanitizer is told.
class Fibers {
    static constexpr size_t STACK = 256 << 10;
    struct Fiber {
        // Where it begins, and where it goes on: by longjmp, since swapcontext calls the system.
        ucontext_t start;
        jmp_buf at;
        std::unique_ptr<char[]> stack{new char[STACK]};
        void* fake = nullptr; // the sanitizer's: where its frames are
        bool begun = false, ended;
    };
    static inline Fibers* here = nullptr;
    // They go on with the next block, and with the next launch.
    static inline std::deque<Fiber> all;
    dim3 block;
    std::function<void()> kernel;
    unsigned count = block.x * block.y;
    Fiber* current = nullptr;
    jmp_buf back;
    const void* bottom = nullptr;
    size_t size = 0;

    static void begin() {
        __sanitizer_finish_switch_fiber(nullptr, &here->bottom, &here->size);
        for (;;) {
            here->kernel();
            here->current->ended = true;
            wait();
        }
    }

    void go_on(unsigned t) {
        void* fake;
        current = &all[t], threadIdx = {t % block.x, t / block.x, 0};
        __sanitizer_start_switch_fiber(&fake, current->stack.get(), STACK);
        if (!_setjmp(back)) {
            if (current->begun) _longjmp(current->at, 1);
            current->begun = true;
            setcontext(&current->start);
        }
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
    }

  public:
    Fibers(dim3 block, std::function<void()> kernel) : block(block), kernel(kernel) {
        while (all.size() < count) {
            Fiber& fiber = all.emplace_back();
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = fiber.stack.get(), fiber.start.uc_stack.ss_size = STACK;
            makecontext(&fiber.start, begin, 0);
        }
    }

    void run() {
        here = this;
        for (unsigned k = 0; k < count; k++) all[k].ended = false;
        // Upwards and downwards in turn: what a thread must not read before the others have written it is old in one.
        for (bool up = false, more = true; more; up = !up) {
            for (unsigned k = 0; k < count; k++) go_on(up ? k : count - 1 - k);
            // All threads of a block get to each of its barriers.
            for (unsigned k = 0; k < count; k++)
                if (all[k].ended != all[0].ended) abort();
            more = !all[0].ended;
        }
    }

    static void wait() {
        Fiber& fiber = *here->current;
        __sanitizer_start_switch_fiber(&fiber.fake, here->bottom, here->size);
        if (!_setjmp(fiber.at)) _longjmp(here->back, 1);
        __sanitizer_finish_switch_fiber(fiber.fake, &here->bottom, &here->size);
    }
};
inline void __syncthreads() { Fibers::wait(); }

// All threads of a block, not only those of a warp, call together.
inline void __syncwarp() {}
template <class V> V __shfl_xor_sync(unsigned, V x, unsigned far) {
    static uint64_t given[1024];
    const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
    memcpy(&given[thread], &x, sizeof x);
    __syncthreads();
    memcpy(&x, &given[thread ^ far], sizeof x);
    __syncthreads();
    return x;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

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
// One block after the other. Its threads are fibers: each runs to __syncthreads or to its end, then another one does.
// (With threads of the system two cores need a minute for what takes a second here.)
template <class F> void launch_together(dim3 grid, dim3 block, F kernel) {
    gridDim = grid, blockDim = block;
    Fibers fibers(block, kernel);
    each_block_of(grid, [&](dim3 at) { blockIdx = at, fibers.run(); });
}
#endif
