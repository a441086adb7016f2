// A step of an optimizer: from gradients to parameters. For `optimizer.cu`, which updates a bucket, and for
// `sharded.cu`, which also adds the gradients up and sends the parameters.
//
// The parameter's own bits count: where `master` does not round to them, it is out of date (at the first step, or since
// somebody has written the parameter), and the parameter takes its place.
//
// Formulas: PyTorch's SGD, Adam and AdamW (torch.optim 2.x, `foreach` and `fused`, which agree), and
// `torch.nn.utils.clip_grad_norm_`. Every element is computed by itself, so the bits do not depend on the launch
// dimensions, nor on which device has which part. The sums of squares have a fixed order: the chunks of a bucket do not
// depend on its parts, and a chunk's sum is a tree over its batches (`tree_of`).
#pragma once
#include "lanes.cuh"
#include "segments.cuh"

// Elements of a sum of squares; those of them that a warp has in hand at once, 8 in each lane.
const u32 CHUNK = 2048;
const u32 BATCH = 256, BATCHES = CHUNK / BATCH;

// NOTHING: everything stays as it is.
enum Kind : u32 { SGD, MOMENTUM, ADAM, NOTHING };

struct Rule {
    u32 kind, nesterov, gather;
    // What gradients are multiplied with, before they are clipped; the norm is of gradients without it.
    f32 factor;
    // 0: not clipped.
    f32 most;
    // Added to the gradient, times the parameter.
    f32 decay;
    // What the parameter is multiplied with first (AdamW).
    f32 shrink;
    f32 beta1, rest1, beta2, rest2;
    // The learning rate; of Adam over 1 - beta1^t.
    f32 rate;
    // The root of 1 - beta2^t.
    f32 root;
    f32 eps;
};

// The moments, and the parameters in f32. Each has an element for the elements of a bucket from `begin` on, also for
// those between segments, or is null. It is aligned to 16 bytes, and so is every pack of a bucket, relative to `begin`.
struct State {
    f32 *first, *second, *master;
    u64 begin;
};

// Elements that are moved at once, of N.
template <class T, u32 N> constexpr u32 AT_ONCE = 16 / sizeof(T) < N ? 16 / sizeof(T) : N;

// N elements at p, which is aligned for that.
template <class T, u32 N> __device__ inline void load_all(const T* p, T (&x)[N]) {
    const u32 E = AT_ONCE<T, N>;
#pragma unroll
    for (u32 at = 0; at < N; at += E) {
        const Chunk<T, E> pack = *reinterpret_cast<const Chunk<T, E>*>(p + at);
#pragma unroll
        for (u32 k = 0; k < E; k++) x[at + k] = pack.lane[k];
    }
}

template <class T, u32 N> __device__ inline void store_all(T* p, const T (&x)[N]) {
    const u32 E = AT_ONCE<T, N>;
#pragma unroll
    for (u32 at = 0; at < N; at += E) {
        Chunk<T, E> pack;
#pragma unroll
        for (u32 k = 0; k < E; k++) pack.lane[k] = x[at + k];
        *reinterpret_cast<Chunk<T, E>*>(p + at) = pack;
    }
}

// The first `most` of N elements at p, which may be anywhere.
template <class T, u32 N> __device__ inline void load(const T* p, u32 most, T (&x)[N]) {
    if (most == N && (u64)p % (AT_ONCE<T, N> * sizeof(T)) == 0) return load_all(p, x);
#pragma unroll
    for (u32 k = 0; k < N; k++)
        if (k < most) x[k] = p[k];
}

template <class T, u32 N> __device__ inline void store(T* p, u32 most, const T (&x)[N]) {
    if (most == N && (u64)p % (AT_ONCE<T, N> * sizeof(T)) == 0) return store_all(p, x);
#pragma unroll
    for (u32 k = 0; k < N; k++)
        if (k < most) p[k] = x[k];
}

__device__ inline bool is_finite(f32 x) { return fabsf(x) <= 3.402823466e38f; }

// Whether a step with gradients of this norm changes anything.
__device__ inline bool changes(const Rule& rule, f32 norm) { return rule.kind != NOTHING && is_finite(norm); }

// What gradients of this norm are multiplied with.
__device__ inline f32 scale_of(const Rule& rule, f32 norm) {
    if (rule.most > 0.0f) {
        const f32 clip = rule.most / (norm * rule.factor + 1e-6f);
        if (clip < 1.0f) return rule.factor * clip;
    }
    return rule.factor;
}

__device__ inline f32 stepped(u32 kind, const Rule& rule, f32 scale, f32 g, f32 w, f32& first, f32& second) {
    g *= scale;
    w *= rule.shrink;
    if (rule.decay != 0.0f) g += rule.decay * w;
    if (kind == SGD) return w - rule.rate * g;
    if (kind == MOMENTUM) {
        first = rule.beta1 * first + rule.rest1 * g;
        return w - rule.rate * (rule.nesterov ? g + rule.beta1 * first : first);
    }
    first = first + (g - first) * rule.rest1;
    second = rule.beta2 * second + rule.rest2 * (g * g);
    return w - rule.rate * (first / (sqrtf(second) / rule.root + rule.eps));
}

// `most` parameters at `place`, whose gradients are at element i of the bucket, with their state. Loads, the step and
// stores are apart, so that the loads of many are on their way at once.
template <class T, u32 N> struct Elements {
    T own[N];
    f32 m[N], v[N], w[N];

    __device__ void load_from(const State& state, u64 i, u32 most, const T* place) {
        const u64 at = i - state.begin;
        load(place, most, own);
        if (state.first != nullptr) load_all(state.first + at, m);
        if (state.second != nullptr) load_all(state.second + at, v);
        if (state.master != nullptr) load_all(state.master + at, w);
    }

    // One branch for all elements, where all are there.
    __device__ void step(const State& state, const Rule& rule, f32 scale, u32 most, const T (&grad)[N]) {
        if (most < N) step_by(rule.kind, state, rule, scale, most, grad);
        else if (rule.kind == SGD) step_by(SGD, state, rule, scale, N, grad);
        else if (rule.kind == MOMENTUM) step_by(MOMENTUM, state, rule, scale, N, grad);
        else step_by(ADAM, state, rule, scale, N, grad);
    }

    __device__ void step_by(u32 kind, const State& state, const Rule& rule, f32 scale, u32 most,
                            const T (&grad)[N]) {
#pragma unroll
        for (u32 e = 0; e < N; e++) {
            if (e >= most) continue;
            if (state.master == nullptr || to_bits(narrow<T>(w[e])) != to_bits(own[e])) w[e] = wide(own[e]);
            w[e] = stepped(kind, rule, scale, wide(grad[e]), w[e], m[e], v[e]);
            own[e] = narrow<T>(w[e]);
        }
    }

    __device__ void store_to(const State& state, u64 i, u32 most, T* place) const {
        const u64 at = i - state.begin;
        store(place, most, own);
        if (state.first != nullptr) store_all(state.first + at, m);
        if (state.second != nullptr) store_all(state.second + at, v);
        if (state.master != nullptr) store_all(state.master + at, w);
    }
};

// Updates them, if anything changes. `own` are then the parameters.
template <class T, u32 N>
__device__ inline void update_pack(const State& state, const Rule& rule, bool changes, f32 scale, u64 i, u32 most,
                                   T* place, const T (&grad)[N], T (&own)[N]) {
    Elements<T, N> pack = {};
    pack.load_from(state, i, most, place);
    if (changes) {
        pack.step(state, rule, scale, most, grad);
        pack.store_to(state, i, most, place);
    }
#pragma unroll
    for (u32 e = 0; e < N; e++) own[e] = pack.own[e];
}

// The squares of 16 bytes of gradients, in order.
template <class T> __device__ inline f64 add_squares(f64 sum, const uint4& unit) {
#pragma unroll
    for (u32 k = 0; k < 16 / sizeof(T); k++) {
        const f64 x = (f64)wide(lane<T>(unit, k));
        sum += x * x;
    }
    return sum;
}

// A warp's sum, the same in all its lanes. A lane has the sum of every 32nd unit of 16 bytes of a batch.
__device__ inline f64 warp_sum(f64 sum) {
#pragma unroll
    for (u32 other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    return sum;
}

// The sum of a chunk from those of its batches.
__device__ inline f64 tree_of(const f64 (&batch)[BATCHES]) {
    f64 sum[BATCHES];
#pragma unroll
    for (u32 k = 0; k < BATCHES; k++) sum[k] = batch[k];
#pragma unroll
    for (u32 width = BATCHES / 2; width > 0; width /= 2) {
#pragma unroll
        for (u32 k = 0; k < width; k++) sum[k] = sum[2 * k] + sum[2 * k + 1];
    }
    return sum[0];
}
