// Data that are their own flags. A device's inbox is filled with a reserved word; no datum has it, so what is something
// else has arrived. A receiver polls the data themselves, takes them, and writes the reserved word back. A byte of data
// crosses NVLink as one byte (a packet of push.cu: two), with no barrier, and no address of a user's buffer is told.
//
// **The reserved word** is EMPTY, 0xffffffff. A unit of 16 bytes is polled whole (`arrived`). f32, and f16 and bf16 in
// pairs: none of its four words is EMPTY; each word is one access, and they may arrive one by one. f64: no high word
// is; each element is one access of 8 bytes, and the low word may be anything (1 - 2^-53 has 0xffffffff there). Such a
// word is a NaN, or two; `guarded` makes it another NaN, in the sender's own copy too, so that all members fold the
// same bits. All other bits stay: so only sums may go this way, no collective that moves data.
//
// **Where.** Behind the rooms of eager sends a device has, by sender and never for itself:
//   whole   [sender][parity of the pair's epoch][`Signals::whole` bytes], for kernels of one trip;
//   slots   [sender][block][SLOTS][`Signals::slot` bytes], for any size, reused within a kernel by credits.
//
// **Memory order, whole.** Member s writes the room of (s, parity of e) at r in the pair's meeting e, and again in e +
// 2. In e, r polls each unit until it has come whole, and then wipes it: no store of s to it is left. The wipe is
// before the end of r's kernel of e; that is before anything that r sends in e + 1; s waits for something of that in
// its kernel of e + 1 (every member waits for all others in every meeting); the end of that kernel is before s's kernel
// of e + 2. The ends of kernels order all accesses, at the scope of the system, and the relaxed store and load between
// them carry that over (a release and an acquire pattern of PTX). So the wipe is before the new data, and r, in e + 2,
// sees the one or the other, never the data of e. (One parity is not enough: s may be through with e and send e + 1
// while r still polls for e, since s has waited only for what r sends at the begin of its kernel.)
//
// **Memory order, slots.** A block uses slot p % SLOTS in step p, and every call begins at step 0. It writes a slot
// again when the receiver's block of the same index has told it (`tell_taken`) that the step before is taken: polls and
// wipes, the barrier of the block, the release of one thread there; the acquire of one thread, the barrier of the
// block, the new data here. A kernel ends when the others have taken all that it has sent. So all slots are empty
// between kernels, no position has to be kept, and the next kernel may be of any kind. The credit has the meeting's
// epoch above the count, and may be one epoch ahead: a member that is already in its next kernel has taken everything
// of this one.
//
// **After a failure** what a kernel has not taken stays. The host fills the inbox of every member of a failed gang with
// EMPTY when all have drained, before the member meets again. A member that did not see the failure has completed all
// its kernels: it took all that was sent to it. A member that could not be drained in time later also removes what its
// kernels have sent meanwhile, before it meets anybody.
#pragma once
#include "pack.cuh"
#include "move.cuh"
#include "route.cuh"

const u32 EMPTY = ~0u;
const u32 SLOTS = 4;

template <class T> __device__ inline uint4 guarded(uint4 unit) {
    const u32 other = sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;
    if constexpr (sizeof(T) != 8) {
        unit.x = unit.x == EMPTY ? other : unit.x;
        unit.z = unit.z == EMPTY ? other : unit.z;
    }
    unit.y = unit.y == EMPTY ? other : unit.y;
    unit.w = unit.w == EMPTY ? other : unit.w;
    return unit;
}

template <class T> __device__ inline bool arrived(uint4 unit) {
    const bool high = unit.y != EMPTY && unit.w != EMPTY;
    return sizeof(T) == 8 ? high : high && unit.x != EMPTY && unit.z != EMPTY;
}

// Accesses to an inbox, own or a peer's. What is sent must be guarded.
template <class T> __device__ inline uint4 look(u64 at) {
    if constexpr (sizeof(T) == 8) return load_halves(at);
    else return load_packet(at);
}
template <class T> __device__ inline void put(u64 at, uint4 unit) {
    if constexpr (sizeof(T) == 8) store_halves(at, unit);
    else store_packet(at, unit);
}
template <class T> __device__ inline void wipe(u64 at) { put<T>(at, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY)); }

// Unit `i` of the `n` elements at `x`, in the user's memory; behind the last element are zeros.
template <class T> __device__ inline uint4 load_unit(u64 x, u64 n, u64 i) {
    const u64 at = i * LANES<T>;
    if (x % 16 == 0 && at + LANES<T> <= n) return load<uint4>(x + i * 16);
    uint4 unit = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (u32 k = 0; k < LANES<T> && at + k < n; k++) {
        const uint4 one = only_lane<T>(k, from_bits<T>(load<BitsOf<T>>(x + (at + k) * sizeof(T))));
        unit = make_uint4(unit.x | one.x, unit.y | one.y, unit.z | one.z, unit.w | one.w);
    }
    return unit;
}
template <class T> __device__ inline void store_unit(u64 x, u64 n, u64 i, uint4 unit) {
    const u64 at = i * LANES<T>;
    if (x % 16 == 0 && at + LANES<T> <= n) return store(x + i * 16, unit);
#pragma unroll 1
    for (u32 k = 0; k < LANES<T> && at + k < n; k++) store(x + (at + k) * sizeof(T), to_bits(lane_at<T>(unit, k)));
}

// Where what `sender` sends to `receiver` in one trip begins.
__device__ inline u64 whole_of(const Meet& meet, u32 sender, u32 receiver, u32 epoch) {
    return place_of(meet, sender, receiver, epoch, meet.signals->wholes, meet.signals->whole);
}

// The first of the slots of this block; the others are `Signals::slot` bytes apart.
__device__ inline u64 slots_of(const Meet& meet, u32 sender, u32 receiver) {
    const u32 from = ordinal(meet, sender), to = ordinal(meet, receiver);
    const u32 place = (from < to ? from : from - 1) * BLOCKS + blockIdx.x;
    return (u64)(signals_of(meet, receiver) + 1) + meet.signals->slots + (u64)place * SLOTS * meet.signals->slot;
}

// Takes the units `k` of `expected` (bits), which arrive at `at(k)` of the own inbox from member `who(k)`; other units
// of the array stay as they are. False if the kernel gave up.
template <class T, u32 G, class At, class Who>
__device__ inline bool take(const Meet& meet, u32 expected, At at, Who who, uint4 (&unit)[G]) {
    Patience patience;
#pragma unroll 1
    for (u32 missing = expected; missing != 0;) {
#pragma unroll
        for (u32 k = 0; k < G; k++) {
            if (missing >> k & 1) unit[k] = look<T>(at(k));
        }
#pragma unroll
        for (u32 k = 0; k < G; k++) {
            if ((missing >> k & 1) && arrived<T>(unit[k])) {
                wipe<T>(at(k));
                missing &= ~(1u << k);
            }
        }
        if (missing != 0 && patience.over(meet, ordinal(meet, who(__ffs(missing) - 1)))) return false;
    }
    return true;
}

// Units whose accesses overlap.
const u32 GROUP = 8;

// Folds the units of members [from, from + GROUP), up to the last member, onto those of the ranks before.
template <class T>
__device__ inline void fold_group(u32 op, u32 from, u32 count, const uint4 (&unit)[GROUP], Acc<T> (&acc)[LANES<T>],
                                  const Acc<T>* factor) {
    if (op == SUM || op == AVG) {
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            if (from + k >= count) continue;
#pragma unroll
            for (u32 w = 0; w < LANES<T>; w++) {
                const Acc<T> x = wide_lane<T>(unit[k], w);
                acc[w] = from + k == 0 ? x : acc[w] + x;
            }
        }
        return;
    }
#pragma unroll 1
    for (u32 k = 0; k < GROUP && from + k < count; k++) {
        const uint4 one = pick(unit, k);
        Acc<T> x[LANES<T>];
#pragma unroll
        for (u32 w = 0; w < LANES<T>; w++) x[w] = wide_lane<T>(one, w);
        fold_any<T>(op, from + k, acc, x, factor);
    }
}

// The fold of one unit of all members in rank order, rounded once, as it may be sent. `own` is this member's, guarded;
// member `rank`'s arrives at `at(rank)`. False if the kernel gave up.
template <class T, class At>
__device__ inline bool take_and_fold(const Meet& meet, u32 op, const Ending<T>& ending, const Acc<T>* factor, uint4 own,
                                     At at, uint4& result) {
    Acc<T> acc[LANES<T>] = {};
#pragma unroll 1
    for (u32 from = 0; from < meet.count; from += GROUP) {
        uint4 unit[GROUP];
        const u32 left = meet.count - from, here = left < GROUP ? (1u << left) - 1 : (1u << GROUP) - 1;
        const u32 mine = meet.me >= from && meet.me - from < GROUP ? 1u << (meet.me - from) : 0;
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) unit[k] = own;
        const auto in = [&](u32 k) { return at(from + k); };
        if (!take<T>(meet, here & ~mine, in, [&](u32 k) { return from + k; }, unit)) return false;
        fold_group<T>(op, from, meet.count, unit, acc, factor);
    }
    result = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (u32 w = 0; w < LANES<T>; w++) set_lane<T>(result, w, ending(acc[w]));
    result = guarded<T>(result);
    return true;
}

// The same for the sum or the average of two: `own` and the other one's unit. The result is not sent.
template <class T> __device__ inline uint4 sum_of_two(u32 me, const Ending<T>& ending, uint4 own, uint4 other) {
#ifdef __CUDA_ARCH__
    // A GPU's f32 has one NaN, which is not the reserved word: the order makes no difference.
    const bool plain = sizeof(T) != 8;
#else
    const bool plain = false;
#endif
    const uint4 a = plain || me == 0 ? own : other, b = plain || me == 0 ? other : own;
    const uint4 result = pack_of<T>([&](u32 w) { return (wide_lane<T>(a, w) + wide_lane<T>(b, w)) * ending.by; });
    return plain ? result : guarded<T>(result);
}

// Units of one thread that arrive from the only other member, `step` bytes apart from `in` on: those of `missing`
// (bits, not 0). Each is added to `own` and stored from `to` on. All are polled together. False if the kernel gave up.
template <class T, u32 U>
__device__ inline bool take_from_other(const Meet& meet, u32 other, const Ending<T>& ending, u32 missing, u64 in,
                                       u64 step, const uint4 (&own)[U], u64 to) {
    Patience patience;
#pragma unroll 1
    for (;;) {
        uint4 unit[U];
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (U == 1 || missing >> u & 1) unit[u] = look<T>(in + u * step);
        }
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if ((U == 1 || missing >> u & 1) && arrived<T>(unit[u])) {
                wipe<T>(in + u * step);
                store(to + u * step, sum_of_two<T>(meet.me, ending, own[u], unit[u]));
                missing &= ~(1u << u);
                if (U == 1) return true;
            }
        }
        if (U > 1 && missing == 0) return true;
        if (patience.over(meet, other)) return false;
    }
}

// Thread `rank` tells member `rank` that this block has taken and wiped all units of its first `count` steps, before
// the last barrier of the block. `epoch` by rank.
__device__ inline void tell_taken(const Meet& meet, const u32* epoch, u32 count) {
    const u32 rank = threadIdx.x;
    if (rank >= meet.count || rank == meet.me) return;
    u64* to = &signals_of(meet, rank)->step[DONE][blockIdx.x][ordinal(meet, meet.me)];
    store_release(to, (u64)epoch[rank] << 32 | count);
}

// Thread `rank` waits until member `rank` has told `count` of this meeting, or anything of the next. False if it gave
// up. A barrier of the block must follow before anybody writes to the slots.
__device__ inline bool hear_taken(const Meet& meet, const u32* epoch, u32 count) {
    const u32 rank = threadIdx.x;
    if (rank >= meet.count || rank == meet.me) return true;
    const u32 other = ordinal(meet, rank);
    const u64* at = &signals_of(meet, meet.me)->step[DONE][blockIdx.x][other];
    Patience patience;
#pragma unroll 1
    for (;;) {
        const u64 seen = load_relaxed(at);
        const u32 in = (u32)(seen >> 32);
        if ((in == epoch[rank] && (u32)seen >= count) || in == following(epoch[rank])) break;
        if (patience.over(meet, other)) return false;
    }
    load_acquire(at);
    return true;
}
