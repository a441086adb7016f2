// Operations on the rows of a row-major matrix: softmax, cross-entropy, norms, argmax.
//
//   softmax_T              (const T* x, T* y, u64 rows, u32 cols, u32 log)
//   softmax_backward_T     (const T* y, const T* dy, T* dx, u64 rows, u32 cols, u32 log)
//   cross_entropy_T        (const T* x, const u32* labels, T* dx, A* loss, u64 rows, u32 cols, A scale)
//   layer_norm_T           (const T* x, const T* gamma, const T* beta, T* y, A* mean, A* rstd, u64 rows, u32 cols,
//                           A eps)
//   layer_norm_backward_T  (const T* dy, const T* x, const T* gamma, const A* mean, const A* rstd, T* dx,
//                           u64 rows, u32 cols)
//   rms_norm_T, rms_norm_backward_T   the same without beta and mean
//   argmax_T               (const T* x, u32* at, u64 rows, u32 cols)
//
// T is f32, f64, f16 or bf16; A is f64 for f64, else f32. All arithmetic is in A, and rounds once when it is stored.
//
// rows.cuh says which threads work on a row, and why its bits depend on nothing else.
//
// The output of a row operation may be its input: all reads of an element that is to be written come before the last
// meeting of the row's threads, or are by the thread that writes it.
#include "rows.cuh"

// FITS: all packs of all rows are whole, aligned and in registers. Then the code is unrolled and has no ends to look
// after. f64 does without: its code is the largest.
#define BY_FIT(T, bits, CALL, ...)                                                                                     \
    if constexpr (sizeof(T) < 8) {                                                                                     \
        if (fits<T>(cols, bits)) return CALL<true>(__VA_ARGS__);                                                       \
    }                                                                                                                  \
    CALL<false>(__VA_ARGS__);

// `bits` is the union of all addresses.
template <class T> __device__ inline bool fits(u32 cols, u64 bits) {
    return bits % 16 == 0 && cols % LANES<T> == 0 && cols <= KEPT * blockDim.x * LANES<T>;
}

// A flag that is a type, so that a call need not name it before its other types.
template <bool VALUE> struct Flag {};

template <bool FITS, class T> __device__ inline void store_row(T* y, u64 row, u32 cols, u32 p, uint4 pack) {
    T* at = y + row * cols;
    if (FITS) *(uint4*)(at + p) = pack;
    else store_pack(at, p, cols, is_aligned(at), pack);
}

// A pack of what all rows have in common.
template <bool FITS, class T> __device__ inline uint4 load_common(const T* x, u32 p, u32 cols, bool whole) {
    return FITS ? *(const uint4*)(x + p) : load_pack(x, p, cols, whole);
}

// The greatest element of a row, and the sum of the exponentials of the differences to it: one pass ("online softmax",
// Milakov and Gimelshein, 2018). An element that is NaN or +infinity makes the sum NaN; so does a row of -infinity in
// what is computed from it.
template <class T, bool FITS> __device__ inline Two<Acc<T>> top_and_sum(const Row<T, FITS>& x) {
    typedef Acc<T> A;
    A top = -infinity<A>(), sum = 0;
    const auto finite = [](A top) { return top == -infinity<A>() ? A(0) : top; };
    each_pack<T, FITS>(x.cols, [&](u32 p, u32 k) {
        const uint4 pack = x.pack(p, k);
        A next = top;
#pragma unroll
        for (u32 i = 0; i < LANES<T>; i++)
            if (x.has(p, i)) next = larger(next, wide(lane<T>(pack, i)));
        const A shift = finite(next);
        sum *= exp_of(top - shift);
        top = next;
#pragma unroll
        for (u32 i = 0; i < LANES<T>; i++)
            if (x.has(p, i)) sum += exp_of(wide(lane<T>(pack, i)) - shift);
    });
    const A all = max_across(top);
    return {all, sum_across(sum * exp_of(top - finite(all)))};
}

template <bool FITS, class T> __device__ inline void softmax(const T* x, T* y, u64 rows, u32 cols, u32 log) {
    typedef Acc<T> A;
    each_row(rows, [&](u64 row) {
        const Row<T, FITS> in(x, row, cols);
        const Two<A> found = top_and_sum(in);
        const A top = found.a, factor = A(1) / found.b, shift = log ? log_of(found.b) : A(0);
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
            const auto of = [&](u32 i) {
                const A v = wide(lane<T>(pack, i)) - top;
                return log ? v - shift : exp_of(v) * factor;
            };
            store_row<FITS>(y, row, cols, p, pack_of<T>(of));
        });
    });
}

template <bool FITS, class T>
__device__ inline void softmax_backward(const T* y, const T* dy, T* dx, u64 rows, u32 cols, u32 log) {
    typedef Acc<T> A;
    each_row(rows, [&](u64 row) {
        const Row<T, FITS> out(y, row, cols), d(dy, row, cols);
        A sum = 0;
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 a = out.pack(p, k), b = d.pack(p, k);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++) {
                const A v = wide(lane<T>(b, i));
                sum += log ? v : v * wide(lane<T>(a, i));
            }
        });
        sum = sum_across(sum);
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 a = out.pack(p, k), b = d.pack(p, k);
            store_row<FITS>(dx, row, cols, p, pack_of<T>([&](u32 i) {
                const A v = wide(lane<T>(a, i)), g = wide(lane<T>(b, i));
                return log ? g - exp_of(v) * sum : v * (g - sum);
            }));
        });
    });
}

// dx = (softmax(x) - one at the label) * scale and loss = -log(softmax(x)[label]). A label that is no column makes both
// NaN. `dx` may be null: then there is only the loss.
template <bool FITS, class T>
__device__ inline void cross_entropy(const T* x, const u32* labels, T* dx, Acc<T>* loss, u64 rows, u32 cols,
                                     Acc<T> scale) {
    typedef Acc<T> A;
    each_row(rows, [&](u64 row) {
        const Row<T, FITS> in(x, row, cols);
        const u32 label = labels[row];
        const bool known = label < cols;
        const A there = known ? wide(x[row * cols + label]) : nan<A>();
        const Two<A> found = top_and_sum(in);
        const A top = found.a, factor = known ? A(1) / found.b : nan<A>();
        if (threadIdx.x == 0) loss[row] = log_of(found.b) - (there - top);
        if (!dx) return;
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
            store_row<FITS>(dx, row, cols, p, pack_of<T>([&](u32 i) {
                const A share = exp_of(wide(lane<T>(pack, i)) - top) * factor;
                return (p + i == label ? share - A(1) : share) * scale;
            }));
        });
    });
}

// y = (x - mean) / sqrt(variance + eps) * gamma + beta. MEAN: of the layer norm; the RMS norm has no mean and no beta.
template <bool FITS, bool MEAN, class T>
__device__ inline void norm(Flag<MEAN>, const T* x, const T* gamma, const T* beta, T* y, Acc<T>* mean_of,
                            Acc<T>* rstd_of, u64 rows, u32 cols, Acc<T> eps) {
    const bool whole = aligned16(gamma, beta);
    each_row(rows, [&](u64 row) {
        const Row<T, FITS> in(x, row, cols);
        const Two<Acc<T>> stats = norm_stats<MEAN>(in, eps);
        if (threadIdx.x == 0) {
            if (MEAN) mean_of[row] = stats.a;
            rstd_of[row] = stats.b;
        }
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 g = load_common<FITS>(gamma, p, cols, whole);
            const uint4 b = MEAN ? load_common<FITS>(beta, p, cols, whole) : make_uint4(0, 0, 0, 0);
            store_row<FITS>(y, row, cols, p, normed<MEAN, T>(in.pack(p, k), stats, g, b));
        });
    });
}

// With h = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - mean of g - h * (mean of g * h)).
template <bool FITS, bool MEAN, class T>
__device__ inline void norm_backward(Flag<MEAN>, const T* dy, const T* x, const T* gamma, const Acc<T>* mean_of,
                                     const Acc<T>* rstd_of, T* dx, u64 rows, u32 cols) {
    typedef Acc<T> A;
    const bool whole = is_aligned(gamma);
    each_row(rows, [&](u64 row) {
        const Row<T, FITS> d(dy, row, cols), in(x, row, cols);
        const A mean = MEAN ? mean_of[row] : A(0), rstd = rstd_of[row];
        A sum = 0, product = 0;
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 a = d.pack(p, k), b = in.pack(p, k), c = load_common<FITS>(gamma, p, cols, whole);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++) {
                // Beyond the row, dy and gamma are zeros.
                const A g = wide(lane<T>(a, i)) * wide(lane<T>(c, i));
                sum += g;
                product += g * ((wide(lane<T>(b, i)) - mean) * rstd);
            }
        });
        const Two<A> sums = sums_across(sum, product);
        const A first = MEAN ? sums.a / A(cols) : A(0), second = sums.b / A(cols);
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 a = d.pack(p, k), b = in.pack(p, k), c = load_common<FITS>(gamma, p, cols, whole);
            store_row<FITS>(dx, row, cols, p, pack_of<T>([&](u32 i) {
                const A g = wide(lane<T>(a, i)) * wide(lane<T>(c, i));
                return rstd * (g - first - (wide(lane<T>(b, i)) - mean) * rstd * second);
            }));
        });
    });
}

// The first of the greatest elements; a NaN is greater than all.
template <bool FITS, class T> __device__ inline void argmax(const T* x, u32* at, u64 rows, u32 cols) {
    typedef Acc<T> A;
    const auto better = [](Found<A> p, Found<A> q) {
        const bool p_nan = p.value != p.value, q_nan = q.value != q.value;
        const bool equal = (p_nan && q_nan) || p.value == q.value;
        const bool first = equal ? p.at < q.at : p_nan || (!q_nan && p.value > q.value);
        return first ? p : q;
    };
    each_row(rows, [&](u64 row) {
        const Row<T, FITS> in(x, row, cols);
        // A thread without elements: after all others.
        Found<A> best = {-infinity<A>(), ~0u};
        each_pack<T, FITS>(cols, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++)
                if (in.has(p, i)) best = better(best, {wide(lane<T>(pack, i)), p + i});
        });
        best = across(best, better);
        if (threadIdx.x == 0) at[row] = best.at;
    });
}

#define ROWS(T, A)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(1024) softmax_##T(const T* x, T* y, u64 rows, u32 cols, u32 log) {    \
        BY_FIT(T, (u64)x | (u64)y, softmax, x, y, rows, cols, log)                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) softmax_backward_##T(const T* y, const T* dy, T* dx, u64 rows,  \
                                                                            u32 cols, u32 log) {                       \
        BY_FIT(T, (u64)y | (u64)dy | (u64)dx, softmax_backward, y, dy, dx, rows, cols, log)                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) cross_entropy_##T(                                              \
        const T* x, const u32* labels, T* dx, A* loss, u64 rows, u32 cols, A scale) {                                  \
        BY_FIT(T, (u64)x | (u64)dx, cross_entropy, x, labels, dx, loss, rows, cols, scale)                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) layer_norm_##T(                                                 \
        const T* x, const T* gamma, const T* beta, T* y, A* mean, A* rstd, u64 rows, u32 cols, A eps) {                \
        BY_FIT(T, (u64)x | (u64)gamma | (u64)beta | (u64)y, norm, Flag<true>(), x, gamma, beta, y, mean, rstd, rows,   \
               cols, eps)                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_##T(const T* x, const T* gamma, T* y, A* rstd,         \
                                                                    u64 rows, u32 cols, A eps) {                       \
        BY_FIT(T, (u64)x | (u64)gamma | (u64)y, norm, Flag<false>(), x, gamma, gamma, y, (A*)nullptr, rstd, rows,      \
               cols, eps)                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) layer_norm_backward_##T(                                        \
        const T* dy, const T* x, const T* gamma, const A* mean, const A* rstd, T* dx, u64 rows, u32 cols) {            \
        BY_FIT(T, (u64)dy | (u64)x | (u64)gamma | (u64)dx, norm_backward, Flag<true>(), dy, x, gamma, mean, rstd, dx,  \
               rows, cols)                                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_backward_##T(                                          \
        const T* dy, const T* x, const T* gamma, const A* rstd, T* dx, u64 rows, u32 cols) {                           \
        BY_FIT(T, (u64)dy | (u64)x | (u64)gamma | (u64)dx, norm_backward, Flag<false>(), dy, x, gamma,                 \
               (const A*)nullptr, rstd, dx, rows, cols)                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) argmax_##T(const T* x, u32* at, u64 rows, u32 cols) {           \
        BY_FIT(T, (u64)x, argmax, x, at, rows, cols)                                                                   \
    }

ROWS(f32, f32)
ROWS(f64, f64)
ROWS(f16, f32)
ROWS(bf16, f32)
