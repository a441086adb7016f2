// For sharded.cpp: a step on buckets, by kernels `sharded_buckets_<T>`. Gradients are added up already, or not.
#pragma once
#include "world.h"

static const auto buckets_kernel_of(f32*) { return sharded_buckets_f32; }
static const auto buckets_kernel_of(f16*) { return sharded_buckets_f16; }
static const auto buckets_kernel_of(bf16*) { return sharded_buckets_bf16; }

template <class T> struct BucketCall : AnyCall {
    // A parameter's first element in its bucket, and its elements.
    struct Parameter {
        u64 start, len;
    };
    struct Bucket {
        std::vector<Parameter> parameters;
        u64 len = 0, shift = 0; // with the gaps between parameters; chunks of the buckets before
        std::vector<T> sum, before;
        std::vector<std::vector<T>> given; // by member
        // By member: gradients, moments, parameters.
        std::vector<Array<T>> grads;
        std::vector<Array<f32>> kept[3];
        std::vector<std::vector<f32>> old[3];
        std::vector<std::vector<Array<T>>> weights;
    };
    std::vector<u32> members; // ordinals, by rank
    u32 blocks;
    Rule rule;
    bool later = chance(2); // the rule is in memory, as in a graph
    bool adds = chance(2);
    bool halted = chance(6); // the norm of the step before was not finite
    std::vector<Bucket> buckets;
    u64 chunks = 0;
    f64 squares = 0;
    std::vector<Array<f64>> sums;
    std::vector<Array<f32>> norm;
    std::vector<std::vector<u64>> pieces;

    u64 begin(const Bucket& bucket, u32 rank) const {
        const u64 all = (bucket.len + CHUNK - 1) / CHUNK, n = members.size(), each = all / n, more = all % n;
        const u64 at = (rank * each + (rank < more ? rank : more)) * CHUNK;
        return at < bucket.len ? at : bucket.len;
    }
    u64 owner(const Bucket& bucket, u64 i) const {
        u32 rank = 0;
        while (i >= begin(bucket, rank + 1)) rank++;
        return rank;
    }

    BucketCall(std::vector<u32> of, const Rule& rule) : members(std::move(of)), rule(rule) {
        const u32 n = members.size();
        const bool strange = chance(8);
        blocks = 1 + random_number() % MOST_BLOCKS;
        buckets.resize(1 + random_number() % 3);
        for (Bucket& bucket : buckets) {
            const u64 grain = 16 / sizeof(T);
            const bool many = chance(3);
            for (u64 more = many ? 40 : 1 + random_number() % 3; more > 0; more--) {
                const u64 most = many || chance(2) ? 20 : 2 * CHUNK;
                bucket.parameters.push_back({bucket.len, 1 + random_number() % most});
                bucket.len = (bucket.len + bucket.parameters.back().len + grain - 1) / grain * grain;
            }
            bucket.shift = chunks;
            chunks += (bucket.len + CHUNK - 1) / CHUNK;
            bucket.before.assign(bucket.len, narrow<T>(0.0f));
            bucket.given.assign(n, bucket.before);
            for (const Parameter& p : bucket.parameters)
                for (u64 i = p.start; i < p.start + p.len; i++) {
                    for (auto& given : bucket.given) given[i] = drawn<T>(strange);
                    bucket.before[i] = drawn<T>(strange);
                }
        }
        if (chance(6)) buckets.back().given[0][0] = narrow<T>(INFINITY);
        for (Bucket& bucket : buckets) {
            for (u64 i = 0; i < bucket.len; i++) {
                f32 acc = wide(bucket.given[0][i]);
                for (u32 rank = 1; rank < n; rank++) acc += wide(bucket.given[rank][i]);
                bucket.sum.push_back(narrow<T>(acc));
            }
        }
        for (u32 rank = 0; rank < n; rank++) {
            norm.emplace_back(1, true), sums.emplace_back(chunks, true);
            *norm[rank].at() = halted ? INFINITY : 1.0f;
            for (u64 c = 0; c < chunks; c++) sums[rank].at()[c] = NAN;
            for (Bucket& bucket : buckets) fill(bucket, rank);
        }
    }

    void fill(Bucket& bucket, u32 rank) {
        const u64 from = begin(bucket, rank), to = begin(bucket, rank + 1);
        bucket.grads.emplace_back(bucket.len, true);
        for (u64 i = 0; i < bucket.len; i++) {
            const bool own = i >= from && i < to;
            bucket.grads[rank].at()[i] = adds ? bucket.given[rank][i] : own ? bucket.sum[i] : narrow<T>(77.0f);
            if (own) squares += (f64)wide(bucket.sum[i]) * wide(bucket.sum[i]);
            if (adds) continue;
            f64& square = sums[rank].at()[bucket.shift + i / CHUNK];
            if (own && i % CHUNK == 0) square = 0;
            if (own) square += (f64)wide(bucket.sum[i]) * wide(bucket.sum[i]);
        }
        const bool there[3] = {rule.kind != SGD, rule.kind == ADAM, sizeof(T) == 2};
        for (u32 which = 0; which < 3; which++) {
            Array<f32> array(there[which] ? to - from : 0, true);
            for (u64 i = 0; i < array.n; i++) {
                array.at()[i] = (which == 0 ? -0.5f : 0.0f) + (random_number() >> 44) * 0x1p-20f;
                if (which == 2 && !chance(3)) array.at()[i] = wide(bucket.before[from + i]);
            }
            bucket.old[which].emplace_back(array.at(), array.at() + array.n);
            bucket.kept[which].push_back(std::move(array));
        }
        bucket.weights.emplace_back();
        for (const Parameter& p : bucket.parameters) {
            // At any offset: nobody promises more.
            bucket.weights[rank].emplace_back(p.len);
            for (u64 i = 0; i < p.len; i++) bucket.weights[rank].back().at()[i] = bucket.before[p.start + i];
        }
    }

    std::vector<u64> table(u32 rank, u64& own) {
        std::vector<u64> words;
        own = 0;
        for (Bucket& bucket : buckets) {
            const u64 from = begin(bucket, rank), to = begin(bucket, rank + 1);
            for (size_t k = 0; k < bucket.parameters.size(); k++) {
                const Parameter& p = bucket.parameters[k];
                const u64 start = std::max(p.start, from), end = std::min(p.start + p.len, to);
                if (start >= end) continue;
                words.push_back(own * CHUNK + start - from), words.push_back(end - start);
                words.push_back(bucket.shift + from / CHUNK - own);
                for (auto& kept : bucket.kept) {
                    words.push_back(kept[rank].n > 0 ? (u64)(kept[rank].at() + start - from) : 0);
                }
                for (auto& grads : bucket.grads) words.push_back((u64)(grads.at() + start));
                for (u32 other = 0; other < members.size(); other++) {
                    words.push_back((u64)(bucket.weights[other][k].at() + start - p.start));
                }
            }
            own += (to - from + CHUNK - 1) / CHUNK;
        }
        return words;
    }

    void start(World& world, u64 place) {
        const u32 n = members.size();
        pieces.resize(n);
        for (u32 rank = 0; rank < n; rank++) {
            Machine& machine = *world.machines[members[rank]];
            Meet meet = {machine.signals, 0, place, DEADLINE, n, rank, 0};
            for (u32 k = 0; k < n; k++) meet.members |= (u64)members[k] << 4 * k;
            Eight by[2] = {};
            for (u32 k = 0; k < n; k++) by[k / 8].x[k % 8] = (u64)sums[k].at();
            u64 own;
            pieces[rank] = table(rank, own);
            const u32 count = pieces[rank].size() / (6 + 2 * n);
            const auto kernel = [=, this] {
                buckets_kernel_of((T*)0)(meet, later ? Rule() : rule, later ? &rule : nullptr, adds, norm[rank].at(),
                                         pieces[rank].data(), count, own, chunks, by[0], by[1]);
            };
            machine.queue.push_back([&machine, kernel, grid = blocks, width = world.threads] {
                for (u32 b = 0; b < grid; b++) machine.blocks[b]->begin(grid, kernel, width);
            });
        }
    }

    void check(u64 seed) override {
        const u32 n = members.size();
        const f32 found = *norm[0].at(), root = adds && halted ? NAN : (f32)sqrt(squares);
        const bool close = (is_nan(found) && is_nan(root)) || found == root || fabsf(found - root) < 1e-5f * root;
        require(close, "a norm of buckets", seed);
        for (u32 rank = 0; rank < n; rank++) {
            require(same(*norm[rank].at(), found), "members with other norms of buckets", seed);
            require(norm[rank].intact() && sums[rank].intact(), "bytes beside sums", seed);
            for (u64 c = 0; c < chunks; c++) {
                require(same(sums[rank].at()[c], sums[0].at()[c]), "a sum of squares", seed);
            }
        }
        for (Bucket& bucket : buckets) {
            for (size_t k = 0; k < bucket.parameters.size(); k++) check(bucket, k, found, seed);
            for (u32 rank = 0; rank < n; rank++) {
                require(bucket.grads[rank].intact(), "bytes beside a bucket", seed);
                for (auto& kept : bucket.kept) require(kept[rank].intact(), "bytes beside a moment", seed);
            }
        }
    }

    void check(Bucket& bucket, size_t k, f32 found, u64 seed) {
        const Parameter& p = bucket.parameters[k];
        for (u64 i = p.start; i < p.start + p.len; i++) {
            const u32 rank = owner(bucket, i);
            const u64 at = i - begin(bucket, rank);
            const auto old = [&](u32 which) {
                const auto& all = bucket.old[which][rank];
                return all.empty() ? 0 : all[at];
            };
            f32 m = old(0), v = old(1), w = old(2);
            if (sizeof(T) == 4 || to_bits(narrow<T>(w)) != to_bits(bucket.before[i])) w = wide(bucket.before[i]);
            T want = bucket.before[i];
            const bool finite = is_finite(found);
            if (finite) {
                w = stepped(rule.kind, rule, scale_of(rule, found), wide(bucket.sum[i]), w, m, v);
                want = narrow<T>(w);
            }
            const f32 now[3] = {m, v, finite ? w : old(2)};
            for (u32 which = 0; which < 3; which++) {
                auto& kept = bucket.kept[which][rank];
                require(kept.n == 0 || same(kept.at()[at], now[which]), "a moment of a bucket", seed);
            }
            for (u32 other = 0; other < members.size(); other++) {
                require(same(want, bucket.weights[other][k].at()[i - p.start]), "a parameter of a bucket", seed);
            }
        }
        for (auto& weights : bucket.weights) require(weights[k].intact(), "bytes beside a parameter", seed);
    }
};
