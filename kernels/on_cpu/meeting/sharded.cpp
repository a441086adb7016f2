// Runs kernels/sharded.cu, compiled for the CPU, on two to five devices at the same time (fibers.h), as check.cpp runs
// inbox.cu: steps in turn of all types and rules, by all devices and by some, with and without clipping. The bits of
// parameters, moments and sent parameters are compared with plain loops. Some steps are on buckets. Plain stores may be
// late, too.
#define PLAIN_IS_SHARED
#include "fibers.h"
#include "inbox.cuh"
#include "world.h"

template <class T> static bool same(T a, T b) { return to_bits(a) == to_bits(b) || (is_nan(a) && is_nan(b)); }

#include "buckets.h"

static Rule any_rule(bool clips) {
    Rule rule = {};
    rule.kind = random_number() % 3, rule.nesterov = chance(2), rule.factor = chance(2) ? 1.0f : 0.5f;
    rule.most = clips ? (chance(2) ? 3.0f : 1e9f) : 0.0f, rule.decay = chance(2) ? 0.0f : 0.01f;
    rule.shrink = chance(2) ? 1.0f : 0.99f, rule.beta1 = 0.9f, rule.rest1 = 0.1f, rule.beta2 = 0.99f;
    rule.rest2 = 0.01f, rule.rate = 0.1f, rule.root = 0.5f, rule.eps = 1e-6f;
    return rule;
}

// One parameter: its first element among all, and its elements.
struct Place {
    u64 start, len;
};

template <class T> struct Call : AnyCall {
    std::vector<u32> members; // ordinals, by rank
    u32 op, blocks;
    bool clips, strange, by_packets = chance(2);
    Rule rule = {};
    std::vector<Place> places;
    u64 len = 0; // with the gaps between parameters
    std::vector<Array<T>> grads;
    std::vector<std::vector<Array<T>>> weights; // of each member, by parameter
    std::vector<Array<f32>> first, second, master, norm, later;
    std::vector<Array<f64>> sums;
    std::vector<std::vector<T>> given;
    std::vector<T> before; // parameters, by element of all
    std::vector<std::vector<f32>> kept[3];

    static u64 grain() { return 16 / sizeof(T); }
    bool flat() const { return places.size() == 1; }
    u64 chunks() const { return (len + CHUNK - 1) / CHUNK; }
    // Whole chunks; the first members have one more.
    u64 begin(u32 rank) const {
        const u64 n = members.size(), each = chunks() / n, more = chunks() % n;
        const u64 at = (rank * each + (rank < more ? rank : more)) * CHUNK;
        return at < len ? at : len;
    }
    u64 part(u32 rank) const { return begin(rank + 1) - begin(rank); }

    static Array<f32> numbers(u64 n, bool there, f32 from) {
        Array<f32> array(there ? n : 0, true);
        for (u64 i = 0; i < array.n; i++) array.at()[i] = from + (random_number() >> 44) * 0x1p-20f;
        return array;
    }

    Call(std::vector<u32> of) : members(std::move(of)) {
        const u32 n = members.size();
        op = chance(2) ? SUM : AVG, blocks = 1 + random_number() % MOST_BLOCKS;
        clips = chance(2), strange = chance(8);
        rule = any_rule(clips);
        for (u64 more = chance(2) ? 1 : 1 + random_number() % 6; more > 0; more--) {
            const u64 most = chance(3) ? 20 : 3 * CHUNK;
            places.push_back({len, 1 + random_number() % most});
            len = (len + places.back().len + grain() - 1) / grain() * grain();
        }
        before.resize(len);
        for (const Place& place : places)
            for (u64 i = 0; i < place.len; i++) before[place.start + i] = drawn<T>(strange);
        for (u32 rank = 0; rank < n; rank++) {
            grads.emplace_back(len, true);
            for (u64 i = 0; i < len; i++) grads[rank].at()[i] = drawn<T>(strange);
            for (size_t k = 0; k < places.size(); k++) {
                const u64 end = k + 1 < places.size() ? places[k + 1].start : len;
                for (u64 i = places[k].start + places[k].len; i < end; i++) grads[rank].at()[i] = narrow<T>(0.0f);
            }
            given.emplace_back(grads[rank].at(), grads[rank].at() + len);
            weights.emplace_back();
            for (const Place& place : places) {
                weights[rank].emplace_back(place.len, true);
                for (u64 i = 0; i < place.len; i++) weights[rank].back().at()[i] = before[place.start + i];
            }
            first.push_back(numbers(part(rank), rule.kind != SGD, -0.5f));
            second.push_back(numbers(part(rank), rule.kind == ADAM, 0.0f));
            master.push_back(numbers(part(rank), sizeof(T) == 2, -1.0f));
            // Some that are not out of date.
            for (u64 i = 0; i < master[rank].n; i++) {
                if (!chance(3)) master[rank].at()[i] = wide(before[begin(rank) + i]);
            }
            u32 which = 0;
            for (auto* all : {&first, &second, &master}) {
                kept[which++].emplace_back((*all)[rank].at(), (*all)[rank].at() + (*all)[rank].n);
            }
            norm.emplace_back(1, true), sums.emplace_back(chunks(), true), later.emplace_back(14, true);
            memcpy(later[rank].at(), &rule, sizeof(Rule));
        }
    }

    void start(World& world, u32 rank, u64 place);

    void check(u64 seed) override {
        const u32 n = members.size();
        const Ending<T> ending(op, n);
        std::vector<T> sum(len);
        f64 squares = 0;
        for (u64 i = 0; i < len; i++) {
            f32 acc = wide(given[0][i]);
            for (u32 k = 1; k < n; k++) acc += wide(given[k][i]);
            sum[i] = ending(acc);
            squares += (f64)wide(sum[i]) * wide(sum[i]);
        }
        f32 found = 0;
        if (clips) {
            found = *norm[0].at();
            const f32 want = (f32)sqrt(squares);
            const bool close = (is_nan(found) && is_nan(want)) || found == want || fabsf(found - want) < 1e-5f * want;
            require(close, "a norm", seed);
        }
        const bool finite = is_finite(found);
        const f32 scale = scale_of(rule, found);
        for (u32 rank = 0; rank < n; rank++) {
            require(!clips || same(*norm[rank].at(), found), "members with other norms", seed);
            require(grads[rank].intact() && norm[rank].intact() && sums[rank].intact(), "bytes beside a buffer", seed);
            require(first[rank].intact() && second[rank].intact() && master[rank].intact(), "bytes beside", seed);
            for (size_t k = 0; k < places.size(); k++) {
                require(weights[rank][k].intact(), "bytes beside a parameter", seed);
                for (u64 j = 0; j < places[k].len; j++) {
                    const u64 i = places[k].start + j;
                    u32 owner = 0;
                    while (i >= begin(owner + 1)) owner++;
                    const u64 at = i - begin(owner);
                    f32 m = rule.kind != SGD ? kept[0][owner][at] : 0, v = rule.kind == ADAM ? kept[1][owner][at] : 0;
                    f32 w = wide(before[i]);
                    const bool is_late = sizeof(T) != 2 || to_bits(narrow<T>(kept[2][owner][at])) != to_bits(before[i]);
                    if (!is_late) w = kept[2][owner][at];
                    T want = before[i];
                    if (finite) {
                        w = stepped(rule.kind, rule, scale, wide(sum[i]), w, m, v);
                        want = narrow<T>(w);
                    }
                    const bool here = flat() || owner == rank;
                    const T got = here ? weights[rank][k].at()[j] : grads[rank].at()[i];
                    require(same(want, got), here ? "a parameter" : "a parameter that was sent", seed);
                    if (owner != rank || !finite) continue;
                    require(rule.kind == SGD || same(first[rank].at()[at], m), "a first moment", seed);
                    require(rule.kind != ADAM || same(second[rank].at()[at], v), "a second moment", seed);
                    require(sizeof(T) == 4 || same(master[rank].at()[at], w), "a master parameter", seed);
                }
            }
        }
    }
};

static const auto kernel_of(f32*) { return sharded_f32; }
static const auto kernel_of(f16*) { return sharded_f16; }
static const auto kernel_of(bf16*) { return sharded_bf16; }

template <class T> void Call<T>::start(World& world, u32 rank, u64 place) {
    const u32 n = members.size();
    Machine& machine = *world.machines[members[rank]];
    Meet meet = {machine.signals, 0, place, DEADLINE, n, rank, 0};
    for (u32 k = 0; k < n; k++) meet.members |= (u64)members[k] << 4 * k;
    Eight by[6] = {};
    for (u32 k = 0; k < n; k++) {
        by[k / 8].x[k % 8] = (u64)grads[k].at();
        by[2 + k / 8].x[k % 8] = flat() ? (u64)weights[k][0].at() : (u64)grads[k].at();
        by[4 + k / 8].x[k % 8] = (u64)sums[k].at();
    }
    Column table[3][8] = {};
    u32 count = 0;
    for (size_t k = 0; k < places.size(); k++) {
        const u64 from = std::max(places[k].start, begin(rank));
        const u64 to = std::min(places[k].start + places[k].len, begin(rank + 1));
        if (from >= to) continue;
        table[0][count / 8].at[count % 8] = from, table[1][count / 8].at[count % 8] = to - from;
        table[2][count / 8].at[count % 8] = (u64)(weights[rank][k].at() + (from - places[k].start));
        count++;
    }
    const auto or_null = [](Array<f32>& array) { return array.n > 0 ? array.at() : nullptr; };
    // As much as packets can be for.
    std::vector<u64>& told = world.kept[{members, rank}];
    told.resize(2 * PACKETS + 1);
    f32* const memory[3] = {or_null(first[rank]), or_null(second[rank]), or_null(master[rank])};
    const Rule* const in_memory = chance(2) ? (const Rule*)later[rank].at() : nullptr;
    Rule given_rule = rule;
    if (in_memory) given_rule.rate = 77;
    const auto kernel = [=, this, at = (u64*)(((u64)told.data() + 15) / 16 * 16)] {
#define FOUR_OF(k, j) table[k][j], table[k][j + 1], table[k][j + 2], table[k][j + 3]
#define EIGHT_OF(k) FOUR_OF(k, 0), FOUR_OF(k, 4)
        kernel_of((T*)0)(meet, op, given_rule, in_memory, memory[0], memory[1], memory[2],
                         clips ? norm[rank].at() : nullptr, by_packets ? at : nullptr, begin(rank), begin(rank + 1),
                         chunks(), count, by[0], by[1], by[2], by[3], by[4], by[5], EIGHT_OF(0), EIGHT_OF(1),
                         EIGHT_OF(2));
    };
    machine.queue.push_back([&machine, kernel, grid = blocks, width = world.threads] {
        for (u32 b = 0; b < grid; b++) machine.blocks[b]->begin(grid, kernel, width);
    });
}

template <class T>
static std::unique_ptr<AnyCall> queued(World& world, const std::vector<u32>& members, u64 place) {
    if (chance(3)) {
        auto call = std::make_unique<BucketCall<T>>(members, any_rule(chance(2)));
        call->start(world, place);
        return call;
    }
    auto call = std::make_unique<Call<T>>(members);
    for (u32 rank = 0; rank < members.size(); rank++) call->start(world, rank, place);
    return call;
}

int main(int argc, char** argv) {
    return each_world(argc > 1 ? atoi(argv[1]) : 20, [](World& world, const std::vector<u32>& members, u64 place) {
        switch (random_number() % 3) {
        case 0: return queued<f32>(world, members, place);
        case 1: return queued<f16>(world, members, place);
        default: return queued<bf16>(world, members, place);
        }
    });
}
