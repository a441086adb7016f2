// Reductions in one launch in which devices only write to each other's memory: every member sends its elements of each
// slice to the slice's owner. The owner reduces them in rank order and writes the results to their destinations.
//
//   exchange_{f32,f64,f16,bf16,i8,u8,i32,u32,i64,u64}
//            (Meet meet, u32 op, Factors lo, Factors hi, Pieces pieces, and by eights, low and high: from, bytes, to,
//            inbox)
//
// SMs are fastest over NVLink with stores: loads from peers together with stores to them, as in combine.cu, reach about
// 315 GB/s; stores to all peers at once reach about 345 GB/s.
//
// A slice is cut into parts, one for each block, and the parts into pieces. Block b has the same parts of all slices on
// all members, and is independent of other blocks. Its receive buffers are *slots* in its member's inbox, one for each
// sender and parity of the piece. Step p of a block:
//
//   if there is a piece p:   own elements of all members' pieces p -> the owners' slots   before: TAKEN(p - 2) of all
//                            signals all: PUT(p)
//   if p > 0:                folds piece p - 1 of its slice from slots and own elements   before: PUT(p - 1) of all
//                            signals all: TAKEN(p - 1)
//
// So the next piece is in flight while the current one is reduced. Every step waits only for the others' previous step,
// or for the first half of their current step, so there is no cycle of waits. (With one slot, step 1 would wait for the
// others' step 1, and they for this one's.) Pieces are counted from 1, and a count carries the meeting's epoch, so
// nothing is reset, and an old count is not mistaken for a new one. A member whose slice is shorter than others' or
// empty still signals and waits.
//
// In place: the owner overwrites a piece of a slice with the result after this member's PUT, so this member's elements
// have been read. In the own slice, the threads that have read the piece overwrite it.
//
// No memory of a peer is touched after the peer's kernel has ended. Slots: the peer has seen all PUTs. Destinations: if
// `returns` says that results go to other members, all members meet at the end. (If results stay with their owners, a
// member that has seen all PUTs has seen the last signal of every peer. The next meeting's flags may come before a peer
// has ended, but a block that has got this far reads no flags.)
#include "combine.cuh"
#include "route.cuh"

const u32 SLOTS = 2;

// By rank.
struct Exchange {
    u64 from[MOST];  // own elements of the member's slice
    u64 bytes[MOST]; // of the slice
    u64 to[MOST];    // where the member wants the own slice's sums, or 0
    u64 inbox[MOST]; // the members' inboxes
};

// Parameters that are equal on all members.
struct Pieces {
    u64 piece;   // bytes of one, and of a slot; a multiple of 128
    u32 count;   // of the largest slice's parts
    u32 returns; // whether sums go to others than their owners
};

// In shared memory.
template <class T> struct Desk {
    Exchange exchange;
    Table<T> table;   // for the fold of a piece
    u32 destinations;
};

// The work of one block.
template <class T> struct Trade {
    const Meet& meet;
    const Pieces& pieces;
    Desk<T>& desk;

    __device__ Share all() const { return {threadIdx.x, blockDim.x}; }

    // The first byte of the block's piece in a slice.
    __device__ u64 begin(u32 p) const { return ((u64)p * gridDim.x + blockIdx.x) * pieces.piece; }

    __device__ u64 bytes(u32 owner, u32 p) const {
        const u64 all = desk.exchange.bytes[owner], at = begin(p);
        return at >= all ? 0 : all - at < pieces.piece ? all - at : pieces.piece;
    }

    // The slot at an owner for a sender's piece.
    __device__ u64 slot(u32 owner, u32 sender, u32 p) const {
        const u32 room = sender < owner ? sender : sender - 1;
        const u64 index = ((u64)(p % SLOTS) * gridDim.x + blockIdx.x) * (meet.count - 1) + room;
        return desk.exchange.inbox[owner] + index * pieces.piece;
    }

    // Thread `rank` of a warp signals member `rank` that `count` pieces are done.
    __device__ void tell(Step step, u32 count) const {
        const u32 rank = threadIdx.x;
        if (rank >= meet.count || rank == meet.me) return;
        u64* to = &signals_of(meet, rank)->step[step][blockIdx.x][ordinal(meet, meet.me)];
        store_release(to, (u64)desk.table.epoch[rank] << 32 | count);
    }

    // For the whole block, with a barrier: waits until all others have done `count` pieces. False if the block gave up.
    __device__ bool hear(Step step, u32 count) const {
        const u32 rank = threadIdx.x;
        bool come = true;
        if (rank < meet.count && rank != meet.me) {
            const u32 other = ordinal(meet, rank), epoch = desk.table.epoch[rank];
            const u64* at = &signals_of(meet, meet.me)->step[step][blockIdx.x][other];
            Patience patience;
#pragma unroll 1
            for (;;) {
                const u64 seen = load_relaxed(at);
                if ((u32)(seen >> 32) == epoch && (u32)seen >= count) break;
                if (patience.over(meet, other)) {
                    come = false;
                    break;
                }
            }
            load_acquire(at);
        }
        return __syncthreads_and(come);
    }

    // Sends a piece to all owners at once.
    __device__ void send(u32 p) const {
        by_warps(all(), meet.count - 1, [&](u32 k, Share share) {
            const u32 owner = rank_after(meet, k + 1);
            const u64 from = desk.exchange.from[owner] + begin(p), to = slot(owner, meet.me, p);
            move_elements<T>(share, bytes(owner, p), from ^ to, from, 1, [&](u32) { return to; });
        });
    }

    // Stores the addresses of a fold; valid for all threads after the next barrier.
    __device__ void set_down(u32 p) const {
        Table<T>& table = desk.table;
        const u32 rank = threadIdx.x;
        const u64 own = desk.exchange.from[meet.me] + begin(p);
        if (rank < meet.count) table.source[rank] = rank == meet.me ? own : slot(meet.me, rank, p);
        if (rank != blockDim.x - 1) return;
        u32 destinations = 0;
        u64 odd = own;
#pragma unroll 1
        for (u32 k = 0; k < meet.count; k++) {
            const u64 to = desk.exchange.to[rank_after(meet, k)];
            if (to == 0) continue;
            table.destination[destinations++] = to + begin(p);
            odd |= to;
        }
        // Slots are aligned.
        table.odd = odd % 16;
        desk.destinations = destinations;
    }

    __device__ bool run(u32 op) const {
#pragma unroll 1
        for (u32 p = 0; p <= pieces.count; p++) {
            if (p < pieces.count) {
                if (p >= SLOTS && !hear(TAKEN, p + 1 - SLOTS)) return false;
                send(p);
                __syncthreads();
                tell(PUT, p + 1);
            }
            if (p == 0) continue;
            set_down(p - 1);
            if (!hear(PUT, p)) return false;
            const u64 n = bytes(meet.me, p - 1) / sizeof(T);
            fold<T, Loops::FEW>(all(), desk.table, n, op, meet.count, desk.destinations);
            __syncthreads();
            // No member waits for the slots of the last pieces.
            if (p + SLOTS <= pieces.count) tell(TAKEN, p);
        }
        return true;
    }
};

template <class T> __device__ inline void trade(const Meet& meet, u32 op, const Pieces& pieces, Desk<T>& desk) {
    Barrier barrier(meet, desk.table.epoch);
    if (barrier.start() && Trade<T>{meet, pieces, desk}.run(op) && pieces.returns) barrier.end();
    barrier.leave();
}

#define EXCHANGE(T)                                                                                                \
    KERNEL exchange_##T(Meet meet, u32 op, Factors lo, Factors hi, Pieces pieces, Eight from_lo, Eight from_hi,       \
                        Eight bytes_lo, Eight bytes_hi, Eight to_lo, Eight to_hi, Eight inbox_lo,                  \
                        Eight inbox_hi) {                                                                          \
        __shared__ Desk<T> desk;                                                                                   \
        if (threadIdx.x == 0) {                                                                                    \
            spread(desk.exchange.from, from_lo, from_hi);                                                          \
            spread(desk.exchange.bytes, bytes_lo, bytes_hi);                                                       \
            spread(desk.exchange.to, to_lo, to_hi);                                                                \
            spread(desk.exchange.inbox, inbox_lo, inbox_hi);                                                       \
            if (op == SCALED) fill_factors(desk.table.factor, lo, hi);                                             \
        }                                                                                                          \
        trade<T>(meet, op, pieces, desk);                                                                          \
    }

EACH_TYPE(EXCHANGE)
