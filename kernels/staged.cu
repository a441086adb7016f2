// Collectives of devices without peer access, in one launch, through page-locked host memory. Each member has a *stage*
// there, behind its `Signals`.
//
//   staged_{f32,f64,f16,bf16,i8,u8,i32,u32,i64,u64}
//        (Meet meet, Stage stage, Role role, u32 op, Factors lo, Factors hi, and by eights, low and high:
//         put_from, put_bytes, pull_to, pull_bytes)
//
// The data are cut into pieces, and each piece into parts, one for each block. A block works on its parts piece by
// piece, in three teams of warps that work at the same time, so that the bus is busy in both directions:
//
//   putters   own memory -> own stage      data for others, one lane for each; local data, own memory -> own memory
//   readers   the others' stages -> own    fold the others' data for this member with its own, in rank order, to its
//                                          destination, and to the stage if others need the result
//   pullers   the others' stages -> own    results, or data that are only moved
//
// With no results to pull (`two` is 0) readers and pullers are one team. A stage has SLOTS slots for each block, which
// the pieces use in turn. Before a slot is filled, all others must have used its old piece:
//
//   PUT(j)     the sender's piece j is on its stage        before it: DONE(j - SLOTS) of all, for the slot
//   DONE(j)    the sender has used all pieces j, and its   before it: PUT(j) of all, also its own; TAKEN(j - SLOTS)
//              own result of piece j is on its stage       of all, for the room of the result
//   TAKEN(j)   the sender has all results of piece j       before it: DONE(j) of all
//
// Each signal waits only for earlier signals, so there is no cycle of waits. A kernel ends when all others have
// finished with its stage, so the next kernel finds it empty. Pieces are counted from 1, and a count carries the
// meeting's epoch, so nothing is reset, and an old count is not mistaken for a new one. A peer cannot be an epoch
// ahead, since it needs this kernel's DONE (or TAKEN) to end.
//
// In place: a piece of the source is overwritten only at the end of the chain PUT, DONE, TAKEN of that piece, or by the
// own reader after the own PUT.
#include "combine.cuh"

const u32 SLOTS = 4;

// Parameters that are equal on all members.
struct Stage {
    u64 offset; // of a stage from its member's signals
    u64 chunk;  // bytes of a lane's part, a multiple of 128
    u64 slot;   // bytes of a slot, for all lanes
    u32 steps;  // pieces, at least one
    u32 lanes;  // 1: one for all; else one for each member, by rank, where an own one is for results
    u32 two;    // whether results are pulled
    u32 spare;
    u64 counts; // of the `Count`s from the signals
    u64 spares;
};

// The signal of one member to one block of another, by [`Step`], block and ordinal of the sender; each on its own cache
// line. If several devices write parts of one line of host memory, they take the line from each other and from the
// waiting device: 256 KB were reduced on four H200s in 72 us with shared lines, and in 31 us with separate lines.
struct Count {
    u64 epoch_and_pieces;
    u64 pad[7];
};

// The own part.
struct Role {
    u64 from, to, bytes;                   // of the fold: own source, own destination or null
    u64 local_from, local_to, local_bytes; // what stays
    u64 result;                            // whether the fold's result goes to the stage
    u64 spare;
};

// By rank, but `put_*`, which is by lane.
struct Desk {
    u64 stage[MOST];                       // this block's slots there
    u64 put_from[MOST], put_bytes[MOST];
    u64 pull_to[MOST], pull_bytes[MOST];
    u32 puts;                              // pieces that this block has put; all ones when it has given up
};

// Some of a block's warps, with a separate barrier.
struct Team {
    u32 id, first, count;

    __device__ u32 index() const { return threadIdx.x - first; }
    __device__ void sync() const { sync_some(id, count); }
    // Whether `x` holds in all threads of the team. A barrier, too.
    __device__ bool all(bool x) const { return all_of_some(id, count, x); }
};

// The data that the functions of a team use.
template <class T> struct Play {
    const Meet& meet;
    const Stage& stage;
    const Role& role;
    Desk& desk;
    Table<T>& table;
    u32 op;
    Team team;

    // The word by which member `from` signals this block of member `rank`.
    __device__ u64* told(Step step, u32 rank, u32 from) const {
        Count* counts = (Count*)((u64)signals_of(meet, rank) + stage.counts);
        return &counts[(step * STAGED + blockIdx.x) * MOST + ordinal(meet, from)].epoch_and_pieces;
    }

    // Signals all members that the work up to `count` is complete.
    __device__ void post(Step step, u32 count) const {
        team.sync();
        const u32 rank = team.index();
        if (rank >= meet.count) return;
        if (rank != meet.me) {
            store_release(told(step, rank, meet.me), (u64)table.epoch[rank] << 32 | count);
        } else if (step == PUT) {
            store_block(&desk.puts, count);
        }
    }

    // Waits until all others have reached `count`. False if it gave up.
    __device__ bool wait(Step step, u32 count) const {
        const u32 rank = team.index();
        bool come = true;
        if (rank < meet.count && rank != meet.me) {
            const u32 other = ordinal(meet, rank), epoch = table.epoch[rank];
            const u64* at = told(step, meet.me, rank);
            Patience patience;
#pragma unroll 1
            for (;;) {
                const u64 seen = load_relaxed(at);
                if ((u32)(seen >> 32) == epoch && (u32)seen >= count) break;
                // With several steps, constant polling would take bandwidth of the bus.
                if (stage.steps > 1 && patience.polls >= 4) __nanosleep(200);
                if (patience.over(meet, other)) {
                    come = false;
                    break;
                }
            }
            load_acquire(at);
        }
        return team.all(come);
    }

    // [`wait`] for the putters of this block, which give up by themselves.
    __device__ bool wait_for_own_put(u32 count) const {
        bool come = true;
        if (team.index() == 0) {
            u32 puts;
            while ((puts = load_block(&desk.puts)) < count) {}
            come = puts != ~0u;
        }
        return team.all(come);
    }

    // The first byte of this block's part of piece `j` in a lane.
    __device__ u64 begin(u32 j) const { return ((u64)j * gridDim.x + blockIdx.x) * stage.chunk; }

    __device__ u64 bytes(u64 all, u64 begin) const {
        return begin >= all ? 0 : all - begin < stage.chunk ? all - begin : stage.chunk;
    }

    // A lane of the slot of piece `j` on a member's stage.
    __device__ u64 lane_of(u32 rank, u32 j, u32 lane) const {
        return desk.stage[rank] + (j % SLOTS) * stage.slot + lane * stage.chunk;
    }

    // Warp by warp, `count` moves at once: move(k) has {from, to, bytes}.
    struct Move {
        u64 from, to, bytes;
    };
    template <class F> __device__ void move_all(u32 count, F move) const {
        by_warps({team.index(), team.count}, count, [&](u32 k, Share share) {
            const Move m = move(k);
            move_elements<T>(share, m.bytes, m.from ^ m.to, m.from, 1, [&](u32) { return m.to; });
        });
    }

    __device__ void put(u32 j) const {
        const u64 at = begin(j);
        move_all(stage.lanes + (role.local_bytes > 0), [&](u32 k) -> Move {
            if (k == stage.lanes) return {role.local_from + at, role.local_to + at, bytes(role.local_bytes, at)};
            return {desk.put_from[k] + at, lane_of(meet.me, j, k), bytes(desk.put_bytes[k], at)};
        });
    }

    __device__ void pull(u32 j) const {
        const u64 at = begin(j);
        move_all(meet.count, [&](u32 k) -> Move {
            const u32 lane = stage.lanes == 1 ? 0 : stage.two ? k : meet.me;
            return {lane_of(k, j, lane), desk.pull_to[k] + at, bytes(desk.pull_bytes[k], at)};
        });
    }

    __device__ void fold(u32 j) const {
        const u64 at = begin(j), here = bytes(role.bytes, at);
        if (here == 0) return;
        const u32 lane = stage.lanes == 1 ? 0 : meet.me, rank = team.index();
        const u32 destinations = (role.to != 0) + (role.result != 0);
        if (rank < meet.count) table.source[rank] = rank == meet.me ? role.from + at : lane_of(rank, j, lane);
        if (rank == 0) {
            u32 d = 0;
            if (role.to != 0) table.destination[d++] = role.to + at;
            if (role.result != 0) table.destination[d++] = lane_of(meet.me, j, lane);
            // All stages have equal alignment.
            table.odd = (role.from | (role.to != 0 ? role.to : 0)) % 16;
        }
        team.sync();
        const u64 n = here / sizeof(T);
        const Cut parts = cut(table, n);
        const Ending<T> ending(op, meet.count);
        const Share share = {team.index(), team.count};
        fold_units<T, uint4>(share, table, op, ending, meet.count, destinations, parts.packs);
        fold_units<T, BitsOf<T>>(share, table, op, ending, meet.count, destinations, parts.rest);
    }

    __device__ void put_all() const {
#pragma unroll 1
        for (u32 j = 0; j < stage.steps; j++) {
            if (j >= SLOTS && !wait(DONE, j + 1 - SLOTS)) {
                if (team.index() == 0) store_block(&desk.puts, ~0u);
                return;
            }
            put(j);
            post(PUT, j + 1);
        }
        wait(DONE, stage.steps);
    }

    __device__ void read_all() const {
#pragma unroll 1
        for (u32 j = 0; j < stage.steps; j++) {
            if (!wait(PUT, j + 1) || !wait_for_own_put(j + 1)) return;
            if (stage.two && j >= SLOTS && !wait(TAKEN, j + 1 - SLOTS)) return;
            fold(j);
            if (!stage.two) pull(j);
            post(DONE, j + 1);
        }
        if (stage.two) wait(TAKEN, stage.steps);
    }

    __device__ void pull_all() const {
#pragma unroll 1
        for (u32 j = 0; j < stage.steps; j++) {
            if (!wait(DONE, j + 1)) return;
            pull(j);
            post(TAKEN, j + 1);
        }
    }
};

// blockDim.x is a multiple of 128.
template <class T>
__device__ inline void staged(const Meet& meet, const Stage& stage, const Role& role, u32 op, Desk& desk,
                              Table<T>& table) {
    await_earlier();
    const u32 rank = threadIdx.x;
    if (rank < meet.count) {
        table.epoch[rank] = epoch_with(meet, rank);
        desk.stage[rank] = (u64)signals_of(meet, rank) + stage.offset + (u64)blockIdx.x * SLOTS * stage.slot;
    }
    __syncthreads();
    const bool last = threadIdx.x == blockDim.x - 1;
    const u32 ticket = last ? take_ticket(meet) : 0;
    const u32 half = blockDim.x / 2, each = stage.two ? half / 2 : half;
    if (threadIdx.x < each) {
        Play<T>{meet, stage, role, desk, table, op, {1, 0, each}}.put_all();
    } else if (!stage.two || threadIdx.x < half) {
        Play<T>{meet, stage, role, desk, table, op, {2, each, each}}.read_all();
    } else {
        Play<T>{meet, stage, role, desk, table, op, {3, half, half}}.pull_all();
    }
    if (last) note_epochs(meet, ticket, table.epoch);
}

#define STAGED_KERNEL(T)                                                                                           \
    KERNEL staged_##T(Meet meet, Stage stage, Role role, u32 op, Factors lo, Factors hi, Eight put_from_lo,           \
                      Eight put_from_hi, Eight put_bytes_lo, Eight put_bytes_hi, Eight pull_to_lo,                 \
                      Eight pull_to_hi, Eight pull_bytes_lo, Eight pull_bytes_hi) {                                \
        __shared__ Desk desk;                                                                                      \
        __shared__ Table<T> table;                                                                                 \
        if (threadIdx.x == blockDim.x - 1) {                                                                       \
            spread(desk.put_from, put_from_lo, put_from_hi);                                                       \
            spread(desk.put_bytes, put_bytes_lo, put_bytes_hi);                                                    \
            spread(desk.pull_to, pull_to_lo, pull_to_hi);                                                          \
            spread(desk.pull_bytes, pull_bytes_lo, pull_bytes_hi);                                                 \
            desk.puts = 0;                                                                                         \
            if (op == SCALED) fill_factors(table.factor, lo, hi);                                                  \
        }                                                                                                          \
        staged<T>(meet, stage, role, op, desk, table);                                                             \
    }

EACH_TYPE(STAGED_KERNEL)
