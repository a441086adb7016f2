// The eager algorithm, for collectives of some hundred kilobytes (MPI's "eager protocol"): each member writes its data
// into a buffer (a "room") that the receiver reserves for it. The receiver reduces or copies the data from there.
//
//   eager_{f32,f64,f16,bf16,i8,u8,i32,u32,i64,u64}
//         (Meet meet, u64 n, u32 op, Route route, Factors lo, Factors hi, const T* src, T* dst)
//
// The arguments are those of `push`, for at most `Signals::room` bytes. Member a sends `n` elements to b if a is a
// sender and b a receiver: the elements at src + b * route.out. The receiver folds the received data in rank order to
// dst, or writes the data of a to dst + a * route.in. The data are plain 16-byte stores (half the bytes of packets),
// followed by one flag for each block. No member loads over NVLink, and there is no barrier before or after.
//
// Block b has bytes [b * span, (b + 1) * span) of every chunk, on all members. It stores its part to the others' rooms,
// signals the others' blocks b, waits for them, and works on the data in its device's rooms. (Every `gridDim`-th unit
// would be wrong: a member whose memory has another alignment uses other units, and would signal data that another
// block has stored.)
//
// Why two rooms are enough: member s writes the room of (s, parity of e) at r in the pair's meeting e, and again in e +
// 2. push.cu has the argument, which also holds here. A block waits for all members, also for those that send nothing.
// Rooms are not shared with packets: plain data may look like the flags of a later epoch.
//
// Why one flag is enough: a block sets its flag after its stores to the rooms, and the receiver's block reads the rooms
// after it has seen the flag (release and acquire, with a barrier of the block on both sides). A member that has seen
// all flags of meeting e may end, and its next kernel may set the same flag to e + 1 before this block has looked. So
// the block accepts e + 1, too: the work of e is complete then. The kernel after that needs a signal of this device's
// next kernel, so no member is two meetings ahead. A member that gives up resets nothing: other members read only their
// own memory, and results after a failure are unspecified.
//
// `src` may be `dst`, chunk for chunk: a chunk of the destination is a chunk of the source, or overlaps none. Then only
// block b reads the bytes that block b writes (its range of the chunks). It reads the data that it sends before its
// flag, and it writes for the first time after the flag. It reads its own contribution to a fold in the same thread
// that writes there, or, in a move, before the others' data arrive. By shape: sums in place write the chunk that is not
// sent, or a range that was already sent; a gathered chunk goes beside the own one, which stays; an all-to-all in place
// writes ranges that were already sent.
#include "combine.cuh"
#include "route.cuh"

// In shared memory.
template <class T> struct Desk {
    Table<T> table;               // for the fold; sources are also where the others' ranges arrive
    u64 outbox[MOST];             // receivers' rooms, from the next member on,
    u32 to[MOST];                 // with their ranks
    u32 from[MOST];               // other senders' ranks
};

// The block's work on its range, which begins at byte `begin` of every chunk.
template <class T> struct Job {
    const Meet& meet;
    const Route& route;
    Desk<T>& desk;
    u64 src, dst, begin, bytes;
    u32 outs, ins; // the others that this member sends to, or receives from: `others_after`

    __device__ Share all() const { return {threadIdx.x, blockDim.x}; }
    __device__ u64 source(u32 rank) const { return src + rank * route.out * sizeof(T) + begin; }
    __device__ u64 destination(u32 rank) const { return dst + rank * route.in * sizeof(T) + begin; }

    // Thread k stores the addresses of the k-th member after this one.
    __device__ void set_down(u32 k) const {
        Table<T>& table = desk.table;
        if (k == 0) {
            table.source[meet.me] = source(meet.me);
            table.destination[0] = dst + begin;
            // Rooms are aligned.
            table.odd = (source(meet.me) | (dst + begin)) % 16;
            return;
        }
        const u32 rank = rank_after(meet, k), bit = 1u << (k - 1);
        const u32 epoch = epoch_with(meet, rank);
        const u64 outbox = room(meet, meet.me, rank, epoch);
        table.epoch[rank] = epoch;
        table.source[rank] = room(meet, rank, meet.me, epoch) + begin;
        if (outs & bit) {
            const u32 at = __popc(outs & (bit - 1));
            desk.outbox[at] = outbox + begin;
            desk.to[at] = rank;
        }
        if (ins & bit) desk.from[__popc(ins & (bit - 1))] = rank;
    }

    __device__ void send() const {
        const u32 count = __popc(outs);
        if (count == 0) return;
        if (route.out == 0) {
            // Data that all receivers get is read once.
            const u64 from = source(0);
            return move_elements<T>(all(), bytes, from, from, count, [&](u32 j) { return desk.outbox[j]; });
        }
        by_warps(all(), count, [&](u32 k, Share share) {
            const u64 from = source(desk.to[k]);
            move_elements<T>(share, bytes, from, from, 1, [&](u32) { return desk.outbox[k]; });
        });
    }

    __device__ void move_own() const {
        const u64 from = source(meet.me), to = destination(meet.me);
        if (from != to) move_elements<T>(all(), bytes, from ^ to, from, 1, [&](u32) { return to; });
    }

    __device__ void spread() const {
        const u32 count = __popc(ins);
        if (count == 0) return;
        by_warps(all(), count, [&](u32 k, Share share) {
            const u32 rank = desk.from[k];
            const u64 from = desk.table.source[rank], to = destination(rank);
            move_elements<T>(share, bytes, to, from, 1, [&](u32) { return to; });
        });
    }

    __device__ void add_up(u32 op) const {
        fold<T, Loops::NEAR>(all(), desk.table, bytes / sizeof(T), op, meet.count, 1);
    }
};

template <class T>
__device__ inline void eager(const Meet& meet, u64 n, u32 op, const Route& route, const Factors& lo, const Factors& hi,
                             u64 src, u64 dst) {
    __shared__ Desk<T> desk;
    await_earlier();
    // A meeting without data is no meeting, as in push.cu.
    if (n == 0) return;
    const u32 whole = (u32)n * sizeof(T);
    const u32 span = ((whole - 1) / (gridDim.x * 128) + 1) * 128;
    const u32 begin = blockIdx.x * span;
    const u32 bytes = begin >= whole ? 0 : whole - begin < span ? whole - begin : span;
    const bool sends = route.sends(meet.me), receives = route.receives(meet.me);
    const u32 outs = sends ? others_after(meet, route.receivers) : 0;
    const u32 ins = receives ? others_after(meet, route.senders) : 0;
    const Job<T> job = {meet, route, desk, src, dst, begin, bytes, outs, ins};
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const u32* epoch = desk.table.epoch;
    u32 ticket = ~0u;
    if (threadIdx.x < meet.count) job.set_down(threadIdx.x);
    if (op == SCALED && last_thread) fill_factors(desk.table.factor, lo, hi);
    __syncthreads();
    if (last_thread) ticket = take_ticket(meet);
    job.send();
    __syncthreads();
    tell(meet, START, epoch);
    // While the others' data are in flight.
    if (!route.folds && sends && receives) job.move_own();
    if (__syncthreads_and(hear(meet, START, epoch, true)) && receives) {
        if (route.folds) {
            job.add_up(op);
        } else {
            job.spread();
        }
    }
    if (last_thread) note_epochs(meet, ticket, epoch);
}

#define EAGER(T)                                                                                                   \
    KERNEL eager_##T(Meet meet, u64 n, u32 op, Route route, Factors lo, Factors hi, const T* src, T* dst) {           \
        eager<T>(meet, n, op, route, lo, hi, (u64)src, (u64)dst);                                                  \
    }

EACH_TYPE(EAGER)
