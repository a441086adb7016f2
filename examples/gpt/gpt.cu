// The kernels of examples/gpt: heads of attention apart and together, and softmax of the words before each word. Their
// Rust halves are in kernels.rs.
//
//   split_heads_T              (const T* x, const T* bias, T* y, u64 rows, u32 context, u32 heads, u32 head, u32 parts,
//                               u32 biased)
//            y[part][sequence][head][place] = x[sequence][place][part][head] (+ bias[part][head]), `head` elements each
//   merge_heads_T              (const T* x, T* y, u64 rows, u32 context, u32 heads, u32 head, u32 parts)
//            the way back, without a bias
//   causal_softmax_T           (T* x, u64 rows, u32 context, u32 block)
//            x is rows of `context` elements. Row r belongs to the place r % context of its sequence, and is a softmax
//            of the elements up to this place. The others up to the end of the place's block become 0; those behind the
//            block are not touched.
//   causal_softmax_backward_T  (const T* y, T* dy, u64 rows, u32 context, u32 block)
//            dy = y * (dy - sum of dy * y), up to the end of the block of the row's place
//
// T is f32 or bf16. All arithmetic is in f32, and rounds once when it is stored. `context`, `block` and `head` are
// multiples of 8, and all addresses of 16 bytes: there are only whole packs. `rows` is less than 2^32. The softmax has
// blocks of (32, n) threads: a warp for each row.
#include "rows.cuh"

namespace {

// Calls `f(divided, whole, column)` for each pack: the place of its first element in both orders, and in the bias. A
// block has places of one head of one sequence, and so few divisions.
template <class T, class F>
__device__ inline void each_part(u64 rows, u32 context, u32 heads, u32 head, u32 parts, F f) {
    const u32 packs = head / LANES<T>, sequences = (u32)rows / context, width = heads * head;
    for (u32 z = blockIdx.z; z < sequences * parts; z += gridDim.z) {
        const u32 part = z / sequences, sequence = z % sequences;
        for (u32 h = blockIdx.y; h < heads; h += gridDim.y) {
            for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < context * packs; i += gridDim.x * blockDim.x) {
                const u32 place = i / packs, at = i % packs * LANES<T>, column = part * width + h * head + at;
                const u64 row = (u64)sequence * context + place;
                f(((u64)(z * heads + h) * context + place) * head + at, row * (parts * width) + column, column);
            }
        }
    }
}

template <class T> __device__ inline uint4 pack_at(const T* x, u64 at) { return *(const uint4*)(x + at); }

template <class T>
__device__ inline void split(const T* x, const T* bias, T* y, u64 rows, u32 context, u32 heads, u32 head, u32 parts,
                             u32 biased) {
    each_part<T>(rows, context, heads, head, parts, [&](u64 divided, u64 whole, u32 column) {
        uint4 pack = pack_at(x, whole);
        if (biased) {
            const uint4 b = pack_at(bias, column);
            pack = pack_of<T>([&](u32 k) { return wide(lane<T>(pack, k)) + wide(lane<T>(b, k)); });
        }
        *(uint4*)(y + divided) = pack;
    });
}

template <class T>
__device__ inline void merge(const T* x, T* y, u64 rows, u32 context, u32 heads, u32 head, u32 parts) {
    each_part<T>(rows, context, heads, head, parts,
                 [&](u64 divided, u64 whole, u32) { *(uint4*)(y + whole) = pack_at(x, divided); });
}

__device__ inline u32 block_end(u32 place, u32 block) { return (place / block + 1) * block; }

// FITS: all packs of a row are in registers.
template <bool FITS, class T> __device__ inline void causal(T* x, u64 rows, u32 context, u32 block) {
    typedef Acc<T> A;
    each_row(rows, [&](u64 row) {
        const u32 place = (u32)(row % context), end = block_end(place, block);
        T* at = x + row * context;
        const Row<T, FITS> in(at, 0, end);
        A top = -infinity<A>();
        each_pack<T, FITS>(end, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++)
                if (p + i <= place) top = larger(top, wide(lane<T>(pack, i)));
        });
        top = max_across(top);
        A sum = 0;
        each_pack<T, FITS>(end, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++)
                if (p + i <= place) sum += exp_of(wide(lane<T>(pack, i)) - top);
        });
        const A factor = A(1) / sum_across(sum);
        each_pack<T, FITS>(end, [&](u32 p, u32 k) {
            const uint4 pack = in.pack(p, k);
            *(uint4*)(at + p) = pack_of<T>([&](u32 i) {
                return p + i <= place ? exp_of(wide(lane<T>(pack, i)) - top) * factor : A(0);
            });
        });
    });
}

template <bool FITS, class T>
__device__ inline void causal_backward(const T* y, T* dy, u64 rows, u32 context, u32 block) {
    typedef Acc<T> A;
    each_row(rows, [&](u64 row) {
        const u32 end = block_end((u32)(row % context), block);
        T* at = dy + row * context;
        const Row<T, FITS> out(y + row * context, 0, end), d(at, 0, end);
        A sum = 0;
        each_pack<T, FITS>(end, [&](u32 p, u32 k) {
            const uint4 a = out.pack(p, k), b = d.pack(p, k);
#pragma unroll
            for (u32 i = 0; i < LANES<T>; i++) sum += wide(lane<T>(b, i)) * wide(lane<T>(a, i));
        });
        sum = sum_across(sum);
        each_pack<T, FITS>(end, [&](u32 p, u32 k) {
            const uint4 a = out.pack(p, k), b = d.pack(p, k);
            *(uint4*)(at + p) =
                pack_of<T>([&](u32 i) { return wide(lane<T>(a, i)) * (wide(lane<T>(b, i)) - sum); });
        });
    });
}

template <class T> __device__ inline bool row_fits(u32 context) {
    return context <= KEPT * blockDim.x * LANES<T>;
}

} // namespace

#define GPT(T)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) split_heads_##T(                                                 \
        const T* x, const T* bias, T* y, u64 rows, u32 context, u32 heads, u32 head, u32 parts, u32 biased) {          \
        split(x, bias, y, rows, context, heads, head, parts, biased);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) merge_heads_##T(const T* x, T* y, u64 rows, u32 context,         \
                                                                      u32 heads, u32 head, u32 parts) {                \
        merge(x, y, rows, context, heads, head, parts);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) causal_softmax_##T(T* x, u64 rows, u32 context, u32 block) {     \
        if (row_fits<T>(context)) causal<true>(x, rows, context, block);                                               \
        else causal<false>(x, rows, context, block);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) causal_softmax_backward_##T(const T* y, T* dy, u64 rows,         \
                                                                                  u32 context, u32 block) {            \
        if (row_fits<T>(context)) causal_backward<true>(y, dy, rows, context, block);                                  \
        else causal_backward<false>(y, dy, rows, context, block);                                                      \
    }

GPT(f32)
GPT(bf16)
