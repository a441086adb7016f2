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
    f64 squares[2][THREADS / 32]; // of the warps' batches, in turn
};

// Devices whose elements are on their way at once.
const u32 AT_A_TIME = 2;

// No chunk.
const u64 NONE = ~0ull;

// A chunk is the work of BATCHES warps, or fewer if a block has fewer.
template <class T> struct Sharded {
    static const u32 W = 16 / sizeof(T);
    // Units of 16 bytes of a lane, of a batch.
    static const u32 U = BATCH / (32 * W);

    const Meet& meet;
    Desk& desk;
    const State& state;
    const Ending<T>& ending;
    u64 end;
    u32 count;
    bool finite;
    f32 scale;

    static __device__ u32 warps() { return blockDim.x / 32; }
    // Chunks that a block works on at once; the one of these that this warp works on, and its first batch.
    static __device__ u32 teams() { return warps() > BATCHES ? warps() / BATCHES : 1; }
    static __device__ u32 team() { return threadIdx.x / 32 / BATCHES; }
    static __device__ u32 first_batch() { return threadIdx.x / 32 % BATCHES; }

    // The first element of a unit of the lane.
    static __device__ u64 element(u64 chunk, u32 batch, u32 u) {
        return chunk * CHUNK + batch * BATCH + (u * 32 + threadIdx.x % 32) * W;
    }

    // The lane's units of a batch, of the devices from `rank` on; of sums that are made, the own device's.
    __device__ void fetch(u64 chunk, u32 batch, u32 rank, bool gathered, uint4 (&in)[AT_A_TIME][U]) const {
#pragma unroll
        for (u32 s = 0; s < AT_A_TIME; s++) {
            if (gathered ? s > 0 : rank + s >= meet.count) continue;
            const u64 from = desk.grads[gathered ? meet.me : rank + s];
#pragma unroll
            for (u32 u = 0; u < U; u++) {
                const u64 i = element(chunk, batch, u);
                in[s][u] = i < end ? load<uint4>(from + i * sizeof(T)) : make_uint4(0, 0, 0, 0);
            }
        }
    }

    // The sums of the lane's units of a batch, in rank order. `in` are those of the first devices.
    __device__ void fold(u64 chunk, u32 batch, uint4 (&in)[AT_A_TIME][U], uint4 (&out)[U]) const {
        Acc<T> acc[U][W] = {};
#pragma unroll 1
        for (u32 rank = 0;;) {
#pragma unroll
            for (u32 s = 0; s < AT_A_TIME; s++) {
                if (rank + s >= meet.count) continue;
#pragma unroll
                for (u32 u = 0; u < U; u++) {
#pragma unroll
                    for (u32 w = 0; w < W; w++) {
                        const Acc<T> x = wide_lane<T>(in[s][u], w);
                        acc[u][w] = rank + s == 0 ? x : acc[u][w] + x;
                    }
                }
            }
            rank += AT_A_TIME;
            if (rank >= meet.count) break;
            fetch(chunk, batch, rank, false, in);
        }
#pragma unroll
        for (u32 u = 0; u < U; u++) {
#pragma unroll
            for (u32 w = 0; w < W; w++) set_lane(out[u], w, ending(acc[u][w]));
        }
    }

    // Brings what the device keeps of a batch near.
    __device__ void bring(u64 chunk, u32 batch) const {
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            const u64 i = element(chunk, batch, u), at = (i - state.begin) * sizeof(f32);
            if (i >= end) continue;
            if (state.first != nullptr) prefetch((u64)state.first + at);
            if (state.second != nullptr) prefetch((u64)state.second + at);
            if (state.master != nullptr) prefetch((u64)state.master + at);
        }
    }

    // Adds up a chunk, if it is there, and tells all devices the squares of the sums. For the whole block.
    __device__ void gather(u64 chunk, bool there, u32 odd) const {
        f64(&all)[THREADS / 32] = desk.squares[odd];
#pragma unroll 1
        for (u32 batch = first_batch(); batch < BATCHES; batch += warps()) {
            f64 squares = 0.0;
            if (there) {
                uint4 in[AT_A_TIME][U], sum[U];
                fetch(chunk, batch, 0, false, in);
                fold(chunk, batch, in, sum);
#pragma unroll
                for (u32 u = 0; u < U; u++) {
                    const u64 i = element(chunk, batch, u);
                    if (i >= end) continue;
                    store(desk.grads[meet.me] + i * sizeof(T), sum[u]);
                    squares = add_squares<T>(squares, sum[u]);
                }
            }
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) all[team() * BATCHES + batch] = squares;
        }
        // The one of the turn after the next is behind the barrier of the next.
        __syncthreads();
        const u32 rank = threadIdx.x % (32 * BATCHES);
        if (!there || rank >= meet.count) return;
        f64 batches[BATCHES];
#pragma unroll
        for (u32 k = 0; k < BATCHES; k++) batches[k] = all[team() * BATCHES + k];
        store(desk.sums[rank] + chunk * sizeof(f64), to_bits(tree_of(batches)));
    }

    // Updates a batch, whose units were fetched; before, adds them up, unless `gather` has done so, by the same
    // threads. Then fetches those of the chunk `next`, if it is there.
    __device__ void finish(u64 chunk, u64 next, u32 batch, bool gathered, uint4 (&in)[AT_A_TIME][U]) const {
        // All of it is on its way at once.
        Pack<T, W> pack[U] = {};
        u64 place[U];
        u32 most[U];
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            const u64 i = element(chunk, batch, u);
            most[u] = 0;
            if (i >= end || count == 0) continue;
            const u32 k = segment_of(desk.table, count, i);
            const u64 j = i - desk.table.start[k], len = desk.table.len[k];
            if (j >= len) continue;
            most[u] = len - j < W ? (u32)(len - j) : W;
            place[u] = desk.table.place[k] + j * sizeof(T);
            pack[u].load_from(state, i, most[u], reinterpret_cast<const T*>(place[u]));
        }
        uint4 sum[U];
#pragma unroll
        for (u32 u = 0; u < U; u++) sum[u] = in[0][u];
        if (!gathered) fold(chunk, batch, in, sum);
        if (next != NONE) {
            fetch(next, batch, 0, gathered, in);
            bring(next, batch);
        }
#pragma unroll
        for (u32 u = 0; u < U; u++) {
            if (most[u] == 0) continue;
            const u64 i = element(chunk, batch, u);
            if (finite) {
                T grad[W];
#pragma unroll
                for (u32 w = 0; w < W; w++) grad[w] = lane<T>(sum[u], w);
                pack[u].step(state, desk.rule, scale, most[u], grad);
                pack[u].store_to(state, i, most[u], reinterpret_cast<T*>(place[u]));
            }
            send(i, most[u], pack[u].own);
        }
    }

    // The parameters at element i, to the other devices.
    __device__ void send(u64 i, u32 most, const T (&own)[W]) const {
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
    const u32 N = 8;
    f64 sum = 0.0;
#pragma unroll 1
    for (u64 c = threadIdx.x; c < chunks; c += N * blockDim.x) {
        u64 x[N];
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            const u64 at = c + k * blockDim.x;
            x[k] = at < chunks ? load<u64>(desk.sums[meet.me] + at * sizeof(f64)) : 0;
        }
#pragma unroll
        for (u32 k = 0; k < N; k++) sum += from_bits<f64>(x[k]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) desk.norm = __double2float_rn(sqrt(sum));
    __syncthreads();
    return desk.norm;
}

// The chunks of a warp: chunks go to blocks in turn, and in a block to teams of warps, so few chunks keep many
// multiprocessors busy. The blocks make `turns` turns; a team has nothing to do in the last one if its chunk is not
// there. (An empty part may begin at the end of all, in the middle of a chunk.)
template <class T> struct Turns {
    u64 first, step, behind, turns;

    __device__ Turns(u64 from, u64 end) {
        const u64 block = (from + CHUNK - 1) / CHUNK + blockIdx.x;
        first = block + Sharded<T>::team() * (u64)gridDim.x, step = Sharded<T>::teams() * (u64)gridDim.x;
        behind = (end + CHUNK - 1) / CHUNK;
        turns = behind > block ? (behind - block + step - 1) / step : 0;
    }
    __device__ u64 chunk(u64 turn) const { return first + turn * step; }
    __device__ bool has(u64 turn) const { return turn < turns && chunk(turn) < behind; }
    // Its turns.
    __device__ u64 own() const { return turns > 0 && !has(turns - 1) ? turns - 1 : turns; }
};

template <class T>
__device__ inline bool sharded(Sharded<T>& work, const Turns<T>& share, Desk& desk, f32* norm, u64 chunks) {
    const bool clips = norm != nullptr;
    if (clips) {
#pragma unroll 1
        for (u64 turn = 0; turn < share.turns; turn++) work.gather(share.chunk(turn), share.has(turn), turn % 2);
        if (!meet_all(work.meet, desk)) return false;
        const f32 found = norm_of(work.meet, desk, chunks);
        if (blockIdx.x == 0 && threadIdx.x == 0) *norm = found;
        work.finite = is_finite(found);
        work.scale = scale_of(desk.rule, found);
    } else {
        work.scale = scale_of(desk.rule, 0.0f);
    }
    // The last ones first: their sums are still in the cache.
    const u64 own = share.own();
#pragma unroll 1
    for (u32 batch = work.first_batch(); batch < BATCHES && own > 0; batch += work.warps()) {
        uint4 in[AT_A_TIME][Sharded<T>::U];
        work.fetch(share.chunk(own - 1), batch, 0, clips, in);
#pragma unroll 1
        for (u64 k = own; k > 0; k--) {
            work.finish(share.chunk(k - 1), k > 1 ? share.chunk(k - 2) : NONE, batch, clips, in);
        }
    }
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
        fill_table(desk.table, count, LIST(s), LIST(l), LIST(a));                                                  \
        Barrier barrier(meet, desk.epoch);                                                                         \
        if (threadIdx.x == 0) desk.rule = later != nullptr ? *later : rule;                                        \
        const State state = {first, second, master, begin};                                                        \
        const Ending<T> ending(op, meet.count);                                                                    \
        Sharded<T> work = {meet, desk, state, ending, end, count, true, 0.0f};                                     \
        const Turns<T> share(begin, end);                                                                          \
        if (barrier.start() && sharded<T>(work, share, desk, norm, chunks)) barrier.end();                         \
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
const u32 STARTS = 256;
enum Word : u32 { START_AT, LEN, SHIFT, GRADS, FIRST, SECOND, MASTER, PARAMETERS };

struct Pieces {
    const u64* words;
    u32 count, stride;
    const u64* starts; // in shared memory: of all pieces, if there are at most STARTS

    __device__ u64 at(u32 piece, u32 word) const { return words[(u64)piece * stride + word]; }
    __device__ u64 start(u32 piece) const { return count <= STARTS ? starts[piece] : at(piece, START_AT); }

    // The last one that begins at or before element i. (The first one begins at 0.)
    __device__ u32 of(u64 i) const {
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (start(middle) <= i) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// Updates the parameters of a batch of the own chunks, and sends them. For a warp.
template <class T>
__device__ inline void update_pieces(const Meet& meet, const Desk& desk, const Pieces& pieces, f32 scale, u64 batch) {
    const u32 W = 16 / sizeof(T), U = BATCH / (32 * W);
    // All of it is on its way at once.
    Pack<T, W> pack[U] = {};
    uint4 sum[U] = {};
    State state[U];
    u32 piece[U], most[U];
    u64 offset[U];
#pragma unroll
    for (u32 u = 0; u < U; u++) {
        const u64 i = batch * BATCH + (u * 32 + threadIdx.x % 32) * W;
        const u32 k = piece[u] = pieces.of(i);
        const u64 start = pieces.start(k), j = i - start, len = pieces.at(k, LEN);
        most[u] = j >= len ? 0 : len - j < W ? (u32)(len - j) : W;
        if (most[u] == 0) continue;
        offset[u] = j;
        state[u] = {(f32*)pieces.at(k, FIRST), (f32*)pieces.at(k, SECOND), (f32*)pieces.at(k, MASTER), 0};
        sum[u] = load<uint4>(pieces.at(k, GRADS) + j * sizeof(T));
        pack[u].load_from(state[u], j, most[u], (const T*)pieces.at(k, PARAMETERS + meet.me) + j);
    }
#pragma unroll
    for (u32 u = 0; u < U; u++) {
        if (most[u] == 0) continue;
        T grad[W];
#pragma unroll
        for (u32 w = 0; w < W; w++) grad[w] = lane<T>(sum[u], w);
        pack[u].step(state[u], desk.rule, scale, most[u], grad);
        pack[u].store_to(state[u], offset[u], most[u], (T*)pieces.at(piece[u], PARAMETERS + meet.me) + offset[u]);
        uint4 unit;
#pragma unroll
        for (u32 w = 0; w < W; w++) set_lane(unit, w, pack[u].own[w]);
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank++) {
            if (rank == meet.me) continue;
            const u64 to = pieces.at(piece[u], PARAMETERS + rank) + offset[u] * sizeof(T);
            if (most[u] == W && to % 16 == 0) {
                store(to, unit);
                continue;
            }
#pragma unroll
            for (u32 w = 0; w < W; w++)
                if (w < most[u]) store(to + w * sizeof(T), to_bits(pack[u].own[w]));
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
    for (u64 batch = first; batch < own * BATCHES; batch += step) update_pieces<T>(meet, desk, pieces, scale, batch);
    return true;
}

#define SHARDED_BUCKETS(T)                                                                                         \
    KERNEL sharded_buckets_##T(Meet meet, Rule rule, f32* norm, const u64* pieces, u32 count, u64 own, u64 chunks, \
                               Eight sums_lo, Eight sums_hi) {                                                     \
        __shared__ Desk desk;                                                                                      \
        __shared__ u64 starts[STARTS];                                                                             \
        if (threadIdx.x == 0) {                                                                                    \
            spread(desk.sums, sums_lo, sums_hi);                                                                   \
            desk.rule = rule;                                                                                      \
        }                                                                                                          \
        Barrier barrier(meet, desk.epoch);                                                                         \
        const Pieces table = {pieces, count, PARAMETERS + meet.count, starts};                                     \
        for (u32 k = threadIdx.x; k < count && count <= STARTS; k += blockDim.x) starts[k] = table.at(k, START_AT); \
        if (barrier.start() && sharded_buckets<T>(meet, desk, table, norm, own, chunks)) barrier.end();            \
        barrier.leave();                                                                                           \
    }

SHARDED_BUCKETS(f32)
SHARDED_BUCKETS(f16)
SHARDED_BUCKETS(bf16)
