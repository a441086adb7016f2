// A step of an optimizer whose state is divided among the devices (ZeRO-1), in one kernel per device: it adds up the
// gradients of its part, updates the parameters of its part, and writes them to all devices.
//
//   sharded_<T>  (Meet meet, u32 op, Rule rule, const Rule* later, f32* first, f32* second, f32* master, f32* norm,
//                 u64* told, u64 begin, u64 end, u64 chunks, u32 count, and by eights, low and high, by rank: grads,
//                 to, sums; Column s0..s7, l0..l7, a0..a7)
//
// T is the type of gradients and parameters: f32 f16 bf16. Elements begin .. end of all are this device's part; it
// begins at a whole chunk of 2048. `grads` are all devices' gradients. `to` is where each device wants the parameters,
// in the order of the gradients; the own device has its own by the table of segments (segments.cuh), and nothing is
// written to the own `to`. The rule is in memory if `later` is not null: for graphs.
//
// With `norm` gradients are clipped, so all devices need the norm before any updates. Then each first leaves its sums
// where its own gradients were, and tells all devices the squares of each chunk; and each adds up all squares in one
// order, as `gradient_norm_f32` does. `norm` is that root. Squares go as packets, data beside flags, which need no
// meeting: to other devices as in exchange.cu, to the own blocks by `told`, a packet for each own chunk. Only this
// kernel ever writes `told`, always for the same members, and it is zero at first. Where the squares of a part are more
// than there are packets, they go to `sums` of all devices, and all blocks of all devices meet.
//
// Bits: those of a reduce-scatter in rank order, `squares`, `gradient_norm_f32`, `update` and an all-gather, whatever
// the number of blocks.
//
//   sharded_buckets_<T>  (Meet meet, Rule rule, const Rule* later, u32 adds, f32* norm, const u64* pieces, u32 count,
//                         u64 own, u64 chunks, Eight sums_lo, sums_hi)
//
// The same for gradients in buckets, always with a norm; new parameters go to their places on all devices. `pieces` is
// a table in memory, so there may be any number of them: see `Word`. The member's `own` chunks, of all buckets one
// behind the other, are numbered from 0. Without `adds` the gradients are added up already, each member's part at this
// member, and the squares of its chunks are at `sums` of the own device. With `adds`, as in a graph, nothing changes
// after a step whose norm, still at `norm`, was not finite: the norm is then NaN. All members had that norm.
//
// Who touches what between the start and the end of the meeting. Elements of part p of any device's gradients, and of
// any device's parameters: the owner of p alone, and there one thread for each element. `sums`, number c of all
// devices: the owner of chunk c writes it before the second meeting, and all read it after. A packet: its chunk's
// owner writes it, and all read it until it has come; the end of the meeting is before the next one at its place. In
// `sharded_buckets` a parameter's owner is the owner of the chunk that has its gradient; all blocks read `norm` before
// the second meeting, and one writes it after.
#include "meet.cuh"
#include "optimizer.cuh"

// By rank.
struct Desk {
    u64 grads[MOST], to[MOST], sums[MOST];
    u32 epoch[MOST];
    u64 told; // 0: no packets
    Table table;
    Rule rule;
    f32 norm;
    f32 halted;                   // NaN: nothing may change; else 0
    f64 squares[2][THREADS / 32]; // of the warps' batches, in turn
};

// Devices whose elements are on their way at once.
const u32 AT_A_TIME = 2;

// Of which devices gradients are fetched.
enum From { ALL, OWN, OTHERS };

// The flag of packets from or to a member: the epoch of the two devices; of the own ones that with the next device.
__device__ inline u32 flag_of(const Meet& meet, const Desk& desk, u32 rank) {
    return desk.epoch[rank == meet.me ? (rank + 1) % meet.count : rank];
}

// What a lane updates at once: FOUR elements, so that few elements keep many warps busy, and a thread has few
// instructions before it stores. A warp has a piece of a chunk.
const u32 FOUR = 4, PIECES = CHUNK / (32 * FOUR);
template <class T> struct FourOf {
    typedef u64 Unit;
};
template <> struct FourOf<f32> {
    typedef uint4 Unit;
};

// Gradients that lie one behind the other: those of one device are one buffer.
template <class T> struct Flat {
    struct Spot {
        u64 at; // the element
    };
    // Others need the parameters of the own part also if nothing changes.
    static const bool always_sends = true, aligned = true;

    const Meet& meet;
    const Desk& desk;
    const State& kept;
    u64 end;
    u32 count;

    __device__ Spot spot(u64 i) const { return {i}; }
    __device__ bool has(const Spot& spot) const { return spot.at < end; }
    __device__ u64 grad(const Spot& spot, u32 rank) const { return desk.grads[rank] + spot.at * sizeof(T); }
    __device__ u64 to(const Spot& spot, u32 rank) const { return desk.to[rank] + spot.at * sizeof(T); }
    __device__ State state(const Spot&) const { return kept; }
    // How many of the FOUR elements there are parameters, and where these are.
    __device__ u32 most(const Spot& spot, u64& place) const {
        if (spot.at >= end || count == 0) return 0;
        const u32 k = segment_of(desk.table, count, spot.at);
        const u64 j = spot.at - desk.table.start[k], len = desk.table.len[k];
        if (j >= len) return 0;
        place = desk.table.place[k] + j * sizeof(T);
        return len - j < FOUR ? (u32)(len - j) : FOUR;
    }
    // The number of a chunk among all, and among the own ones.
    __device__ u64 number(u64 chunk) const { return chunk; }
    __device__ u64 own_number(u64 chunk) const { return chunk - kept.begin / CHUNK; }
};

// A chunk is the work of BATCHES warps that add up for the norm, and of PIECES that update; or of all the block's, if
// they are fewer. WHERE says where elements are.
template <class T, class WHERE> struct Sharded {
    // Units of 16 bytes of a lane, of a batch.
    static const u32 U = BATCH / (32 * (16 / sizeof(T)));
    typedef typename FourOf<T>::Unit Four;
    typedef typename WHERE::Spot Spot;

    const Meet& meet;
    Desk& desk;
    const WHERE& where;
    const Ending<T>& ending;
    bool changing;
    f32 scale;

    static __device__ u32 warp() { return threadIdx.x / 32; }
    static __device__ u32 warps() { return blockDim.x / 32; }

    // The lane's first element of the warp's elements from `at` on.
    template <class Unit> static __device__ u64 own_of(u64 at) {
        return at + threadIdx.x % 32 * (sizeof(Unit) / sizeof(T));
    }

    // The lane's units from element `first` on, of the devices from `rank` on.
    template <From FROM = ALL, class Unit, u32 N>
    __device__ void fetch(u64 first, u32 rank, Unit (&in)[AT_A_TIME][N]) const {
        Spot spot[N];
        bool has[N];
#pragma unroll
        for (u32 u = 0; u < N; u++) {
            spot[u] = where.spot(first + u * 32 * (sizeof(Unit) / sizeof(T)));
            has[u] = where.has(spot[u]);
        }
#pragma unroll
        for (u32 s = 0; s < AT_A_TIME; s++) {
            const bool wanted = rank + s < meet.count && (FROM == ALL || (rank + s == meet.me) == (FROM == OWN));
#pragma unroll
            for (u32 u = 0; u < N; u++) {
                // Always stored: a store in a branch would put `in` into local memory.
                Unit unit = in[s][u];
                if (wanted) unit = has[u] ? load<Unit>(where.grad(spot[u], rank + s)) : Unit();
                in[s][u] = unit;
            }
        }
    }

    // The sums of the lane's units, in rank order. `in` are those of the first devices.
    template <class Unit, u32 N>
    __device__ void fold(u64 first, Unit (&in)[AT_A_TIME][N], T (&out)[N][sizeof(Unit) / sizeof(T)]) const {
        const u32 W = sizeof(Unit) / sizeof(T);
        Acc<T> acc[N][W] = {};
#pragma unroll 1
        for (u32 rank = 0;;) {
#pragma unroll
            for (u32 s = 0; s < AT_A_TIME; s++) {
                if (rank + s >= meet.count) continue;
#pragma unroll
                for (u32 u = 0; u < N; u++) {
#pragma unroll
                    for (u32 w = 0; w < W; w++) {
                        const Acc<T> x = wide(lane<T>(in[s][u], w));
                        acc[u][w] = rank + s == 0 ? x : acc[u][w] + x;
                    }
                }
            }
            rank += AT_A_TIME;
            if (rank >= meet.count) break;
            fetch(first, rank, in);
        }
#pragma unroll
        for (u32 u = 0; u < N; u++) {
#pragma unroll
            for (u32 w = 0; w < W; w++) out[u][w] = ending(acc[u][w]);
        }
    }

    // Adds up a chunk, if it is there, and tells all devices the squares of the sums. For the whole block: `team` has
    // the chunk.
    __device__ void gather(u64 chunk, bool there, u32 odd, u32 team) const {
        f64(&all)[THREADS / 32] = desk.squares[odd];
#pragma unroll 1
        for (u32 batch = warp() % BATCHES; batch < BATCHES; batch += warps()) {
            f64 squares = 0.0;
            const u64 first = own_of<uint4>(chunk * CHUNK + batch * BATCH);
            if (there) {
                uint4 in[AT_A_TIME][U] = {};
                T sum[U][16 / sizeof(T)];
                fetch(first, 0, in);
                fold(first, in, sum);
#pragma unroll
                for (u32 u = 0; u < U; u++) {
                    const Spot spot = where.spot(first + u * 32 * (16 / sizeof(T)));
                    if (!where.has(spot)) continue;
                    uint4 unit;
#pragma unroll
                    for (u32 w = 0; w < 16 / sizeof(T); w++) set_lane(unit, w, sum[u][w]);
                    store(where.grad(spot, meet.me), unit);
                    squares = add_squares<T>(squares, unit);
                }
            }
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) all[team * BATCHES + batch] = squares;
        }
        // The one of the turn after the next is behind the barrier of the next.
        __syncthreads();
        const u32 rank = threadIdx.x % (32 * BATCHES);
        if (!there || rank >= meet.count) return;
        f64 batches[BATCHES];
#pragma unroll
        for (u32 k = 0; k < BATCHES; k++) batches[k] = all[team * BATCHES + k];
        const u64 squares = to_bits(tree_of(batches));
        if (desk.told == 0) return store(desk.sums[rank] + where.number(chunk) * sizeof(f64), squares);
        const u32 flag = flag_of(meet, desk, rank);
        const u64 to = rank == meet.me ? desk.told : packets(meet, meet.me, rank, flag);
        const u64 at = to + where.own_number(chunk) * sizeof(uint4);
        store_halves(at, make_uint4((u32)squares, flag, (u32)(squares >> 32), flag));
    }

    // A lane's elements on their way: gradients, and what is kept of `most` of them.
    struct Held {
        Four in[AT_A_TIME][1];
        Elements<T, FOUR> pack;
        Spot spot;
        u64 place;
        u32 most;
    };

    // Loads what the own device keeps of the lane's elements from `i` on.
    __device__ void load_kept(u64 i, Held& held) const {
        held.spot = where.spot(i);
        held.most = where.most(held.spot, held.place);
        if (held.most == 0) return;
        const State state = where.state(held.spot);
        held.pack.load_from(state, held.spot.at, held.most, reinterpret_cast<const T*>(held.place));
    }

    // Loads what the own device has of the walk's first elements, also gradients that need not be added up first.
    __device__ void load_first(u64 i, bool clips, Held& held) const {
        load_kept(i, held);
        if (!clips) fetch<OWN>(i, 0, held.in);
    }

    // Loads the sums that `gather` has made, of elements that are held.
    __device__ void load_sums(Held& held) const {
        if (where.has(held.spot)) held.in[0][0] = load<Four>(where.grad(held.spot, meet.me));
    }

    // Brings what the device keeps of the elements from `i` on near.
    __device__ void bring(u64 i) const {
        const Spot spot = where.spot(i);
        if (!where.has(spot)) return;
        const State state = where.state(spot);
        const u64 at = (spot.at - state.begin) * sizeof(f32);
        if (state.first != nullptr) prefetch((u64)state.first + at);
        if (state.second != nullptr) prefetch((u64)state.second + at);
        if (state.master != nullptr) prefetch((u64)state.master + at);
    }

    // Updates the lane's elements from `i` on; before, adds up their gradients, unless `gather` has done so.
    __device__ void finish(u64 i, bool gathered, Held& held) const {
        T sum[1][FOUR];
        if (gathered) {
#pragma unroll
            for (u32 w = 0; w < FOUR; w++) sum[0][w] = lane<T>(held.in[0][0], w);
        } else {
            fold(i, held.in, sum);
        }
        if (held.most == 0) return;
        if (changing) {
            const State state = where.state(held.spot);
            held.pack.step(state, desk.rule, scale, held.most, sum[0]);
            held.pack.store_to(state, held.spot.at, held.most, reinterpret_cast<T*>(held.place));
        }
        send(held.spot, held.most, held.pack.own);
    }

    // The parameters there, to the other devices.
    __device__ void send(const Spot& spot, u32 most, const T (&own)[FOUR]) const {
        Four unit;
#pragma unroll
        for (u32 w = 0; w < FOUR; w++) set_lane(unit, w, own[w]);
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank++) {
            if (rank == meet.me) continue;
            const u64 to = where.to(spot, rank);
            if (most == FOUR && (WHERE::aligned || to % sizeof(Four) == 0)) {
                store(to, unit);
                continue;
            }
#pragma unroll
            for (u32 w = 0; w < FOUR; w++)
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

// The root of the block's sum, for all threads.
__device__ inline f32 root_of_all(Desk& desk, f64 sum) {
    sum = block_sum(sum);
    if (threadIdx.x == 0) desk.norm = __double2float_rn(sqrt(sum));
    __syncthreads();
    return desk.norm;
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
    return root_of_all(desk, sum);
}

// The same from packets, in the same order. False if the block gave up.
__device__ inline bool norm_of_packets(const Meet& meet, Desk& desk, u32 chunks, f32& norm) {
    const u32 N = 4, each = chunks / meet.count, more = chunks % meet.count;
    f64 sum = 0.0;
    bool come = true;
    u32 c = threadIdx.x, behind = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < meet.count; rank++) {
        const u32 begin = behind, flag = flag_of(meet, desk, rank);
        behind += each + (rank < more ? 1 : 0);
        const u64 from = rank == meet.me ? desk.told : packets(meet, rank, meet.me, flag);
#pragma unroll 1
        while (c < behind && come) {
            uint4 x[N] = {};
            Patience patience;
            for (bool all = false; !all && come;) {
                all = true;
#pragma unroll
                for (u32 k = 0; k < N; k++) {
                    const u32 at = c + k * blockDim.x;
                    if (at >= behind) continue;
                    x[k] = load_halves(from + (u64)(at - begin) * sizeof(uint4));
                    all &= x[k].y == flag && x[k].w == flag;
                }
                if (!all) come = !patience.over(meet, ordinal(meet, rank));
            }
#pragma unroll
            for (u32 k = 0; k < N; k++) {
                if (c >= behind) continue;
                sum += from_bits<f64>((u64)x[k].z << 32 | x[k].x);
                c += blockDim.x;
            }
        }
    }
    if (!__syncthreads_and(come)) return false;
    norm = root_of_all(desk, sum);
    return true;
}

// The chunks of a team of warps: chunks go to blocks in turn, and in a block to teams, so few chunks keep many
// multiprocessors busy. The blocks make `turns` turns; a team has nothing to do in the last one if its chunk is not
// there. (An empty part may begin at the end of all, in the middle of a chunk.)
struct Turns {
    u32 first, step, behind, turns;

    __device__ Turns(u64 from, u64 end, u32 team, u32 teams) {
        const u32 block = (u32)((from + CHUNK - 1) / CHUNK) + blockIdx.x;
        first = block + team * gridDim.x, step = teams * gridDim.x;
        behind = (u32)((end + CHUNK - 1) / CHUNK);
        turns = behind > block ? (behind - block + step - 1) / step : 0;
    }
    __device__ u64 chunk(u32 turn) const { return (u64)first + turn * step; }
    __device__ bool has(u32 turn) const { return turn < turns && chunk(turn) < behind; }
};

// The elements that a lane updates, FOUR from `i` on and so on: those of its block's last turn first.
struct Walk {
    const Turns& turns;
    u32 piece, left;
    u64 i;

    __device__ explicit Walk(const Turns& turns) : turns(turns), piece(threadIdx.x / 32), left(turns.turns) { set(); }
    __device__ bool is_there() const { return left > 0 && piece < PIECES; }
    __device__ void set() {
        i = turns.chunk(left - 1) * CHUNK + (piece * 32 + threadIdx.x % 32) * FOUR;
    }
    __device__ void advance() {
        if (--left == 0) piece += blockDim.x / 32, left = turns.turns;
        set();
    }
};

// `held` are the walk's first elements, without gradients of other devices. `squares` tells those of the own chunks.
template <class T, class WHERE, class Squares>
__device__ inline bool sharded(Sharded<T, WHERE>& work, Walk& walk, typename Sharded<T, WHERE>::Held& held, Desk& desk,
                               f32* norm, u64 chunks, Squares squares) {
    const bool clips = norm != nullptr;
    if (clips) {
        squares();
        f32 found = 0.0f;
        if (desk.told != 0) {
            if (!norm_of_packets(work.meet, desk, (u32)chunks, found)) return false;
        } else {
            if (!meet_all(work.meet, desk)) return false;
            found = norm_of(work.meet, desk, chunks);
        }
        found += desk.halted;
        if (blockIdx.x == 0 && threadIdx.x == 0) *norm = found;
        work.changing = changes(desk.rule, found);
        work.scale = scale_of(desk.rule, found);
        if (!work.changing && !WHERE::always_sends) return true;
        // Other threads of the block may have made them, before a barrier.
        if (walk.is_there()) work.load_sums(held);
    } else {
        work.changing = changes(desk.rule, 0.0f);
        work.scale = scale_of(desk.rule, 0.0f);
        if (walk.is_there()) work.template fetch<OTHERS>(walk.i, 0, held.in);
    }
    // What comes next is on its way while a thread computes.
#pragma unroll 1
    while (walk.is_there()) {
        const u64 i = walk.i;
        typename Sharded<T, WHERE>::Held next = {};
        walk.advance();
        if (walk.is_there()) {
            work.load_kept(walk.i, next);
            if (clips) work.load_sums(next);
            else work.fetch(walk.i, 0, next.in);
            if (walk.left > 1) work.bring(walk.i - (u64)walk.turns.step * CHUNK);
        }
        work.finish(i, clips, held);
        held = next;
    }
    return true;
}

// Adds up all chunks of the elements begin .. end.
template <class T, class WHERE> __device__ inline void gather_all(const Sharded<T, WHERE>& work, u64 begin, u64 end) {
    const u32 team = work.warp() / BATCHES, teams = work.warps() / BATCHES;
    const Turns share(begin, end, team, teams > 0 ? teams : 1);
#pragma unroll 1
    for (u32 turn = 0; turn < share.turns; turn++) work.gather(share.chunk(turn), share.has(turn), turn % 2, team);
}

#define SHARDED(T)                                                                                                 \
    KERNEL sharded_##T(Meet meet, u32 op, Rule rule, const Rule* later, f32* first, f32* second, f32* master,      \
                       f32* norm, u64* told, u64 begin, u64 end, u64 chunks, u32 count, Eight grads_lo,            \
                       Eight grads_hi, Eight to_lo, Eight to_hi, Eight sums_lo, Eight sums_hi, EIGHTS(s),          \
                       EIGHTS(l), EIGHTS(a)) {                                                                     \
        __shared__ Desk desk;                                                                                      \
        if (is_turn(9)) spread(desk.grads, grads_lo, grads_hi);                                                    \
        if (is_turn(10)) spread(desk.to, to_lo, to_hi);                                                            \
        if (is_turn(11)) spread(desk.sums, sums_lo, sums_hi);                                                      \
        fill_table(desk.table, count, LIST(s), LIST(l), LIST(a));                                                  \
        Barrier barrier(meet, desk.epoch);                                                                         \
        if (is_turn(12)) desk.rule = later != nullptr ? *later : rule, desk.halted = 0.0f;                         \
        if (is_turn(13)) desk.told = chunks <= (u64)meet.signals->packets * meet.count ? (u64)told : 0;            \
        const State state = {first, second, master, begin};                                                        \
        const Ending<T> ending(op, meet.count);                                                                    \
        const Flat<T> where = {meet, desk, state, end, count};                                                     \
        Sharded<T, Flat<T>> work = {meet, desk, where, ending, false, 0.0f};                                       \
        const Turns turns(begin, end, 0, 1);                                                                       \
        Walk walk(turns);                                                                                          \
        Sharded<T, Flat<T>>::Held held = {};                                                                       \
        /* While the first warp meets others. */                                                                   \
        if (threadIdx.x >= 32 && walk.is_there()) work.load_first(walk.i, norm != nullptr, held);                  \
        bool works = barrier.start();                                                                              \
        if (threadIdx.x < 32 && works && walk.is_there()) work.load_first(walk.i, norm != nullptr, held);          \
        const auto squares = [&] { gather_all(work, begin, end); };                                                \
        if (works && sharded(work, walk, held, desk, norm, chunks, squares)) barrier.end();                        \
        barrier.leave();                                                                                           \
    }

SHARDED(f32)
SHARDED(f16)
SHARDED(bf16)

// A parameter's part in the member's part of a bucket, in words: the first element among those of the own chunks, the
// number of elements, and what is added to the number of an own chunk to get its number among all; then the addresses
// of the moments, of the parameters in f32, and, by rank, first of the gradients and then of the parameters. Pieces are
// in the order of their first elements. Every unit of 16 bytes of an own chunk begins in one of them or behind the last
// of its bucket.
const u32 STARTS = 256;
enum Word : u32 { START_AT, LEN, SHIFT, FIRST, SECOND, MASTER, BY_RANK };

template <class T> struct Pieces {
    struct Spot {
        u64 at; // the element of the piece
        u32 piece;
    };
    static const bool always_sends = false, aligned = false;

    const Meet& meet;
    const u64* words;
    u32 count, stride;
    const u64* starts; // in shared memory: of all pieces, if there are at most STARTS

    __device__ Pieces(const Meet& meet, const u64* words, u32 count, const u64* starts)
        : meet(meet), words(words), count(count), stride(BY_RANK + 2 * meet.count), starts(starts) {}

    __device__ u64 word(u32 piece, u32 word) const { return words[(u64)piece * stride + word]; }
    __device__ u64 start(u32 piece) const { return count <= STARTS ? starts[piece] : word(piece, START_AT); }

    // In the last one that begins at or before element i. (The first one begins at 0.)
    __device__ Spot spot(u64 i) const {
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (start(middle) <= i) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return {i - start(low), low};
    }
    __device__ bool has(const Spot& spot) const { return spot.at < word(spot.piece, LEN); }
    __device__ u64 grad(const Spot& spot, u32 rank) const {
        return word(spot.piece, BY_RANK + rank) + spot.at * sizeof(T);
    }
    __device__ u64 to(const Spot& spot, u32 rank) const {
        return word(spot.piece, BY_RANK + meet.count + rank) + spot.at * sizeof(T);
    }
    __device__ State state(const Spot& spot) const {
        const u32 k = spot.piece;
        return {(f32*)word(k, FIRST), (f32*)word(k, SECOND), (f32*)word(k, MASTER), 0};
    }
    __device__ u32 most(const Spot& spot, u64& place) const {
        const u64 len = word(spot.piece, LEN);
        if (spot.at >= len) return 0;
        place = to(spot, meet.me);
        return len - spot.at < FOUR ? (u32)(len - spot.at) : FOUR;
    }
    __device__ u64 number(u64 chunk) const { return chunk + word(spot(chunk * CHUNK).piece, SHIFT); }
    __device__ u64 own_number(u64 chunk) const { return chunk; }
};

// Tells all devices the squares of the own chunks, which are at `sums`.
template <class T> __device__ inline void tell_squares(const Pieces<T>& where, const Desk& desk, u64 own) {
    const Meet& meet = where.meet;
#pragma unroll 1
    for (u64 chunk = grid_index(); chunk < own; chunk += grid_size()) {
        const u64 at = where.number(chunk) * sizeof(f64);
        const u64 squares = load<u64>(desk.sums[meet.me] + at);
#pragma unroll 1
        for (u32 rank = 0; rank < meet.count; rank++)
            if (rank != meet.me) store(desk.sums[rank] + at, squares);
    }
}

#define SHARDED_BUCKETS(T)                                                                                          \
    KERNEL sharded_buckets_##T(Meet meet, Rule rule, const Rule* later, u32 adds, f32* norm, const u64* pieces,     \
                               u32 count, u64 own, u64 chunks, Eight sums_lo, Eight sums_hi) {                      \
        __shared__ Desk desk;                                                                                       \
        __shared__ u64 starts[STARTS];                                                                              \
        if (is_turn(9)) spread(desk.sums, sums_lo, sums_hi);                                                        \
        Barrier barrier(meet, desk.epoch);                                                                          \
        if (is_turn(12)) desk.rule = later != nullptr ? *later : rule, desk.told = 0;                               \
        if (is_turn(13)) desk.halted = adds && !is_finite(*norm) ? __int_as_float(0x7fffffff) : 0.0f;               \
        const Pieces<T> where(meet, pieces, count, starts);                                                         \
        for (u32 k = threadIdx.x; k < count && count <= STARTS; k += blockDim.x) starts[k] = where.word(k, START_AT); \
        __syncthreads();                                                                                            \
        const Ending<T> ending(SUM, meet.count);                                                                    \
        Sharded<T, Pieces<T>> work = {meet, desk, where, ending, false, 0.0f};                                      \
        const Turns turns(0, own * CHUNK, 0, 1);                                                                    \
        Walk walk(turns);                                                                                           \
        Sharded<T, Pieces<T>>::Held held = {};                                                                      \
        if (threadIdx.x >= 32 && walk.is_there()) work.load_first(walk.i, true, held);                              \
        const bool works = barrier.start();                                                                         \
        if (threadIdx.x < 32 && works && walk.is_there()) work.load_first(walk.i, true, held);                      \
        const auto squares = [&] {                                                                                  \
            if (adds) gather_all(work, 0, own * CHUNK);                                                             \
            else tell_squares(where, desk, own);                                                                    \
        };                                                                                                          \
        if (works && sharded(work, walk, held, desk, norm, chunks, squares)) barrier.end();                         \
        barrier.leave();                                                                                            \
    }

SHARDED_BUCKETS(f32)
SHARDED_BUCKETS(f16)
SHARDED_BUCKETS(bf16)
