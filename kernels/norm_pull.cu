// An all-reduce (the sum), the addition of a residual, and a norm of the rows, in one kernel, which reads the rows of
// all members where they are: norm.cuh has what is computed. For any number of rows; it uses no inbox.
//
//   norm_pull_{f32,f16,bf16}, norm_pull_wide_f32
//       (Meet meet, Plan plan, T* residual, const T* gamma, const T* beta, f32* mean, f32* rstd,
//        Eight x_lo, x_hi, y_lo, y_hi)
//
// `x` and `y` are those of all members, by rank. A member's `y` may be its `x`.
//
// A block takes "waves" of rows. Blocks of the same index take the same rows on all members.
//
//   2 members   Each reads the other's x, and adds up every row itself: the bytes cross a link once, in one trip. While
//               a wave is normed, all packs of the next one are on their way to registers (not in `wide`, which has
//               too few of them).
//   more        As in combine.cu every row has an owner: the rows of a wave that come o-th are added up by member o,
//               who writes the sums to `y` of all members. Each then adds its own residual.
//
// Apart: two members of whom none works in place. Nobody writes x, so a row is normed as soon as it is added up, from
// registers, and the rows of a block do not wait for each other. All members know all addresses, so they agree on it.
//
// Otherwise a wave is normed some steps after it was added up: one, of two members two, so that nobody waits for an
// answer. Before, the block hears from the blocks of all members that they are through with it: they have read this
// member's x there, so it may be overwritten, and the sums have come.
//
// Who touches x and y of a member while the kernels run. Row r: its readers are those who add it up; of more members
// that is the owner alone, and there one thread reads an element of all members before it writes it to any. The member
// itself writes `y` after all that. So it does not matter which of the members work in place.
//
// Meetings. All blocks of an index start together (meet.cuh: START), so x is there. They tell each other the waves that
// they are through with by the credits of inbox.cuh, of this meeting's epoch; apart there is one credit, for all waves.
// A block ends when it has heard the last wave from all: then no peer touches this member's memory any more. A thread
// that gives up goes on to the block's next barrier, and there all its threads leave; what they leave is not specified.
#include "norm.cuh"

// In shared memory, by rank.
struct Desk {
    u64 x[MOST], y[MOST];
    u32 epoch[MOST];
    u64 credit; // of two members: where the other one hears from this block
};

// A thread's packs of a row of two members.
struct Coming {
    uint4 other[KEPT], mine[KEPT], before[KEPT];
};

// The work of one block. TWO: of two members. AHEAD: there are registers for a wave that is on its way. K: packs of a
// thread, fewer than KEPT for few rows of more members.
template <class T, bool TWO, bool AHEAD, u32 K = KEPT> struct Work : Normed<T, K> {
    static_assert(!TWO || K == KEPT);
    typedef Normed<T, K> Rows;
    using Rows::plan, Rows::own, Rows::at, Rows::has, Rows::residual, Rows::added;
    const Meet& meet;
    const Desk& desk;
    const u32 width; // rows of a wave, in units of blockDim.y
    static const u32 IN_FLIGHT = K < KEPT ? K : 1; // packs of a thread that is an owner

    __device__ Work(const Meet& meet, const Plan& plan, const Memory<T>& own, const Desk& desk)
        : Rows(plan, own), meet(meet), desk(desk), width(TWO ? 1 : meet.count) {}

    // The row of this thread in wave p; of more than two members, the one that member `owner` adds up.
    __device__ u64 row_of(u32 p, u32 owner) const {
        return (((u64)p * gridDim.x + blockIdx.x) * width + owner) * blockDim.y + threadIdx.y;
    }

    // Asks for this thread's packs of wave p of two members; without AHEAD, of the other one's x only.
    __device__ void fetch(u32 p, Coming& coming) const {
        const u64 row = row_of(p, 0), from = desk.x[1 - meet.me];
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            if (!has(row, k)) continue;
            coming.other[k] = load<uint4>(from + at(row, k) * sizeof(T));
            if (AHEAD) fetch_own(row, k, coming);
        }
    }
    __device__ void fetch_own(u64 row, u32 k, Coming& coming) const {
        coming.mine[k] = load<uint4>((u64)(own.x + at(row, k)));
        coming.before[k] = load<uint4>((u64)(own.residual + at(row, k)));
    }
    // Adds up wave p of two members. `packs`: the new residual.
    __device__ void add_two(u32 p, Coming& coming, uint4 (&packs)[KEPT]) const {
        const u64 row = row_of(p, 0);
        const Ending<T> ending(SUM, 2);
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            packs[k] = make_uint4(0, 0, 0, 0);
            if (!has(row, k)) continue;
            if (!AHEAD) fetch_own(row, k, coming);
            packs[k] = added(row, k, coming.before[k], sum_of_two<T>(meet.me, ending, coming.mine[k], coming.other[k]));
        }
    }
    // Adds up the own rows of wave p of more members.
    __device__ void add_all(u32 p) const {
        const u64 row = row_of(p, meet.me);
        const Ending<T> ending(SUM, meet.count);
#pragma unroll IN_FLIGHT
        for (u32 k = 0; k < K; k++) {
            if (!has(row, k)) continue;
            const u64 offset = at(row, k) * sizeof(T);
            Acc<T> acc[LANES<T>] = {};
#pragma unroll 1
            for (u32 from = 0; from < meet.count; from += GROUP) {
                uint4 unit[GROUP];
#pragma unroll
                for (u32 j = 0; j < GROUP; j++) {
                    if (from + j < meet.count) unit[j] = load<uint4>(desk.x[from + j] + offset);
                }
                fold_group<T>(SUM, from, meet.count, unit, acc, nullptr);
            }
            uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (u32 w = 0; w < LANES<T>; w++) set_lane<T>(sum, w, ending(acc[w]));
            *(uint4*)(own.y + at(row, k)) = sum;
#pragma unroll 1
            for (u32 j = 1; j < meet.count; j++) store(desk.y[rank_after(meet, j)] + offset, sum);
        }
    }

    // The norm of a row. Of two members its residual is there; of more, its sums are in `y`.
    __device__ void finish(u64 row) const {
        uint4 packs[K], gamma[K];
        this->weights(gamma);
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            packs[k] = make_uint4(0, 0, 0, 0);
            if (!has(row, k)) continue;
            packs[k] = residual(row, k);
            if (!TWO) packs[k] = added(row, k, packs[k], load<uint4>((u64)(own.y + at(row, k))));
        }
        this->norm_of(row, packs, gamma);
    }
    // The norms of wave p of more members. Few packs of all its rows are on their way together.
    __device__ void finish_all(u32 p) const {
        if constexpr (K == KEPT) {
#pragma unroll 1
            for (u32 owner = 0; owner < width; owner++) {
                const u64 row = row_of(p, owner);
                if (row < plan.rows) finish(row);
            }
        } else {
            const u32 R = 4;
            uint4 gamma[K];
            this->weights(gamma);
#pragma unroll 1
            for (u32 from = 0; from < width; from += R) {
                uint4 packs[R][K], sums[R][K];
#pragma unroll
                for (u32 r = 0; r < R; r++) {
                    const u64 row = from + r < width ? row_of(p, from + r) : plan.rows;
#pragma unroll
                    for (u32 k = 0; k < K; k++) {
                        packs[r][k] = make_uint4(0, 0, 0, 0);
                        if (!has(row, k)) continue;
                        packs[r][k] = residual(row, k);
                        sums[r][k] = load<uint4>((u64)(own.y + at(row, k)));
                    }
                }
#pragma unroll
                for (u32 r = 0; r < R; r++) {
                    const u64 row = from + r < width ? row_of(p, from + r) : plan.rows;
                    if (row >= plan.rows) continue;
#pragma unroll
                    for (u32 k = 0; k < K; k++) {
                        if (has(row, k)) packs[r][k] = added(row, k, packs[r][k], sums[r][k]);
                    }
                    this->norm_of(row, packs[r], gamma);
                }
            }
        }
    }

    __device__ u32 waves() const {
        const u64 together = (u64)gridDim.x * blockDim.y * width;
        return (u32)((plan.rows + together - 1) / together);
    }
    __device__ bool hear(u32 count) const { return threadIdx.y != 0 || hear_taken(meet, desk.epoch, count); }

    // As `tell_taken` of inbox.cuh, for two members: the block has read the other one's x and written nothing for it.
    // Relaxed: what was read was added up before the last barrier of the block, so these reads are complete, and no
    // later write can change them. NCCL's receivers give credits in this way, too (`postPeer` in prims_simple.h). A
    // release waits for all traffic of the multiprocessor: also for the rows that are on their way.
    __device__ void tell_read(u32 count) const {
        if (threadIdx.x != 0 || threadIdx.y != 0) return;
        store_relaxed((u64*)desk.credit, (u64)desk.epoch[1 - meet.me] << 32 | count);
    }

    // Two members apart. The other one may hear early that its rows were read: before they are normed.
    __device__ void run_apart() const {
        Coming coming;
        uint4 packs[KEPT], gamma[KEPT];
        if (AHEAD) fetch(0, coming), this->weights(gamma);
#pragma unroll 1
        for (u32 p = 0, last = waves() - 1; p <= last; p++) {
            if (!AHEAD) fetch(p, coming);
            add_two(p, coming, packs);
            if (AHEAD) fetch(p + 1, coming);
            if (!AHEAD) this->weights(gamma);
            if (p == last) {
                __syncthreads();
                tell_read(1);
                let_next_come();
            }
            const u64 row = row_of(p, 0);
            if (row < plan.rows) this->norm_of(row, packs, gamma);
        }
        hear(1);
    }

    // Two members, one or both in place. Two steps behind, what a block hears was told long ago. A thread hears before
    // it asks for more, since an acquire waits for the thread's loads.
    __device__ void run_in_place() const {
        const u32 waves = this->waves();
        Coming coming;
        if (AHEAD) fetch(0, coming);
#pragma unroll 1
        for (u32 p = 0; p < waves + 2; p++) {
            uint4 packs[KEPT];
            if (!AHEAD) fetch(p, coming);
            add_two(p, coming, packs);
            const bool heard = p < 2 || hear(p - 1);
            if (AHEAD) fetch(p + 1, coming);
            if (!__syncthreads_and(heard)) return;
            if (p < waves) tell_read(p + 1);
            else let_next_come();
            if (p < 2) continue;
            const u64 row = row_of(p - 2, 0);
            if (row < plan.rows) finish(row);
        }
    }

    // More members.
    __device__ void run_all() const {
        const u32 waves = this->waves();
#pragma unroll 1
        for (u32 p = 0; p <= waves; p++) {
            if (p < waves) {
                add_all(p);
                __syncthreads();
                if (threadIdx.y == 0) tell_taken(meet, desk.epoch, p + 1);
            } else {
                let_next_come();
            }
            if (p == 0) continue;
            if (!__syncthreads_and(hear(p))) return;
            finish_all(p - 1);
        }
    }
};

// As `Barrier::start` of meet.cuh, for blocks of rows of threads.
__device__ inline bool start(const Meet& meet, const u32* epoch) {
    const bool first = threadIdx.y == 0;
    if (first) arrive(meet, epoch);
    if (__syncthreads_and(!first || hear(meet, START, epoch, false))) return true;
    if (first) withdraw(meet);
    return false;
}

template <class T, bool AHEAD>
__device__ inline void norm_pull(const Meet& meet, const Plan& plan, Memory<T> own, const Eight& x_lo,
                                 const Eight& x_hi, const Eight& y_lo, const Eight& y_hi) {
    __shared__ Desk desk;
    // A thread that does not wait for others.
    const bool last_thread = threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1;
    if (last_thread) {
        spread(desk.x, x_lo, x_hi);
        spread(desk.y, y_lo, y_hi);
    }
    await_earlier();
    if (threadIdx.y == 0 && threadIdx.x < meet.count) desk.epoch[threadIdx.x] = epoch_with(meet, threadIdx.x);
    if (last_thread && meet.count == 2) {
        desk.credit = (u64)&signals_of(meet, 1 - meet.me)->step[DONE][blockIdx.x][ordinal(meet, meet.me)];
    }
    __syncthreads();
    u32 ticket = ~0u;
    if (last_thread) ticket = take_ticket(meet);
    own.x = (const T*)desk.x[meet.me], own.y = (T*)desk.y[meet.me];
    const bool apart = desk.x[0] != desk.y[0] && desk.x[1] != desk.y[1];
    if (start(meet, desk.epoch)) {
        if (meet.count > 2 && (!AHEAD || plan.packs == KEPT)) Work<T, false, AHEAD>(meet, plan, own, desk).run_all();
        else if (AHEAD && meet.count > 2 && plan.packs == 1) Work<T, false, AHEAD, 1>(meet, plan, own, desk).run_all();
        else if (AHEAD && meet.count > 2) Work<T, false, AHEAD, 2>(meet, plan, own, desk).run_all();
        else if (apart) Work<T, true, AHEAD>(meet, plan, own, desk).run_apart();
        else Work<T, true, AHEAD>(meet, plan, own, desk).run_in_place();
    }
    if (last_thread) note_epochs(meet, ticket, desk.epoch);
}

#define NORM_PULL(T)                                                                                                   \
    KERNEL norm_pull_##T(Meet meet, Plan plan, T* residual, const T* gamma, const T* beta, f32* mean, f32* rstd,       \
                         Eight x_lo, Eight x_hi, Eight y_lo, Eight y_hi) {                                             \
        const Memory<T> own = {nullptr, residual, gamma, beta, nullptr, mean, rstd};                                   \
        norm_pull<T, true>(meet, plan, own, x_lo, x_hi, y_lo, y_hi);                                                   \
    }

NORM_PULL(f32)
NORM_PULL(f16)
NORM_PULL(bf16)

WIDE_KERNEL norm_pull_wide_f32(Meet meet, Plan plan, f32* residual, const f32* gamma, const f32* beta, f32* mean,
                               f32* rstd, Eight x_lo, Eight x_hi, Eight y_lo, Eight y_hi) {
    const Memory<f32> own = {nullptr, residual, gamma, beta, nullptr, mean, rstd};
    norm_pull<f32, false>(meet, plan, own, x_lo, x_hi, y_lo, y_hi);
}
