// Sums of floats by data that are their own flags: inbox.cuh has the protocol and its memory order.
//
//   inbox_{f32,f64,f16,bf16}  (Meet meet, u64 n, u32 op, Route route, Factors lo, Factors hi, const T* src, T* dst)
//   slots_{f32,f64,f16,bf16}  (Meet meet, u32 op, Factors lo, Factors hi, Pieces pieces, and by eights, low and high:
//                             from, bytes, to)
//
// `inbox` takes one trip: the arguments are those of `push`, for at most `Signals::whole` bytes; the route folds, and
// all members are senders. Each thread sends all its units before it waits for the first, and it alone reads and writes
// a unit of the destination, so `src` may be `dst`, chunk for chunk. A member that nothing is sent to gets unit 0
// nevertheless: all wait for all in every meeting, on which the two parities depend. A meeting of no units is none.
//
// `slots` takes any size, in slices: member a sends its elements at from[b], bytes[b] of them, to b, who adds them up.
// If `returns`, the sums go to all members; else they stay. (Two members that add up all elements, each for itself,
// have two slices that are the whole.) A slice is cut into pieces of at most `Signals::slot` bytes, dealt out to the
// blocks: step p of block b has piece p * gridDim + b of every slice. There are slots to send ahead:
//
//   no returns, step p:  sends piece p + 2        before: all others have done step p - 2
//                        takes and folds piece p
//   returns, step p:     sends piece p + 1        before: all others have done step p - 1
//                        takes and folds piece p, sends the sums
//                        takes the sums of piece p - 1
//
// Pieces use slots p % 4; if there are sums, pieces 2 * (p % 2), and sums the slot behind. A step waits for others'
// previous steps, or for the sends of this step, which wait for previous steps only: no cycle of waits.
//
// In place: a member's elements of a piece are overwritten by the sum, which depends on them, or by the thread that has
// read them for its own slice, a barrier of the block after they were sent.
#include "inbox.cuh"

// Addresses of the other members, by rank, in shared memory.
struct Lines {
    u64 in[MOST], out[MOST];
    u32 epoch[MOST];
};

// What one member does in one trip.
template <class T> struct Trip {
    const Meet& meet;
    const Route& route;
    const Lines& lines;
    u64 n, src, dst;

    __device__ u64 source(u32 rank) const { return src + rank * route.out * sizeof(T); }

    // What all receivers get, if they get the same.
    __device__ uint4 common(u64 i) const {
        return route.out == 0 ? load_unit<T>(src, n, i) : make_uint4(0, 0, 0, 0);
    }

    __device__ void send(u64 i, uint4 common) const {
#pragma unroll 1
        for (u32 from = 1; from < meet.count; from += GROUP) {
            uint4 unit[GROUP];
#pragma unroll
            for (u32 k = 0; k < GROUP; k++) {
                unit[k] = common;
                const u32 rank = rank_after(meet, from + k);
                if (route.out != 0 && from + k < meet.count) unit[k] = load_unit<T>(source(rank), n, i);
            }
#pragma unroll
            for (u32 k = 0; k < GROUP; k++) {
                const u32 rank = rank_after(meet, from + k);
                if (from + k < meet.count && (route.receives(rank) || i == 0)) {
                    put<T>(lines.out[rank] + i * 16, guarded<T>(unit[k]));
                }
            }
        }
    }

    // False if the kernel gave up.
    __device__ bool receive(u64 i, u32 op, const Ending<T>& ending, const Acc<T>* factor) const {
        const bool wanted = route.receives(meet.me);
        if (!wanted && i != 0) return true;
        const uint4 own = load_unit<T>(source(meet.me), n, i);
        uint4 result;
        const auto at = [&](u32 rank) { return lines.in[rank] + i * 16; };
        if (!take_and_fold<T>(meet, op, ending, factor, guarded<T>(own), at, result)) return false;
        if (wanted) store_unit<T>(dst, n, i, result);
        return true;
    }
};

// The sum or the average of two members who both receive, whole units at aligned places: the shortest way there is. At
// most U units of a thread are under way. The other member may go by `trip`, if its places are not aligned. Both get
// the same bits: a GPU adds up in f32, whose sums have only one NaN. f64 has many, so it always goes by `trip`.
template <class T, u32 U>
__device__ inline void trip_of_two(const Meet& meet, const Route& route, u32 units, u32 op, u64 src, u64 dst) {
    const u32 peer = 1 - meet.me, other = ordinal(meet, peer), mine = ordinal(meet, meet.me);
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const Ending<T> ending(op, 2);
    u32 i = (u32)grid_index(), step = (u32)grid_size(), ticket = ~0u;
    // By parity: the places in which `whole_of` finds the rooms.
    u32 out_place = 2 * (mine < other ? mine : mine - 1), in_place = 2 * (other < mine ? other : other - 1);
    u64 from = src + peer * route.out * sizeof(T) + i * 16, own = src + meet.me * route.out * sizeof(T) + i * 16;
    u64 to = dst + i * 16, epoch_at = (u64)&meet.signals->epoch[other], pad_at = (u64)&meet.signals->peer[other];
    settle(i), settle(step), settle(from), settle(to), settle(epoch_at), settle(pad_at);
    settle(out_place), settle(in_place);
    await_earlier();
    // All loads are under way before the first is waited for.
    const u32 epoch_before = load_relaxed((const u32*)epoch_at);
    const u64 pad = load<u64>(pad_at), whole = load<u64>((u64)&meet.signals->wholes);
    uint4 unit[U];
    u32 here = 0;
#pragma unroll
    for (u32 u = 0; u < U; u++) {
        if (i + u * step >= units) continue;
        here |= 1u << u;
        unit[u] = load<uint4>(from + (u64)(u * step) * 16);
    }
    const u32 epoch = following(epoch_before), parity = epoch & 1u;
    const u64 rooms = sizeof(Signals) + (u32)whole + (u64)i * 16;
    const u64 out = pad + rooms + (u64)(out_place + parity) * (u32)(whole >> 32);
    const u64 in = (u64)meet.signals + rooms + (u64)(in_place + parity) * (u32)(whole >> 32);
    u32 moved = 0;
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (here >> u & 1) put<T>(out + (u64)(moved + u * step) * 16, guarded<T>(unit[u]));
        }
        if (moved == 0) {
            // All threads of the block have used the epoch.
            __syncthreads();
            if (gridDim.x <= FEW) let_next_come();
            if (last_thread) ticket = take_ticket(meet);
        }
        if (here == 0) break;
        const u64 at = (u64)moved * 16;
        if (route.out != 0) {
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                if (here >> u & 1) unit[u] = load<uint4>(own + at + (u64)(u * step) * 16);
            }
        }
        if (!take_from_other<T>(meet, other, ending, here, in + at, (u64)step * 16, unit, to + at)) break;
        // The peer's block runs.
        if (gridDim.x > FEW) let_next_come();
        if (U == 1) break;
        moved += U * step;
        here = 0;
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (i + moved + u * step >= units) continue;
            here |= 1u << u;
            unit[u] = load<uint4>(from + (u64)(moved + u * step) * 16);
        }
    }
    if (last_thread && ticket == gridDim.x - 1) {
        meet.signals->ticket = 0;
        meet.signals->epoch[other] = epoch;
    }
}

// The sum or the average of three to M members that all receive: at most one whole unit of a thread, at aligned places.
// All loads and polls of a thread overlap. Another member may go by `trip`, as above.
template <class T, u32 M>
__device__ inline void trip_of_few(const Meet& meet, const Route& route, u32 units, u32 op, u64 src, u64 dst) {
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const Ending<T> ending(op, meet.count);
    const u32 i = (u32)grid_index(), mine = ordinal(meet, meet.me);
    const u64 at = (u64)i * 16, part = route.out * sizeof(T);
    const bool here = i < units;
    const u32 others = ((1u << meet.count) - 1) & ~(1u << meet.me);
    await_earlier();
    const u64 whole = load<u64>((u64)&meet.signals->wholes);
    u32 epoch[M];
    u64 pad[M];
    uint4 unit[M], own = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (u32 k = 0; k < M; k++) {
        if (!(others >> k & 1)) continue;
        epoch[k] = load_relaxed(&meet.signals->epoch[ordinal(meet, k)]);
        pad[k] = load<u64>((u64)&meet.signals->peer[ordinal(meet, k)]);
    }
    if (here) own = load<uint4>(src + meet.me * part + at);
#pragma unroll
    for (u32 k = 0; k < M; k++) {
        unit[k] = own;
        if (part != 0 && here && (others >> k & 1)) unit[k] = load<uint4>(src + k * part + at);
    }
    const u64 rooms = sizeof(Signals) + (u32)whole + at;
    u64 in[M];
#pragma unroll
    for (u32 k = 0; k < M; k++) {
        if (!(others >> k & 1)) continue;
        const u32 other = ordinal(meet, k);
        epoch[k] = following(epoch[k]);
        const u32 parity = epoch[k] & 1u;
        // By parity: the places in which `whole_of` finds the rooms.
        const u32 out_place = 2 * (mine < other ? mine : mine - 1), in_place = 2 * (other < mine ? other : other - 1);
        in[k] = (u64)meet.signals + rooms + (u64)(in_place + parity) * (u32)(whole >> 32);
        if (here) put<T>(pad[k] + rooms + (u64)(out_place + parity) * (u32)(whole >> 32), guarded<T>(unit[k]));
    }
    // All threads of the block have used the epochs.
    __syncthreads();
    if (gridDim.x <= FEW) let_next_come();
    u32 ticket = ~0u;
    if (last_thread) ticket = take_ticket(meet);
    if (here) {
#pragma unroll
        for (u32 k = 0; k < M; k++) unit[k] = guarded<T>(own);
        if (take<T>(meet, others, [&](u32 k) { return in[k]; }, [](u32 k) { return k; }, unit)) {
            // All peers' blocks run.
            if (gridDim.x > FEW) let_next_come();
            uint4 result = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (u32 w = 0; w < LANES<T>; w++) {
                Acc<T> acc = wide_lane<T>(unit[0], w);
#pragma unroll
                for (u32 k = 1; k < M; k++) {
                    if (k < meet.count) acc = acc + wide_lane<T>(unit[k], w);
                }
                set_lane<T>(result, w, ending(acc));
            }
            store(dst + at, guarded<T>(result));
        }
    }
    if (!last_thread || ticket != gridDim.x - 1) return;
    meet.signals->ticket = 0;
#pragma unroll
    for (u32 k = 0; k < M; k++) {
        if (others >> k & 1) meet.signals->epoch[ordinal(meet, k)] = epoch[k];
    }
}

template <class T>
__device__ inline void trip(const Meet& meet, const Route& route, u64 n, u32 op, const Factors& lo, const Factors& hi,
                            u64 src, u64 dst, Lines& lines, Acc<T>* factor) {
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const u32 rank = threadIdx.x;
    if (rank < meet.count && rank != meet.me) {
        const u32 epoch = epoch_with(meet, rank);
        lines.epoch[rank] = epoch;
        lines.in[rank] = whole_of(meet, rank, meet.me, epoch);
        lines.out[rank] = whole_of(meet, meet.me, rank, epoch);
    }
    const Trip<T> trip = {meet, route, lines, n, src, dst};
    const Ending<T> ending(op, meet.count);
    const u64 units = (n - 1) / LANES<T> + 1, first = grid_index(), step = grid_size();
    // The first data are in flight while the epochs are read.
    uint4 common = first < units ? trip.common(first) : make_uint4(0, 0, 0, 0);
    __syncthreads();
    u32 ticket = ~0u;
    if (last_thread) ticket = take_ticket(meet);
#pragma unroll 1
    for (u64 i = first; i < units; i += step) {
        if (i != first) common = trip.common(i);
        trip.send(i, common);
    }
    if (gridDim.x <= FEW) let_next_come();
#pragma unroll 1
    for (u64 i = first; i < units; i += step) {
        if (!trip.receive(i, op, ending, factor)) break;
    }
    if (last_thread) note_epochs(meet, ticket, lines.epoch);
}

template <class T>
__device__ inline void inbox(const Meet& meet, u64 n, u32 op, const Route& route, const Factors& lo, const Factors& hi,
                             u64 src, u64 dst) {
    __shared__ Lines lines;
    __shared__ Acc<T> factor[MOST];
    const u64 units = n / LANES<T>, odd = src | dst | route.out * sizeof(T) | n * sizeof(T);
    const bool all = (op == SUM || op == AVG) && route.receivers == (1u << meet.count) - 1;
    if constexpr (sizeof(T) != 8) {
        if (__builtin_expect(all && odd % 16 == 0 && n != 0 && units >> 28 == 0, 1)) {
            const bool one = units <= grid_size(); // unit of a thread
            if (meet.count == 2 && one) return trip_of_two<T, 1>(meet, route, (u32)units, op, src, dst);
            if (meet.count == 2) return trip_of_two<T, 4>(meet, route, (u32)units, op, src, dst);
            if (meet.count <= 4 && one) return trip_of_few<T, 4>(meet, route, (u32)units, op, src, dst);
            if (meet.count <= 8 && one) return trip_of_few<T, 8>(meet, route, (u32)units, op, src, dst);
        }
    }
    await_earlier();
    if (n == 0) return;
    if (op == SCALED && threadIdx.x == blockDim.x - 1) fill_factors(factor, lo, hi);
    trip<T>(meet, route, n, op, lo, hi, src, dst, lines, factor);
}

// Parameters that are equal on all members.
struct Pieces {
    u64 piece;   // bytes of one, a multiple of 16, at most `Signals::slot`
    u32 count;   // of the largest slice's pieces for one block
    u32 returns; // whether sums go to all members
};

// In shared memory, by rank.
template <class T> struct Desk {
    u64 from[MOST];  // own elements of the member's slice
    u64 bytes[MOST]; // of the slice
    u64 to[MOST];    // where the slice's sums go; of the others' slices, if they return
    u64 in[MOST], out[MOST];
    u64 slot;
    u32 epoch[MOST];
    Acc<T> factor[MOST];
};

// The work of one block.
template <class T> struct Trade {
    const Meet& meet;
    const Pieces& pieces;
    const Desk<T>& desk;
    u32 op;
    const Ending<T>& ending;

    __device__ Share all() const { return {threadIdx.x, blockDim.x}; }
    __device__ u64 begin(u32 p) const { return ((u64)p * gridDim.x + blockIdx.x) * pieces.piece; }

    // Elements of piece `p` of a slice.
    __device__ u64 elements(u32 owner, u32 p) const {
        const u64 all = desk.bytes[owner], at = begin(p);
        return (at >= all ? 0 : all - at < pieces.piece ? all - at : pieces.piece) / sizeof(T);
    }
    __device__ static u64 units(u64 elements) { return (elements + LANES<T> - 1) / LANES<T>; }

    __device__ u64 piece_slot(u32 p) const { return (pieces.returns ? 2 * (p % 2) : p % SLOTS) * desk.slot; }
    __device__ u64 sums_slot(u32 p) const { return (2 * (p % 2) + 1) * desk.slot; }

    static const u32 U = 4; // units of a thread in flight

    __device__ void send(u32 p) const {
        by_warps(all(), meet.count - 1, [&](u32 k, Share share) {
            const u32 owner = rank_after(meet, k + 1);
            const u64 n = elements(owner, p), count = units(n), to = desk.out[owner] + piece_slot(p);
            const u64 from = desk.from[owner] + begin(p);
#pragma unroll 1
            for (u64 i = share.first; i < count; i += U * share.step) {
                uint4 unit[U];
#pragma unroll
                for (u32 u = 0; u < U; u++) {
                    if (i + u * share.step < count) unit[u] = load_unit<T>(from, n, i + u * share.step);
                }
#pragma unroll
                for (u32 u = 0; u < U; u++) {
                    if (i + u * share.step < count) put<T>(to + (i + u * share.step) * 16, guarded<T>(unit[u]));
                }
            }
        });
    }

    // Takes units of one member: calls done(i, unit) for each of the thread's share. False if the kernel gave up.
    template <class Done> __device__ bool take_from(u32 rank, u64 slot, Share share, u64 count, Done done) const {
        const u64 from = desk.in[rank] + slot;
#pragma unroll 1
        for (u64 i = share.first; i < count; i += U * share.step) {
            uint4 unit[U];
            u32 expected = 0;
#pragma unroll
            for (u32 u = 0; u < U; u++) expected |= (u32)(i + u * share.step < count) << u;
            const auto at = [&](u32 u) { return from + (i + u * share.step) * 16; };
            if (!take<T>(meet, expected, at, [&](u32) { return rank; }, unit)) return false;
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                if (expected >> u & 1) done(i + u * share.step, unit[u]);
            }
        }
        return true;
    }

    // Takes and folds piece `p` of the own slice, and sends the sums if they return. False if the kernel gave up.
    __device__ bool fold(u32 p) const {
        const u64 n = elements(meet.me, p), count = units(n), slot = piece_slot(p);
        const u64 from = desk.from[meet.me] + begin(p), to = desk.to[meet.me] + begin(p);
        if (meet.count == 2 && (op == SUM || op == AVG) && !pieces.returns) {
            return take_from(1 - meet.me, slot, all(), count, [&](u64 i, uint4 other) {
                const uint4 own = load_unit<T>(from, n, i);
                store_unit<T>(to, n, i, sum_of_two<T>(meet.me, ending, own, other));
            });
        }
#pragma unroll 1
        for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
            const uint4 own = load_unit<T>(from, n, i);
            uint4 result;
            const auto at = [&](u32 rank) { return desk.in[rank] + slot + i * 16; };
            if (!take_and_fold<T>(meet, op, ending, desk.factor, guarded<T>(own), at, result)) return false;
            if (pieces.returns) {
#pragma unroll 1
                for (u32 k = 1; k < meet.count; k++) {
                    put<T>(desk.out[rank_after(meet, k)] + sums_slot(p) + i * 16, result);
                }
            }
            store_unit<T>(to, n, i, result);
        }
        return true;
    }

    // Takes the others' sums of their pieces `p`.
    __device__ bool take_sums(u32 p) const {
        bool good = true;
        by_warps(all(), meet.count - 1, [&](u32 k, Share share) {
            const u32 owner = rank_after(meet, k + 1);
            const u64 n = elements(owner, p), to = desk.to[owner] + begin(p);
            const auto done = [&](u64 i, uint4 unit) { store_unit<T>(to, n, i, unit); };
            if (good) good = take_from(owner, sums_slot(p), share, units(n), done);
        });
        return good;
    }

    // False if the block gave up.
    __device__ bool run() const {
        const u32 ahead = pieces.returns ? 1 : 2, steps = pieces.count + (pieces.returns ? 1 : 0);
        for (u32 p = 0; p < ahead && p < pieces.count; p++) send(p);
#pragma unroll 1
        for (u32 p = 0; p < steps; p++) {
            const u32 taken = pieces.returns ? p : p > 1 ? p - 1 : 0;
            if (taken > 0 && !__syncthreads_and(hear_taken(meet, desk.epoch, taken))) return false;
            if (p + ahead < pieces.count) send(p + ahead);
            bool good = p >= pieces.count || fold(p);
            if (good && pieces.returns && p > 0) good = take_sums(p - 1);
            if (!__syncthreads_and(good)) return false;
            tell_taken(meet, desk.epoch, p + 1);
        }
        return hear_taken(meet, desk.epoch, steps);
    }
};

template <class T> __device__ inline void trade(const Meet& meet, u32 op, const Pieces& pieces, Desk<T>& desk) {
    const bool last_thread = threadIdx.x == blockDim.x - 1;
    const u32 rank = threadIdx.x;
    await_earlier();
    if (rank < meet.count && rank != meet.me) {
        desk.epoch[rank] = epoch_with(meet, rank);
        desk.in[rank] = slots_of(meet, rank, meet.me);
        desk.out[rank] = slots_of(meet, meet.me, rank);
    }
    if (last_thread) desk.slot = meet.signals->slot;
    __syncthreads();
    u32 ticket = ~0u;
    if (last_thread) ticket = take_ticket(meet);
    const Ending<T> ending(op, meet.count);
    Trade<T>{meet, pieces, desk, op, ending}.run();
    if (last_thread) note_epochs(meet, ticket, desk.epoch);
}

#define INBOX(T)                                                                                                   \
    KERNEL inbox_##T(Meet meet, u64 n, u32 op, Route route, Factors lo, Factors hi, const T* src, T* dst) {           \
        inbox<T>(meet, n, op, route, lo, hi, (u64)src, (u64)dst);                                                  \
    }                                                                                                              \
    KERNEL slots_##T(Meet meet, u32 op, Factors lo, Factors hi, Pieces pieces, Eight from_lo, Eight from_hi,          \
                     Eight bytes_lo, Eight bytes_hi, Eight to_lo, Eight to_hi) {                                   \
        __shared__ Desk<T> desk;                                                                                   \
        if (threadIdx.x == 0) {                                                                                    \
            spread(desk.from, from_lo, from_hi);                                                                   \
            spread(desk.bytes, bytes_lo, bytes_hi);                                                                \
            spread(desk.to, to_lo, to_hi);                                                                         \
            if (op == SCALED) fill_factors(desk.factor, lo, hi);                                                   \
        }                                                                                                          \
        trade<T>(meet, op, pieces, desk);                                                                          \
    }

INBOX(f32) INBOX(f64) INBOX(f16) INBOX(bf16)
