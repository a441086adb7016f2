// Buckets of gradients: packs segments to the wire type and unpacks them, by tables of segments; also sums the squares.
//
//   pack_<G>_<W>    (W* wire, u32 count, A factor, Column s0..s7, l0..l7, a0..a7)
//       wire[s + j] = a[j] * factor for j < l, 0 up to the segment's whole grains; all 0 where a is null
//   unpack_<G>_<W>  (const W* wire, f64* partial, u64 first, u64 n, u32 count, Column s0..s7, l0..l7, a0..a7)
//       a[j] = wire[s + j] for j < l, except where a is null; partial[block] = the sum of the squares of wire[first ..
//       first + n), unless partial is null
//   gradient_norm_<A>  (const f64* partial, A* out, u32 count)   one block: out = sqrt of the sum of all partials
//
// G is the gradients' type and W the wire's: f32_f32 f32_f16 f32_bf16 f64_f64 f64_f32 f16_f16 bf16_bf16. A is what G is
// computed in: f64 for f64, else f32.
//
// Segments are in ascending order and begin at whole grains: 8 elements for half types, else 4. 64 segments are passed
// as arguments, so a bucket needs one launch and no copy of its table. A host launch may have further arguments: the
// same memory again, for software GPUs.
//
// Bits: products and sums of squares are in f64, where a square of an f32 is exact. The elements of a thread depend on
// the launch dimensions and on first and n, not on the table: so devices with another layout of gradients get the same
// bits.
#include "segments.cuh"

// Loads in flight per thread: enough to hide the memory latency.
const u32 UNROLL = 4;

// Elements of G that a segment is rounded up to: 16 bytes, and never less than 4.
template <class G> __device__ inline u64 grains(u64 len) {
    const u64 grain = sizeof(G) == 2 ? 8 : 4;
    return (len + grain - 1) & ~(grain - 1);
}

template <class G, class W>
__device__ inline void pack(W* wire, const Table& table, u32 count, Accumulator<G> factor) {
    const u64 first = table.start[0], end = table.start[count - 1] + grains<G>(table.len[count - 1]);
    const u64 step = grid_size();
#pragma unroll 1
    for (u64 i = first + grid_index(); i < end; i += UNROLL * step) {
        Accumulator<G> value[UNROLL];
        bool here[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u64 at = i + u * step;
            value[u] = 0;
            here[u] = at < end;
            if (!here[u]) continue;
            const u32 k = segment_of(table, count, at);
            const u64 j = at - table.start[k], len = table.len[k];
            here[u] = j < grains<G>(len);
            if (j < len && table.place[k] != 0) value[u] = wide(reinterpret_cast<const G*>(table.place[k])[j]) * factor;
        }
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++)
            if (here[u]) wire[i + u * step] = narrow<W>(value[u]);
    }
}

template <class G, class W>
__device__ inline void unpack(const W* wire, f64* partial, u64 first, u64 n, const Table& table, u32 count) {
    const u64 step = grid_size(), end = first + n;
    f64 sum = 0.0;
#pragma unroll 1
    for (u64 i = first + grid_index(); i < end; i += UNROLL * step) {
        Accumulator<W> value[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) value[u] = i + u * step < end ? wide(wire[i + u * step]) : 0;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            sum += (f64)value[u] * (f64)value[u];
            const u64 at = i + u * step;
            if (count == 0 || at >= end || at < table.start[0]) continue;
            const u32 k = segment_of(table, count, at);
            const u64 j = at - table.start[k];
            if (j < table.len[k] && table.place[k] != 0) reinterpret_cast<G*>(table.place[k])[j] = narrow<G>(value[u]);
        }
    }
    if (partial == nullptr) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

#define BUCKET(G, W)                                                                                               \
    extern "C" __global__ void pack_##G##_##W(W* wire, u32 count, Accumulator<G> factor, EIGHTS(s), EIGHTS(l),     \
                                              EIGHTS(a)) {                                                         \
        __shared__ Table table;                                                                                    \
        fill_table(table, count, LIST(s), LIST(l), LIST(a));                                                       \
        __syncthreads();                                                                                           \
        pack<G, W>(wire, table, count, factor);                                                                    \
    }                                                                                                              \
    extern "C" __global__ void unpack_##G##_##W(const W* wire, f64* partial, u64 first, u64 n, u32 count,          \
                                                EIGHTS(s), EIGHTS(l), EIGHTS(a)) {                                 \
        __shared__ Table table;                                                                                    \
        fill_table(table, count, LIST(s), LIST(l), LIST(a));                                                       \
        __syncthreads();                                                                                           \
        unpack<G, W>(wire, partial, first, n, table, count);                                                       \
    }

BUCKET(f32, f32)
BUCKET(f32, f16)
BUCKET(f32, bf16)
BUCKET(f64, f64)
BUCKET(f64, f32)
BUCKET(f16, f16)
BUCKET(bf16, bf16)

__device__ inline void norm_of(f64 sum, f32* out) { *out = __double2float_rn(sqrt(sum)); }
__device__ inline void norm_of(f64 sum, f64* out) { *out = sqrt(sum); }

template <class A> __device__ inline void gradient_norm(const f64* partial, A* out, u32 count) {
    if (blockIdx.x != 0) return;
    f64 sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) norm_of(sum, out);
}

extern "C" __global__ void gradient_norm_f32(const f64* partial, f32* out, u32 count) {
    gradient_norm<f32>(partial, out, count);
}
extern "C" __global__ void gradient_norm_f64(const f64* partial, f64* out, u32 count) {
    gradient_norm<f64>(partial, out, count);
}
