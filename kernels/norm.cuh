// What follows a sum of rows: it is added to the residual, and that is normed. For norm_inbox.cu and norm_pull.cu.
//
// With s the sum of all members' x in rank order, rounded: residual = round(residual + s), y = norm(residual) * gamma
// (+ beta). Residual and weights are the member's own. The RMS norm has neither beta nor mean.
//
// Threads. A row belongs to blockDim.x threads, and all its packs are in their registers, at most K for each; a block
// has blockDim.y rows. That is KEPT / K times the threads that the row has in rows.cu, by its width alone; sums go in
// the order of those. So the bits are those of rows.cu, and of the collectives. All addresses are multiples of 16,
// columns are whole packs.
//
// Few long rows: a row belongs to `split` blocks, a power of two. Of the row's warps in rows.cu, warp w is in block w %
// split: so the last steps of the butterfly are those among blocks. Blocks tell each other their sums by words of the
// own pad, `step[DONE]` and `step[TAKEN]` of the own ordinal, which no other kernel uses. The low half of a word is a
// sum. The high half is the number of the kernel: the device counts such kernels in `epoch` of the own ordinal. All
// blocks are on the device.
#pragma once
#include "inbox.cuh"
#define ROWS_SHARE_BLOCKS
#include "rows.cuh"

// An entry with blocks of 1024 threads, and so up to 64 registers a thread.
#define WIDE_KERNEL extern "C" __global__ void __launch_bounds__(1024, 1)

// Equal on all members. Not 0 rows.
struct Plan {
    u64 rows;
    u32 cols;
    f32 eps;
    u32 way;   // `Way` of norm_inbox.cu; norm_pull.cu does not look at it
    u32 layer; // else the RMS norm
    u32 packs; // of a thread
    u32 split; // blocks of a row; if not 1, there are `rows * split` blocks, and a thread has at most 2 packs
};

template <class T> struct Memory {
    const T* x;
    T* residual;
    const T *gamma, *beta;
    T* y;
    f32 *mean, *rstd;
};

// Of the packs of a block whose threads have at most two each.
__device__ inline f32* packs_in_block() {
    __shared__ f32 sums[2 * 512];
    return sums;
}

// SPLIT: a row belongs to `plan.split` blocks.
template <class T, u32 K, bool SPLIT = false> struct Normed {
    const Plan& plan;
    const Memory<T>& own;

    __device__ Normed(const Plan& plan, const Memory<T>& own) : plan(plan), own(own) {}

    // How many of the threads that a row has in rows.cu are in this block.
    __device__ static u32 threads() { return blockDim.x * K / KEPT; }

    // This thread's k-th pack of a row, its first element, and the place of that in all rows.
    __device__ u32 pack(u32 k) const {
        if constexpr (!SPLIT) return threadIdx.x + k * blockDim.x;
        const u32 thread = threadIdx.x % threads(), warp = thread / 32 * plan.split + blockIdx.x % plan.split;
        return (threadIdx.x / threads() * threads() + k * blockDim.x) * plan.split + warp * 32 + thread % 32;
    }
    __device__ u32 element(u32 k) const { return pack(k) * LANES<T>; }
    __device__ u64 at(u64 row, u32 k) const { return row * plan.cols + element(k); }
    __device__ bool has(u64 row, u32 k) const { return row < plan.rows && element(k) < plan.cols; }

    __device__ uint4 residual(u64 row, u32 k) const { return *(const uint4*)(own.residual + at(row, k)); }
    // The residual, which was `before`, with the sum of its elements from now on.
    __device__ uint4 added(u64 row, u32 k, uint4 before, uint4 sum) const {
        const auto of = [&](u32 i) { return wide(lane<T>(before, i)) + wide(lane<T>(sum, i)); };
        return *(uint4*)(own.residual + at(row, k)) = pack_of<T>(of);
    }
    // This thread's packs of the weights: on their way before the sum is there.
    __device__ void weights(uint4 (&gamma)[K]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (element(k) < plan.cols) gamma[k] = *(const uint4*)(own.gamma + element(k));
        }
    }

    // The sum over the row of `of(x)` for all elements of this block, as rows.cuh has it.
    template <class F> __device__ f32 sum(const uint4 (&packs)[K], F of) const {
        f32 part[K] = {};
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (element(k) >= plan.cols) continue;
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++) part[k] += of(wide(lane<T>(packs[k], i)));
        }
        f32 sum = 0;
        if (K == KEPT) {
#pragma unroll
            for (u32 k = 0; k < K; k++) sum += part[k];
        } else {
            f32* const row = packs_in_block() + threadIdx.y * blockDim.x * K;
            sync_row(); // The sums of the last call have been read.
#pragma unroll
            for (u32 k = 0; k < K; k++) row[threadIdx.x + k * blockDim.x] = part[k];
            sync_row();
#pragma unroll
            for (u32 k = 0; k < KEPT; k++) sum += row[threadIdx.x % threads() + k * threads()];
        }
        return across(One<f32>{sum}, [](One<f32> p, One<f32> q) { return One<f32>{p.a + q.a}; }, threads()).a;
    }

    // `all(step, sum)` adds up the sums of all blocks of a row; `sum` is this block's.
    template <bool MEAN, class All>
    __device__ void norm(u64 row, const uint4 (&packs)[K], const uint4 (&gamma)[K], All all) const {
        const f32 mean = MEAN ? all(TAKEN, sum(packs, [](f32 x) { return x; })) / f32(plan.cols) : 0.0f;
        const f32 squares = all(DONE, sum(packs, [&](f32 x) { return (x - mean) * (x - mean); }));
        const Two<f32> stats = {mean, 1.0f / sqrt_of(squares / f32(plan.cols) + plan.eps)};
        if (pack(0) == 0) {
            if (MEAN) own.mean[row] = stats.a;
            own.rstd[row] = stats.b;
        }
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (element(k) >= plan.cols) continue;
            const uint4 b = MEAN ? *(const uint4*)(own.beta + element(k)) : make_uint4(0, 0, 0, 0);
            *(uint4*)(own.y + at(row, k)) = normed<MEAN, T>(packs[k], stats, gamma[k], b);
        }
    }
    // The norm of a row of the residual, from its packs.
    template <class All>
    __device__ void norm_of(u64 row, const uint4 (&packs)[K], const uint4 (&gamma)[K], All all) const {
        if (plan.layer) norm<true>(row, packs, gamma, all);
        else norm<false>(row, packs, gamma, all);
    }
    __device__ void norm_of(u64 row, const uint4 (&packs)[K], const uint4 (&gamma)[K]) const {
        norm_of(row, packs, gamma, [](Step, f32 sum) { return sum; });
    }

    // Adds up the sums of the blocks of a row, to the same bits in all. `number` is this kernel's. If the kernel gives
    // up, the result is not specified.
    __device__ f32 of_blocks(const Meet& meet, u32 number, Step step, f32 sum) const {
        const u32 ours = blockIdx.x - blockIdx.x % plan.split, me = ordinal(meet, meet.me);
        u64(*const words)[MOST] = signals_of(meet, meet.me)->step[step];
        const u64 tag = (u64)number << 32;
        if (threadIdx.x == 0) store_relaxed(&words[blockIdx.x][me], tag | __float_as_uint(sum));
        const u64* const at = &words[ours + threadIdx.x % plan.split][me];
        u64 word = load_relaxed(at);
        // A block of this row is late only if its peer is.
        for (Patience patience; word >> 32 != number; word = load_relaxed(at)) {
            if (patience.over(meet, ordinal(meet, rank_after(meet, 1)))) break;
        }
        sum = __uint_as_float((u32)word);
        __syncwarp();
        for (u32 far = plan.split / 2; far > 0; far /= 2) sum += __shfl_xor_sync(ALL, sum, far);
        return sum;
    }
};
