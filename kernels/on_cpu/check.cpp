// Tests of one family of kernels (FAMILY_<name>, its source SOURCE) on the CPU: run.py compiles it. Every array begins
// at each of some offsets, and ends where its allocation does, so that the sanitizer sees an access beyond it; before
// it are bytes that must stay.
#include "shim.h"
#include "fold.cuh"
#include SOURCE

static u64 state = 88172645463325252ull;
static double uniform_number() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}
static void require(bool good, const char* what, u64 n, u64 offset, u64 i) {
    if (good) return;
    printf("wrong: %s, n %llu, offset %llu, element %llu\n", what, n, offset, i);
    exit(1);
}

// `n` elements, the first one `offset` elements after a multiple of 16 bytes.
template <class T> struct Array {
    static const u64 GUARD = 64;
    u8* begin;
    T* at;
    u64 n;
    Array(u64 n, u64 offset) : n(n) {
        const u64 before = GUARD + offset * sizeof(T);
        begin = (u8*)malloc(before + n * sizeof(T));
        memset(begin, 0x5a, before + n * sizeof(T));
        at = (T*)(begin + before);
    }
    Array(const Array&) = delete;
    ~Array() {
        for (u8* byte = begin; byte < (u8*)at; byte++) require(*byte == 0x5a, "bytes before an array", n, 0, 0);
        free(begin);
    }
    void draw(double low, double high) {
        for (u64 i = 0; i < n; i++) at[i] = narrow<T>(low + (high - low) * uniform_number());
    }
    std::vector<T> copy() const { return std::vector<T>(at, at + n); }
};
template <class T> static bool same(T a, T b) { return memcmp(&a, &b, sizeof(T)) == 0; }
// The relative error of one rounding.
template <class T> constexpr double EPS = 0;
template <> constexpr double EPS<f32> = 0x1p-24;
template <> constexpr double EPS<f64> = 0x1p-53;
template <> constexpr double EPS<f16> = 0x1p-11;
template <> constexpr double EPS<bf16> = 0x1p-8;
template <class T> const double LEAST = sizeof(T) == 2 ? 3e-8 : 1e-38;
// As `close` in tests/ops/rig.rs.
template <class T> static bool close_to(T got, double want, double slack) {
    return std::fabs((double)wide(got) - want) <= 1.01 * EPS<T> * std::fabs(want) + slack * EPS<Acc<T>> + LEAST<T>;
}

// Around packs, around tiles of both sizes of blocks, and several tiles.
static const u64 LENGTHS[] = {0, 1, 2, 3, 7, 8, 9, 31, 1024, 2049, 4096, 4103, 9001};
static const u64 OFFSETS[] = {0, 1, 2, 3, 4, 5, 8, 15, 16};
struct Launched {
    unsigned blocks, threads;
};
static const Launched GRIDS[] = {{1, 32}, {3, 256}};

#if defined FAMILY_elementwise
template <class T, class Kernel> static void filled(Kernel kernel, T value) {
    for (u64 n : LENGTHS) for (u64 offset : OFFSETS) for (auto [blocks, threads] : GRIDS) {
        Array<T> x(n, offset);
        launch(blocks, threads, [&] { kernel(x.at, n, value); });
        for (u64 i = 0; i < n; i++) require(x.at[i] == value, "fill", n, offset, i);
    }
}
template <class T, class Scale, class Axpy> static void scaled(Scale scale, Axpy axpy) {
    const Acc<T> a = (Acc<T>)1.7;
    for (u64 n : LENGTHS) for (u64 offset : OFFSETS) for (u64 other : {u64(0), offset})
    for (auto [blocks, threads] : GRIDS) {
        Array<T> x(n, offset), y(n, other);
        x.draw(-2, 2), y.draw(-2, 2);
        const auto p = x.copy(), q = y.copy();
        launch(blocks, threads, [&] { axpy(x.at, y.at, n, a); });
        launch(blocks, threads, [&] { scale(x.at, n, a); });
        for (u64 i = 0; i < n; i++) {
            require(same(x.at[i], narrow<T>((Acc<T>)(a * wide(p[i])))), "scale", n, offset, i);
            require(same(y.at[i], narrow<T>(fused(a, wide(p[i]), wide(q[i])))), "axpy", n, offset, i);
        }
    }
}
static void tests() {
    filled<u8>(fill_u8, 0xab), filled<u16>(fill_u16, 0xabcd), filled<u32>(fill_u32, 0xabcdef12);
    filled<u64>(fill_u64, 0x123456789abcdef0ull);
    scaled<f32>(scale_f32, axpy_f32), scaled<f64>(scale_f64, axpy_f64);
    scaled<f16>(scale_f16, axpy_f16), scaled<bf16>(scale_bf16, axpy_bf16);
}

#elif defined FAMILY_pointwise
static double below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
// Function `f`, or its derivative.
static double function(u32 f, double x, bool slope) {
    const double c = 2 * std::sqrt(2 / M_PI), s = 1 / (1 + std::exp(-x));
    const double t = 1 / (1 + std::exp(-c * (x + 0.044715 * x * x * x)));
    switch (f) {
    case 0: return slope ? 1 : x;
    case 1: return slope ? x > 0 : x > 0 ? x : 0;
    case 2: return slope ? below(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI) : x * below(x);
    case 3: return slope ? t + x * t * (1 - t) * c * (1 + 0.134145 * x * x) : x * t;
    default: return slope ? s * (1 + x * (1 - s)) : x * s;
    }
}
template <class T, class Forward, class Backward, class Both>
static void functions(Forward forward, Backward backward, Both binary) {
    for (u64 length : LENGTHS) for (u64 offset : {0, 1, 3}) for (u32 cols : {0, 8, 64, 101})
    for (auto [blocks, threads] : GRIDS) {
        const u64 n = cols ? length / cols * cols : length;
        Array<T> x(n, offset), d(n, 0), y(n, offset % 2), bias(cols, cols == 64);
        x.draw(-3, 3), d.draw(-3, 3), bias.draw(-0.5, 0.5);
        const T* b = cols ? bias.at : nullptr;
        const auto sum = [&](u64 i) { return (double)wide(x.at[i]) + (cols ? (double)wide(bias.at[i % cols]) : 0); };
        for (u32 f = 0; f < 5; f++) {
            launch(blocks, threads, [&] { forward(x.at, b, y.at, n, cols ? cols : 1, f); });
            // Sums with a bias are rounded once before.
            for (u64 i = 0; i < n; i++)
                require(close_to(y.at[i], function(f, sum(i), false), b ? 64 : 32), "activation", n, f, i);
            launch(blocks, threads, [&] { backward(d.at, x.at, b, y.at, n, cols ? cols : 1, f); });
            for (u64 i = 0; i < n; i++) {
                const double want = (double)wide(d.at[i]) * function(f, sum(i), true);
                require(close_to(y.at[i], want, b ? 192 : 96), "activation backward", n, f, i);
            }
            // In place, the same bits, wherever the array begins.
            Array<T> z(n, offset), w(n, 2);
            for (u64 i = 0; i < n; i++) z.at[i] = x.at[i], w.at[i] = d.at[i];
            launch(blocks, threads, [&] { backward(w.at, x.at, b, w.at, n, cols ? cols : 1, f); });
            for (u64 i = 0; i < n; i++) require(same(w.at[i], y.at[i]), "backward in place", n, f, i);
            launch(blocks, threads, [&] { forward(x.at, b, y.at, n, cols ? cols : 1, f); });
            launch(blocks, threads, [&] { forward(z.at, b, z.at, n, cols ? cols : 1, f); });
            for (u64 i = 0; i < n; i++) require(same(z.at[i], y.at[i]), "activation in place", n, f, i);
        }
        for (u32 op = 0; op < 3; op++) {
            launch(blocks, threads, [&] { binary(x.at, d.at, y.at, n, op); });
            for (u64 i = 0; i < n; i++) {
                const Acc<T> p = wide(x.at[i]), q = wide(d.at[i]);
                const Acc<T> want = op == 0 ? p + q : op == 1 ? p - q : p * q;
                require(same(y.at[i], narrow<T>(want)), "binary", n, offset, i);
            }
        }
    }
    Array<T> far(5, 0), y(5, 0);
    const double inputs[] = {NAN, INFINITY, -INFINITY, -200, 200};
    for (u32 i = 0; i < 5; i++) far.at[i] = narrow<T>(inputs[i]);
    for (u32 f = 0; f < 5; f++) {
        launch(1, 32, [&] { forward(far.at, (const T*)nullptr, y.at, 5, 1, f); });
        require(std::isnan((double)wide(y.at[0])), "NaN", 5, f, 0);
        require(std::isinf((double)wide(y.at[1])) && wide(y.at[4]) == 200, "infinity", 5, f, 1);
        require(f == 0 || std::fabs((double)wide(y.at[3])) < 1e-80, "-200", 5, f, 3);
        require(f == 0 || wide(y.at[2]) == 0, "-infinity", 5, f, 2);
    }
    // Far from 0 functions and slopes are at their limits.
    const double limits[] = {INFINITY, 1e30, 1e20, 6e4, -6e4, -1e20, -1e30, -INFINITY};
    Array<T> x(8, 0), d(8, 0), z(8, 0);
    for (u32 i = 0; i < 8; i++) x.at[i] = narrow<T>(limits[i]), d.at[i] = narrow<T>(1.0);
    for (u32 f = 1; f < 5; f++) {
        launch(1, 32, [&] { forward(x.at, (const T*)nullptr, z.at, 8, 1, f); });
        for (u32 i = 0; i < 8; i++)
            require(i < 4 ? same(z.at[i], x.at[i]) : wide(z.at[i]) == 0, "activation at its limit", 8, f, i);
        launch(1, 32, [&] { backward(d.at, x.at, (const T*)nullptr, z.at, 8, 1, f); });
        for (u32 i = 0; i < 8; i++) require(wide(z.at[i]) == (i < 4 ? 1 : 0), "slope at its limit", 8, f, i);
    }
    launch(1, 32, [&] { backward(far.at, far.at, (const T*)nullptr, y.at, 1, 1, 4); });
    require(std::isnan((double)wide(y.at[0])), "slope at NaN", 1, 4, 0);
}
static void tests() {
    functions<f32>(activate_f32, activate_backward_f32, binary_f32);
    functions<f64>(activate_f64, activate_backward_f64, binary_f64);
    functions<f16>(activate_f16, activate_backward_f16, binary_f16);
    functions<bf16>(activate_bf16, activate_backward_bf16, binary_bf16);
}

#elif defined FAMILY_random
// Word `k` of a block, by the rounds of the paper.
static u32 word_of(u64 block, u64 seed, u32 k) {
    u32 x[4] = {(u32)block, (u32)(block >> 32), 0, 0}, a = (u32)seed, b = (u32)(seed >> 32);
    for (int round = 0; round < 10; round++, a += 0x9e3779b9u, b += 0xbb67ae85u) {
        const u64 p = (u64)0xd2511f53u * x[0], q = (u64)0xcd9e8d57u * x[2];
        const u32 y[4] = {(u32)(q >> 32) ^ x[1] ^ a, (u32)q, (u32)(p >> 32) ^ x[3] ^ b, (u32)p};
        memcpy(x, y, sizeof x);
    }
    return x[k];
}
static const u64 SEED = 0x0123456789abcdefull;
static u32 word_at(u64 element) { return word_of(element / 4, SEED, element % 4); }
// A uniform number of as many bits as KIND has.
template <class Kind> static double unit_at(u64 element) {
    if constexpr (sizeof(Kind) == 8) {
        const u32 k = element % 2 * 2;
        return (double)(((u64)word_of(element / 2, SEED, k + 1) << 32 | word_of(element / 2, SEED, k)) >> 11) * 0x1p-53;
    }
    const int bits = std::is_same_v<Kind, bf16> ? 8 : std::is_same_v<Kind, f16> ? 11 : 24;
    return std::ldexp((double)(word_at(element) >> (32 - bits)), -bits);
}
template <class T, class Uniform, class Normal, class Dropout>
static void drawn(Uniform uniform, Normal normal, Dropout dropout) {
    typedef Acc<T> A;
    for (u64 n : {0, 1, 3, 7, 9, 31, 1027}) for (u64 first : {0ull, 1ull, 6ull, 0x3fffffffdull})
    for (u64 offset : {0, 1, 4}) for (auto [blocks, threads] : GRIDS) {
        Array<T> x(n, offset), y(n, offset % 3);
        const A low = (A)-0.3, span = (A)0.77, scale = (A)1.5;
        launch(blocks, threads, [&] { uniform(x.at, n, SEED, first, low, span); });
        for (u64 i = 0; i < n; i++)
            require(same(x.at[i], narrow<T>((A)(low + (A)((A)unit_at<T>(first + i) * span)))), "uniform", n, first, i);
        launch(blocks, threads, [&] { normal(x.at, n, SEED, first, A(0), A(1)); });
        for (u64 i = 0; i < n; i++) {
            const u64 even = (first + i) & ~1ull;
            const double u = unit_at<A>(even) + EPS<A>, v = 2 * M_PI * unit_at<A>(even + 1);
            const double want = std::sqrt(-2 * std::log(u)) * ((first + i) % 2 ? std::sin(v) : std::cos(v));
            require(close_to(x.at[i], want, 16 * (1 + std::fabs(want))), "normal", n, first, i);
        }
        x.draw(-2, 2);
        for (u64 threshold : {0ull, 1ull << 30, 1ull << 32}) {
            const auto kept = [&](u64 i) {
                return word_at(first + i) < threshold ? T{} : narrow<T>((A)(wide(x.at[i]) * scale));
            };
            launch(blocks, threads, [&] { dropout(x.at, y.at, n, SEED, first, threshold, scale); });
            for (u64 i = 0; i < n; i++) require(same(y.at[i], kept(i)), "dropout", n, first, i);
            Array<T> z(n, offset);
            for (u64 i = 0; i < n; i++) z.at[i] = x.at[i];
            launch(blocks, threads, [&] { dropout(z.at, z.at, n, SEED, first, threshold, scale); });
            for (u64 i = 0; i < n; i++) require(same(z.at[i], y.at[i]), "dropout in place", n, first, i);
        }
    }
}
static void tests() {
    require(word_of(0, 0, 0) == 0x6627e8d5u && word_of(0, 0, 3) == 0x9b00dbd8u, "known answer", 0, 0, 0);
    for (u64 n : LENGTHS) for (u64 first : {0ull, 5ull, 0xffffffffffff0000ull}) for (u64 offset : {0, 1})
    for (u32 threads : {64, 50}) {
        Array<u32> x(n, offset);
        launch(3, threads, [&] { random_u32(x.at, n, SEED, first); });
        for (u64 i = 0; i < n; i++) require(x.at[i] == word_at(first + i), "words", n, first, i);
    }
    drawn<f32>(uniform_f32, normal_f32, dropout_f32), drawn<f64>(uniform_f64, normal_f64, dropout_f64);
    drawn<f16>(uniform_f16, normal_f16, dropout_f16), drawn<bf16>(uniform_bf16, normal_bf16, dropout_bf16);
    // The bounds that random.cu states, of every number of 24 bits, and exact multiples of a quarter.
    for (u32 bits = 0; bits < 1u << 24; bits += 1 + bits % 37) {
        const double r = std::sqrt(-2 * std::log((bits + 1) * 0x1p-24)), v = 2 * M_PI * (bits * 0x1p-24);
        require(std::fabs(radius(bits) - r) <= 0x1p-22 * r, "radius", 0, 0, bits);
        for (bool sine : {false, true}) {
            const double h = sine ? std::sin(v) : std::cos(v);
            require(std::fabs(height(bits, sine) - h) <= 0x1p-22 * std::fabs(h) + 1e-15, "height", 0, sine, bits);
        }
    }
}

#elif defined FAMILY_number || defined FAMILY_order
// Any bits, among them ends of all types: zeros, the least and the largest, infinities, NaNs.
template <class T> static void draw_bits(Array<T>& x) {
    static const u64 ENDS[] = {0, 1, ~0ull, 1ull << 63, ~0ull >> 1, 1ull << 31, 0x7fffffff, 0x8000, 0x7fff, 0x80, 0x7f,
                               0x7f800000, 0xff800000, 0x7ff0ull << 48, 0xfff0ull << 48, 0x7c00, 0xfc00, 0x7f80};
    for (u64 i = 0; i < x.n; i++) {
        const u64 drawn = (u64)(uniform_number() * 0x1p53) ^ (u64)(uniform_number() * 0x1p53) << 30;
        x.at[i] = from_bits<T>((BitsOf<T>)(drawn % 3 ? drawn : ENDS[drawn / 3 % 18]));
    }
}
template <class T> static bool is_nan(T x) {
    if constexpr (Type<T>::FLOAT) return std::isnan(wide(x));
    else return false;
}
// Whether `a` comes before `b`: by their signs where they are equal; a NaN is beyond the infinities.
template <class T> static bool less(T a, T b) {
    if constexpr (!Type<T>::FLOAT) return a < b;
    else {
        const bool left = std::signbit(wide(a)), right = std::signbit(wide(b));
        if (left != right) return left;
        if (wide(a) < wide(b) || wide(b) < wide(a)) return wide(a) < wide(b);
        return left ? to_bits(b) < to_bits(a) : to_bits(a) < to_bits(b);
    }
}
template <class T> constexpr u32 KIND = Type<T>::FLOAT ? FLOAT : T(-1) < T(0) ? SIGNED : UNSIGNED;
template <> constexpr u32 KIND<f16> = FLOAT;
template <> constexpr u32 KIND<bf16> = FLOAT;
template <class T> constexpr u64 INFINITE = ~0ull;
template <> constexpr u64 INFINITE<f32> = 0x7f800000;
template <> constexpr u64 INFINITE<f64> = 0x7ff0ull << 48;
template <> constexpr u64 INFINITE<f16> = 0x7c00;
template <> constexpr u64 INFINITE<bf16> = 0x7f80;

#if defined FAMILY_number
template <class T> static T divided(T x, T y) {
    if constexpr (Type<T>::FLOAT) return narrow<T>(wide(x) / wide(y));
    else if (y == 0) return 0;
    else return (T)((__int128)x / (__int128)y);
}
template <class T> static T better(T x, T y, bool larger) {
    return is_nan(x) ? x : is_nan(y) ? y : less(x, y) == larger ? y : x;
}
template <class T, class Divide, class Select, class Extreme>
static void numbers(Divide divide, Select select, Extreme extreme) {
    typedef BitsOf<T> W;
    for (u64 n : {1, 5, 64, 9001}) for (u64 offset : {0, 1}) {
        Array<T> x(n, offset), y(n, offset), z(n, 0), same_place(n, offset);
        draw_bits(x), draw_bits(y);
        for (u64 i = 0; i < n; i++) same_place.at[i] = x.at[i];
        launch(3, 256, [&] { divide(x.at, y.at, z.at, n); });
        launch(3, 256, [&] { divide(same_place.at, y.at, same_place.at, n); });
        for (u64 i = 0; i < n; i++) {
            const T want = divided(x.at[i], y.at[i]);
            require(same(z.at[i], want) || (is_nan(want) && is_nan(z.at[i])), "quotient", n, offset, i);
            require(same(z.at[i], same_place.at[i]) || is_nan(want), "quotient in place", n, offset, i);
        }
        for (u32 larger : {0, 1}) {
            W *a = (W*)x.at, *b = (W*)y.at, *c = (W*)z.at;
            launch(3, 256, [&] { select(a, b, c, n, INFINITE<T>, KIND<T>, larger); });
            for (u64 i = 0; i < n; i++) {
                const T want = better(x.at[i], y.at[i], larger);
                require(same(z.at[i], want) || (is_nan(want) && is_nan(z.at[i])), "smaller or larger", n, offset, i);
            }
            Array<T> some(3, 0), one(1, 0);
            launch_together({3, 1, 1}, {256, 1, 1},
                            [&] { extreme(a, (W*)some.at, n, INFINITE<T>, KIND<T>, larger); });
            launch_together({1, 1, 1}, {256, 1, 1},
                            [&] { extreme((W*)some.at, (W*)one.at, 3, INFINITE<T>, KIND<T>, larger); });
            T want = x.at[0];
            for (u64 i = 0; i < n; i++) want = better(want, x.at[i], larger);
            require(same(one.at[0], want) || (is_nan(want) && is_nan(one.at[0])), "extreme", n, offset, larger);
        }
    }
}
template <class T, class Unary> static void functions(Unary unary) {
    for (u64 n : LENGTHS) for (u64 offset : {0, 1, 3}) for (auto [blocks, threads] : GRIDS) for (u32 op : {0, 1}) {
        Array<T> x(n, offset), y(n, offset % 2);
        x.draw(0, 3);
        launch(blocks, threads, [&] { unary(x.at, y.at, n, op); });
        for (u64 i = 0; i < n; i++) {
            const double v = (double)wide(x.at[i]);
            require(close_to(y.at[i], op ? std::sqrt(v) : std::exp(v), 80), "function", n, op, i);
        }
        const auto before = y.copy();
        launch(blocks, threads, [&] { unary(x.at, x.at, n, op); });
        for (u64 i = 0; i < n; i++) require(same(x.at[i], before[i]), "function in place", n, op, i);
    }
}
static void tests() {
#define NUMBERS(T, W) numbers<T>(divide_##T, select_##W, extreme_##W);
    NUMBERS(i8, u8) NUMBERS(u8, u8) NUMBERS(i32, u32) NUMBERS(u32, u32) NUMBERS(i64, u64) NUMBERS(u64, u64)
    NUMBERS(f32, u32) NUMBERS(f64, u64) NUMBERS(f16, u16) NUMBERS(bf16, u16)
    functions<f32>(unary_f32), functions<f64>(unary_f64), functions<f16>(unary_f16), functions<bf16>(unary_bf16);
}
#else
// As `scan` and `sort` in crates/train/src/ops/order.rs.
static const dim3 TWO = {2, 1, 1}, ALL = {THREADS, 1, 1};
template <class T, class A, class Sums, class Scan> static void scanned(Sums sums, Scan scan) {
    for (u64 n : {1, 2048, 5001}) for (u32 exclusive : {0, 1}) {
        const u64 tiles = (n + TILE - 1) / TILE;
        Array<T> x(n, 1), y(n, 0);
        Array<A> totals(tiles, 0), offsets(tiles, 0);
        for (u64 i = 0; i < n; i++) x.at[i] = Summed<T>::back((typename Summed<T>::Type)((i32)(uniform_number() * 5) - 2));
        launch_together(TWO, ALL, [&] { sums(x.at, totals.at, n); });
        typename Summed<A>::Type offset = 0;
        for (u64 tile = 0; tile < tiles; tile++) {
            offsets.at[tile] = Summed<A>::back(offset);
            offset += Summed<A>::of(totals.at[tile]);
        }
        launch_together(TWO, ALL, [&] { scan(x.at, offsets.at, y.at, n, exclusive); });
        typename Summed<T>::Type sum = 0;
        for (u64 i = 0; i < n; i++) {
            const auto next = (typename Summed<T>::Type)(sum + Summed<T>::of(x.at[i]));
            require(same(y.at[i], Summed<T>::back(exclusive ? sum : next)), "running sum", n, exclusive, i);
            sum = next;
        }
    }
}
template <class T, class Digits, class Scatter> static void sorted(Digits digits, Scatter scatter) {
    typedef BitsOf<T> W;
    for (u64 n : {2, 2048, 4500}) {
        const u64 tiles = (n + TILE - 1) / TILE;
        Array<T> x(n, 1), y(n, 0);
        Array<u32> counts(DIGITS * tiles, 0), places(DIGITS * tiles, 0);
        draw_bits(x);
        auto want = x.copy();
        std::stable_sort(want.begin(), want.end(), less<T>);
        W *from = (W*)x.at, *to = (W*)y.at;
        for (u32 shift = 0; shift < 8 * sizeof(T); shift += 4, std::swap(from, to)) {
            launch_together(TWO, ALL, [&] { digits(from, counts.at, n, shift, KIND<T>); });
            u32 place = 0;
            for (u64 i = 0; i < DIGITS * tiles; i++) places.at[i] = place, place += counts.at[i];
            launch_together(TWO, ALL, [&] { scatter(from, to, places.at, n, shift, KIND<T>); });
        }
        for (u64 i = 0; i < n; i++) require(same(x.at[i], want[i]), "sorted", n, KIND<T>, i);
    }
}
static void tests() {
#define SCANNED(T, A) scanned<T, A>(scan_sums_##T, scan_##T);
    SCANNED(i8, i8) SCANNED(u32, u32) SCANNED(i64, i64) SCANNED(f32, f32) SCANNED(f16, f32) SCANNED(bf16, f32)
#define SORTED(T, W) sorted<T>(digits_##W, scatter_##W);
    SORTED(i8, u8) SORTED(f16, u16) SORTED(u32, u32) SORTED(f32, u32) SORTED(f64, u64)
}
#endif

#elif defined FAMILY_columns
template <class T, class Sum, class Layer, class Rms, class Final, class Finals>
static void sums(Sum sum, Layer layer, Rms rms, Final final, Finals finals) {
    typedef Acc<T> A;
    for (u64 rows : {0, 9, 131}) for (u32 cols : {1, 100, 264}) for (u32 parts : {1, 3})
    for (u64 offset : {0, 1}) {
        Array<T> x(rows * cols, offset), d(rows * cols, offset), one(cols, 0), two(cols, 0), three(cols, 0);
        Array<A> mean(rows, 0), rstd(rows, 0), h(parts * cols, 0), p(parts * cols, 0);
        Array<A> g(parts * cols, offset), b(parts * cols, offset);
        x.draw(-0.5, 0.5), d.draw(-0.5, 0.5), mean.draw(0, 1), rstd.draw(0.5, 1.5);
        const dim3 grid = {2, parts > 1 ? 2u : 1u, 1}, block = {32, 8, 1};
        launch_together(grid, block, [&] { layer(d.at, x.at, mean.at, rstd.at, g.at, b.at, rows, cols, parts); });
        launch_together(grid, block, [&] { rms(d.at, x.at, rstd.at, h.at, rows, cols, parts); });
        launch_together(grid, block, [&] { sum(x.at, p.at, rows, cols, parts); });
        launch_together({1, 1, 2}, block, [&] { finals(g.at, b.at, one.at, two.at, parts, cols); });
        launch_together({1, 1, 1}, block, [&] { final(p.at, three.at, parts, cols); });
        for (u32 c = 0; c < cols; c++) {
            double want[4] = {}, rms_sum = 0;
            for (u64 i = 0; i < rows; i++) {
                const double dy = wide(d.at[i * cols + c]), v = wide(x.at[i * cols + c]);
                want[0] += dy * (v - mean.at[i]) * rstd.at[i], want[1] += dy;
                want[2] += v, want[3] += dy * v * rstd.at[i];
            }
            for (u32 part = 0; part < parts; part++) rms_sum += h.at[part * cols + c];
            const double slack = (double)(rows + 3);
            require(close_to(one.at[c], want[0], slack), "layer norm, gamma", rows, cols, c);
            require(close_to(two.at[c], want[1], slack), "layer norm, beta", rows, cols, c);
            require(close_to(three.at[c], want[2], slack), "column sum", rows, cols, c);
            require(close_to((A)rms_sum, want[3], slack), "RMS norm, gamma", rows, cols, c);
        }
    }
}
#define SUMS(T) \
    sums<T>(column_sum_##T, layer_norm_columns_##T, rms_norm_columns_##T, column_final_##T, column_finals_##T)
static void tests() { SUMS(f32), SUMS(f64), SUMS(f16), SUMS(bf16); }

#elif defined FAMILY_embedding
static void tests() {
    for (u64 n : {0, 1, 5, 300}) for (u64 width : {1, 2, 4, 8, 12, 16, 48, 4096}) for (u64 offset : {0, 1, 4, 8})
    for (auto [blocks, threads] : GRIDS) {
        Array<u8> table(10 * width, offset), out(n * width, offset);
        Array<u32> indices(n, 1);
        for (u64 i = 0; i < 10 * width; i++) table.at[i] = (u8)(256 * uniform_number());
        for (u64 i = 0; i < n; i++) indices.at[i] = (u32)(11.5 * uniform_number());
        launch(blocks, threads, [&] { gather_rows(table.at, indices.at, out.at, n, width, 10); });
        for (u64 i = 0; i < n * width; i++) {
            const u32 row = indices.at[i / width];
            require(out.at[i] == (row < 10 ? table.at[row * width + i % width] : 0xff), "gather", n, width, i);
        }
    }
}
#elif defined FAMILY_prove
static u64 product(u64 a, u64 b) { return (u64)((unsigned __int128)a * b % P); }
static u64 power_of(u64 x, u64 e) {
    u64 y = 1;
    for (; e > 0; e /= 2, x = product(x, x)) if (e % 2) y = product(y, x);
    return y;
}
static void transform(u32 log_n, u32 passes) {
    const u64 n = 1ull << log_n, w = power_of(7, (P - 1) >> LOG_MOST), edges[] = {0, 1, P - 1, P, ~0ull};
    Array<u64> x(n, 0), y(n, 0), roots(2 * HALF, 0);
    for (u64 i = 0; i < n; i++) x.at[i] = i % 7 < 5 ? edges[(4 + 3 * i) % 5] : (u64)(uniform_number() * 0x1p64);
    for (u64 i = 0; i < HALF; i++) roots.at[i] = power_of(w, i), roots.at[HALF + i] = power_of(w, i * HALF);
    const auto coefficients = x.copy();
    u64 *from = x.at, *to = y.at;
    for (u32 pass = 0, done = 0; pass < passes; pass++) {
        const u32 log_radix = (log_n - done + passes - pass - 1) / (passes - pass);
        launch_together({pass + 1}, {64}, [&] { ntt_pass(from, to, roots.at, log_n, done, log_radix); });
        std::swap(from, to), done += log_radix;
    }
    // The polynomial's values at some of the points, and at all of them where they are few.
    for (u64 i = 0; i < n; i += n > 512 ? 37 : 1) {
        const u64 point = power_of(w, i << (LOG_MOST - log_n));
        u64 value = 0;
        for (u64 k = n; k-- > 0;) value = (product(value, point) + (unsigned __int128)coefficients[k]) % P;
        require(from[i] == value, "transform", n, passes, i);
    }
}
static void tree(u32 leaves, std::array<u32, 8> root) {
    Array<u64> values(4 * leaves, 0);
    Array<u32> tree(16 * leaves, 0);
    for (u64 i = 0; i < values.n; i++) values.at[i] = i * 0x9e3779b97f4a7c15ull;
    launch(3, 32, [&] { merkle_leaves(values.at, tree.at, leaves); });
    for (u32 parents = leaves / 2; parents > 0;) {
        const u32 levels = std::min(9, (int)std::bit_width(parents));
        launch_together({1}, {64}, [&] { merkle_fold(tree.at, parents, levels); });
        parents >>= levels;
    }
    for (u32 i = 0; i < 8; i++) require(tree.at[8 + i] == root[i], "root", leaves, 0, i);
}
static void tests() {
    for (auto [log_n, passes] : {std::pair{1u, 1u}, {3, 1}, {6, 1}, {6, 2}, {8, 1}, {9, 2}, {12, 2}, {12, 3}})
        transform(log_n, passes);
    // By hashlib of Python.
    tree(16, {0xd5d344a9, 0x0bfff688, 0x7a924a15, 0xcf1daf9f, 0x8bc9e77f, 0xf584af00, 0xcc7199ce, 0x56ecb32b});
    tree(1024, {0xc5c98643, 0x5ffe0b71, 0xedcd76b0, 0xdbdae91d, 0x722865a5, 0xbe9523a6, 0x22ab1f7d, 0xbc056b30});
}

#elif defined FAMILY_decode
// `rows` sequences at place `at`, whose groups of `shared` heads have room for `longest` places.
template <class T, class Kernel> static void attends(Kernel kernel, u32 at, u32 shared, u32 longest) {
    const u32 groups = 2, rows = 2, all = groups * (shared + 2) * DIM, room = longest * DIM, half = DIM / 2;
    Array<T> qkv(rows * all, 0), keys(rows * groups * room, 0), values(rows * groups * room, 0);
    Array<T> mixed(rows * groups * shared * DIM, 0);
    Array<f32> angles((at + 1) * DIM, 0);
    Array<u32> place(1, 0);
    place.at[0] = at;
    // Large ones give one place the whole share.
    const double large = at == 1 ? 400 : 2;
    qkv.draw(-large, large), keys.draw(-1, 1), values.draw(-1, 1), angles.draw(-1, 1);
    // What is behind the place must not count.
    for (u64 i = 0; i < keys.n; i++)
        if (i % room >= (at + 1) * DIM) keys.at[i] = values.at[i] = narrow<T>(100.0f);
    const auto old = keys.copy();
    launch_together({groups, rows}, {THREADS}, [&] {
        kernel(qkv.at, angles.at, place.at, keys.at, values.at, mixed.at, shared, longest);
    });
    const auto turned = [&](const T* x, u32 j) {
        const double cos = angles.at[at * DIM + j % half], sin = angles.at[at * DIM + half + j % half];
        const double a = wide(x[j % half]), b = wide(x[half + j % half]);
        return j < half ? a * cos - b * sin : b * cos + a * sin;
    };
    for (u32 i = 0; i < rows * groups * shared; i++) {
        const u32 row = i / shared / groups, own = i / shared % groups;
        const T* from = qkv.at + row * all;
        const T *k = keys.at + (row * groups + own) * room, *v = values.at + (row * groups + own) * room;
        for (u32 j = 0; j < DIM; j++) {
            const T* key = from + (groups * shared + own) * DIM;
            require(close_to(k[at * DIM + j], turned(key, j), 4 * large), "key", at, own, j);
            require(same(v[at * DIM + j], from[(groups * (shared + 1) + own) * DIM + j]), "value", at, own, j);
            for (u32 p = 0; p < longest; p++)
                if (p != at) require(same(k[p * DIM + j], old[k - keys.at + p * DIM + j]), "cache", at, p, j);
        }
        std::vector<double> shares(at + 1);
        double sum = 0;
        for (u32 p = 0; p <= at; p++) {
            double dot = 0;
            for (u32 j = 0; j < DIM; j++) {
                dot += turned(from + (own * shared + i % shared) * DIM, j) * (double)wide(k[p * DIM + j]);
            }
            shares[p] = dot / std::sqrt((double)DIM);
        }
        const double most = *std::max_element(shares.begin(), shares.end());
        for (double& share : shares) sum += share = std::exp(share - most);
        for (u32 j = 0; j < DIM; j++) {
            double want = 0;
            for (u32 p = 0; p <= at; p++) want += shares[p] / sum * (double)wide(v[p * DIM + j]);
            require(close_to(mixed.at[i * DIM + j], want, 200), "mixed", at, i, j);
        }
    }
}
template <class T, class Fill, class Next, class Attend, class Swiglu, class Best>
static void decodes(Fill fill, Next next, Attend attend, Swiglu swiglu, Best best) {
    for (auto [at, shared, longest] : {std::array{0u, 1u, 1u}, {1, 4, 2}, {63, 3, 65}, {64, 4, 80}, {512, 2, 514},
                                       {LONGEST - 1, 1, LONGEST}})
        attends<T>(attend, at, shared, longest);
    // Rows 3.. and columns 5..75 of a matrix of 100 columns.
    Array<T> w(5000, 0);
    launch(3, 64, [&] { fill(w.at, 7, 5000, 70, 3, 5, 100, 0.25f); });
    for (u32 i = 0; i < 5000; i++) {
        u32 x = (3 + i / 70) * 100 + 5 + i % 70 + 7 * 0x9e3779b9u;
        x = (x ^ x >> 16) * 0x7feb352du, x = (x ^ x >> 15) * 0x846ca68bu, x ^= x >> 16;
        require(close_to(w.at[i], (double)(int)x * 0x1p-33, 4), "weights", 5000, 0, i);
    }
    const u32 rows = 3, inner = 515, width = 48;
    Array<T> gates(rows * 2 * inner, 0), y(rows * inner, 0);
    gates.draw(-3, 3);
    launch_together({2, rows}, {256}, [&] { swiglu(gates.at, y.at, inner); });
    for (u32 i = 0; i < rows * inner; i++) {
        const double x = wide(gates.at[i / inner * 2 * inner + i % inner]);
        const double up = wide(gates.at[(i / inner * 2 + 1) * inner + i % inner]);
        require(close_to(y.at[i], x / (1 + std::exp(-x)) * up, 64), "swiglu", inner, 0, i);
    }
    for (u32 words : {1, 33, 509, 9000}) for (double most : {2.0, -1.0}) {
        if (words > 1000 && most < 0) continue;
        const u32 first = 1000;
        Array<T> logits(rows * words, 0), table((first + words) * width, 0), x(rows * width, 0);
        Array<u64> found(rows * PARTS, 0);
        Array<u32> place(1, 0), all(6 * rows, 0);
        // Many values are the same.
        for (u64 i = 0; i < logits.n; i++) logits.at[i] = narrow<T>((f32)(most - (int)(i * 7919 % 13) / 4.0));
        table.draw(-1, 1);
        for (u64 i = 0; i < all.n; i++) all.at[i] = i % 5;
        place.at[0] = 3;
        launch_together({PARTS, rows}, {BEST_THREADS}, [&] { best(logits.at, found.at, place.at, words, first); });
        require(place.at[0] == 4, "place", words, 0, 0);
        for (u32 given : {5u, 4u}) {
            launch_together({rows}, {32}, [&] { next(found.at, table.at, all.at, place.at, x.at, given, width); });
            for (u32 row = 0; row < rows; row++) {
                u32 want = 0;
                for (u32 i = 0; i < words; i++)
                    if (wide(logits.at[row * words + i]) > wide(logits.at[row * words + want])) want = i;
                want = given == 5 ? (4 * rows + row) % 5 : first + want;
                require(all.at[4 * rows + row] == want, "word", words, given, row);
                for (u32 j = 0; j < width; j++)
                    require(same(x.at[row * width + j], table.at[want * width + j]), "vector", words, given, j);
            }
        }
    }
}
static void tests() {
    decodes<f32>(weights_f32, next_word_f32, attend_f32, swiglu_f32, best_word_f32);
    decodes<bf16>(weights_bf16, next_word_bf16, attend_bf16, swiglu_bf16, best_word_bf16);
}

#elif defined FAMILY_gpt
template <class T, class Softmax, class Backward>
static void causal_rows(u32 context, u32 block, Softmax softmax, Backward backward) {
    // Whole sequences, and as many rows for each warp.
    const u64 rows = std::max(context, 16u), n = rows * context;
    Array<T> x(n, 0), y(n, 0), dy(n, 0);
    x.draw(-3, 3), y.draw(0, 1), dy.draw(1, 2);
    const auto scores = x.copy(), gradient = dy.copy();
    launch_together({2}, {32, 8}, [&] { softmax(x.at, rows, context, block); });
    launch_together({2}, {32, 8}, [&] { backward(y.at, dy.at, rows, context, block); });
    for (u64 i = 0; i < n; i++) {
        const u64 begin = i / context * context, place = i / context % context, end = (place / block + 1) * block;
        double sum = 0, product = 0;
        for (u64 c = 0; c < end; c++) {
            if (c <= place) sum += std::exp((double)wide(scores[begin + c]));
            product += (double)wide(y.at[begin + c]) * wide(gradient[begin + c]);
        }
        const u64 c = i - begin;
        const double share = c <= place ? std::exp((double)wide(scores[i])) / sum : 0;
        // Beyond the block nothing is written.
        const double want = c < end ? share : wide(scores[i]);
        require(close_to(x.at[i], want, 8 * share), "causal softmax", context, block, i);
        const double down = c < end ? wide(y.at[i]) * (wide(gradient[i]) - product) : wide(gradient[i]);
        require(close_to(dy.at[i], down, 64 * product), "its step back", context, block, i);
    }
}
template <class T, class Split, class Merge>
static void heads_of(u32 context, u32 heads, u32 head, u32 parts, Split split, Merge merge) {
    const u64 sequences = 3, rows = sequences * context, width = parts * heads * head;
    Array<T> x(rows * width, 0), bias(width, 0), y(rows * width, 0), back(rows * width, 0);
    x.draw(-1, 1), bias.draw(-1, 1);
    for (u32 biased : {1, 0}) {
        launch_together({1, 2, 3}, {32}, [&] {
            split(x.at, bias.at, y.at, rows, context, heads, head, parts, biased);
        });
        for (u64 i = 0; i < x.n; i++) {
            const u64 row = i / width, column = i % width, part = column / (heads * head), h = column / head % heads;
            const u64 sequence = part * sequences + row / context;
            const u64 at = ((sequence * heads + h) * context + row % context) * head + column % head;
            const T want = narrow<T>(biased ? wide(x.at[i]) + wide(bias.at[column]) : wide(x.at[i]));
            require(same(y.at[at], want), "heads apart", context, parts, i);
        }
    }
    launch_together({2, 3, 2}, {32}, [&] { merge(y.at, back.at, rows, context, heads, head, parts); });
    for (u64 i = 0; i < x.n; i++) require(same(back.at[i], x.at[i]), "heads together", context, parts, i);
}
static void tests() {
    for (auto [context, block] : {std::pair{8u, 8u}, {64, 16}}) {
        causal_rows<f32>(context, block, causal_softmax_f32, causal_softmax_backward_f32);
        causal_rows<bf16>(context, block, causal_softmax_bf16, causal_softmax_backward_bf16);
    }
    // Too long for registers.
    causal_rows<f32>(528, 264, causal_softmax_f32, causal_softmax_backward_f32);
    for (u32 parts : {1, 3}) {
        heads_of<f32>(24, 3, 16, parts, split_heads_f32, merge_heads_f32);
        heads_of<bf16>(16, 2, 64, parts, split_heads_bf16, merge_heads_bf16);
    }
}
#endif

int main() {
    tests();
#if defined FAMILY_pointwise || defined FAMILY_random
    for (double wrong : {1.0, -1.0}) error = wrong, tests();
#endif
    puts("ok");
}
