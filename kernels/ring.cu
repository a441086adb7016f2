// Ring all-reduce in one launch: every member writes only to its successor's memory, and reads only its own.
//
//   ring_{f32,f64}  (Meet meet, Ring ring, Cut cut, T factor)
//
// Hop h sends chunk (me - h) mod n, which the predecessor's hop h - 1 has delivered. There are 2 (n - 1) hops:
//
//   0                  own source                          -> successor's inbox
//   1 .. n - 2         own source + what is in the inbox   -> successor's inbox
//   n - 1              (the same) * factor, the result     -> own destination, successor's destination
//   n .. 2 n - 3       own destination                     -> successor's destination
//
// So chunk c is reduced from rank c onwards, as in the ring of copies, with the same chunks and the same operations:
// the bits are equal. SMs are fastest over NVLink with stores to one neighbour; loads are slower.
//
// Block b does its own part of every chunk, in pieces, round by round. Blocks with one index form a separate ring,
// independent of other blocks. In a round, `abreast` pieces take each hop one after the other. An inbox has `slots`
// slots for each block, which the pieces of hops 0 .. n - 2 use in turn. Each member signals
//
//   PUT    its successor: how many pieces it has sent, by all hops        before every hop but 0, and before the end
//   TAKEN  its predecessor: how many it has taken out of its inbox        before hops 0 .. n - 2, for a slot
//
// counted from 1 in every meeting, with the meeting's epoch in the upper bits. So nothing is reset, and an old count is
// not mistaken for a new one.
//
// There is no cycle of waits. Number a block's sends 0, 1, ..: by round, hop, position abreast. Send i waits for the
// predecessor's send i - abreast, and for the slot of piece m: until the successor has forwarded piece m - slots, which
// it does by a send below i, since slots > abreast. So of all open sends, the one with the least number can proceed.
// (With slots == abreast all members would fill the inboxes and wait for each other.) The start barrier guarantees that
// all members' blocks run.
//
// A slot is filled again after TAKEN, which comes after the loads. In place: the predecessor overwrites a piece of
// chunk c here with its sum, which contains the data that this member has sent from there: so the piece has been read.
// No memory is in use after the end: only the predecessor writes here, and all its sends have arrived; this member's
// sends have been used when its successor ends. A late signal of its successor is a count of an old epoch.
//
// The next meeting, of any kind, finds this one complete: a kernel ends when pieces (also empty ones) have arrived by
// all members' hops, so all blocks of a pair have passed the start barrier (whose flags may then have newer epochs). A
// block that gives up signals nothing more. Its earlier signals carry the epoch, which is counted in any case.
#include "lanes.cuh"
#include "meet.cuh"

// Addresses.
struct Ring {
    u64 from, to;          // own source, own destination; they may be one
    u64 next_to;           // the successor's destination
    u64 inbox, next_inbox; // own and the successor's
};

// Parameters that are equal on all members.
struct Cut {
    u64 bytes; // of a buffer
    u64 chunk; // chunk c begins at c * chunk, a multiple of 128; the last ones may be shorter, or empty
    u64 piece; // bytes of a slot, a multiple of 128
    u32 rounds, abreast, slots, spare;
};

// Moves `units` units to one or two destinations: (own + arrived) * factor if data have arrived, else own unchanged.
template <class T, class Unit>
__device__ inline void pass(u64 units, u64 own, u64 arrived, T factor, u64 first, u64 second) {
    const u32 U = 4, W = sizeof(Unit) / sizeof(T); // units of a thread in flight, elements of each
    const u64 step = blockDim.x;
#pragma unroll 1
    for (u64 i = threadIdx.x; i < units; i += U * step) {
        Unit x[U], y[U];
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (i + u * step < units) x[u] = load<Unit>(own + (i + u * step) * sizeof(Unit));
        }
        if (arrived != 0) {
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                if (i + u * step < units) y[u] = load<Unit>(arrived + (i + u * step) * sizeof(Unit));
            }
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                if (i + u * step >= units) continue;
#pragma unroll
                for (u32 w = 0; w < W; w++) set_lane<T>(x[u], w, (lane<T>(x[u], w) + lane<T>(y[u], w)) * factor);
            }
        }
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (i + u * step < units) store(first + (i + u * step) * sizeof(Unit), x[u]);
        }
        if (second == 0) continue;
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (i + u * step < units) store(second + (i + u * step) * sizeof(Unit), x[u]);
        }
    }
}

// Moves one piece. Members' buffers may be aligned differently, each to its elements.
template <class T>
__device__ inline void pass_piece(u64 bytes, u64 own, u64 arrived, T factor, u64 first, u64 second) {
    const u64 packs = (own | arrived | first | second) % 16 == 0 ? bytes / 16 : 0, done = packs * 16;
    pass<T, uint4>(packs, own, arrived, factor, first, second);
    const auto rest = [&](u64 at) { return at == 0 ? 0 : at + done; };
    pass<T, BitsOf<T>>((bytes - done) / sizeof(T), own + done, rest(arrived), factor, first + done, rest(second));
}

// The threads of a block that signal and wait. Each is in a separate warp, since a release blocks its warp until all
// stores have completed.
enum Clerk : u32 { HEARS_PUT = 0, HEARS_TAKEN = 32, TELLS_PUT = 64, TELLS_TAKEN = 96 };

// One of these threads, with its word and the word's owner.
struct Desk {
    const Meet& meet;
    u64* word = nullptr;
    u32 epoch = 0, other = 0;

    __device__ Desk(const Meet& meet, const u32* epochs) : meet(meet) {
        const u32 clerk = threadIdx.x, last = meet.count - 1;
        if (clerk % 32 != 0 || clerk > TELLS_TAKEN) return;
        const bool hears = clerk == HEARS_PUT || clerk == HEARS_TAKEN;
        const bool with_previous = clerk == HEARS_PUT || clerk == TELLS_TAKEN;
        const u32 rank = with_previous ? (meet.me == 0 ? last : meet.me - 1) : (meet.me == last ? 0 : meet.me + 1);
        const Step step = clerk == HEARS_PUT || clerk == TELLS_PUT ? PUT : TAKEN;
        const u32 own = ordinal(meet, meet.me);
        other = ordinal(meet, rank);
        epoch = epochs[rank];
        word = &signals_of(meet, hears ? meet.me : rank)->step[step][blockIdx.x][hears ? other : own];
    }

    // Waits until the count is reached. False if it gave up.
    __device__ bool hears(u32 count) const {
        Patience patience;
#pragma unroll 1
        for (;;) {
            const u64 seen = load_relaxed(word);
            if ((u32)(seen >> 32) == epoch && (u32)seen >= count) break;
            if (patience.over(meet, other)) return false;
        }
        load_acquire(word);
        return true;
    }

    // For the whole block, with a barrier: waits until the predecessor has put `put` pieces and the successor has taken
    // `taken`.
    __device__ bool all_hear(u32 put, u32 taken) const {
        bool come = true;
        if (threadIdx.x == HEARS_PUT && put > 0) come = hears(put);
        if (threadIdx.x == HEARS_TAKEN && taken > 0) come = hears(taken);
        return __syncthreads_and(come);
    }

    // For the whole block: signals its work so far. A count of 0 sends no signal.
    __device__ void tell(u32 put, u32 taken) const {
        __syncthreads();
        if (threadIdx.x == TELLS_PUT) store_release(word, (u64)epoch << 32 | put);
        if (threadIdx.x == TELLS_TAKEN && taken > 0) store_release(word, (u64)epoch << 32 | taken);
    }
};

// False when it had to give up.
template <class T>
__device__ inline bool go_round(const Meet& meet, const Ring& ring, const Cut& cut, T factor, const u32* epochs) {
    const Desk desk(meet, epochs);
    const u32 n = meet.count, hops = 2 * (n - 1), through = cut.rounds * (n - 1) * cut.abreast;
    const u64 slots = (u64)blockIdx.x * cut.slots * cut.piece;
    u32 sent = 0, filled = 0, taken = 0; // pieces, of which some through slots; and slots emptied
#pragma unroll 1
    for (u32 round = 0; round < cut.rounds; round++) {
        u32 chunk = meet.me;
#pragma unroll 1
        for (u32 hop = 0; hop < hops; hop++) {
            const u64 begin = chunk * cut.chunk < cut.bytes ? chunk * cut.chunk : cut.bytes;
            const u64 here = cut.bytes - begin < cut.chunk ? cut.bytes - begin : cut.chunk;
#pragma unroll 1
            for (u32 k = 0; k < cut.abreast; k++) {
                const u64 at = (((u64)round * cut.abreast + k) * gridDim.x + blockIdx.x) * cut.piece;
                const u64 bytes = at >= here ? 0 : here - at < cut.piece ? here - at : cut.piece;
                const bool fills = hop < n - 1, adds = hop > 0 && hop < n, ends = hop == n - 1;
                const u32 put = hop == 0 ? 0 : sent + 1 - cut.abreast;
                if (!desk.all_hear(put, fills && filled >= cut.slots ? filled + 1 - cut.slots : 0)) return false;
                const u64 own = (hop < n ? ring.from : ring.to) + begin + at;
                const u64 arrived = adds ? ring.inbox + slots + taken % cut.slots * cut.piece : 0;
                const u64 slot = ring.next_inbox + slots + filled % cut.slots * cut.piece;
                const u64 next = fills ? slot : ring.next_to + begin + at;
                pass_piece<T>(bytes, own, arrived, ends ? factor : (T)1, next, ends ? ring.to + begin + at : 0);
                sent++;
                filled += fills;
                taken += adds;
                // No member waits for the slots of the last pieces.
                desk.tell(sent, adds && taken + cut.slots <= through ? taken : 0);
            }
            chunk = chunk == 0 ? n - 1 : chunk - 1;
        }
    }
    return desk.all_hear(sent, 0);
}

template <class T> __device__ inline void run(const Meet& meet, const Ring& ring, const Cut& cut, T factor) {
    __shared__ u32 epoch[MOST];
    Barrier barrier(meet, epoch);
    if (barrier.start()) go_round<T>(meet, ring, cut, factor, epoch);
    barrier.leave();
}

#define RING(T) \
    KERNEL ring_##T(Meet meet, Ring ring, Cut cut, T factor) { run<T>(meet, ring, cut, factor); }

RING(f32)
RING(f64)
