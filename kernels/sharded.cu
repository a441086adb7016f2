// A step of an optimizer whose state is divided among the devices (ZeRO-1), in one kernel per device: it adds up the
// gradients of its part, updates the parameters of its part, and writes them to all devices.
//
//   sharded_<T>  (Meet meet, u32 op, Rule rule, const Rule* later, f32* first, f32* second, f32* master, f32* norm,
//                 u64 begin, u64 end, u64 chunks, u32 count, and by eights, low and high, by rank: grads, to, sums;
//                 Column s0..s7, l0..l7, a0..a7)
//
// T is the type of gradients and parameters: f32 f16 bf16. Elements begin .. end of all are this device's part; it
// begins at a whole chunk of 2048. `grads` are all devices' gradients. `to` is where each device wants the parameters,
// in the order of the gradients; the own device has its own by the table of segments (segments.cuh), and nothing is
// written to the own `to`. The rule is in memory if `later` is not null: for graphs.
//
// With `norm` gradients are clipped, so all devices need the norm before any updates. Then each first leaves its sums
// where its own gradients were, and the squares of each chunk at `sums` of all devices; they meet; and each adds up
// all squares in one order, as `gradient_norm_f32` does. `norm` is that root.
//
// Bits: those of a reduce-scatter in rank order, `squares`, `gradient_norm_f32`, `update` and an all-gather, whatever
// the number of blocks.
//
//   sharded_buckets_<T>  (Meet meet, Rule rule, f32* norm, const u64* pieces, u32 count, u64 own, u64 chunks,
//                         Eight sums_lo, sums_hi)
//
// The same for gradients in buckets, which are added up already, each member's part at this member. The squares of the
// own chunks are at `sums` of the own device; the kernel gives them to all, and writes the new parameters to their
// places on all devices. `pieces` is a table in memory, so there may be any number of them: see `Piece`. The member's
// `own` chunks, of all buckets one behind the other, are numbered from 0.
//
// Who touches what between the start and the end of the meeting. Elements of part p of any device's gradients, and of
// any device's parameters: the owner of p alone, and there one thread for each element. `sums`, number c of all
// devices: the owner of chunk c writes it before the second meeting, and all read it after. In `sharded_buckets` a
// parameter's owner is the owner of the chunk that has its gradient.
#include "meet.cuh"
#include "optimizer.cuh"

// By rank.
struct Desk {
    u64 grads[MOST], to[MOST], sums[MOST];
    u32 epoch[MOST];
    Table table;
    Rule rule;
    f32 norm;
};

// Registers cannot be indexed by a number that the compiler does not know.
template <u32 N> __device__ inline uint4 pick_unit(const uint4 (&from)[N], u32 at) {
    uint4 x = from[0];
#pragma unroll
    for (u32 i = 1; i < N; i++) {
        x.x = at == i ? from[i].x : x.x;
        x.y = at == i ? from[i].y : x.y;
        x.z = at == i ? from[i].z : x.z;
        x.w = at == i ? from[i].w : x.w;
    }
    return x;
}

template <class T> struct Sharded {
    static const u32 W = 16 / sizeof(T);
    static const u32 ROUNDS = CHUNK / (32 * W);
    // Units of 16 bytes that a thread has on their way from each of two devices: as many as there are registers for.
    static const u32 U = 16 / W;

    const Meet& meet;
    const Desk& desk;
    const State& state;
    const Ending<T>& ending;
    u64 end;
    u32 count;
    bool finite;
    f32 scale;

    // The lane's unit of a round: its first element.
    __device__ u64 element(u64 chunk, u32 round) const { return chunk * CHUNK + (round * 32 + threadIdx.x % 32) * W; }

    // The sums of units of U rounds, in rank order.
    __device__ void fold(u64 chunk, u32 round, uint4 (&out)[U]) const {
        Acc<T> acc[U][W] = {};
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank += 2) {
            uint4 in[2][U];
            const bool two = rank + 1 < meet.count;
#pragma unroll
            for (u32 s = 0; s < 2; s++) {
                if (s == 1 && !two) continue;
                const u64 from = desk.grads[rank + s];
#pragma unroll
                for (u32 u = 0; u < U; u++) {
                    const u64 i = element(chunk, round + u);
                    in[s][u] = i < end ? load<uint4>(from + i * sizeof(T)) : make_uint4(0, 0, 0, 0);
                }
            }
#pragma unroll
            for (u32 s = 0; s < 2; s++) {
                if (s == 1 && !two) continue;
#pragma unroll
                for (u32 u = 0; u < U; u++) {
#pragma unroll
                    for (u32 w = 0; w < W; w++) {
                        const Acc<T> x = wide_lane<T>(in[s][u], w);
                        acc[u][w] = rank + s == 0 ? x : acc[u][w] + x;
                    }
                }
            }
        }
#pragma unroll
        for (u32 u = 0; u < U; u++) {
#pragma unroll
            for (u32 w = 0; w < W; w++) set_lane(out[u], w, ending(acc[u][w]));
        }
    }

    // Updates the parameters of a unit, and sends them.
    __device__ void update(u64 i, const uint4& sum) const {
        if (i >= end) return;
        const u32 k = segment_of(desk.table, count, i);
        const u64 j = i - desk.table.start[k], len = desk.table.len[k];
        if (count == 0 || j >= len) return;
        const u32 most = len - j < W ? (u32)(len - j) : W;
        T grad[W], own[W];
#pragma unroll
        for (u32 w = 0; w < W; w++) grad[w] = lane<T>(sum, w);
        update_pack(state, desk.rule, finite, scale, i, most, reinterpret_cast<T*>(desk.table.place[k]) + j, grad, own);
        uint4 unit;
#pragma unroll
        for (u32 w = 0; w < W; w++) set_lane(unit, w, own[w]);
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank++) {
            if (rank == meet.me) continue;
            const u64 to = desk.to[rank] + i * sizeof(T);
            if (most == W) {
                store(to, unit);
                continue;
            }
#pragma unroll
            for (u32 w = 0; w < W; w++)
                if (w < most) store(to + w * sizeof(T), to_bits(own[w]));
        }
    }

    // Adds up a chunk, and tells all devices the squares of the sums.
    __device__ void gather(u64 chunk) const {
        f64 squares = 0.0;
#pragma unroll 1
        for (u32 round = 0; round < ROUNDS; round += U) {
            uint4 sum[U];
            fold(chunk, round, sum);
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                const u64 i = element(chunk, round + u);
                if (i >= end) continue;
                store(desk.grads[meet.me] + i * sizeof(T), sum[u]);
                squares = add_squares<T>(squares, sum[u]);
            }
        }
        squares = warp_sum(squares);
        const u32 rank = threadIdx.x % 32;
        if (rank < meet.count) store(desk.sums[rank] + chunk * sizeof(f64), to_bits(squares));
    }

    // Updates a chunk; before, adds it up, unless `gather` has done so, by the same threads.
    __device__ void finish(u64 chunk, bool gathered) const {
#pragma unroll 1
        for (u32 round = 0; round < ROUNDS && element(chunk, round) - threadIdx.x % 32 * W < end; round += U) {
            uint4 sum[U] = {};
            if (!gathered) fold(chunk, round, sum);
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                const u64 i = element(chunk, round + u);
                if (gathered && i < end) sum[u] = load<uint4>(desk.grads[meet.me] + i * sizeof(T));
            }
            // One copy of a long piece of code.
#pragma unroll 1
            for (u32 u = 0; u < U; u++) update(element(chunk, round + u), pick_unit(sum, u));
        }
    }
};

// The second meeting: every block waits for all blocks of all devices. A block tells it by a word on each device, which
// holds the epoch of the two devices, as in exchange.cu. For its own device that is the epoch with the next one, and
// which device that is: two meetings with different devices may have equal epochs. (Nobody else uses the own word.)
__device__ inline u64 word_of(const Meet& meet, const Desk& desk, u32 rank) {
    const u32 next = (meet.me + 1) % meet.count;
    if (rank == meet.me) return (u64)desk.epoch[next] << 32 | (1 + ordinal(meet, next)) << 8 | 1;
    return (u64)desk.epoch[rank] << 32 | 1;
}

// For the whole block, with barriers. All blocks are on the device. False if the block gave up.
__device__ inline bool meet_all(const Meet& meet, const Desk& desk) {
    __syncthreads();
    if (threadIdx.x < meet.count) {
        u64* to = &signals_of(meet, threadIdx.x)->step[PUT][blockIdx.x][ordinal(meet, meet.me)];
        store_release(to, word_of(meet, desk, threadIdx.x));
    }
    bool come = true;
#pragma unroll 1
    for (u32 k = threadIdx.x; k < meet.count * gridDim.x && come; k += blockDim.x) {
        const u32 rank = k / gridDim.x, other = ordinal(meet, rank);
        const u64* at = &signals_of(meet, meet.me)->step[PUT][k % gridDim.x][other];
        const u64 expected = word_of(meet, desk, rank);
        Patience patience;
#pragma unroll 1
        while (load_relaxed(at) != expected) {
            if (patience.over(meet, other)) {
                come = false;
                break;
            }
        }
        load_acquire(at);
    }
    return __syncthreads_and(come);
}

// The root of all sums, for all threads.
__device__ inline f32 norm_of(const Meet& meet, Desk& desk, u64 chunks) {
    f64 sum = 0.0;
    for (u64 c = threadIdx.x; c < chunks; c += blockDim.x) {
        sum += from_bits<f64>(load<u64>(desk.sums[meet.me] + c * sizeof(f64)));
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) desk.norm = __double2float_rn(sqrt(sum));
    __syncthreads();
    return desk.norm;
}

template <class T>
__device__ inline bool sharded(const Meet& meet, Desk& desk, u32 op, const State& state, f32* norm, u64 end,
                               u64 chunks, u32 count) {
    const Ending<T> ending(op, meet.count);
    Sharded<T> work = {meet, desk, state, ending, end, count, true, scale_of(desk.rule, 0.0f)};
    // Chunks go to blocks in turn, and in a block to warps, so few chunks keep many multiprocessors busy.
    // (An empty part may begin at the end of all, in the middle of a chunk.)
    const u64 begin = (state.begin + CHUNK - 1) / CHUNK, behind = (end + CHUNK - 1) / CHUNK;
    const u64 first = begin + (u64)(threadIdx.x / 32) * gridDim.x + blockIdx.x, step = blockDim.x / 32 * gridDim.x;
    const bool clips = norm != nullptr;
    if (clips) {
#pragma unroll 1
        for (u64 chunk = first; chunk < behind; chunk += step) work.gather(chunk);
        if (!meet_all(meet, desk)) return false;
        const f32 found = norm_of(meet, desk, chunks);
        if (blockIdx.x == 0 && threadIdx.x == 0) *norm = found;
        work.finite = is_finite(found);
        work.scale = scale_of(desk.rule, found);
    }
    // The last ones first: their sums are still in the cache.
    const u64 rounds = behind > first ? (behind - first + step - 1) / step : 0;
#pragma unroll 1
    for (u64 k = rounds; k > 0; k--) work.finish(first + (k - 1) * step, clips);
    return true;
}

#define SHARDED(T)                                                                                                 \
    KERNEL sharded_##T(Meet meet, u32 op, Rule rule, const Rule* later, f32* first, f32* second, f32* master,      \
                       f32* norm, u64 begin, u64 end, u64 chunks, u32 count, Eight grads_lo, Eight grads_hi,       \
                       Eight to_lo, Eight to_hi, Eight sums_lo, Eight sums_hi, EIGHTS(s), EIGHTS(l), EIGHTS(a)) {  \
        __shared__ Desk desk;                                                                                      \
        if (threadIdx.x == blockDim.x - 1) {                                                                       \
            spread(desk.grads, grads_lo, grads_hi);                                                                \
            spread(desk.to, to_lo, to_hi);                                                                         \
            spread(desk.sums, sums_lo, sums_hi);                                                                   \
        }                                                                                                          \
        fill_table(desk.table, LIST(s), LIST(l), LIST(a));                                                         \
        Barrier barrier(meet, desk.epoch);                                                                         \
        if (threadIdx.x == 0) desk.rule = later != nullptr ? *later : rule;                                        \
        if (barrier.start() &&                                                                                     \
            sharded<T>(meet, desk, op, State{first, second, master, begin}, norm, end, chunks, count)) {           \
            barrier.end();                                                                                         \
        }                                                                                                          \
        barrier.leave();                                                                                           \
    }

SHARDED(f32)
SHARDED(f16)
SHARDED(bf16)

// A parameter's part in the member's part of a bucket, in words: the first element among those of the own chunks, the
// number of elements, and what is added to the number of an own chunk to get its number among all; then the addresses
// of the gradients, of the moments, of the parameters in f32, and, by rank, of the parameters. Pieces are in the order
// of their first elements. Every unit of 16 bytes of an own chunk begins in one of them or behind the last of its
// bucket.
enum Word : u32 { START_AT, LEN, SHIFT, GRADS, FIRST, SECOND, MASTER, PARAMETERS };

struct Pieces {
    const u64* words;
    u32 count, stride;

    __device__ u64 at(u32 piece, u32 word) const { return words[(u64)piece * stride + word]; }

    // The last one that begins at or before element i. (The first one begins at 0.)
    __device__ u32 of(u64 i) const {
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (at(middle, START_AT) <= i) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// Updates the parameters of an own chunk, and sends them. For a warp.
template <class T>
__device__ inline void update_pieces(const Meet& meet, const Desk& desk, const Pieces& pieces, f32 scale, u64 chunk) {
    const u32 W = 16 / sizeof(T);
    u32 k = pieces.of(chunk * CHUNK);
#pragma unroll 1
    for (u32 round = 0; round < CHUNK / (32 * W); round++) {
        const u64 i = chunk * CHUNK + (round * 32 + threadIdx.x % 32) * W;
        while (k + 1 < pieces.count && pieces.at(k + 1, START_AT) <= i) k++;
        const u64 start = pieces.at(k, START_AT), j = i - start, len = pieces.at(k, LEN);
        if (j >= len) continue;
        const u32 most = len - j < W ? (u32)(len - j) : W;
        const uint4 sum = load<uint4>(pieces.at(k, GRADS) + j * sizeof(T));
        const State state = {(f32*)pieces.at(k, FIRST), (f32*)pieces.at(k, SECOND), (f32*)pieces.at(k, MASTER), start};
        T grad[W], own[W];
#pragma unroll
        for (u32 w = 0; w < W; w++) grad[w] = lane<T>(sum, w);
        T* place = (T*)pieces.at(k, PARAMETERS + meet.me) + j;
        update_pack(state, desk.rule, true, scale, i, most, place, grad, own);
        uint4 unit;
#pragma unroll
        for (u32 w = 0; w < W; w++) set_lane(unit, w, own[w]);
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank++) {
            if (rank == meet.me) continue;
            const u64 to = pieces.at(k, PARAMETERS + rank) + j * sizeof(T);
            if (most == W && to % 16 == 0) {
                store(to, unit);
                continue;
            }
#pragma unroll
            for (u32 w = 0; w < W; w++)
                if (w < most) store(to + w * sizeof(T), to_bits(own[w]));
        }
    }
}

template <class T>
__device__ inline bool sharded_buckets(const Meet& meet, Desk& desk, const Pieces& pieces, f32* norm, u64 own,
                                       u64 chunks) {
#pragma unroll 1
    for (u64 chunk = grid_index(); chunk < own; chunk += grid_size()) {
        const u64 at = (chunk + pieces.at(pieces.of(chunk * CHUNK), SHIFT)) * sizeof(f64);
        const u64 squares = load<u64>(desk.sums[meet.me] + at);
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank++)
            if (rank != meet.me) store(desk.sums[rank] + at, squares);
    }
    if (!meet_all(meet, desk)) return false;
    const f32 found = norm_of(meet, desk, chunks);
    if (blockIdx.x == 0 && threadIdx.x == 0) *norm = found;
    if (!is_finite(found)) return true;
    const f32 scale = scale_of(desk.rule, found);
    const u64 first = (u64)(threadIdx.x / 32) * gridDim.x + blockIdx.x, step = blockDim.x / 32 * gridDim.x;
#pragma unroll 1
    for (u64 chunk = first; chunk < own; chunk += step) update_pieces<T>(meet, desk, pieces, scale, chunk);
    return true;
}

#define SHARDED_BUCKETS(T)                                                                                         \
    KERNEL sharded_buckets_##T(Meet meet, Rule rule, f32* norm, const u64* pieces, u32 count, u64 own, u64 chunks, \
                               Eight sums_lo, Eight sums_hi) {                                                     \
        __shared__ Desk desk;                                                                                      \
        if (threadIdx.x == 0) {                                                                                    \
            spread(desk.sums, sums_lo, sums_hi);                                                                   \
            desk.rule = rule;                                                                                      \
        }                                                                                                          \
        Barrier barrier(meet, desk.epoch);                                                                         \
        const Pieces table = {pieces, count, PARAMETERS + meet.count};                                             \
        if (barrier.start() && sharded_buckets<T>(meet, desk, table, norm, own, chunks)) barrier.end();            \
        barrier.leave();                                                                                           \
    }

SHARDED_BUCKETS(f32)
SHARDED_BUCKETS(f16)
SHARDED_BUCKETS(bf16)
