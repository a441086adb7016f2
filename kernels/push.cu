// The LL ("low latency") algorithm, for small collectives: senders write packets of data and flags to the receivers,
// which reduce or copy the data.
//
//   push_{f32,f64,f16,bf16,i8,u8,i32,u32,i64,u64}
//        (Meet meet, u64 n, u32 op, Route route, Factors lo, Factors hi, const T* src, T* dst)
//
// Member a sends `n` elements to b if a is a sender and b a receiver: the elements at src + b * route.out. The receiver
// folds the received data in rank order to dst, or writes the data of a to dst + a * route.in. A member's own data take
// part like received data.
//
// At most 8 bytes for each of `Signals::packets`. `src` may be `dst`, part for part; both belong to this device. A
// packet carries 8 bytes of data and the epoch twice: {data, epoch, data, epoch}. Each half is one access, so data and
// flag arrive together (NCCL's "LL", src/device/prims_ll.h there). There is no barrier before, between or after, so the
// data cross NVLink only once. A member that has nothing to send still sends the first packet, for its flag.
//
// Why two sets of slots are enough, although every pair counts its own epochs: member s writes the slots of (s, parity
// of e) at r in the pair's meeting e, and again in e + 2. It starts e + 2 after its kernel of e + 1 has ended. In that
// kernel (a push, an eager kernel, or a kernel with barriers) it has waited for a signal that r sent in e + 1. r sent
// it after its kernel of e had ended, and that kernel had read all slots of e. So no slot is overwritten before it was
// read. This needs three things: kernels that meet run one at a time on each device; in a meeting all members wait for
// all others; and a meeting of zero packets, in which no member would wait, is no meeting: it counts no epoch.
#include "lanes.cuh"
#include "route.cuh"

// Addresses of the other members, by rank, in shared memory.
struct Lines {
    u64 inbox[MOST];  // where the member's packets arrive
    u64 outbox[MOST]; // where the member waits for this device's
    u32 epoch[MOST];
};

__device__ inline void open_line(Lines& lines, const Meet& meet, u32 rank) {
    if (rank == meet.me) return;
    const u32 epoch = epoch_with(meet, rank);
    lines.epoch[rank] = epoch;
    lines.inbox[rank] = packets(meet, rank, meet.me, epoch);
    lines.outbox[rank] = packets(meet, meet.me, rank, epoch);
}

// A packet's data: elements [i * E, i * E + E) of x, up to the end of x.
template <class T> __device__ inline u64 load_data(u64 x, u64 n, u64 i) {
    const u32 E = 8 / sizeof(T);
    const u64 at = x + i * 8;
    if (x % 8 == 0 && i * E + E <= n) return load<u64>(at);
    u64 data = 0;
#pragma unroll
    for (u32 e = 0; e < E; e++) {
        if (i * E + e < n) data |= (u64)load<BitsOf<T>>(at + e * sizeof(T)) << (8 * sizeof(T) * e % 64);
    }
    return data;
}

template <class T> __device__ inline void store_data(u64 x, u64 n, u64 i, u64 data) {
    const u32 E = 8 / sizeof(T);
    const u64 at = x + i * 8;
    if (x % 8 == 0 && i * E + E <= n) return store(at, data);
#pragma unroll
    for (u32 e = 0; e < E; e++) {
        if (i * E + e < n) store(at + e * sizeof(T), (BitsOf<T>)(data >> (8 * sizeof(T) * e % 64)));
    }
}

// Number of members whose packets are sent, or awaited, together, so that their accesses overlap.
const u32 GROUP = 8;

// Sends packet `i` to members [1, count) after this one. `own`: this member's data for itself.
template <class T>
__device__ inline void send(const Meet& meet, const Lines& lines, const Route& route, u64 n, u64 i, u64 src, u64 own) {
    const bool sends = route.sends(meet.me);
#pragma unroll 1
    for (u32 from = 1; from < meet.count; from += GROUP) {
        u64 data[GROUP];
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            data[k] = own;
            const u32 rank = rank_after(meet, from + k);
            // All are loaded before the first is stored.
            if (route.out != 0 && sends && from + k < meet.count && route.receives(rank)) {
                data[k] = load_data<T>(src + rank * route.out * sizeof(T), n, i);
            }
        }
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            const u32 rank = rank_after(meet, from + k);
            if (from + k < meet.count && ((sends && route.receives(rank)) || i == 0)) {
                const u32 epoch = lines.epoch[rank];
                const uint4 packet = make_uint4((u32)data[k], epoch, (u32)(data[k] >> 32), epoch);
                store_packet(lines.outbox[rank] + i * 16, packet);
            }
        }
    }
}

// Receives packet `i` of members [from, from + GROUP), up to the last member; `own` replaces this member's packet.
// False if the kernel gave up.
__device__ inline bool receive(const Meet& meet, const Lines& lines, const Route& route, u64 i, u32 from, u64 own,
                               u64 (&data)[GROUP]) {
    u64 inbox[GROUP];
    u32 epoch[GROUP];
    u32 expected = 0;
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) {
        data[k] = own;
        const u32 rank = from + k;
        if (rank < meet.count && rank != meet.me && (i == 0 || (route.sends(rank) && route.receives(meet.me)))) {
            expected |= 1u << k;
            inbox[k] = lines.inbox[rank] + i * 16;
            epoch[k] = lines.epoch[rank];
        }
    }
    Patience patience;
#pragma unroll 1
    for (u32 missing = expected; missing != 0;) {
        uint4 packet[GROUP];
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            if (missing >> k & 1) packet[k] = load_packet(inbox[k]);
        }
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            if ((missing >> k & 1) && packet[k].y == epoch[k] && packet[k].w == epoch[k]) {
                data[k] = (u64)packet[k].z << 32 | packet[k].x;
                missing &= ~(1u << k);
            }
        }
        if (missing != 0 && patience.over(meet, ordinal(meet, from + __ffs(missing) - 1))) return false;
    }
    return true;
}

// Folds packet `i` of all members; false if the kernel gave up.
template <class T>
__device__ inline bool fold_packet(const Meet& meet, const Lines& lines, const Route& route, u32 op,
                                   const Acc<T>* factor, const Ending<T>& ending, u64 i, u64 own, u64& result) {
    const u32 E = 8 / sizeof(T);
    Acc<T> acc[E] = {};
#pragma unroll 1
    for (u32 from = 0; from < meet.count; from += GROUP) {
        u64 data[GROUP];
        if (!receive(meet, lines, route, i, from, own, data)) return false;
#pragma unroll 1
        for (u32 k = 0; k < GROUP && from + k < meet.count; k++) {
            const u64 unit = pick(data, k);
            Acc<T> x[E];
#pragma unroll
            for (u32 e = 0; e < E; e++) x[e] = widened(lane<T>(unit, e));
            fold_any<T>(op, from + k, acc, x, factor);
        }
    }
    result = 0;
#pragma unroll
    for (u32 e = 0; e < E; e++) result |= (u64)to_bits(ending(acc[e])) << (8 * sizeof(T) * e % 64);
    return true;
}

// Writes packet `i` of each member to its destination; false if the kernel gave up.
template <class T>
__device__ inline bool spread_packet(const Meet& meet, const Lines& lines, const Route& route, u64 n, u64 i, u64 own,
                                     u64 dst) {
    const bool wanted = route.receives(meet.me);
#pragma unroll 1
    for (u32 from = 0; from < meet.count; from += GROUP) {
        u64 data[GROUP];
        if (!receive(meet, lines, route, i, from, own, data)) return false;
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            const u32 rank = from + k;
            if (rank < meet.count && wanted && route.sends(rank)) {
                store_data<T>(dst + rank * route.in * sizeof(T), n, i, data[k]);
            }
        }
    }
    return true;
}

template <class T>
__device__ inline void push(const Meet& meet, u64 n, u32 op, const Route& route, const Factors& lo, const Factors& hi,
                            u64 src, u64 dst) {
    __shared__ Lines lines;
    __shared__ Acc<T> factor[MOST];
    const u32 E = 8 / sizeof(T);
    const u64 packets = (n + E - 1) / E;
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const bool folds = route.folds && route.receives(meet.me);
    const Ending<T> ending(op, meet.count);
    u32 ticket = ~0u;
    if (op == SCALED && last_thread) fill_factors(factor, lo, hi);
    await_earlier();
    if (n == 0) return;
    if (threadIdx.x < meet.count) open_line(lines, meet, threadIdx.x);
    // Warps are distributed over the blocks in turn: waiting for packets is faster if fewer warps of a multiprocessor
    // wait.
    const u64 first = ((u64)(threadIdx.x / 32) * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
#pragma unroll 1
    for (u64 i = first;; i += grid_size()) {
        const bool has = i < packets && route.sends(meet.me);
        const u64 own = has ? load_data<T>(src + meet.me * route.out * sizeof(T), n, i) : 0;
        if (i == first) {
            // All threads pass this barrier once; the first data are in flight while the epochs are read.
            __syncthreads();
            if (last_thread) ticket = take_ticket(meet);
        }
        if (i >= packets) break;
        send<T>(meet, lines, route, n, i, src, own);
        if (gridDim.x <= FEW) let_next_come();
        if (folds) {
            u64 result;
            if (!fold_packet(meet, lines, route, op, factor, ending, i, own, result)) break;
            store_data<T>(dst, n, i, result);
        } else if (!spread_packet<T>(meet, lines, route, n, i, own, dst)) {
            break;
        }
    }
    if (last_thread) note_epochs(meet, ticket, lines.epoch);
}

#define PUSH(T)                                                                                                    \
    KERNEL push_##T(Meet meet, u64 n, u32 op, Route route, Factors lo, Factors hi, const T* src, T* dst) {            \
        push<T>(meet, n, op, route, lo, hi, (u64)src, (u64)dst);                                                   \
    }

EACH_TYPE(PUSH)
