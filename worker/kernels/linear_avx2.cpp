// Products with packed weights for AVX2, which multiplies floats and pairs of 16-bit integers (VFMADD, VPMADDWD): weights
// are widened to these once for all rows of a strip. One instruction takes a unit of 32 bits of one row of x, broadcast, to
// 8 outputs: an input as a float, or two as integers, of which those of 8 bits have 16 as well.

#include "linear.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cstring>
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#include "broadcast_avx2.h"
#include "panels.h"

namespace {

using paceline::LinearCall;
using paceline::Team;

constexpr int MOST = 6;                // rows of a strip
constexpr int WIDE = 2;                // rows, of which so few take a panel in one go instead of in two halves
constexpr int64_t STRIPS_AT_ONCE = 8;  // so that they stay in the L2 cache while panels pass
constexpr int LANES = 8;

// Rows of x in units, strip by strip, and what is known of each group of a row. Where a strip of MR rows begins at `row`:
// units [quad][MR][2], the others [groups][MR]. Of four integers of a quad the first and the third are the first unit.
struct Rows {
    int32_t *units;
    int32_t *starts;   // of sums: what the zero of weights would add, taken off
    float *scales;     // of 16 bits the same for all groups of a row
    float *sums_of_x;
    int64_t num_rows;
    int64_t num_units;  // of a row
    int64_t num_groups;
};

inline bool has_scale_per_group(const PacelineWeight &w) { return w.planes == 1; }

inline __m256 load8(const void *x, bool is_bf16, int64_t at) {
    if (!is_bf16) return _mm256_loadu_ps(static_cast<const float *>(x) + at);
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(static_cast<const uint16_t *>(x) + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline __m256 half8(const void *values, int64_t at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(static_cast<const uint16_t *>(values) + at)));
}

inline int32_t sum_of_all(__m256i x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline float largest(const void *x, bool is_bf16, int64_t at, int64_t size) {
    __m256 most = _mm256_setzero_ps();
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int64_t k = 0; k < size; k += LANES) most = _mm256_max_ps(most, _mm256_andnot_ps(sign, load8(x, is_bf16, at + k)));
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// One row of x in bf16, in floats. Of a strip of `size` rows it is number `number`.
void prepare_floats(const uint16_t *x, int64_t in_size, int64_t size, int64_t number, int32_t *units) {
    char *to = reinterpret_cast<char *>(units + number * 2);
    int64_t k = 0;
    for (; k + LANES <= in_size; k += LANES) {
        const __m256i whole = _mm256_castps_si256(load8(x, true, k));
        for (int i = 0; i < 2; i++) {
            const __m128i half = i ? _mm256_extracti128_si256(whole, 1) : _mm256_castsi256_si128(whole);
            _mm_storel_pi(reinterpret_cast<__m64 *>(to), _mm_castsi128_ps(half));
            _mm_storeh_pi(reinterpret_cast<__m64 *>(to + size * 8), _mm_castsi128_ps(half));
            to += size * 16;
        }
    }
    for (; k < in_size; k += 2, to += size * 8) {
        const uint32_t pair[2] = {uint32_t(x[k]) << 16, uint32_t(x[k + 1]) << 16};
        std::memcpy(to, pair, 8);
    }
}

// One row of x in integers, of 16 bits or of 8 with a scale for each group.
void prepare_integers(const LinearCall &call, int64_t row, int64_t begin, int64_t size, const Rows &to) {
    const PacelineWeight &w = call.w;
    const bool per_group = has_scale_per_group(w);
    const float limit = per_group ? 127.0f : 127.0f * 256.0f;
    const int64_t first = row * w.in_size, number = row - begin, known = begin * to.num_groups + number;
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9,
                                           10, 11, 12, 13, 14, 15);
    char *at = reinterpret_cast<char *>(to.units + begin * to.num_units + number * 2);
    float most = per_group ? 0.0f : largest(call.x, call.x_is_bf16, first, w.in_size);
    for (int64_t g = 0; g < to.num_groups; g++) {
        const int64_t group = known + g * size;
        if (per_group) most = largest(call.x, call.x_is_bf16, first + g * w.group, w.group);
        to.scales[group] = most / limit;
        const __m256 inverse = _mm256_set1_ps(most > 0 ? limit / most : 0.0f);
        __m256i sum = _mm256_setzero_si256();
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k += LANES) {
            const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(load8(call.x, call.x_is_bf16, first + k), inverse));
            sum = _mm256_add_epi32(sum, whole);
            const __m256i quads = _mm256_shuffle_epi8(_mm256_packs_epi32(whole, whole), order);
            _mm_storel_epi64(reinterpret_cast<__m128i *>(at), _mm256_castsi256_si128(quads));
            _mm_storel_epi64(reinterpret_cast<__m128i *>(at + size * 8), _mm256_extracti128_si256(quads, 1));
            at += size * 16;
        }
        const int32_t all = sum_of_all(sum);
        to.starts[group] = -w.zero * all;
        to.sums_of_x[group] = float(all) * to.scales[group];
    }
}

// A team's share of the rows.
template <int BITS>
void prepare(const LinearCall &call, const Rows &to, const Strips &strips, const Team &team) {
    const int64_t first = team.begin(to.num_rows), last = team.end(to.num_rows), in_size = call.w.in_size;
    for (int64_t strip = 0; strip < strips.count; strip++) {
        const int64_t begin = strips.begin(strip), end = strips.begin(strip + 1);
        for (int64_t row = first > begin ? first : begin; row < (last < end ? last : end); row++)
            if constexpr (BITS == 16)
                prepare_floats(static_cast<const uint16_t *>(call.x) + row * in_size, in_size, end - begin, row - begin,
                               to.units + begin * to.num_units);
            else
                prepare_integers(call, row, begin, end - begin, to);
    }
}

// Of a quad, the weights of 8 outputs that go with its first or its second unit of x: floats, or pairs of integers.
template <int BITS>
inline __m256i widened(const uint8_t *quad, int outputs, int unit) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(quad + (BITS == 4 ? outputs & 1 : outputs) * 32));
    if (BITS == 16) return unit ? _mm256_and_si256(w, _mm256_set1_epi32(int32_t(0xffff0000))) : _mm256_slli_epi32(w, 16);
    if (BITS == 8) return unit ? _mm256_srli_epi16(w, 8) : _mm256_and_si256(w, _mm256_set1_epi16(255));
    return _mm256_and_si256(_mm256_srli_epi16(w, (outputs >> 1) * 4 + unit * 8), _mm256_set1_epi16(15));
}

// Of 16 outputs with one unit of a row: of floats, and of integers, written out for the same reason.
inline void add_products(__m256 (&sum)[2], __m256i a, __m256i b, const int32_t *unit) {
    add_products(sum[0], sum[1], a, b, unit);
}

inline void add_products(__m256i (&sum)[2], __m256i a, __m256i b, const int32_t *unit) {
    __m256i in, product;
    asm volatile(
        "vpbroadcastd %4, %2\n\t"
        "vpmaddwd %2, %5, %3\n\t"
        "vpmaddwd %2, %6, %2\n\t"
        "vpaddd %3, %0, %0\n\t"
        "vpaddd %2, %1, %1"
        : "+x"(sum[0]), "+x"(sum[1]), "=&x"(in), "=&x"(product)
        : "m"(*unit), "x"(a), "x"(b));
}

// Quads of a panel for MR rows: of P times 16 outputs, from the FIRST on.
template <int BITS, int MR, int P, int FIRST, class Sum>
inline void add_quads(const uint8_t *values, const int32_t *units, int64_t quads, Ahead next, Sum (&sum)[MR][P][2]) {
    for (int64_t q = 0; q < quads; q++) {
        if (FIRST == 0) {  // for the other half as well
            _mm_prefetch(next.at, _MM_HINT_T0);
            if (BITS != 4) _mm_prefetch(next.at + 64, _MM_HINT_T0);
            next.at += next.step;
        }
#pragma GCC unroll 2
        for (int unit = 0; unit < 2; unit++)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const __m256i a = widened<BITS>(values, (FIRST + p) * 2, unit);
                const __m256i b = widened<BITS>(values, (FIRST + p) * 2 + 1, unit);
#pragma GCC unroll 8
                for (int m = 0; m < MR; m++) add_products(sum[m][p], a, b, units + m * 2 + unit);
            }
        values += quad_bytes(BITS);
        units += MR * 2;
    }
}

inline void put(__m256 value, void *y, bool y_is_bf16, int64_t at, int64_t count) {
    if (!y_is_bf16) {
        float *to = static_cast<float *>(y) + at;
        if (count >= LANES) return _mm256_storeu_ps(to, value);
        std::memcpy(to, &value, count * 4);
        return;
    }
    const __m256i bits = _mm256_castps_si256(value);  // rounded to the nearest even; what is no number stays so
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i whole = _mm256_srli_epi32(
        _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    std::memcpy(static_cast<uint16_t *>(y) + at, &halves, count >= LANES ? 16 : count * 2);
}

// P times 16 outputs of a panel, from the FIRST on, for MR rows from `row`.
template <int BITS, int MR, int P, int FIRST>
void tile(const LinearCall &call, const Rows &x, int64_t panel, int64_t row, Ahead next) {
    const PacelineWeight &w = call.w;
    constexpr int64_t BYTES = quad_bytes(BITS);
    const uint8_t *values = static_cast<const uint8_t *>(w.values) + panel * (w.in_size / quad_inputs(BITS)) * BYTES;
    const int32_t *units = x.units + row * x.num_units;
    __m256 totals[MR][P][2];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; v++) totals[m][v / 2][v % 2] = _mm256_setzero_ps();
    if constexpr (BITS == 16) {
        add_quads<BITS, MR, P, FIRST>(values, units, w.in_size / 2, next, totals);
    } else {
        const int64_t quads = w.group / 4;
        for (int64_t g = 0; g < x.num_groups; g++) {
            const int64_t known = row * x.num_groups + g * MR, of_panel = (panel * x.num_groups + g) * PANEL + FIRST * 16;
            const int32_t *starts = x.starts + known;
            const float *scales = x.scales + known, *sums_of_x = x.sums_of_x + known;
            __m256i sum[MR][P][2];
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                for (int v = 0; v < 2 * P; v++) sum[m][v / 2][v % 2] = _mm256_set1_epi32(starts[m]);
            add_quads<BITS, MR, P, FIRST>(values, units, quads, next, sum);
            values += quads * BYTES, units += quads * MR * 2, next.at += quads * next.step;
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; v++) {
                const __m256 scale = half8(w.scales, of_panel + v * LANES);
#pragma GCC unroll 8
                for (int m = 0; m < MR; m++) {
                    __m256 &total = totals[m][v / 2][v % 2];
                    const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(scales + m));
                    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][v / 2][v % 2]), both, total);
                }
            }
            if (!w.minimums) continue;
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; v++) {
                const __m256 minimum = half8(w.minimums, of_panel + v * LANES);
#pragma GCC unroll 8
                for (int m = 0; m < MR; m++) {
                    __m256 &total = totals[m][v / 2][v % 2];
                    total = _mm256_fmadd_ps(_mm256_broadcast_ss(sums_of_x + m), minimum, total);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < 2 * P; v++) {
        const int64_t column = panel * PANEL + (FIRST * 2 + v) * LANES, count = w.out_size - column;
        if (count <= 0) break;
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            __m256 out = totals[m][v / 2][v % 2];
            if (w.bias) out = _mm256_add_ps(out, _mm256_loadu_ps(w.bias + column));
            const int64_t at = (row + m) * w.out_size + column;
            if (call.add) {
                __m256 more = _mm256_setzero_ps();
                std::memcpy(&more, call.add + at, count >= LANES ? 32 : count * 4);
                out = _mm256_add_ps(out, more);
            }
            put(out, call.y, call.y_is_bf16, at, count);
        }
    }
}

// A panel for `wanted` rows, of at most MR. Sums of few rows leave registers for all its outputs, of more for a half.
template <int BITS, int MR = MOST>
void run_tile(int64_t wanted, const LinearCall &call, const Rows &x, int64_t panel, int64_t row, Ahead next) {
    if constexpr (MR > 1)
        if (wanted < MR) return run_tile<BITS, MR - 1>(wanted, call, x, panel, row, next);
    if constexpr (MR <= WIDE) {
        tile<BITS, MR, 2, 0>(call, x, panel, row, next);
    } else {
        tile<BITS, MR, 1, 0>(call, x, panel, row, next);
        tile<BITS, MR, 1, 1>(call, x, panel, row, next);
    }
}

int64_t num_units(const PacelineWeight &w) { return w.in_size / quad_inputs(w.bits) * 2; }

int64_t shared_bytes(const PacelineWeight &w, int64_t num_rows) {
    const int64_t groups = w.bits == 16 ? 0 : num_rows * (w.in_size / w.group);
    return up(num_rows * num_units(w) * 4) + 3 * up(groups * 4);
}

template <int BITS>
void multiply(const LinearCall &call, const Rows &x, const Team &team) {
    const Strips strips(x.num_rows, MOST);
    prepare<BITS>(call, x, strips, team);
    team.meet();
    each_tile<BITS>(call.w, strips, STRIPS_AT_ONCE, team, [&](int64_t rows, int64_t panel, int64_t row, Ahead next) {
        run_tile<BITS>(rows, call, x, panel, row, next);
    });
}

void run(const LinearCall &call, int64_t num_rows, const Team &team) {
    const PacelineWeight &w = call.w;
    Rows rows{};
    rows.num_rows = num_rows;
    rows.num_units = num_units(w);
    rows.num_groups = w.bits == 16 ? 0 : w.in_size / w.group;
    const int64_t groups = num_rows * rows.num_groups;
    char *at = team.shared;
    rows.units = reinterpret_cast<int32_t *>(at), at += up(num_rows * rows.num_units * 4);
    rows.starts = reinterpret_cast<int32_t *>(at), at += up(groups * 4);
    rows.scales = reinterpret_cast<float *>(at), at += up(groups * 4);
    rows.sums_of_x = reinterpret_cast<float *>(at);
    (w.bits == 16 ? multiply<16> : w.bits == 8 ? multiply<8> : multiply<4>)(call, rows, team);
}

}  // namespace

#pragma GCC pop_options

namespace paceline {

extern const Products avx2_products = {shared_bytes, run};

}  // namespace paceline

#endif
