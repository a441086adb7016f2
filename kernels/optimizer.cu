// Optimizers: the steps from gradients to parameters, one launch for each bucket of gradients.
//
//   squares_<T>  (const T* g, f64* partial, u64 n)
//       partial[c] = the sum of the squares of g[2048 c .. 2048 (c + 1)), up to n
//   update_<T>   (T* g, f32* first, f32* second, f32* master, const f32* norm, u64 begin, u32 count, Rule rule,
//                 Eight s0..s7, l0..l7, a0..a7)
//       for each segment of the table, for j < l:  w = a[j] becomes the new parameter, from the gradient g[s + j]
//
// T is the parameters' type: f32 f16 bf16. Computations are in f32. `first` and `second` are the moments, `master` the
// parameters in f32; each has an element for the elements of g from `begin` on, or is null. With `Rule.gather` the new
// parameters are also written to g.
//
// The parameter's own bits count: where `master` does not round to them, it is out of date (at the first step, or since
// somebody has written the parameter), and the parameter takes its place.
//
// If `norm`, the norm of all gradients, is not finite, nothing changes.
//
// Formulas: PyTorch's SGD, Adam and AdamW (torch.optim 2.x, `foreach` and `fused`, which agree), and
// `torch.nn.utils.clip_grad_norm_`. Every element is computed by itself, so the bits do not depend on the launch
// dimensions, nor on which device has which part. The sums of squares have a fixed order: the chunks of a bucket do not
// depend on its parts.
//
// A host launch may have further arguments: the memory of the segments, for software GPUs.
#include "segments.cuh"

const u32 CHUNK = 2048;
// Elements that a thread handles at once. Segments begin at multiples.
const u32 PACK = 4;

enum Kind : u32 { SGD, MOMENTUM, ADAM };

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

template <class T> struct alignas(PACK * sizeof(T)) Pack {
    T x[PACK];
};

// The first `most` elements at p; whole packs at once, where p is aligned.
template <class T> __device__ inline void load(const T* p, u32 most, T (&x)[PACK]) {
    if (most == PACK && ((u64)p & (sizeof(Pack<T>) - 1)) == 0) {
        const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(p);
#pragma unroll
        for (u32 k = 0; k < PACK; k++) x[k] = pack.x[k];
        return;
    }
#pragma unroll
    for (u32 k = 0; k < PACK; k++)
        if (k < most) x[k] = p[k];
}

template <class T> __device__ inline void store(T* p, u32 most, const T (&x)[PACK]) {
    if (most == PACK && ((u64)p & (sizeof(Pack<T>) - 1)) == 0) {
        Pack<T> pack;
#pragma unroll
        for (u32 k = 0; k < PACK; k++) pack.x[k] = x[k];
        *reinterpret_cast<Pack<T>*>(p) = pack;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < PACK; k++)
        if (k < most) p[k] = x[k];
}

__device__ inline u32 bits(f32 x) { return __float_as_uint(x); }
__device__ inline u32 bits(f16 x) { return x.bits; }
__device__ inline u32 bits(bf16 x) { return x.bits; }

__device__ inline f32 next(const Rule& rule, f32 scale, f32 g, f32 w, f32& first, f32& second) {
    g *= scale;
    w *= rule.shrink;
    if (rule.decay != 0.0f) g += rule.decay * w;
    if (rule.kind == SGD) return w - rule.rate * g;
    if (rule.kind == MOMENTUM) {
        first = rule.beta1 * first + rule.rest1 * g;
        return w - rule.rate * (rule.nesterov ? g + rule.beta1 * first : first);
    }
    first = first + (g - first) * rule.rest1;
    second = rule.beta2 * second + rule.rest2 * (g * g);
    return w - rule.rate * (first / (sqrtf(second) / rule.root + rule.eps));
}

template <class T>
__device__ inline void update(T* g, f32* first, f32* second, f32* master, f32 norm, u64 begin, const Table& table,
                              u32 count, const Rule& rule) {
    const bool finite = fabsf(norm) <= 3.402823466e38f;
    f32 scale = rule.factor;
    if (rule.most > 0.0f) {
        const f32 clip = rule.most / (norm * rule.factor + 1e-6f);
        if (clip < 1.0f) scale *= clip;
    }
    const u64 from = table.start[0], end = table.start[count - 1] + table.len[count - 1], step = PACK * grid_size();
    for (u64 i = from + PACK * grid_index(); i < end; i += step) {
        const u32 k = segment_of(table, count, i);
        const u64 j = i - table.start[k], len = table.len[k];
        if (j >= len) continue;
        const u32 most = len - j < PACK ? (u32)(len - j) : PACK;
        T* place = reinterpret_cast<T*>(table.place[k]) + j;
        T grad[PACK], own[PACK];
        f32 m[PACK] = {}, v[PACK] = {}, w[PACK] = {};
        load(g + i, most, grad);
        load(place, most, own);
        if (first != nullptr) load(first + (i - begin), most, m);
        if (second != nullptr) load(second + (i - begin), most, v);
        if (master != nullptr) load(master + (i - begin), most, w);
#pragma unroll
        for (u32 e = 0; e < PACK; e++) {
            if (e >= most) continue;
            if (master == nullptr || bits(narrow<T>(w[e])) != bits(own[e])) w[e] = wide(own[e]);
            if (finite) {
                w[e] = next(rule, scale, wide(grad[e]), w[e], m[e], v[e]);
                own[e] = narrow<T>(w[e]);
            }
        }
        if (rule.gather) store(g + i, most, own);
        if (!finite) continue;
        store(place, most, own);
        if (first != nullptr) store(first + (i - begin), most, m);
        if (second != nullptr) store(second + (i - begin), most, v);
        if (master != nullptr) store(master + (i - begin), most, w);
    }
}

template <class T> __device__ inline void squares(const T* g, f64* partial, u64 n) {
    for (u64 chunk = blockIdx.x; chunk * CHUNK < n; chunk += gridDim.x) {
        const u64 end = (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n;
        f64 sum = 0.0;
        for (u64 i = chunk * CHUNK + threadIdx.x; i < end; i += blockDim.x) {
            const f64 x = (f64)wide(g[i]);
            sum += x * x;
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) partial[chunk] = sum;
        __syncthreads();
    }
}

#define OPTIMIZER(T)                                                                                               \
    extern "C" __global__ void squares_##T(const T* g, f64* partial, u64 n) { squares<T>(g, partial, n); }         \
    extern "C" __global__ void update_##T(T* g, f32* first, f32* second, f32* master, const f32* norm, u64 begin,  \
                                          u32 count, Rule rule, EIGHTS(s), EIGHTS(l), EIGHTS(a)) {                 \
        __shared__ Table table;                                                                                    \
        fill_table(table, LIST(s), LIST(l), LIST(a));                                                              \
        update<T>(g, first, second, master, *norm, begin, table, count, rule);                                     \
    }

OPTIMIZER(f32)
OPTIMIZER(f16)
OPTIMIZER(bf16)
