// An all-reduce (the sum), the addition of a residual, and a norm of the rows, in one kernel, by data that are their
// own flags: inbox.cuh has the protocol.
//
//   norm_inbox_{f32,f16,bf16}, norm_inbox_wide_f32, and norm_inbox_many_.. for more than two members
//       (Meet meet, Plan plan, const T* x, T* residual, const T* gamma, const T* beta, T* y, f32* mean, f32* rstd)
//
// norm.cuh has what is computed, and by which threads. (`wide` has the blocks of 1024 threads that rows of f32 of more
// than 8192 columns take, unless several blocks share a row.)
//
// `y` may be `x`: a thread reads an element of x for the last time before it writes that element of y.
//
// Ways. A block takes "waves" of blockDim.y rows, or with owners of so many rows for each member:
//
//   ONE_TRIP   everything to everyone, in the rooms `whole` of the inbox, for at most `Signals::whole` bytes. All rows
//              of a block are sent before the first is awaited. With few rows a row gets more threads, each with fewer
//              packs, and more blocks: the time is then that of one thread's instructions.
//   TO_ALL     everything to everyone, through slots: for two members, of any size.
//   BY_OWNERS  rows to their owners and sums back through slots: for more than two members. The rows of a wave that
//              come o-th are added up by member o. A wave's norms come when all its sums are there.
//
// Through slots a wave goes in parts of as many packs as a slot holds; each is a step. The steps of a block are as in
// inbox.cu: TO_ALL is two steps ahead with its sends, BY_OWNERS one, with sums one step behind, and a step waits for
// what others have done in earlier steps only. Whether a row exists does not change the number of steps.
//
// Two members, and threads of one or two packs, have their sums in registers. Else a thread writes its sums to the
// residual and reads them back for the norm: so nothing is unrolled over packs and members, which would be megabytes of
// code. Each way is compiled by itself: in a small call it takes longer to fetch unused instructions than to do the
// work.
//
// A thread that gives up goes on to the block's next barrier, and there all threads of the block leave together (with
// one trip it takes nothing any more). What it leaves is not specified.
#include "norm.cuh"

enum Way : u32 { ONE_TRIP, TO_ALL, BY_OWNERS };

// In shared memory, by rank.
struct Lines {
    u64 in[MOST], out[MOST];
    u32 epoch[MOST];
};

// The work of one block, in steps. Step p sends, takes and adds up part p % parts of wave p / parts.
template <class T, Way WAY, bool TWO, u32 K, bool SPLIT = false> struct Work : Normed<T, K, SPLIT> {
    typedef Normed<T, K, SPLIT> Rows;
    using Rows::plan, Rows::own, Rows::at, Rows::has, Rows::residual, Rows::added;
    const Meet& meet;
    const Lines& lines;
    static const bool owners = WAY == BY_OWNERS, slots = WAY != ONE_TRIP, kept = TWO || K < KEPT;
    const u64 slot;
    const u32 units; // of a slot
    const u32 parts; // of a wave
    const u32 width; // rows of a wave, in units of blockDim.y

    __device__ Work(const Meet& meet, const Plan& plan, const Memory<T>& own, const Lines& lines)
        : Rows(plan, own), meet(meet), lines(lines), slot(slots ? meet.signals->slot : 0), units((u32)slot / 16),
          parts(slots ? (K * blockDim.x * blockDim.y - 1) / units + 1 : 1), width(owners ? meet.count : 1) {}

    // The row of this thread in step p; with owners, the one that member `owner` adds up. Rows of several blocks have
    // one step.
    __device__ u64 row_of(u32 p, u32 owner) const {
        if constexpr (SPLIT) return blockIdx.x / plan.split;
        const u64 wave = (u64)(slots ? p / parts : p) * gridDim.x + blockIdx.x;
        return (wave * width + (owners ? owner : 0)) * blockDim.y + threadIdx.y;
    }
    // Where a wave's packs are in slots: pack k of a thread is the `unit`-th of the wave, in the part that has it.
    __device__ static u32 unit(u32 k) { return (k * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
    // This thread's packs of a row in step p, by bits.
    __device__ u32 packs_of(u32 p, u64 row) const {
        u32 packs = 0;
#pragma unroll
        for (u32 k = 0; k < K; k++) packs |= (u32)(has(row, k) && (!slots || unit(k) / units == p % parts)) << k;
        return packs;
    }
    // Where a pack of step p is in the receive buffer of a pair, and where its sum is.
    __device__ u64 place(u32 p, u64 row, u32 k) const {
        if (!slots) return at(row, k) * sizeof(T);
        return (owners ? 2 * (p % 2) : p % SLOTS) * slot + (u64)(unit(k) - p % parts * units) * 16;
    }
    __device__ u64 place_of_sum(u32 p, u64 row, u32 k) const { return place(p, row, k) + slot; }

    // What this member adds to the sum.
    __device__ uint4 share(u64 row, u32 k) const { return guarded<T>(*(const uint4*)(own.x + at(row, k))); }

    // The norm of a row of the residual: from `packs` where they are kept, else each thread reads back its own.
    __device__ void finish(u64 row, uint4 (&packs)[K], uint4 (&gamma)[K]) const {
        if (!kept) {
            this->weights(gamma);
#pragma unroll
            for (u32 k = 0; k < K; k++) {
                packs[k] = has(row, k) ? residual(row, k) : make_uint4(0, 0, 0, 0);
            }
        }
        if constexpr (!SPLIT) return this->norm_of(row, packs, gamma);
        const auto all = [&](Step step, f32 sum) { return this->of_blocks(meet, lines.epoch[meet.me], step, sum); };
        this->norm_of(row, packs, gamma, all);
    }

    // Thread `rank` of one row for member `rank`.
    __device__ bool hear(u32 count) const { return threadIdx.y != 0 || hear_taken(meet, lines.epoch, count); }
    __device__ void tell(u32 count) const {
        if (threadIdx.y == 0) tell_taken(meet, lines.epoch, count);
    }

    __device__ void send(u32 p) const {
#pragma unroll 1
        for (u32 j = 1; j < (TWO ? 2 : meet.count); j++) {
            const u32 to = TWO ? 1 - meet.me : rank_after(meet, j);
            const u64 row = row_of(p, to);
            const u32 packs = packs_of(p, row);
#pragma unroll
            for (u32 k = 0; k < K; k++) {
                if (packs >> k & 1) put<T>(lines.out[to] + place(p, row, k), share(row, k));
            }
        }
    }

    // Takes and adds up the packs of step p of two members. False if the kernel gave up.
    __device__ bool add_two(u32 p, uint4 (&packs)[K], uint4 (&gamma)[K]) const {
        const u64 row = row_of(p, 0);
        const u32 expected = packs_of(p, row), peer = 1 - meet.me;
        const Ending<T> ending(SUM, 2);
        // The own memory is on its way while the peer's data are.
        uint4 mine[K], before[K], other[K];
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (expected >> k & 1) mine[k] = share(row, k), before[k] = residual(row, k);
        }
        this->weights(gamma);
        const auto in = [&](u32 k) { return lines.in[peer] + place(p, row, k); };
        if (!take<T>(meet, expected, in, [&](u32) { return peer; }, other)) return false;
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (!(expected >> k & 1)) continue;
            packs[k] = added(row, k, before[k], sum_of_two<T>(meet.me, ending, mine[k], other[k]));
        }
        return true;
    }

    // The same of more members in one trip, where a thread has few packs.
    __device__ bool add_few(u32 p, uint4 (&packs)[K], uint4 (&gamma)[K]) const {
        const u64 row = row_of(p, 0);
        const u32 expected = packs_of(p, row);
        const Ending<T> ending(SUM, meet.count);
        uint4 mine[K], before[K];
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (expected >> k & 1) mine[k] = share(row, k), before[k] = residual(row, k);
        }
        this->weights(gamma);
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (!(expected >> k & 1)) continue;
            const u64 offset = place(p, row, k);
            const auto in = [&](u32 rank) { return lines.in[rank] + offset; };
            uint4 sum;
            if (!take_and_fold<T>(meet, SUM, ending, nullptr, mine[k], in, sum)) return false;
            packs[k] = added(row, k, before[k], sum);
        }
        return true;
    }

    // The same with many packs: with owners, of the own row, and sends the sums.
    __device__ bool add_all(u32 p) const {
        const u64 row = row_of(p, meet.me);
        const u32 packs = packs_of(p, row);
        const Ending<T> ending(SUM, meet.count);
#pragma unroll 1
        for (u32 k = 0; k < K; k++) {
            if (!(packs >> k & 1)) continue;
            const u64 offset = place(p, row, k);
            const auto in = [&](u32 rank) { return lines.in[rank] + offset; };
            const uint4 before = residual(row, k);
            uint4 sum;
            if (!take_and_fold<T>(meet, SUM, ending, nullptr, share(row, k), in, sum)) return false;
#pragma unroll 1
            for (u32 j = 1; j < width; j++) put<T>(lines.out[rank_after(meet, j)] + place_of_sum(p, row, k), sum);
            added(row, k, before, sum);
        }
        return true;
    }

    // Takes the sums of step p from the others. False if the kernel gave up.
    __device__ bool take_sums(u32 p) const {
#pragma unroll 1
        for (u32 j = 1; j < meet.count; j++) {
            const u32 owner = rank_after(meet, j);
            const u64 row = row_of(p, owner);
            const u32 packs = packs_of(p, row);
            uint4 sum[K];
            const auto in = [&](u32 k) { return lines.in[owner] + place_of_sum(p, row, k); };
            if (!take<T>(meet, packs, in, [&](u32) { return owner; }, sum)) return false;
#pragma unroll
            for (u32 k = 0; k < K; k++) {
                if (packs >> k & 1) added(row, k, residual(row, k), sum[k]);
            }
        }
        return true;
    }

    __device__ void run() const {
        const u64 together = (u64)gridDim.x * blockDim.y * width;
        const u32 pieces = (u32)((plan.rows + together - 1) / together) * parts;
        const u32 behind = owners ? 1 : 0, ahead = !slots ? pieces : owners ? 1 : 2;
#pragma unroll 1
        for (u32 p = 0; p < ahead && p < pieces; p++) send(p);
        if (!slots && gridDim.x <= FEW) let_next_come();
        uint4 packs[K] = {}, gamma[K];
        bool good = true;
#pragma unroll 1
        for (u32 p = 0; p < pieces + behind; p++) {
            // Two steps ahead: all have done step p - 2. One: step p - 1.
            const u32 taken = p + behind > 1 ? p + behind - 1 : 0;
            if (slots && taken > 0 && !__syncthreads_and(hear(taken))) return;
            if (slots && p + ahead < pieces) send(p + ahead);
            if (good && p < pieces) {
                if constexpr (TWO) good = add_two(p, packs, gamma);
                else if constexpr (kept) good = add_few(p, packs, gamma);
                else good = add_all(p);
            }
            if (good && owners && p > 0) good = take_sums(p - 1);
            if (slots) {
                if (!__syncthreads_and(good)) return;
                tell(p + 1);
            }
            // The step whose sums are all there now.
            const u32 done = p - behind;
            if ((owners && p == 0) || (slots && (done + 1) % parts != 0)) continue;
#pragma unroll 1
            for (u32 owner = 0; owner < width; owner++) {
                const u64 row = row_of(done, owner);
                if (row < plan.rows) finish(row, packs, gamma);
            }
        }
        if (slots) hear(pieces + behind);
    }
};

template <class T, bool TWO, bool WIDE>
__device__ inline void norm_inbox(const Meet& meet, const Plan& plan, const Memory<T>& own) {
    __shared__ Lines lines;
    await_earlier();
    const u32 rank = threadIdx.x;
    const bool split = !WIDE && plan.split > 1;
    if (split && rank == meet.me) lines.epoch[rank] = epoch_with(meet, rank);
    if (threadIdx.y == 0 && rank < meet.count && rank != meet.me) {
        const u32 epoch = epoch_with(meet, rank);
        lines.epoch[rank] = epoch;
        const bool whole = plan.way == ONE_TRIP;
        lines.in[rank] = whole ? whole_of(meet, rank, meet.me, epoch) : slots_of(meet, rank, meet.me);
        lines.out[rank] = whole ? whole_of(meet, meet.me, rank, epoch) : slots_of(meet, meet.me, rank);
    }
    __syncthreads();
    // A thread that does not wait for credits.
    const bool last_thread = threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1;
    u32 ticket = ~0u;
    if (last_thread) ticket = take_ticket(meet);
    if (plan.way != ONE_TRIP) {
        Work<T, TWO ? TO_ALL : BY_OWNERS, TWO, KEPT>(meet, plan, own, lines).run();
    } else if (split && plan.packs == 1) {
        Work<T, ONE_TRIP, TWO, 1, true>(meet, plan, own, lines).run();
    } else if (split) {
        Work<T, ONE_TRIP, TWO, 2, true>(meet, plan, own, lines).run();
    } else if (plan.packs == KEPT) {
        Work<T, ONE_TRIP, TWO, KEPT>(meet, plan, own, lines).run();
    } else if (plan.packs == 1) {
        Work<T, ONE_TRIP, TWO, 1>(meet, plan, own, lines).run();
    } else {
        Work<T, ONE_TRIP, TWO, 2>(meet, plan, own, lines).run();
    }
    if (!last_thread) return;
    if (split && ticket == gridDim.x - 1) meet.signals->epoch[ordinal(meet, meet.me)] = lines.epoch[meet.me];
    note_epochs(meet, ticket, lines.epoch);
}

#define NORM_INBOX(HOW, NAME, T, TWO, WIDE)                                                                            \
    HOW norm_inbox_##NAME(Meet meet, Plan plan, const T* x, T* residual, const T* gamma, const T* beta, T* y,          \
                          f32* mean, f32* rstd) {                                                                      \
        norm_inbox<T, TWO, WIDE>(meet, plan, Memory<T>{x, residual, gamma, beta, y, mean, rstd});                      \
    }

NORM_INBOX(KERNEL, f32, f32, true, false)
NORM_INBOX(KERNEL, f16, f16, true, false)
NORM_INBOX(KERNEL, bf16, bf16, true, false)
NORM_INBOX(WIDE_KERNEL, wide_f32, f32, true, true)
NORM_INBOX(KERNEL, many_f32, f32, false, false)
NORM_INBOX(KERNEL, many_f16, f16, false, false)
NORM_INBOX(KERNEL, many_bf16, bf16, false, false)
NORM_INBOX(WIDE_KERNEL, many_wide_f32, f32, false, true)
