// Runs kernels/norm_inbox.cu or norm_pull.cu, compiled for the CPU, on two to five devices at the same time (fibers.h),
// as check.cpp runs inbox.cu: calls in turn of all types and ways, by all devices and by some. The bits of the residual
// and of the norm are compared with plain loops that add up in the order that rows.cuh states.
//
// Partial sums come when the device has done what was before the call. What comes after it takes the results and fills
// the buffers with other numbers, while other devices may still be in the call.
#ifdef FAMILY_norm_pull
#define PLAIN_IS_SHARED
#else
#define BLOCK_THREADS 128
#endif
#include "world.h"

#ifdef FAMILY_norm_pull
// norm_pull.cu has no ways: a number that plan.way (0) never is.
static const u32 ONE_TRIP = 1;
#endif

template <class T> struct Call : AnyCall {
    std::vector<u32> members; // ordinals, by rank
    Plan plan;
    u32 threads, spread = 1, blocks;
    std::vector<char> in_place;
    std::vector<Array<T>> x, residual, y;
    Array<T> gamma, beta;
    std::vector<Array<f32>> mean, rstd;
    std::vector<std::vector<T>> given, before, found;

    u64 len() const { return plan.rows * plan.cols; }

    static Plan drawn_plan(u32 members, u32 threads) {
        Plan plan = {};
#ifndef FAMILY_norm_pull
        plan.way = random_number() % (members == 2 ? 2 : 3);
#endif
        plan.layer = random_number() % 2, plan.eps = 0.25f;
        const u32 most = plan.way == ONE_TRIP ? WHOLE / 16 : KEPT * threads;
        // Often so long that a row has warps of its own in several blocks.
        const u32 end = most < KEPT * threads ? most : KEPT * threads, from = threads > 64 && chance(2) ? end / 2 : 0;
        const u32 packs = from + 1 + random_number() % (end - from);
        plan.cols = packs * LANES<T>;
        plan.rows = 1 + random_number() % (plan.way == ONE_TRIP ? WHOLE / (packs * 16) : 9);
        return plan;
    }
    static Array<T> filled(u64 n, bool strange) {
        Array<T> array(n, true);
        for (u64 i = 0; i < n; i++) {
            T& x = array.at()[i] = drawn<T>(strange);
            // Of many sizes, so that sums depend on the order.
            if (!strange) x = narrow<T>(ldexpf(wide(x), (int)(random_number() % 19) - 12));
        }
        return array;
    }

    Call(std::vector<u32> of, u32 block)
        : members(std::move(of)), plan(drawn_plan(members.size(), block / (1 + block / 64 * chance(2)))),
          threads(32), gamma(filled(plan.cols, false)), beta(filled(plan.cols, false)) {
        // The least threads that have the row in their registers.
        while (KEPT * threads * LANES<T> < plan.cols) threads *= 2;
#ifdef FAMILY_norm_pull
        const bool spreads = members.size() > 2;
#else
        const bool spreads = plan.way == ONE_TRIP;
#endif
        plan.split = 1;
        // Threads of a row of which each block has a warp or two.
        const bool alone = plan.way == ONE_TRIP && plan.rows == 1 && block > 32;
        const u32 several = alone ? 32 * MOST_BLOCKS * (block > 64 && chance(2) ? 2 : 1) : 0;
        if (several >= threads) {
            threads = several, plan.split = MOST_BLOCKS, spread = block * MOST_BLOCKS / several;
        } else if (spreads) {
            while (spread < KEPT && threads * spread * 2 <= block && !chance(3)) spread *= 2;
        }
        plan.packs = KEPT / spread;
        blocks = plan.split > 1 ? plan.split : 1 + random_number() % MOST_BLOCKS;
        const bool strange = chance(3);
        for (u32 rank = 0; rank < members.size(); rank++) {
            x.push_back(filled(len(), strange));
            residual.push_back(filled(len(), false));
            y.emplace_back(len(), true);
            mean.emplace_back(plan.rows), rstd.emplace_back(plan.rows);
            given.emplace_back(x[rank].at(), x[rank].at() + len());
            before.emplace_back(residual[rank].at(), residual[rank].at() + len());
            fill(x[rank], 77.0f);
        }
        in_place.resize(members.size()), found.resize(members.size());
        for (u32 rank = 0; rank < members.size(); rank++) in_place[rank] = chance(2);
    }
    static void fill(Array<T>& array, f32 x) {
        for (u64 i = 0; i < array.n; i++) array.at()[i] = narrow<T>(x);
    }
    T* result(u32 rank) { return in_place[rank] ? x[rank].at() : y[rank].at(); }
    void come(u32 rank) { memcpy(x[rank].at(), given[rank].data(), len() * sizeof(T)); }
    void go(u32 rank) {
        found[rank].assign(result(rank), result(rank) + len());
        require(in_place[rank] || !memcmp(x[rank].at(), given[rank].data(), len() * sizeof(T)), "a source", 0);
        fill(x[rank], 88.0f), fill(y[rank], 99.0f);
    }

    void start(World& world, u32 rank, u64 place);

    // The sum over a row of f(i), as the threads of a row add it up.
    template <class F> f32 sum(F f) const {
        std::vector<f32> of(threads, 0.0f);
        for (u32 t = 0; t < threads; t++)
            for (u32 p = t * LANES<T>; p < plan.cols; p += threads * LANES<T>) {
                f32 part = 0.0f;
                for (u32 i = p; i < p + LANES<T>; i++) part += f(i);
                of[t] += part;
            }
        const auto butterfly = [&](u32 far) {
            std::vector<f32> next(of);
            for (u32 t = 0; t < of.size(); t++) next[t] = of[t] + of[t ^ far];
            of = next;
        };
        for (u32 far = 16; far > 0; far /= 2) butterfly(far);
        for (u32 far = threads / 2; far > 16; far /= 2) butterfly(far);
        return of[0];
    }

    void check(u64 seed) override {
        const auto same = [](T a, T b) { return to_bits(a) == to_bits(b) || (is_nan(a) && is_nan(b)); };
        const u32 n = members.size();
        for (u32 rank = 0; rank < n; rank++) {
            require(x[rank].intact() && residual[rank].intact() && y[rank].intact(), "bytes beside a buffer", seed);
            require(mean[rank].intact() && rstd[rank].intact(), "bytes beside the statistics", seed);
            for (u64 row = 0; row < plan.rows; row++) {
                std::vector<T> z(plan.cols);
                for (u32 c = 0; c < plan.cols; c++) {
                    const u64 i = row * plan.cols + c;
                    f32 acc = wide(given[0][i]);
                    for (u32 k = 1; k < n; k++) acc += wide(given[k][i]);
                    z[c] = narrow<T>(wide(before[rank][i]) + wide(narrow<T>(acc)));
                    require(same(z[c], residual[rank].at()[i]), "a residual", seed);
                }
                const f32 mean_of = plan.layer ? sum([&](u32 i) { return wide(z[i]); }) / (f32)plan.cols : 0.0f;
                const auto square = [&](u32 i) { return (wide(z[i]) - mean_of) * (wide(z[i]) - mean_of); };
                const f32 by = 1.0f / sqrtf(sum(square) / (f32)plan.cols + plan.eps);
                const f32 by_found = rstd[rank].at()[row];
                require(by_found == by || (is_nan(by_found) && is_nan(by)), "a deviation", seed);
                for (u32 c = 0; c < plan.cols; c++) {
                    const f32 v = (wide(z[c]) - mean_of) * by * wide(gamma.at()[c]);
                    const T want = narrow<T>(plan.layer ? v + wide(beta.at()[c]) : v);
                    require(same(want, found[rank][row * plan.cols + c]), "a norm", seed);
                }
            }
            const auto all = [](Array<T>& array, f32 x) {
                for (u64 i = 0; i < array.n; i++) {
                    if (to_bits(array.at()[i]) != to_bits(narrow<T>(x))) return false;
                }
                return true;
            };
            require(all(x[rank], 88.0f) && all(y[rank], 99.0f), "a write after the call", seed);
        }
    }
};

#ifdef FAMILY_norm_pull
#define NORM(T) norm_pull_##T
#define MANY(T) norm_pull_##T
#else
#define NORM(T) norm_inbox_##T
#define MANY(T) norm_inbox_many_##T
#endif
static const auto kernel_of(f32*, bool two) { return two ? NORM(f32) : MANY(f32); }
static const auto kernel_of(f16*, bool two) { return two ? NORM(f16) : MANY(f16); }
static const auto kernel_of(bf16*, bool two) { return two ? NORM(bf16) : MANY(bf16); }

template <class T> void Call<T>::start(World& world, u32 rank, u64 place) {
    const u32 n = members.size();
    Machine& machine = *world.machines[members[rank]];
    Meet meet = {machine.signals, 0, place, DEADLINE, n, rank, 0};
    for (u32 k = 0; k < n; k++) meet.members |= (u64)members[k] << 4 * k;
    f32* const mean_at = plan.layer ? mean[rank].at() : nullptr;
    const T* const beta_at = plan.layer ? beta.at() : nullptr;
#ifdef FAMILY_norm_pull
    Eight by[4] = {};
    for (u32 k = 0; k < n; k++) {
        by[k / 8].x[k % 8] = (u64)x[k].at();
        by[2 + k / 8].x[k % 8] = (u64)result(k);
    }
    const auto kernel = [=, this] {
        kernel_of((T*)0, n == 2)(meet, plan, residual[rank].at(), gamma.at(), beta_at, mean_at, rstd[rank].at(), by[0], by[1],
                         by[2], by[3]);
    };
#else
    const auto kernel = [=, this] {
        kernel_of((T*)0, n == 2)(meet, plan, x[rank].at(), residual[rank].at(), gamma.at(), beta_at, result(rank), mean_at,
                         rstd[rank].at());
    };
#endif
    machine.queue.push_back([this, rank] { come(rank); });
    machine.queue.push_back([&machine, kernel, grid = blocks, width = threads * spread / plan.split] {
        for (u32 b = 0; b < grid; b++) machine.blocks[b]->begin(grid, kernel, width);
    });
    machine.queue.push_back([this, rank] { go(rank); });
}

template <class T>
static std::unique_ptr<AnyCall> queued(World& world, const std::vector<u32>& members, u64 place) {
    auto call = std::make_unique<Call<T>>(members, world.threads);
    for (u32 rank = 0; rank < members.size(); rank++) call->start(world, rank, place);
    return call;
}

int main(int argc, char** argv) {
    return each_world(argc > 1 ? atoi(argv[1]) : 120, [](World& world, const std::vector<u32>& members, u64 place) {
        switch (random_number() % 3) {
        case 0: return queued<f32>(world, members, place);
        case 1: return queued<f16>(world, members, place);
        default: return queued<bf16>(world, members, place);
        }
    });
}
