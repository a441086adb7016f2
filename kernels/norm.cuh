// What follows a sum of rows: it is added to the residual, and that is normed. For norm_inbox.cu and norm_pull.cu.
//
// With s the sum of all members' x in rank order, rounded: residual = round(residual + s), y = norm(residual) * gamma
// (+ beta). Residual and weights are the member's own. The RMS norm has neither beta nor mean.
//
// Threads. As in rows.cu a row belongs to blockDim.x threads, by its width alone, and all its packs are in their
// registers; a block has blockDim.y rows. So the bits are those of rows.cu, and of the collectives: the same functions
// add up. All addresses are multiples of 16, columns are whole packs and at most KEPT packs for each thread.
#pragma once
#include "inbox.cuh"
#include "rows.cuh"

// Equal on all members. Not 0 rows.
struct Plan {
    u64 rows;
    u32 cols;
    f32 eps;
    u32 way;   // of norm_inbox.cu
    u32 layer; // else the RMS norm
};

template <class T> struct Memory {
    const T* x;
    T* residual;
    const T *gamma, *beta;
    T* y;
    f32 *mean, *rstd;
};

template <class T> struct Normed {
    const Plan& plan;
    const Memory<T>& own;

    __device__ Normed(const Plan& plan, const Memory<T>& own) : plan(plan), own(own) {}

    // The first element of this thread's k-th pack of a row, and its place in all rows.
    __device__ static u32 element(u32 k) { return (threadIdx.x + k * blockDim.x) * LANES<T>; }
    __device__ u64 at(u64 row, u32 k) const { return row * plan.cols + element(k); }
    __device__ bool has(u64 row, u32 k) const { return row < plan.rows && element(k) < plan.cols; }

    __device__ uint4 residual(u64 row, u32 k) const { return *(const uint4*)(own.residual + at(row, k)); }
    // The residual, which was `before`, with the sum of its elements from now on.
    __device__ uint4 added(u64 row, u32 k, uint4 before, uint4 sum) const {
        const auto of = [&](u32 i) { return wide(lane<T>(before, i)) + wide(lane<T>(sum, i)); };
        return *(uint4*)(own.residual + at(row, k)) = pack_of<T>(of);
    }

    template <bool MEAN> __device__ void norm(u64 row, const Row<T, true>& in) const {
        const Two<f32> stats = norm_stats<MEAN>(in, plan.eps);
        if (threadIdx.x == 0) {
            if (MEAN) own.mean[row] = stats.a;
            own.rstd[row] = stats.b;
        }
        each_pack<T, true>(plan.cols, [&](u32 p, u32 k) {
            const uint4 g = *(const uint4*)(own.gamma + p);
            const uint4 b = MEAN ? *(const uint4*)(own.beta + p) : make_uint4(0, 0, 0, 0);
            *(uint4*)(own.y + row * plan.cols + p) = normed<MEAN, T>(in.pack(p, k), stats, g, b);
        });
    }
    // The norm of a row of the residual, from its packs.
    __device__ void norm_of(u64 row, const uint4 (&packs)[KEPT]) const {
        const Row<T, true> in(packs, plan.cols);
        if (plan.layer) norm<true>(row, in);
        else norm<false>(row, in);
    }
};
