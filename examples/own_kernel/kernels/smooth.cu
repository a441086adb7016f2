// Each element becomes the mean of itself, twice, and its two neighbours. At the ends the element stands for the
// neighbour that is missing.
extern "C" __global__ void smooth(const float* x, float* y, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float left = x[i == 0 ? i : i - 1], right = x[i + 1 == n ? i : i + 1];
    y[i] = 0.25f * left + 0.5f * x[i] + 0.25f * right;
}
