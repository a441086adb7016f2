// All-reduce around a ring, in one launch: every member writes to its successor's memory alone, and reads its own.
//
//   ring_{f32,f64}  (Meet meet, Ring ring, Cut cut, T factor)
//
// Hop h passes chunk (me - h) mod n on, which came by the predecessor's hop h - 1. 2 (n - 1) hops:
//
//   0                  own source                          -> successor's inbox
//   1 .. n - 2         own source + what is in the inbox   -> successor's inbox
//   n - 1              (the same) * factor, the result     -> own destination, successor's destination
//   n .. 2 n - 3       own destination                     -> successor's destination
//
// So chunk c is added up from rank c onwards, as in the ring of copies (src/collective/ring.rs), in the same chunks and by
// the same operations: the bits are the same. Stores to one neighbour are what SMs do best over NVLink, better than loads.
//
// Block b does its own part of every chunk, in pieces, round by round; blocks of one index are a ring of their own, and
// know nothing of the others. In a round, `abreast` pieces take each hop after one another. An inbox has `slots` slots for
// each block, which the pieces of hops 0 .. n - 2 use in turn. Each member tells
//
//   PUT    its successor: how many pieces it has sent, by all hops        before every hop but 0, and before the end
//   TAKEN  its predecessor: how many it has taken out of its inbox        before hops 0 .. n - 2, for a slot
//
// counted from 1 in every meeting, with the meeting's epoch above, so nothing is reset and an old count is none.
//
// Nobody waits in a circle. Number a block's sendings 0, 1, ..: by round, hop, place abreast. Sending i waits for the
// predecessor's sending i - abreast, and for the slot of piece m: until the successor has passed on piece m - slots, which
// it does by a sending below i, since slots > abreast. So of all that is not sent yet, what has the least number can be.
// (With slots == abreast all would fill the inboxes and wait for each other.) All members' blocks run: the start barrier.
//
// A slot is filled again after TAKEN, which comes after the loads. In place: the predecessor overwrites a piece of chunk c
// here with its sum, and that is made of what this member has sent of its own source there: it has been read. No memory
// is in use after the end: who writes here is the predecessor alone, and all that it sends has arrived; what this member
// sends has been used when its successor ends. What its successor tells it late is a count of an old epoch.
//
// The next meeting, of any kind, finds this one over: a kernel ends when pieces have come by all members' hops, empty ones
// too, so all of a pair's blocks have passed the start (whose flags may then have newer epochs). A block that gives up
// tells nothing more; what it has told carries the epoch, which is counted all the same.
#include "lanes.cuh"
#include "meet.cuh"

// Addresses.
struct Ring {
    u64 from, to;          // own source, own destination; they may be one
    u64 next_to;           // the successor's destination
    u64 inbox, next_inbox; // own and the successor's
};

// What all members agree on.
struct Cut {
    u64 bytes; // of a buffer
    u64 chunk; // chunk c begins at c * chunk, a multiple of 128; the last ones may be shorter, or empty
    u64 piece; // bytes of a slot, a multiple of 128
    u32 rounds, abreast, slots, spare;
};

// `units` units: own + arrived, times `factor`, if anything has arrived; else own as it is. To one or two places.
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

// A piece of so many bytes. Members' buffers may be aligned differently, each to its elements.
template <class T>
__device__ inline void pass_piece(u64 bytes, u64 own, u64 arrived, T factor, u64 first, u64 second) {
    const u64 packs = (own | arrived | first | second) % 16 == 0 ? bytes / 16 : 0, done = packs * 16;
    pass<T, uint4>(packs, own, arrived, factor, first, second);
    const auto rest = [&](u64 at) { return at == 0 ? 0 : at + done; };
    pass<T, BitsOf<T>>((bytes - done) / sizeof(T), own + done, rest(arrived), factor, first + done, rest(second));
}

// The threads of a block that tell and wait, each in a warp of its own: a release stands until all stores are through.
enum Clerk : u32 { HEARS_PUT = 0, HEARS_TAKEN = 32, TELLS_PUT = 64, TELLS_TAKEN = 96 };

// One of them, with its word and whose it is.
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

    // Whether so many have come. Not when it had to give up.
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

    // Of the whole block, and a barrier: the predecessor has put, and the successor taken so many.
    __device__ bool all_hear(u32 put, u32 taken) const {
        bool come = true;
        if (threadIdx.x == HEARS_PUT && put > 0) come = hears(put);
        if (threadIdx.x == HEARS_TAKEN && taken > 0) come = hears(taken);
        return __syncthreads_and(come);
    }

    // Of the whole block: what it has done so far is done, for those who hear it. 0: nothing to tell.
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
                // The last ones' slots nobody waits for.
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
