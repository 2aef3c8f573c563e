// The small kernels beside products and attention, one row at a time: what torch does in several passes over memory,
// in one, in fp32 and rounded once. Shapes: worker/kernels/elements.py.

#pragma once

#include "attention.h"
#include "vectors.h"

namespace {

template <class T>
void rms_norm_row(const float *x, const float *weight, typename T::Element *out, int64_t size, float eps) {
    F squares = {};
    for (int64_t i = 0; i < size; i += W) {
        const F part = load<F>(x + i, size - i);
        squares = fma(part, part, squares);
    }
    const float factor = 1.0f / __builtin_sqrtf(sum_of_all(squares)[0] / size + eps);
    for (int64_t i = 0; i < size; i += W)
        T::put(out + i, load<F>(x + i, size - i) * factor * load<F>(weight + i, size - i), size - i);
}

void rms_norm(const float *x, const float *weight, void *out, int out_is_bf16, int64_t size, float eps) {
    if (out_is_bf16)
        rms_norm_row<BFloat16>(x, weight, static_cast<uint16_t *>(out), size, eps);
    else
        rms_norm_row<Float>(x, weight, static_cast<float *>(out), size, eps);
}

template <class T>
void rotate_heads(typename T::Element *x, const typename T::Element *cos, const typename T::Element *sin,
                  int64_t num_heads, int64_t head_dim, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += W) {
        const int64_t n = half - i;
        const F cos_a = T::get(cos + i, n), sin_a = T::get(sin + i, n);
        const F cos_b = T::get(cos + half + i, n), sin_b = T::get(sin + half + i, n);
        for (int64_t head = 0; head < num_heads; head++) {
            typename T::Element *to = x + head * head_dim + i;
            const F a = T::get(to, n), b = T::get(to + half, n);
            T::put(to, fma(b, sin_a, a * cos_a), n);
            T::put(to + half, fma(a, sin_b, b * cos_b), n);
        }
    }
}

void rotate(void *x, int is_bf16, const void *cos, const void *sin, int64_t num_heads, int64_t head_dim, int64_t dim) {
    if (is_bf16)
        rotate_heads<BFloat16>(static_cast<uint16_t *>(x), static_cast<const uint16_t *>(cos),
                               static_cast<const uint16_t *>(sin), num_heads, head_dim, dim);
    else
        rotate_heads<Float>(static_cast<float *>(x), static_cast<const float *>(cos), static_cast<const float *>(sin),
                            num_heads, head_dim, dim);
}

// silu, x / (1 + e^-x), or gelu with tanh, which is x / (1 + e^-2z).
template <bool GELU>
INLINE F activated(F x) {
    if constexpr (!GELU) return x / (exp(-x) + 1.0f);
    const F z = x * fma(x * x, splat(0.044715f), splat(1.0f)) * 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return x / (exp(-z) + 1.0f);
}

template <class T, bool GELU>
void gate_row(const typename T::Element *gate_up, typename T::Element *out, int64_t size) {
    for (int64_t i = 0; i < size; i += W) {
        const F up = T::get(gate_up + size + i, size - i);
        T::put(out + i, activated<GELU>(T::get(gate_up + i, size - i)) * up, size - i);
    }
}

template <bool GELU>
void gate_of(const void *gate_up, void *out, int is_bf16, int64_t size) {
    if (is_bf16)
        gate_row<BFloat16, GELU>(static_cast<const uint16_t *>(gate_up), static_cast<uint16_t *>(out), size);
    else
        gate_row<Float, GELU>(static_cast<const float *>(gate_up), static_cast<float *>(out), size);
}

void gate(const void *gate_up, void *out, int is_bf16, int64_t size, int activation) {
    if (activation == paceline::GELU_TANH)
        gate_of<true>(gate_up, out, is_bf16, size);
    else
        gate_of<false>(gate_up, out, is_bf16, size);
}

constexpr int64_t MOST_BEST = 64;

// The largest of a row, as many as asked for.
struct Best {
    int64_t wanted, count = 0, lowest = 0;
    float values[MOST_BEST];
    int64_t places[MOST_BEST];

    float limit() const { return count < wanted ? -__builtin_inff() : values[lowest]; }

    void add(float value, int64_t place) {
        const int64_t to = count < wanted ? count++ : lowest;
        values[to] = value, places[to] = place;
        if (count < wanted) return;
        lowest = 0;
        for (int64_t i = 1; i < wanted; i++)
            if (values[i] < values[lowest]) lowest = i;
    }
};

template <class T>
void rescore_row(float *scores, int64_t num, const float *x, const typename T::Element *weights, int64_t size,
                 int64_t num_best) {
    constexpr int64_t STEP = 4 * W;
    Best best{num_best < MOST_BEST ? num_best : MOST_BEST};
    for (int64_t i = 0; i < num; i += STEP) {
        if (i + STEP <= num) {
            const float *at = scores + i;
            const F most = max(max(load<F>(at), load<F>(at + W)), max(load<F>(at + 2 * W), load<F>(at + 3 * W)));
            if (!(max_of_all(most)[0] > best.limit())) continue;
        }
        for (int64_t place = i; place < num && place < i + STEP; place++)
            if (scores[place] > best.limit()) best.add(scores[place], place);
    }
    for (int64_t b = 0; b < best.count; b++) {
        const typename T::Element *weight = weights + best.places[b] * size;
        F sum = {};
        for (int64_t i = 0; i < size; i += W) sum = fma(load<F>(x + i, size - i), T::get(weight + i, size - i), sum);
        scores[best.places[b]] = sum_of_all(sum)[0];
    }
}

void rescore(float *scores, int64_t num, const float *x, const void *weights, int is_bf16, int64_t size, int64_t num_best) {
    if (is_bf16)
        rescore_row<BFloat16>(scores, num, x, static_cast<const uint16_t *>(weights), size, num_best);
    else
        rescore_row<Float>(scores, num, x, static_cast<const float *>(weights), size, num_best);
}

}  // namespace
