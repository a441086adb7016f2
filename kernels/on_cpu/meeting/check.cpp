// Runs kernels/inbox.cu, compiled for the CPU, on two to five devices that run at the same time (fibers.h): calls in
// turn of both kernels, of all types, by all devices and by some, in many orders. Results are compared with a plain
// fold; all members must have the same bits; no call may be given up; and after all calls every inbox is empty. Then a
// gang fails in the middle, inboxes are emptied as the host does it, and the next calls must be right again.
#include "fibers.h"
#include "common.cuh"
#include SOURCE

static void require(bool good, const char* what, u64 seed) {
    if (good) return;
    printf("wrong: %s, seed %llu\n", what, seed);
    _exit(1);
}

static const u64 WHOLE = 2048, SLOT = 256;
static const u32 MOST_BLOCKS = 2;

// A device's memory that others know, and what is under way on it.
struct Machine {
    std::vector<char> memory;
    Signals* signals;
    u64 inbox, bytes, words[2] = {}, report = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::function<void()>> queue; // each begins one kernel
    size_t next = 0;

    Machine(int device, u32 devices, u32 threads) {
        bytes = (devices - 1) * (2 * WHOLE + BLOCKS * SLOTS * SLOT);
        memory.resize(sizeof(Signals) + bytes + 256);
        signals = (Signals*)(((u64)memory.data() + 255) / 256 * 256);
        inbox = (u64)(signals + 1);
        signals->abort = (u64)words, signals->report = (u64)&report;
        signals->whole = WHOLE, signals->slots = (devices - 1) * 2 * WHOLE, signals->slot = SLOT;
        empty();
        for (u32 b = 0; b < MOST_BLOCKS; b++) blocks.push_back(std::make_unique<Block>(device, b, threads));
    }
    void empty() { memset((void*)inbox, 0xff, bytes); }
    bool is_empty() const {
        for (u64 k = 0; k < bytes; k++) {
            if (*(const u8*)(inbox + k) != 0xff) return false;
        }
        return true;
    }
    bool busy(int device) const {
        for (const auto& block : blocks) {
            if (block->kernel) return true;
        }
        for (const Flying& one : flying) {
            if (one.device == device) return true;
        }
        return false;
    }
    bool done(int device) const { return next == queue.size() && !busy(device); }
};

struct World {
    std::vector<std::unique_ptr<Machine>> machines;
    World(u32 devices, u32 threads) {
        for (u32 d = 0; d < devices; d++) machines.push_back(std::make_unique<Machine>(d, devices, threads));
        for (auto& one : machines) {
            for (u32 d = 0; d < devices; d++) one->signals->peer[d] = (u64)machines[d]->signals;
        }
    }
    void set_epochs(u32 epoch) {
        for (auto& one : machines) {
            for (u32& e : one->signals->epoch) e = epoch;
        }
    }
    // Until all queues are done. From turn `fails` on the gang of this place has failed.
    void run(u64 fails, u64 place) {
        for (u64 turn = 0, slow = ~0ull;; turn++) {
            if (turn == fails) {
                for (auto& one : machines) one->words[0] = place;
            }
            if (chance(50)) slow = chance(2) ? random_number() % machines.size() : ~0ull;
            bool all = true;
            for (size_t d = 0; d < machines.size(); d++) {
                Machine& one = *machines[d];
                all &= one.done(d);
                if (one.next < one.queue.size() && !one.busy(d) && (d != slow || chance(20))) one.queue[one.next++]();
            }
            if (all) break;
            if (!flying.empty() && !chance(3)) {
                for (u64 k = random_number() % 32; k > 0 && !flying.empty(); k--) let_arrive();
            }
            const u64 d = random_number() % machines.size();
            Block& block = *machines[d]->blocks[random_number() % MOST_BLOCKS];
            if (!block.kernel || (d == slow && !chance(20))) continue;
            block.go.release();
            block.back.acquire();
        }
        for (auto& one : machines) one->queue.clear(), one->next = 0;
    }
};

// `n` elements, the first at any offset, between bytes that must stay.
template <class T> struct Array {
    std::vector<u8> bytes;
    u64 n, begin;
    T* at() { return (T*)begin; }
    explicit Array(u64 n) : bytes(n * sizeof(T) + 128, 0x5a), n(n) {
        begin = ((u64)bytes.data() + 31) / 16 * 16 + (chance(2) ? 0 : random_number() % 4 * sizeof(T));
    }
    bool intact() const {
        const u64 end = begin + n * sizeof(T);
        for (const u8& byte : bytes) {
            const u64 at = (u64)&byte;
            if ((at < begin || at >= end) && byte != 0x5a) return false;
        }
        return true;
    }
};

template <class T> static bool is_nan(T x) { return wide(x) != wide(x); }

// Small numbers whose sums depend on the order, and bits that look like those of an empty inbox, or nearly.
template <class T> static T drawn(bool strange) {
    const u64 ones = ~0ull;
    const u64 bits[] = {ones, ones << 32, 0x3fefffffffffffffull, 0xfffffffeffffffffull, 0x8000000000000000ull,
                        0xffffffffull, 0, 0x7fffffffull, 0xffff0000ffffull};
    if (strange && chance(2)) return from_bits<T>((BitsOf<T>)(bits[random_number() % 9] >> 8 * (8 - sizeof(T)) * chance(2)));
    return narrow<T>((f64)(random_number() >> 44) * 0x1p-16 - 8);
}

// A call, with all members' buffers; `check` when it is over.
struct AnyCall {
    virtual ~AnyCall() {}
    virtual void check(u64 seed) = 0;
};

enum Kind { ALL_REDUCE, REDUCE_SCATTER, REDUCE };

template <class T> struct Call : AnyCall {
    std::vector<u32> members; // ordinals, by rank
    Kind kind;
    bool pieced, in_place;
    u32 op, root, blocks;
    std::vector<u64> counts; // of each member's slice
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
        const u64 some = 1 + random_number() % (chance(3) ? 9 : most);
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
        const bool strange = chance(2);
        for (u32 k = 0; k < 8; k++) factors[0].f[k] = 0.5 + k, factors[1].f[k] = -1.5 * k;
        for (u32 rank = 0; rank < n; rank++) {
            from.emplace_back(total());
            to.emplace_back(kind == REDUCE_SCATTER ? counts[rank] : total());
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
                const bool all = kind != ALL_REDUCE || to_bits(got) == to_bits(result(0)[i]);
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
    Meet meet = {machine.signals, 0, place, 30, n, rank, 0};
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
        const bool both = kind == ALL_REDUCE && n == 2;
        for (u32 k = 0; k < n; k++) {
            by[k / 8].x[k % 8] = (u64)(src + (both ? 0 : begin(k)));
            by[2 + k / 8].x[k % 8] = (both ? total() : counts[k]) * sizeof(T);
            const bool mine = kind == ALL_REDUCE || k == rank;
            by[4 + k / 8].x[k % 8] = mine ? (u64)(dst + (kind == ALL_REDUCE && !both ? begin(k) : 0)) : 0;
        }
        const u64 largest = (both ? total() : most()) * sizeof(T), piece = largest > 700 ? SLOT : 128;
        const u32 count = (largest + piece * blocks - 1) / (piece * blocks);
        const Pieces pieces = {piece, count, kind == ALL_REDUCE && !both};
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

// `calls` calls of one gang, by all devices or some.
static std::vector<std::unique_ptr<AnyCall>> queue(World& world, u32 calls, u64 place) {
    std::vector<std::unique_ptr<AnyCall>> all;
    for (u32 k = 0; k < calls; k++) {
        std::vector<u32> members;
        for (u32 d = 0; d < world.machines.size(); d++) {
            if (!chance(5)) members.insert(members.begin() + random_number() % (members.size() + 1), d);
        }
        if (members.size() < 2) members = {1, 0};
        switch (random_number() % 4) {
        case 0: all.push_back(queued<f32>(world, members, place)); break;
        case 1: all.push_back(queued<f64>(world, members, place)); break;
        case 2: all.push_back(queued<f16>(world, members, place)); break;
        default: all.push_back(queued<bf16>(world, members, place));
        }
    }
    return all;
}

int main(int argc, char** argv) {
    for (u64 seed = 1; seed <= (argc > 1 ? atoi(argv[1]) : 60); seed++) {
        state = seed * 0x9e3779b97f4a7c15ull | 1;
        for (int k = 0; k < 5; k++) random_number();
        const u32 devices[] = {2, 2, 3, 3, 4, 5};
        World world(devices[seed % 6], seed % 4 == 0 ? 64 : 32);
        if (chance(2)) world.set_epochs(~0u - random_number() % 4);
        for (u64 place = 1; place <= 3; place++) {
            const bool fails = place == 2;
            const auto calls = queue(world, 5, place);
            world.run(fails ? random_number() % 3000 : ~0ull, place);
            for (const auto& call : calls) {
                if (!fails) call->check(seed);
            }
            for (auto& one : world.machines) {
                require(fails || one->report == 0, "a wait that never ends", seed);
                require(fails || one->is_empty(), "something is left in an inbox", seed);
                one->empty();
                one->report = 0;
            }
        }
    }
    printf("right\n");
}
