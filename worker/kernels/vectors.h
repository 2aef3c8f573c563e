// Vectors of W floats for one instruction set, and what both attention and the small kernels do with them. Included by
// kernels_*.cpp after they have set W and switched the instruction set on; all in a namespace without a name, so that no
// other file can be linked to code that does not run on its processor.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if W > 4
#include <immintrin.h>
#endif

namespace {

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));

#define INLINE inline __attribute__((always_inline))

INLINE F splat(float x) { return x - F{}; }
INLINE I splat(int32_t x) { return x - I{}; }

template <class V>
INLINE V load(const void *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// The first n elements, zeros behind them.
template <class V>
INLINE V load(const void *from, int64_t n) {
    constexpr int64_t size = sizeof(V) / W;
    if (n >= W) return load<V>(from);
    V v{};
    std::memcpy(&v, from, n * size);
    return v;
}

template <class V>
INLINE void store(void *to, V v) {
    std::memcpy(to, &v, sizeof v);
}

template <class V>
INLINE void store(void *to, V v, int64_t n) {
    constexpr int64_t size = sizeof(V) / W;
    if (n >= W) return store(to, v);
    std::memcpy(to, &v, n * size);
}

INLINE F fma(F a, F b, F c) {
#if W == 16
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif W == 8
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE F max(F a, F b) { return a > b ? a : b; }

INLINE F from_bf16(H h) { return (F)(__builtin_convertvector(h, I) << 16); }

// Rounded to the nearest even.
INLINE H to_bf16(F x) {
#ifdef HAS_BF16
    return (H)(__m256i)_mm512_cvtneps_pbh((__m512)x);
#else
    const I bits = (I)x;
    const I rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((x == x ? rounded : (I)((bits >> 16) | 64)) & 0xffff, H);
#endif
}

template <class V, int... lanes>
INLINE V shuffle(V a, V b, std::integer_sequence<int, lanes...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, lanes...);
#else
    return __builtin_shuffle(a, b, I{lanes...});
#endif
}

template <int S, int... j>
constexpr auto swapped(std::integer_sequence<int, j...>) {
    return std::integer_sequence<int, (j ^ S)...>{};
}

using Lanes = std::make_integer_sequence<int, W>;

template <int S = W / 2>
INLINE F max_of_all(F x) {
    if constexpr (S == 0)
        return x;
    else
        return max_of_all<S / 2>(max(x, shuffle(x, x, swapped<S>(Lanes{}))));
}

template <int S = W / 2>
INLINE F sum_of_all(F x) {
    if constexpr (S == 0)
        return x;
    else
        return sum_of_all<S / 2>(x + shuffle(x, x, swapped<S>(Lanes{})));
}

// 2^x; 0 far below -126, and what is no number stays so. Taylor's terms over half a unit: within 2 of 2^-24 of the result.
INLINE F exp2(F x) {
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    x = splat(-200.0f) > x ? splat(-200.0f) : x;
    const F shifted = x + magic, whole = shifted - magic, part = x - whole;
    F p = splat(1.5403530393381609e-4f);
    p = fma(p, part, splat(1.3333558146428443e-3f));
    p = fma(p, part, splat(9.618129107628477e-3f));
    p = fma(p, part, splat(5.550410866482158e-2f));
    p = fma(p, part, splat(2.402265069591007e-1f));
    p = fma(p, part, splat(6.931471805599453e-1f));
    p = fma(p, part, splat(1.0f));
#if W == 16
    return (F)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const F scaled = (F)((I)p + (((I)shifted - (I)magic) << 23));
    return x >= -126.0f ? scaled : p * 0.0f;  // p: within a unit of 1, or no number
#endif
}

constexpr float LOG2E = 1.4426950408889634f;

// e^x; 0 and infinity where a float has few bits left.
INLINE F exp(F x) {
    const F y = x * LOG2E;
    return y < 126.0f ? exp2(y) : splat(__builtin_inff());
}

INLINE F tanh(F x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// As elements of a tensor.
struct Float {
    using Element = float;
    static INLINE F get(const float *from, int64_t n = W) { return load<F>(from, n); }
    static INLINE void put(float *to, F x, int64_t n = W) { store(to, x, n); }
};

struct BFloat16 {
    using Element = uint16_t;
    static INLINE F get(const uint16_t *from, int64_t n = W) { return from_bf16(load<H>(from, n)); }
    static INLINE void put(uint16_t *to, F x, int64_t n = W) { store(to, to_bf16(x), n); }
};

}  // namespace
