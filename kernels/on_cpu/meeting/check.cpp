// Runs kernels/inbox.cu, compiled for the CPU, on two to five devices that run at the same time (fibers.h): calls in
// turn of both kernels, of all types, by all devices and by some, in many orders. Results are compared with a plain
// fold; all members must have the same bits; no call may be given up; and after all calls every inbox is empty. Then a
// gang fails in the middle, inboxes are emptied as the host does it, and the next calls must be right again.
//
// Before that, calls of two to eight devices whose stores are counted, against the host's model (traffic.inc).
#include "world.h"

enum Kind { ALL_REDUCE, REDUCE_SCATTER, REDUCE };

// A call, and what each member does in it.
struct Row {
    Kind kind;
    bool pieced;
    u32 root;
    std::vector<u64> counts, sent, taken;
    u64 trips;
};
static const Row rows[] = {
#include "traffic.inc"
};

template <class T> struct Call : AnyCall {
    std::vector<u32> members; // ordinals, by rank
    Kind kind;
    bool pieced, in_place, whole = false;
    u32 op, root, blocks;
    std::vector<u64> counts; // of each member's slice
    u64 piece;               // most bytes of one
    std::vector<Array<T>> from, to;
    std::vector<std::vector<T>> given;
    Factors factors[2];

    u64 begin(u32 rank) const {
        u64 sum = 0;
        for (u32 k = 0; k < rank; k++) sum += counts[k];
        return sum;
    }
    u64 total() const { return begin(members.size()); }
    u64 most() const {
        u64 found = 0;
        for (u64 count : counts) found = count > found ? count : found;
        return found;
    }

    Call(std::vector<u32> of) : members(std::move(of)) {
        const u32 n = members.size();
        kind = (Kind)(random_number() % 3), pieced = kind != REDUCE && chance(2), in_place = chance(2);
        op = random_number() % 6, root = random_number() % n, blocks = 1 + random_number() % MOST_BLOCKS;
        // In elements: of one trip, or of all slots several times.
        const u64 most = (pieced ? SLOT * MOST_BLOCKS * 5 : WHOLE) / sizeof(T);
        u64 some = 1 + random_number() % (chance(3) ? 9 : most);
        // Whole units at aligned places have ways of their own.
        whole = chance(2);
        if (whole) some = (some * sizeof(T) + 15) / 16 * 16 / sizeof(T);
        counts.assign(n, some);
        if (kind != REDUCE_SCATTER) {
            // Parts of whole grains, as the host cuts them.
            const u64 grain = 128 / sizeof(T), len = pieced ? some * n : some;
            for (u32 k = 0; k < n; k++) {
                const u64 part = (len + n * grain - 1) / (n * grain) * grain;
                counts[k] = k * part >= len ? 0 : len - k * part < part ? len - k * part : part;
            }
        } else if (pieced) {
            for (u32 k = 0; k < n; k++) counts[k] = k != root && chance(3) ? 0 : 1 + random_number() % some;
        }
        piece = largest() > 700 ? SLOT : 128;
        fill(chance(2));
    }
    Call(const Row& row)
        : members(row.counts.size()), kind(row.kind), pieced(row.pieced), in_place(false), op(SUM), root(row.root),
          blocks(1), counts(row.counts), piece(SLOT) {
        for (u32 k = 0; k < members.size(); k++) members[k] = k;
        fill(false);
    }

    // Whether two members add up everything, each for itself.
    bool both() const { return kind == ALL_REDUCE && members.size() == 2; }
    // Bytes of the largest slice.
    u64 largest() const { return (both() ? total() : most()) * sizeof(T); }

    void fill(bool strange) {
        const u32 n = members.size();
        for (u32 k = 0; k < 8; k++) factors[0].f[k] = 0.5 + k, factors[1].f[k] = -1.5 * k;
        for (u32 rank = 0; rank < n; rank++) {
            from.emplace_back(total(), whole);
            to.emplace_back(kind == REDUCE_SCATTER ? counts[rank] : total(), whole);
            for (u64 i = 0; i < total(); i++) from[rank].at()[i] = drawn<T>(strange);
            given.emplace_back(from[rank].at(), from[rank].at() + total());
        }
    }

    // The elements from `first` on that the sums of member `rank` go to.
    T* result(u32 rank) {
        return !in_place ? to[rank].at() : from[rank].at() + (kind == REDUCE_SCATTER ? begin(rank) : 0);
    }

    void start(World& world, u32 rank, u64 place);

    void check(u64 seed) override {
        const u32 n = members.size();
        std::vector<Acc<T>> factor(16);
        for (u32 k = 0; k < 16; k++) factor[k] = (Acc<T>)factors[k / 8].f[k % 8];
        for (u32 rank = 0; rank < n; rank++) {
            require(from[rank].intact() && to[rank].intact(), "bytes beside a buffer", seed);
            if (kind == REDUCE && rank != root) continue;
            const u64 first = kind == REDUCE_SCATTER ? begin(rank) : 0;
            for (u64 i = 0; i < (kind == REDUCE_SCATTER ? counts[rank] : total()); i++) {
                Acc<T> acc[1] = {};
                for (u32 k = 0; k < n; k++) {
                    const Acc<T> x[1] = {wide(given[k][first + i])};
                    fold_any<T>(op, k, acc, x, factor.data());
                }
                const T want = Ending<T>(op, n)(acc[0]), got = result(rank)[i];
                const bool same = to_bits(want) == to_bits(got) || (is_nan(want) && is_nan(got));
                require(same, pieced ? "a sum through slots" : "a sum of one trip", seed);
                // A GPU has only one NaN where it adds up in f32; this machine has many.
                const bool sums = op == SUM || op == AVG;
                const bool one = sums && sizeof(T) != 8 && is_nan(got) && is_nan(result(0)[i]);
                const bool all = kind != ALL_REDUCE || one || to_bits(got) == to_bits(result(0)[i]);
                require(all, "members with other bits", seed);
            }
        }
    }
};

#define ENTRIES(T)                                               \
    static const auto whole_kernel(T*) { return inbox_##T; }     \
    static const auto pieces_kernel(T*) { return slots_##T; }
ENTRIES(f32) ENTRIES(f64) ENTRIES(f16) ENTRIES(bf16)

template <class T> void Call<T>::start(World& world, u32 rank, u64 place) {
    const u32 n = members.size();
    Machine& machine = *world.machines[members[rank]];
    Meet meet = {machine.signals, 0, place, DEADLINE, n, rank, 0};
    for (u32 k = 0; k < n; k++) meet.members |= (u64)members[k] << 4 * k;
    T* const src = from[rank].at();
    T* const dst = result(rank);
    std::function<void()> kernel;
    if (!pieced) {
        const u16 all = (1u << n) - 1;
        const u64 out = kind == REDUCE_SCATTER ? counts[0] : 0, each = kind == REDUCE_SCATTER ? counts[0] : total();
        const Route route = {all, kind == REDUCE ? (u16)(1u << root) : all, 1, out, 0};
        kernel = [=, this] { whole_kernel((T*)0)(meet, each, op, route, factors[0], factors[1], src, dst); };
    } else {
        Eight by[6] = {};
        for (u32 k = 0; k < n; k++) {
            by[k / 8].x[k % 8] = (u64)(src + (both() ? 0 : begin(k)));
            by[2 + k / 8].x[k % 8] = (both() ? total() : counts[k]) * sizeof(T);
            const bool mine = kind == ALL_REDUCE || k == rank;
            by[4 + k / 8].x[k % 8] = mine ? (u64)(dst + (kind == ALL_REDUCE && !both() ? begin(k) : 0)) : 0;
        }
        const u32 count = (largest() + piece * blocks - 1) / (piece * blocks);
        const Pieces pieces = {piece, count, kind == ALL_REDUCE && !both()};
        kernel = [=, this] {
            pieces_kernel((T*)0)(meet, op, factors[0], factors[1], pieces, by[0], by[1], by[2], by[3], by[4], by[5]);
        };
    }
    machine.queue.push_back([&machine, kernel, grid = blocks] {
        for (u32 b = 0; b < grid; b++) machine.blocks[b]->begin(grid, kernel);
    });
}

template <class T>
static std::unique_ptr<AnyCall> queued(World& world, const std::vector<u32>& members, u64 place) {
    auto call = std::make_unique<Call<T>>(members);
    for (u32 rank = 0; rank < members.size(); rank++) call->start(world, rank, place);
    return call;
}

// Runs each row in some orders: always the same units, and no fewer trips than by the model. Where no slot is used
// twice, some order has no more; else what a block sees is often more than it has waited for.
static void count_rows() {
    std::unique_ptr<World> world;
    for (const Row& row : rows) {
        const u32 n = row.counts.size();
        if (!world || world->machines.size() != n) world = std::make_unique<World>(n, 32);
        const bool few = row.trips <= (row.kind == ALL_REDUCE && n > 2 ? 3 : 2);
        u64 fewest = ~0ull;
        for (u64 order = 1; order <= 2 || (few && fewest > row.trips); order++) {
            state = order * 0x9e3779b97f4a7c15ull | 1;
            counted = {.on = true};
            Call<f32> call(row);
            for (u32 rank = 0; rank < n; rank++) call.start(*world, rank, 1);
            world->run(~0ull, 1);
            call.check(order);
            for (u32 rank = 0; rank < n; rank++) {
                require(counted.sent[rank] == row.sent[rank], "other units sent than by the model", order);
                require(counted.taken[rank] == row.taken[rank], "other units taken than by the model", order);
                require(world->machines[rank]->is_empty(), "something is left in an inbox", order);
            }
            require(counted.trips >= row.trips, "fewer trips than by the model", order);
            fewest = std::min(fewest, counted.trips);
            require(order < 100, "more trips than by the model", order);
        }
    }
    counted = {};
}

int main(int argc, char** argv) {
    count_rows();
    return each_world(argc > 1 ? atoi(argv[1]) : 60, [](World& world, const std::vector<u32>& members, u64 place) {
        switch (random_number() % 4) {
        case 0: return queued<f32>(world, members, place);
        case 1: return queued<f64>(world, members, place);
        case 2: return queued<f16>(world, members, place);
        default: return queued<bf16>(world, members, place);
        }
    });
}
