// Accesses to global memory, own or a peer's, that C++ has no words for.
//
// Addresses are plain numbers, since they come out of tables: a pointer whose address space the compiler cannot see
// becomes a slower, generic access.
#pragma once
#include "common.cuh"

// Weak accesses of 1 to 16 bytes, aligned to their size: many may be in flight, and nothing orders them but the meeting
// around them. Never ld.global.nc: peers write this memory while the kernel runs.
template <class Unit> __device__ Unit load(u64 at);

template <> __device__ inline u8 load<u8>(u64 at) {
    u32 x;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(at));
    return (u8)x;
}
template <> __device__ inline u16 load<u16>(u64 at) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(at));
    return x;
}
template <> __device__ inline u32 load<u32>(u64 at) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}
template <> __device__ inline u64 load<u64>(u64 at) {
    u64 x;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
}
template <> __device__ inline uint4 load<uint4>(u64 at) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

__device__ inline void store(u64 at, u8 x) { asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)x) : "memory"); }
__device__ inline void store(u64 at, u16 x) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(x) : "memory"); }
__device__ inline void store(u64 at, u32 x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
__device__ inline void store(u64 at, u64 x) { asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory"); }
__device__ inline void store(u64 at, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Words that devices, or a device and the host, tell each other something by. Waiting is done by relaxed loads and one
// acquire at the end; what it costs to poll with acquires: https://github.com/NVIDIA/nccl/issues/2058
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
__device__ inline void store_relaxed(u64* at, u64 x) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

// A packet of data and flags. The halves of 8 bytes are single accesses each; that the whole is one is not needed.
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

// A kernel may be put on the device while the one before it on its stream ends (kernels from compute capability 9.0 on, by
// `Launch::early`): `await_earlier` is where it waits until that one has completed, and all its writes are visible. Nothing
// in global memory is touched before; what comes from the parameters may be. No thread may do without it: the kernel
// after this one waits for this one alone, and takes it that all before it have completed, too.
// https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ inline void await_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may come when a thread of every block has called this, or the block has ended. It promises nothing about
// memory, and says nothing to a kernel that was not launched to come early.
__device__ inline void let_next_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Barriers of some of a block's warps, by number (0 is __syncthreads'), and words in shared memory that they tell each
// other something by: `store_block` comes after what the thread did before it.
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
