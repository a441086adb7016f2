// Accesses to global memory, own or a peer's, that C++ cannot express.
//
// Addresses are plain numbers, since they come from tables: with a pointer of unknown address space the compiler
// generates slower, generic accesses.
#pragma once
#include "common.cuh"

// Weak accesses of 1 to 16 bytes, aligned to their size. Many may be in flight, and only the meeting around them orders
// them. Never ld.global.nc, since peers write this memory while the kernel runs.
template <class Unit> __device__ Unit load(u64 at);

// A byte has no register of its own size.
#define LOAD(Unit, InRegister, constraint)                                           \
    template <> __device__ inline Unit load<Unit>(u64 at) {                          \
        InRegister x;                                                                \
        asm volatile("ld.global." #Unit " %0, [%1];" : "=" constraint(x) : "l"(at)); \
        return (Unit)x;                                                              \
    }
LOAD(u8, u32, "r")
LOAD(u16, u16, "h")
LOAD(u32, u32, "r")
LOAD(u64, u64, "l")
#undef LOAD
template <> __device__ inline uint4 load<uint4>(u64 at) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

// Asks for the line of own memory in the second-level cache.
__device__ inline void prefetch(u64 at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ inline void store(u64 at, u8 x) { asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)x) : "memory"); }
__device__ inline void store(u64 at, u16 x) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(x) : "memory"); }
__device__ inline void store(u64 at, u32 x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
__device__ inline void store(u64 at, u64 x) { asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory"); }
__device__ inline void store(u64 at, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Words for signals between devices, or between a device and the host. A wait polls with relaxed loads and makes one
// acquire at the end; for the cost of polling with acquires see https://github.com/NVIDIA/nccl/issues/2058
__device__ inline u32 load_relaxed(const u32* at) {
    u32 x;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline u64 load_relaxed(const u64* at) {
    u64 x;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline void store_release(u32* at, u32 x) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
__device__ inline u64 load_acquire(const u64* at) {
    u64 x;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline void store_release(u64* at, u64 x) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}
__device__ inline void store_relaxed(u32* at, u32 x) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
__device__ inline void store_relaxed(u64* at, u64 x) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

// A packet of data and flags, or four words of data. A packet's halves of 8 bytes arrive whole; of other data only each
// word need do so.
__device__ inline uint4 load_packet(u64 at) {
    uint4 x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
}
__device__ inline void store_packet(u64 at, uint4 x) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// The same with two accesses of 8 bytes, for elements that must not be torn.
__device__ inline uint4 load_halves(u64 at) {
    u64 low, high;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(at) : "memory");
    return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ inline void store_halves(u64 at, uint4 x) {
    const u64 low = (u64)x.y << 32 | x.x, high = (u64)x.w << 32 | x.z;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(low), "l"(high) : "memory");
}

// A kernel may start while the previous kernel of its stream ends (from compute capability 9.0 on, by `Launch::early`).
// `await_earlier` waits until that kernel has completed and all its writes are visible. Before it, no thread touches
// global memory; parameters may be read. No thread may skip it: the next kernel waits only for this one, and assumes
// that all earlier kernels have completed, too.
// PTX ISA: "Parallel Synchronization and Communication Instructions: griddepcontrol",
// https://docs.nvidia.com/cuda/parallel-thread-execution/
__device__ inline void await_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once a thread of every block has called this or the block has ended. It does not order
// memory accesses, and has no effect on a kernel without an early launch.
__device__ inline void let_next_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Has a number computed here, before what follows: above all before `await_earlier`, where computing costs nothing.
__device__ inline void settle(u64& x) { asm volatile("" : "+l"(x)); }
__device__ inline void settle(u32& x) { asm volatile("" : "+r"(x)); }

__device__ inline u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Barriers of some of a block's warps, by number (0 is that of __syncthreads), and signals between them in shared
// memory: `store_block` is ordered after the thread's earlier accesses.
__device__ inline void sync_some(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline bool all_of_some(u32 id, u32 threads, bool x) {
    u32 all;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.and.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(all)
                 : "r"(id), "r"(threads), "r"((u32)x)
                 : "memory");
    return all != 0;
}
__device__ inline void store_block(u32* at, u32 x) {
    __threadfence_block();
    *(volatile u32*)at = x;
}
__device__ inline u32 load_block(const u32* at) {
    const u32 x = *(const volatile u32*)at;
    __threadfence_block();
    return x;
}
