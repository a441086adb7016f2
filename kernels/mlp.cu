// The kernels of `examples/train_digits`: a perceptron of two layers, ReLU, softmax and cross-entropy, in f32.
//
// Matrices are row-major, rows x cols. The products are `Device::gemm`; these are the steps between them. Sums run
// in a fixed order in one thread, so that training gives the same bits every run; the matrices are small enough
// (64-128-10) that correctness and order come first.
#include "common.cuh"

// Whether `n` elements of both can be read four at a time, with 32-bit indices: a 64-bit remainder takes longer than
// the memory access.
__device__ inline bool by_four(u64 n, const f32* x, const f32* y) {
    return n % 4 == 0 && n >> 32 == 0 && ((u64)x | (u64)y) % 16 == 0;
}

// h[r][c] = f(h[r][c] + b[c]).
template <class F>
__device__ inline void with_bias(f32* __restrict__ h, const f32* __restrict__ b, u32 rows, u32 cols, F f) {
    const u64 n = (u64)rows * cols;
    if (cols % 4 != 0 || !by_four(n, h, b)) {
        for (u64 i = grid_index(); i < n; i += grid_size()) h[i] = f(h[i] + b[i % cols]);
        return;
    }
    for (u64 i = grid_index(); i < n / 4; i += grid_size()) {
        const float4 x = ((const float4*)h)[i], y = ((const float4*)b)[(u32)i % (cols / 4)];
        ((float4*)h)[i] = {f(x.x + y.x), f(x.y + y.y), f(x.z + y.z), f(x.w + y.w)};
    }
}

// h[r][c] = max(h[r][c] + b[c], 0). NaN stays NaN, so that a diverged run shows.
extern "C" __global__ void bias_relu(f32* __restrict__ h, const f32* __restrict__ b, u32 rows, u32 cols) {
    with_bias(h, b, rows, cols, [](f32 v) { return v < 0.0f ? 0.0f : v; });
}

// h[r][c] += b[c].
extern "C" __global__ void bias_add(f32* __restrict__ h, const f32* __restrict__ b, u32 rows, u32 cols) {
    with_bias(h, b, rows, cols, [](f32 v) { return v; });
}

// dlogits = (softmax(logits) - onehot(label)) * scale and loss_rows[r] = -log softmax(logits)[r][label], one thread
// per row. The row's maximum is subtracted first, so that no exponential overflows. A label outside the columns gives a
// loss of NaN and touches no memory outside the row.
extern "C" __global__ void softmax_xent(const f32* __restrict__ logits, const int* __restrict__ labels,
                                        f32* __restrict__ dlogits, f32* __restrict__ loss_rows, u32 rows, u32 cols,
                                        f32 scale) {
    for (u64 r = grid_index(); r < rows; r += grid_size()) {
        const f32* row = logits + r * cols;
        f32* grad = dlogits + r * cols;
        f32 top = __int_as_float(0xff800000);  // -infinity
        for (u32 c = 0; c < cols; c++) top = fmaxf(top, row[c]);
        f32 sum = 0.0f;
        for (u32 c = 0; c < cols; c++) sum += expf(row[c] - top);
        const int label = labels[r];
        for (u32 c = 0; c < cols; c++) {
            const f32 p = expf(row[c] - top) / sum;
            grad[c] = (p - ((int)c == label ? 1.0f : 0.0f)) * scale;
        }
        const bool known = label >= 0 && (u32)label < cols;
        loss_rows[r] = known ? logf(sum) - (row[label] - top) : __int_as_float(0x7fc00000);
    }
}

// dh[i] = 0 where h[i] <= 0; h is the output of bias_relu.
extern "C" __global__ void relu_backward(f32* __restrict__ dh, const f32* __restrict__ h, u64 n) {
    if (!by_four(n, dh, h)) {
        for (u64 i = grid_index(); i < n; i += grid_size())
            if (h[i] <= 0.0f) dh[i] = 0.0f;
        return;
    }
    for (u64 i = grid_index(); i < n / 4; i += grid_size()) {
        const float4 x = ((const float4*)dh)[i], y = ((const float4*)h)[i];
        const auto kept = [](f32 x, f32 y) { return y <= 0.0f ? 0.0f : x; };
        ((float4*)dh)[i] = {kept(x.x, y.x), kept(x.y, y.y), kept(x.z, y.z), kept(x.w, y.w)};
    }
}

// out[c] = x[0][c] + x[1][c] + .., in the order of the rows, one thread per column.
extern "C" __global__ void col_sum(const f32* __restrict__ x, f32* __restrict__ out, u32 rows, u32 cols) {
    for (u64 c = grid_index(); c < cols; c += grid_size()) {
        f32 sum = 0.0f;
#pragma unroll 16
        for (u64 r = 0; r < rows; r++) sum += x[r * cols + c];
        out[c] = sum;
    }
}

// out[p][c] = `col_sum` over the p-th of `parts` groups of consecutive rows (the last groups have fewer): a first pass
// if there are too many rows for one thread per column. For benches/overlap.rs.
extern "C" __global__ void col_sum_parts(const f32* __restrict__ x, f32* __restrict__ out, u32 rows, u32 cols,
                                         u32 parts) {
    const u64 chunk = ((u64)rows + parts - 1) / parts;
    for (u64 i = grid_index(); i < (u64)parts * cols; i += grid_size()) {
        const u64 c = i % cols, first = i / cols * chunk, end = first + chunk < rows ? first + chunk : rows;
        f32 sum = 0.0f;
#pragma unroll 8
        for (u64 r = first; r < end; r++) sum += x[r * cols + c];
        out[i] = sum;
    }
}

// w[i] = fma(-lr, g[i], w[i]).
extern "C" __global__ void sgd(f32* __restrict__ w, const f32* __restrict__ g, u64 n, f32 lr) {
    for (u64 i = grid_index(); i < n; i += grid_size()) w[i] = fmaf(-lr, g[i], w[i]);
}

// rows_correct[r] = 1 if the first greatest logit of the row is at its label, else 0.
extern "C" __global__ void count_correct(const f32* __restrict__ logits, const int* __restrict__ labels,
                                         u32* __restrict__ rows_correct, u32 rows, u32 cols) {
    for (u64 r = grid_index(); r < rows; r += grid_size()) {
        const f32* row = logits + r * cols;
        u32 best = 0;
        for (u32 c = 1; c < cols; c++)
            if (row[c] > row[best]) best = c;
        rows_correct[r] = (int)best == labels[r] ? 1u : 0u;
    }
}
