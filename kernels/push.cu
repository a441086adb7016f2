// All-reduce of a little: everyone sends all it has to everyone, and adds up what arrives.
//
//   push_{f32,f64,f16,bf16,i8,u8,i32,u32,i64,u64}
//        (Meet meet, u64 n, u32 op, Factors lo, Factors hi, const T* src, T* dst)
//                                                     dst[i] = fold of src[i] of member 0, 1, ...  for i < n
//
// At most 8 bytes for each of `Signals::packets`; `src` may be `dst`; both are this device's. A packet carries 8 bytes of data and twice the
// epoch: {data, epoch, data, epoch}, where each half is one access, so data and flag arrive together ("LL" of NCCL,
// src/device/prims_ll.h there). No barrier before, between or after, hence one crossing of NVLink.
//
// Why two sets of slots are enough, though every pair counts its own epochs. Member s writes the slots of (s, parity
// of e) at r in the pair's meeting e, and again in e + 2. It starts e + 2 when its kernel of e + 1 has ended. In that,
// be it a push or one with barriers, it has waited for something that r sent in e + 1; that r did after its kernel of
// e had ended, in which it read all slots of e. So nothing that is still wanted is overwritten. This rests on three
// things: kernels that meet run one at a time on each device; the members of a meeting all wait for all others in it;
// and a meeting of zero packets, in which nobody would wait, is none: it counts no epoch.
#include "lanes.cuh"
#include "meet.cuh"

// By rank, in shared memory.
struct Lines {
    u64 inbox[MOST];  // where the member's packets arrive
    u64 outbox[MOST]; // where the member waits for this device's
    u32 epoch[MOST];
};

__device__ inline void open_line(Lines& lines, const Meet& meet, u32 rank) {
    const u32 epoch = epoch_with(meet, rank), other = ordinal(meet, rank);
    const u32 each = meet.signals->packets;
    lines.epoch[rank] = epoch;
    lines.inbox[rank] = packets(signals_of(meet, meet.me), other, epoch, each);
    lines.outbox[rank] = packets(signals_of(meet, rank), ordinal(meet, meet.me), epoch, each);
}

// A packet's data: elements [i * E, i * E + E) of x, as far as there are.
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

// Members whose packets are waited for together, so that they arrive while others are looked at.
const u32 GROUP = 8;

// Packet `i` of members [from, from + GROUP) as far as there are; false when it had to give up.
__device__ inline bool receive(const Meet& meet, const Lines& lines, u64 i, u32 from, u64 own, u64 (&data)[GROUP]) {
    u64 inbox[GROUP];
    u32 epoch[GROUP];
    u32 expected = 0;
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) {
        data[k] = own;
        const u32 rank = from + k;
        if (rank < meet.count && rank != meet.me) {
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

// Packet `i` of all members, folded; false when it had to give up.
template <class T>
__device__ inline bool fold_packet(const Meet& meet, const Lines& lines, u32 op, const Acc<T>* factor,
                                   const Ending<T>& ending, u64 i, u64 own, u64& result) {
    const u32 E = 8 / sizeof(T);
    Acc<T> acc[E] = {};
#pragma unroll 1
    for (u32 from = 0; from < meet.count; from += GROUP) {
        u64 data[GROUP];
        if (!receive(meet, lines, i, from, own, data)) return false;
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

template <class T>
__device__ inline void push(const Meet& meet, u64 n, u32 op, const Factors& lo, const Factors& hi, u64 src, u64 dst) {
    __shared__ Lines lines;
    __shared__ Acc<T> factor[MOST];
    if (n == 0) return;
    const u32 E = 8 / sizeof(T);
    const u64 packets = (n + E - 1) / E;
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const Ending<T> ending(op, meet.count);
    u32 ticket = ~0u;
    if (threadIdx.x < meet.count) open_line(lines, meet, threadIdx.x);
    if (op == SCALED && last_thread) fill_factors(factor, lo, hi);
#pragma unroll 1
    for (u64 i = grid_index();; i += grid_size()) {
        u64 own = i < packets ? load_data<T>(src, n, i) : 0;
        if (i == grid_index()) {
            // All threads come by here once; the first data are on their way while the epochs are read.
            __syncthreads();
            if (last_thread) ticket = take_ticket(meet);
        }
        if (i >= packets) break;
        // From the next rank on, so that not all send to the same member first.
#pragma unroll 1
        for (u32 r = 1; r < meet.count; r++) {
            const u32 rank = meet.me + r < meet.count ? meet.me + r : meet.me + r - meet.count;
            const u32 epoch = lines.epoch[rank];
            store_packet(lines.outbox[rank] + i * 16, make_uint4((u32)own, epoch, (u32)(own >> 32), epoch));
        }
        u64 result = own;
        // A member alone keeps what it has, unless that is to be scaled.
        if (meet.count > 1 || op == SCALED) {
            if (!fold_packet(meet, lines, op, factor, ending, i, own, result)) break;
        }
        store_data<T>(dst, n, i, result);
    }
    if (last_thread) note_epochs(meet, ticket, lines.epoch);
}

#define PUSH(T)                                                                                                    \
    KERNEL push_##T(Meet meet, u64 n, u32 op, Factors lo, Factors hi, const T* src, T* dst) {                         \
        push<T>(meet, n, op, lo, hi, (u64)src, (u64)dst);                                                          \
    }

PUSH(f32)
PUSH(f64)
PUSH(f16)
PUSH(bf16)
PUSH(i8)
PUSH(u8)
PUSH(i32)
PUSH(u32)
PUSH(i64)
PUSH(u64)
