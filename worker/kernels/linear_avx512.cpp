// Products with packed weights for AVX-512 with its products of bytes and of bf16 pairs (VPDPBUSD, VPDPBF16PS): one
// instruction takes a quad of one row of x, broadcast, to 16 outputs. Rows of 16-bit integers are two planes of 8 bits.

#include "linear.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cstring>
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma")

#include "panels.h"

namespace {

using paceline::LinearCall;
using paceline::Team;

constexpr int MOST = 12;                // rows of a strip; of two planes half of it
constexpr int64_t STRIPS_AT_ONCE = 16;  // so that they stay in the L2 cache while panels pass

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

// One panel for MR rows from `row`.
template <int BITS, bool MINIMUM, int PLANES, int MR>
void tile(const PacelineWeight &w, const Rows &x, int64_t panel, int64_t row, Ahead next, const float *add, void *y,
          int y_is_bf16) {
    constexpr bool INTEGER = BITS != 16;
    constexpr int QUAD = quad_inputs(BITS);
    constexpr int64_t BYTES = quad_bytes(BITS);
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
void prepare_all(const PacelineWeight &w, const void *x, bool is_bf16, const Rows &to, const Team &team) {
    const Strips strips(to.num_rows, MOST / PLANES);
    const int64_t first = team.begin(to.num_rows), last = team.end(to.num_rows);
    for (int64_t strip = 0; strip < strips.count; strip++) {
        const int64_t begin = strips.begin(strip), end = strips.begin(strip + 1);
        for (int64_t row = first > begin ? first : begin; row < (last < end ? last : end); row++)
            prepare<PLANES>(w, x, is_bf16, row, begin, end - begin, to);
    }
}

template <int BITS, bool MINIMUM, int PLANES>
void product(const LinearCall &call, const Rows &x, const Team &team) {
    const Strips strips(x.num_rows, MOST / PLANES);
    each_tile<BITS>(call.w, strips, STRIPS_AT_ONCE, team, [&](int64_t rows, int64_t panel, int64_t row, Ahead next) {
        run_tile<BITS, MINIMUM, PLANES, MOST / PLANES>(int(rows), call.w, x, panel, row, next, call.add, call.y,
                                                       call.y_is_bf16);
    });
}

int64_t shared_bytes(const PacelineWeight &w, int64_t num_rows) {
    if (w.bits == 16) return 0;
    const int64_t groups = num_rows * (w.in_size / w.group);
    return up(num_rows * w.planes * w.in_size) + up(groups * w.planes * 4) + 2 * up(groups * 4);
}

void run(const LinearCall &call, int64_t num_rows, const Team &team) {
    const PacelineWeight &w = call.w;
    Rows rows{};
    rows.num_rows = num_rows;
    rows.in_size = w.in_size;
    if (w.bits == 16) {
        rows.values = static_cast<int8_t *>(const_cast<void *>(call.x));  // read only
        return product<16, false, 1>(call, rows, team);
    }
    rows.num_groups = w.in_size / w.group;
    const int64_t groups = num_rows * rows.num_groups;
    char *at = team.shared;
    rows.values = reinterpret_cast<int8_t *>(at), at += up(num_rows * w.planes * rows.in_size);
    rows.sums = reinterpret_cast<int32_t *>(at), at += up(groups * w.planes * 4);
    rows.scales = reinterpret_cast<float *>(at), at += up(groups * 4);
    rows.sums_of_x = reinterpret_cast<float *>(at);
    (w.planes == 2 ? prepare_all<2> : prepare_all<1>)(w, call.x, call.x_is_bf16, rows, team);
    team.meet();
    const auto multiply = w.planes == 1 ? product<8, true, 1>
                          : w.bits == 8 ? (w.minimums ? product<8, true, 2> : product<8, false, 2>)
                                        : (w.minimums ? product<4, true, 2> : product<4, false, 2>);
    multiply(call, rows, team);
}

}  // namespace

#pragma GCC pop_options

namespace paceline {

extern const Products avx512_products = {shared_bytes, run};

}  // namespace paceline

#endif
