// Matrix products with narrow weights: y = x W^T (+ bias) (+ add), for few rows and for many.
//
// Weights lie in panels of 32 outputs, one after the other, and each panel in quads of inputs:
//
//     bits 8    [panel][in / 4][32 outputs][4 inputs], a byte each, 128 added
//     bits 4    [panel][in / 4][16 outputs][4 inputs], outputs 0-15 in the low nibbles, 16-31 in the high ones
//     bits 16   [panel][in / 2][32 outputs][2 inputs], bf16
//
// so that a product reads memory once, from one end to the other, and one instruction (VPDPBUSD, VPDPBF16PS) takes a
// quad of one row of x, broadcast, to 16 outputs.
//
// A weight of 4 or 8 bits belongs to a group of its output's inputs, with a scale and, maybe, a minimum. Rows of x become
// integers as they come: of 8 bits with a scale per group, or of 16 bits, as two planes of 8, with a scale per row. Sums
// of integers are exact, and groups are added up in order, so a row's result does not depend on the rows beside it, nor
// on the number of threads. The same holds for bf16, whose products are added up in order.
//
// Knows no torch: pointers in, pointers out.

#include "program.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define PACELINE_LINEAR 1
#endif

extern "C" {

// Made once for each weight, by worker/quant/product.py, in this order.
struct PacelineWeight {
    const void *values;
    const void *scales;    // fp16 [panel][group][32]; none for bits 16
    const void *minimums;  // as scales, or null
    const float *bias;     // [panels * 32], or null
    int64_t in_size;       // a multiple of `group`
    int64_t out_size;
    int64_t group;  // inputs that share a scale, a multiple of 16
    int32_t bits;    // of a weight: 4, 8 or 16
    int32_t zero;    // the value that stands for 0, where there are no minimums
    int32_t planes;  // of x: 1 or 2, of 8 bits each
};

int paceline_linear_runs(void);
void paceline_linear(const PacelineWeight *w, const void *x, int x_is_bf16, int64_t num_rows, const float *add, void *y,
                     int y_is_bf16);
}

#ifndef PACELINE_LINEAR

int paceline_linear_runs(void) { return 0; }
void paceline_linear(const PacelineWeight *, const void *, int, int64_t, const float *, void *, int) {}

#else

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma")

namespace {

constexpr int PANEL = 32;
constexpr int MOST = 12;               // rows of a strip; of two planes half of it
constexpr int64_t STRIPS_AT_ONCE = 16; // so that they stay in the L2 cache while panels pass
constexpr int64_t AHEAD = 2048;        // bytes of weights that are asked of memory before they are needed
constexpr int64_t ALONE = 1 << 18;     // products, below which waking another thread takes longer

// Rows are multiplied in strips, whose sums stay in registers: of about the same number of rows, at most so many.
struct Strips {
    int64_t num_rows, count;

    Strips(int64_t num_rows, int64_t most) : num_rows(num_rows), count((num_rows + most - 1) / most) {}

    int64_t begin(int64_t strip) const { return num_rows * strip / count; }
    int64_t size(int64_t strip) const { return begin(strip + 1) - begin(strip); }
};

// Rows of x as integers, strip by strip, and what is known of each group of a row. Where a strip of MR rows begins at `row`:
// values of a plane [in / 4][MR][4], the others [groups][MR].
struct Rows {
    int8_t *values;    // of the first plane; those of the second follow
    int32_t *sums;     // of values, in planes too
    float *scales;     // with two planes one of each row
    float *sums_of_x;  // in units of the scale with two planes
    int64_t num_rows;
    int64_t in_size;
    int64_t num_groups;

    int8_t *of(int plane, int64_t row) const { return values + (plane * num_rows + row) * in_size; }
    int32_t *sums_of(int plane, int64_t row) const { return sums + (plane * num_rows + row) * num_groups; }
};

inline __m512 load16(const void *x, bool is_bf16, int64_t at) {
    if (!is_bf16) return _mm512_loadu_ps(static_cast<const float *>(x) + at);
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(static_cast<const uint16_t *>(x) + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Quads lie so many bytes apart.
inline void store16(int8_t *to, int64_t stride, __m512i values) {
    int32_t quads[4];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(quads), _mm512_cvtepi32_epi8(values));
    for (int i = 0; i < 4; i++) std::memcpy(to + i * stride, quads + i, 4);
}

inline float largest(const void *x, bool is_bf16, int64_t at, int64_t size) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 16) most = _mm512_max_ps(most, _mm512_abs_ps(load16(x, is_bf16, at + k)));
    return _mm512_reduce_max_ps(most);
}

inline __mmask16 first(int64_t count) { return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1); }

// Written out: GCC 12 moves the sums of its own intrinsics from register to register and to the stack, for half the speed.
inline void add_products(__m512i &sum, __m512i weights, __m512i inputs) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
}

inline void add_products(__m512 &sum, __m512i weights, __m512i inputs) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
}

template <int BITS>
inline void load_pair(const uint8_t *at, __m512i &a, __m512i &b) {
    if (BITS == 4) {
        const __m512i both = _mm512_loadu_si512(at), low = _mm512_set1_epi8(15);
        a = _mm512_and_si512(both, low);
        b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    } else {
        a = _mm512_loadu_si512(at);
        b = _mm512_loadu_si512(at + 64);
    }
}

inline __m512 half16(const void *values, int64_t at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(static_cast<const uint16_t *>(values) + at)));
}

inline void put(const __m512 value, void *y, int y_is_bf16, int64_t at, __mmask16 mask) {
    if (y_is_bf16)
        _mm256_mask_storeu_epi16(static_cast<uint16_t *>(y) + at, mask, (__m256i)_mm512_cvtneps_pbh(value));
    else
        _mm512_mask_storeu_ps(static_cast<float *>(y) + at, mask, value);
}

// What a tile asks of memory, a step for each quad of its own.
struct Ahead {
    const char *at;
    int64_t step;
};

// One panel for MR rows from `row`.
template <int BITS, bool MINIMUM, int PLANES, int MR>
void tile(const PacelineWeight &w, const Rows &x, int64_t panel, int64_t row, Ahead next, const float *add, void *y,
          int y_is_bf16) {
    constexpr bool INTEGER = BITS != 16;
    constexpr int QUAD = INTEGER ? 4 : 2;            // inputs
    constexpr int64_t BYTES = BITS == 4 ? 64 : 128;  // of a panel's quad
    const int64_t num_groups = w.in_size / w.group, quads = w.group / QUAD;
    const uint8_t *values = static_cast<const uint8_t *>(w.values) + panel * (w.in_size / QUAD) * BYTES;
    // Sums of integers take the registers, and totals wait in the nearest cache; bf16 has totals only.
    alignas(64) float totals[INTEGER ? MR : 1][PANEL];
    __m512 total[INTEGER ? 1 : MR][2];
    const int64_t row_bytes = w.in_size * 2;  // of x in bf16
    const int64_t known = row * num_groups;   // where the strip's begins
#pragma GCC unroll 16
    for (int m = 0; m < (INTEGER ? 0 : MR); m++) total[m][0] = total[m][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < num_groups; g++) {
        __m512i sum[PLANES][MR][2];
        const int8_t *inputs[PLANES];
#pragma GCC unroll 2
        for (int p = 0; p < PLANES; p++) {
            inputs[p] = INTEGER ? x.of(p, row) + g * quads * 4 * MR : x.values + row * row_bytes;
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++)
                sum[p][m][0] = sum[p][m][1] = !INTEGER || MINIMUM ? _mm512_setzero_si512()
                                                                  : _mm512_set1_epi32(-w.zero * x.sums_of(p, row)[g * MR + m]);
        }
        for (int64_t q = 0; q < quads; q++) {
            __m512i a, b;
            _mm_prefetch(next.at, _MM_HINT_T0);
            if (BYTES > 64) _mm_prefetch(next.at + 64, _MM_HINT_T0);
            next.at += next.step;
            load_pair<BITS>(values, a, b);
            values += BYTES;
#pragma GCC unroll 2
            for (int p = 0; p < PLANES; p++)
#pragma GCC unroll 16
                for (int m = 0; m < MR; m++) {
                    int32_t quad;
                    std::memcpy(&quad, inputs[p] + (INTEGER ? (q * MR + m) * 4 : m * row_bytes + q * 4), 4);
                    const __m512i in = _mm512_set1_epi32(quad);
                    if constexpr (INTEGER) {
                        add_products(sum[p][m][0], a, in);
                        add_products(sum[p][m][1], b, in);
                    } else {
                        add_products(total[m][0], a, in);
                        add_products(total[m][1], b, in);
                    }
                }
        }
        if constexpr (!INTEGER) continue;
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const int64_t at = (panel * num_groups + g) * PANEL + side * 16;
            const __m512 scale = half16(w.scales, at);
            const __m512 minimum = MINIMUM ? half16(w.minimums, at) : scale;
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) {
                float *to = totals[INTEGER ? m : 0] + side * 16;
                __m512 part = _mm512_cvtepi32_ps(sum[0][m][side]);
                if (PLANES == 2)
                    part = _mm512_fmadd_ps(part, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum[PLANES - 1][m][side]));
                else
                    part = _mm512_mul_ps(part, _mm512_set1_ps(x.scales[known + g * MR + m]));
                part = g ? _mm512_fmadd_ps(part, scale, _mm512_load_ps(to)) : _mm512_mul_ps(part, scale);
                if (MINIMUM) part = _mm512_fmadd_ps(_mm512_set1_ps(x.sums_of_x[known + g * MR + m]), minimum, part);
                _mm512_store_ps(to, part);
            }
        }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        const int64_t column = panel * PANEL + side * 16;
        if (column >= w.out_size) break;
        const __mmask16 mask = first(w.out_size - column);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            __m512 out = INTEGER ? _mm512_load_ps(totals[INTEGER ? m : 0] + side * 16) : total[INTEGER ? 0 : m][side];
            if (INTEGER && PLANES == 2) out = _mm512_mul_ps(out, _mm512_set1_ps(x.scales[row + m]));
            if (w.bias) out = _mm512_add_ps(out, _mm512_loadu_ps(w.bias + column));
            const int64_t at = (row + m) * w.out_size + column;
            if (add) out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(mask, add + at));
            put(out, y, y_is_bf16, at, mask);
        }
    }
}

// The tile of `wanted` rows, of at most MR.
template <int BITS, bool MINIMUM, int PLANES, int MR>
void run_tile(int wanted, const PacelineWeight &w, const Rows &x, int64_t panel, int64_t row, Ahead next,
              const float *add, void *y, int y_is_bf16) {
    if constexpr (MR > 0) {
        if (wanted < MR)
            run_tile<BITS, MINIMUM, PLANES, MR - 1>(wanted, w, x, panel, row, next, add, y, y_is_bf16);
        else
            tile<BITS, MINIMUM, PLANES, MR>(w, x, panel, row, next, add, y, y_is_bf16);
    }
}

// A team's share: pieces of some panels for a block of rows, as they come.
template <int BITS, bool MINIMUM, int PLANES>
void product(const PacelineWeight &w, const Rows &x, int64_t num_rows, const float *add, void *y, int y_is_bf16,
             const paceline::Team &team) {
    constexpr int64_t STEP = BITS == 4 ? 64 : 128;  // bytes of a panel's quad
    const int64_t panels = (w.out_size + PANEL - 1) / PANEL, bytes = w.in_size / (BITS == 16 ? 2 : 4) * STEP;
    const Strips strips(num_rows, MOST / PLANES);
    const int64_t blocks = (strips.count + STRIPS_AT_ONCE - 1) / STRIPS_AT_ONCE;
    const char *at = static_cast<const char *>(w.values);
    paceline::Walk walk;
    for (int64_t begin, end; team.take_some(blocks * panels, walk, begin, end);)
        for (int64_t piece = begin; piece < end; piece++) {
            const int64_t panel = piece % panels, first = piece / panels * STRIPS_AT_ONCE;
            const int64_t count = strips.count - first < STRIPS_AT_ONCE ? strips.count - first : STRIPS_AT_ONCE;
            for (int64_t s = 0; s < count; s++) {
                // A single strip reads as fast as memory gives; of several each asks for a part of the next panel.
                const Ahead next = count == 1 ? Ahead{at + panel * bytes + AHEAD, STEP}
                                              : Ahead{at + (panel + 1) * bytes + bytes * s / count, STEP / count};
                run_tile<BITS, MINIMUM, PLANES, MOST / PLANES>(int(strips.size(first + s)), w, x, panel,
                                                               strips.begin(first + s), next, add, y, y_is_bf16);
            }
        }
}

// One row of x as integers, of 8 bits or, in two planes, of 16: 256 * high + low, low in [-128, 127].
// It is one of a strip of `size` rows from `begin` on.
template <int PLANES>
void prepare(const PacelineWeight &w, const void *x, bool is_bf16, int64_t row, int64_t begin, int64_t size,
             const Rows &to) {
    constexpr float LIMIT = PLANES == 1 ? 127.0f : 127.0f * 256.0f;
    const int64_t first = row * w.in_size, number = row - begin, known = begin * to.num_groups + number;
    float most = PLANES == 2 ? largest(x, is_bf16, first, w.in_size) : 0.0f;
    if (PLANES == 2) to.scales[row] = most / LIMIT;
    for (int64_t g = 0; g < to.num_groups; g++) {
        if (PLANES == 1) {
            most = largest(x, is_bf16, first + g * w.group, w.group);
            to.scales[known + g * size] = most / LIMIT;
        }
        const __m512 inverse = _mm512_set1_ps(most > 0 ? LIMIT / most : 0.0f);
        __m512i sum_high = _mm512_setzero_si512(), sum_low = sum_high;
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 16) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load16(x, is_bf16, first + k), inverse));
            const int64_t at = k * size + number * 4;
            __m512i high = whole;
            if (PLANES == 2) {
                high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
                const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
                sum_low = _mm512_add_epi32(sum_low, low);
                store16(to.of(1, begin) + at, size * 4, low);
            }
            sum_high = _mm512_add_epi32(sum_high, high);
            store16(to.of(0, begin) + at, size * 4, high);
        }
        const int32_t of_high = to.sums_of(0, begin)[g * size + number] = _mm512_reduce_add_epi32(sum_high);
        float sum = float(of_high);
        if (PLANES == 2)
            sum = sum * 256.0f + float(to.sums_of(1, begin)[g * size + number] = _mm512_reduce_add_epi32(sum_low));
        else
            sum *= to.scales[known + g * size];
        to.sums_of_x[known + g * size] = sum;
    }
}

// A team's share.
template <int PLANES>
void prepare_all(const PacelineWeight &w, const void *x, bool is_bf16, const Rows &to, const paceline::Team &team) {
    const Strips strips(to.num_rows, MOST / PLANES);
    const int64_t first = team.begin(to.num_rows), last = team.end(to.num_rows);
    for (int64_t strip = 0; strip < strips.count; strip++) {
        const int64_t begin = strips.begin(strip), end = strips.begin(strip + 1);
        for (int64_t row = first > begin ? first : begin; row < (last < end ? last : end); row++)
            prepare<PLANES>(w, x, is_bf16, row, begin, end - begin, to);
    }
}

constexpr int64_t ALIGNED = 64;

int64_t up(int64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

class Linear final : public paceline::Call {
public:
    Linear(const PacelineWeight &w, const void *x, bool x_is_bf16, const float *add, void *y, bool y_is_bf16)
        : w_(w), x_(x), add_(add), y_(y), x_is_bf16_(x_is_bf16), y_is_bf16_(y_is_bf16) {}

    Call *copy() const override { return new Linear(*this); }

    bool is_small(int64_t num_rows) const override { return num_rows * w_.in_size * w_.out_size < ALONE; }

    int64_t shared_bytes(int64_t num_rows) const override {
        if (w_.bits == 16) return 0;
        const int64_t groups = num_rows * (w_.in_size / w_.group);
        return up(num_rows * w_.planes * w_.in_size) + up(groups * w_.planes * 4) + 2 * up(groups * 4);
    }

    void run(int64_t num_rows, const paceline::Team &team) const override {
        Rows rows{};
        rows.num_rows = num_rows;
        rows.in_size = w_.in_size;
        if (w_.bits == 16) {
            rows.values = static_cast<int8_t *>(const_cast<void *>(x_));  // read only
            return product<16, false, 1>(w_, rows, num_rows, add_, y_, y_is_bf16_, team);
        }
        rows.num_groups = w_.in_size / w_.group;
        const int64_t groups = num_rows * rows.num_groups;
        char *at = team.shared;
        rows.values = reinterpret_cast<int8_t *>(at), at += up(num_rows * w_.planes * rows.in_size);
        rows.sums = reinterpret_cast<int32_t *>(at), at += up(groups * w_.planes * 4);
        rows.scales = reinterpret_cast<float *>(at), at += up(groups * 4);
        rows.sums_of_x = reinterpret_cast<float *>(at);
        (w_.planes == 2 ? prepare_all<2> : prepare_all<1>)(w_, x_, x_is_bf16_, rows, team);
        team.meet();
        const auto run = w_.bits == 8 ? (w_.minimums ? (w_.planes == 2 ? product<8, true, 2> : product<8, true, 1>)
                                                     : (w_.planes == 2 ? product<8, false, 2> : product<8, false, 1>))
                                      : (w_.minimums ? (w_.planes == 2 ? product<4, true, 2> : product<4, true, 1>)
                                                     : (w_.planes == 2 ? product<4, false, 2> : product<4, false, 1>));
        run(w_, rows, num_rows, add_, y_, y_is_bf16_, team);
    }

private:
    const PacelineWeight &w_;
    const void *x_;
    const float *add_;
    void *y_;
    bool x_is_bf16_, y_is_bf16_;
};

}  // namespace

void paceline_linear(const PacelineWeight *w, const void *x, int x_is_bf16, int64_t num_rows, const float *add, void *y,
                     int y_is_bf16) {
    paceline::submit(Linear(*w, x, x_is_bf16, add, y, y_is_bf16), num_rows);
}

#pragma GCC pop_options

int paceline_linear_runs(void) {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

#endif
