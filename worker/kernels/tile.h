// A tile of attention: queries that share a KV head over one piece of their context, with the softmax computed as keys
// come (Milakov and Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135).
//
// Keys and values are packed once per 64 of them, and then a strip of six query rows at a time goes through both
// products, so that its scores never leave the nearest cache. Both are products of one kind, rows of units times packed
// units, where a unit is 32 bits: one float, or with instructions for bf16 a pair of them.
//
//     scores [rows, keys]  =  q [rows, dim units]     keys    [dim units][64]   a pair: entries 2i and 2i + 1 of a key
//     out    [rows, dim]  +=  weights [rows, units]   values  [key units][dim]  a pair: keys 2i and 2i + 1
//
// What a row computes depends on its own query, its keys and their positions alone: not on the strip, tile, chunk or
// batch that it is in. Rows that do not see a key give it the weight 0.

#pragma once

#include "attention.h"
#include "vectors.h"

namespace {

using paceline::KEYS;
using paceline::LANES;
using paceline::MOST_ROWS;
using paceline::State;
using paceline::STRIP;
using paceline::Tile;

constexpr int WIDEST = W == 16 ? 4 : 2;  // vectors of a row whose sums stay in registers
constexpr float UNSEEN = -1e30f;         // below every score, and finite: the difference of two is 0

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE float greatest(float a, float b) { return a > b ? a : b; }

template <int... j>
INLINE I count_up(std::integer_sequence<int, j...>) {
    return I{j...};
}

template <class T, bool PAIRS>
struct Attend {
    using Element = typename T::Element;
    static constexpr int PER_UNIT = PAIRS ? 2 : 1;
    static constexpr int QUARTER = W == 16 && sizeof(Element) * PER_UNIT == 4 ? 4 : W;  // units transposed in one go

    const PacelineAttention &call;
    const Tile &tile;
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t units = call.head_dim / PER_UNIT;
    const int64_t padded = padded_dim(call);
    int32_t *keys;     // [units][KEYS]
    int32_t *values;   // [KEYS / PER_UNIT][padded]
    int32_t *queries;  // [rows][units]
    Element *zeros;    // [head_dim]
    const Element *of_keys[KEYS], *of_values[KEYS];  // of the keys that come next

    static int64_t padded_dim(const PacelineAttention &call) {
        return up_to(call.head_dim / PER_UNIT, W) * PER_UNIT;
    }

    static int64_t scratch_bytes(const PacelineAttention &call) {
        const int64_t rows = greatest(MOST_ROWS, call.num_heads / call.num_kv_heads);
        return 4 * (call.head_dim * KEYS + padded_dim(call) * KEYS + rows * call.head_dim + call.head_dim);
    }

    Attend(const PacelineAttention &call, const Tile &tile, char *scratch) : call(call), tile(tile) {
        keys = reinterpret_cast<int32_t *>(scratch);
        values = keys + call.head_dim * KEYS;
        queries = values + padded * KEYS;
        zeros = reinterpret_cast<Element *>(queries + greatest(MOST_ROWS, group) * call.head_dim);
    }

    // Of the tile.
    INLINE int64_t first_token() const {
        return call.rows->first_tokens[tile.row] + tile.first_position - call.rows->starts[tile.row];
    }

    static INLINE I get_units(const Element *from, int64_t unit, int64_t units) {
        if constexpr (PAIRS)
            return load<I>(from + 2 * unit, units - unit);
        else
            return (I)T::get(from + unit, units - unit);
    }

    static INLINE F multiply(I a, I b, F sum) {
#ifdef HAS_BF16
        if constexpr (PAIRS) return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
        return fma((F)a, (F)b, sum);
    }

    // c[R][V vectors] = c * factors + a[R][depth] b[depth][V vectors]; c starts at 0 where there are no factors.
    template <int R, int V>
    static INLINE void product(const int32_t *a, int64_t a_stride, const int32_t *b, int64_t b_stride, int64_t depth,
                               float *c, int64_t c_stride, const float *factors) {
        F sum[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] = factors ? load<F>(c + r * c_stride + v * W) * factors[r] : F{};
        for (int64_t k = 0; k < depth; k++) {
            I of_b[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) of_b[v] = load<I>(b + k * b_stride + v * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const I of_a = splat(a[r * a_stride + k]);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) sum[r][v] = multiply(of_a, of_b[v], sum[r][v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) store(c + r * c_stride + v * W, sum[r][v]);
    }

    // The same over any number of vectors.
    template <int R, int V = WIDEST>
    static INLINE void wide_product(const int32_t *a, int64_t a_stride, const int32_t *b, int64_t b_stride,
                                    int64_t depth, float *c, int64_t c_stride, const float *factors, int64_t vectors) {
        for (; vectors >= V; vectors -= V, b += V * W, c += V * W)
            product<R, V>(a, a_stride, b, b_stride, depth, c, c_stride, factors);
        if constexpr (V > 1)
            if (vectors) wide_product<R, V - 1>(a, a_stride, b, b_stride, depth, c, c_stride, factors, vectors);
    }

    // Where the keys and values of positions [block, block + KEYS) lie; zeros for those outside of the tile's piece. They
    // are fetched into the second cache now, a round before they are packed.
    void find(int64_t block) {
        const PacelineRows &rows = *call.rows;
        const int64_t first = greatest(block, tile.first_key), end = least(block + KEYS, tile.end_key);
        for (int64_t i = 0; i < KEYS; i++) of_keys[i] = of_values[i] = zeros;
        const int64_t entry = call.num_kv_heads * call.head_dim, bytes = call.head_dim * sizeof(Element);
        const int32_t *table = rows.tables + tile.row * rows.table_width;
        for (int64_t position = first; position < end;) {
            const int64_t index = position / rows.block_size, start = index * rows.block_size;
            const int64_t stop = least(start + rows.block_size, end);
            const int64_t at = table[index] * rows.block_size * entry + tile.kv_head * call.head_dim;
            for (; position < stop; position++) {
                const Element *key = static_cast<const Element *>(call.keys) + at + (position - start) * entry;
                const Element *value = static_cast<const Element *>(call.values) + at + (position - start) * entry;
                of_keys[position - block] = key;
                of_values[position - block] = value;
                for (int64_t line = 0; line < bytes; line += 64) {
                    __builtin_prefetch(reinterpret_cast<const char *>(key) + line, 0, 2);
                    __builtin_prefetch(reinterpret_cast<const char *>(value) + line, 0, 2);
                }
            }
        }
    }

    // Keys and values that were found.
    void pack() {
        for (int64_t first = 0; first < KEYS; first += W)
            for (int64_t unit = 0; unit < units; unit += QUARTER) {
                I columns[QUARTER];
                if constexpr (QUARTER < W) {
                    transpose_quarter(of_keys + first, unit * PER_UNIT, columns);
                } else {
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++) columns[i] = get_units(of_keys[first + i], unit, units);
                    transpose(columns);
                }
                const int64_t some = least(QUARTER, units - unit);
                for (int64_t i = 0; i < some; i++) store(keys + (unit + i) * KEYS + first, columns[i]);
            }
        for (int64_t key = 0; key < KEYS; key += PER_UNIT)
            for (int64_t unit = 0; unit < units; unit += W) {
                const I a = get_units(of_values[key], unit, units);
                int32_t *to = values + key / PER_UNIT * padded + unit * PER_UNIT;
                if constexpr (PAIRS) {
                    // Even entries, then odd ones: `put` puts them in order again.
                    const I b = get_units(of_values[key + 1], unit, units);
                    store(to, (a & 0xffff) | (b << 16));
                    store(to + W, ((a >> 16) & 0xffff) | (b & ~0xffff));
                } else {
                    store(to, a);
                }
            }
    }

    INLINE F score(F product) const {
        if (call.softcap == 0.0f) return product * (call.scale * LOG2E);
        return tanh(product * (call.scale / call.softcap)) * (call.softcap * LOG2E);
    }

    // Rows [row, row + R) look at `vectors` vectors of keys, from position `block` on.
    template <int R>
    void look(int64_t row, int64_t block, int64_t vectors, const State &state) {
        alignas(64) float scores[R][KEYS];
        alignas(64) int32_t weights[R][KEYS / PER_UNIT];
        float factors[R];
        const int32_t *q = queries + row * units;
        wide_product<R>(q, units, keys, KEYS, units, scores[0], KEYS, nullptr, vectors);
        for (int r = 0; r < R; r++) {
            const int64_t position = tile.first_position + (row + r) / group;
            const int64_t last = position - block;
            const int64_t first = call.window ? greatest(position - call.window + 1 - block, 0) : 0;
            const bool sees_all = first == 0 && last >= vectors * W - 1;
            F most = splat(UNSEEN);
            for (int64_t v = 0; v < vectors; v++) {
                F s = score(load<F>(scores[r] + v * W));
                if (!sees_all) {
                    const I lane = count_up(Lanes{}) + splat(int32_t(v * W));
                    const I sees = (lane >= splat(int32_t(first))) & (lane <= splat(int32_t(least(last, KEYS))));
                    s = sees ? s : splat(-__builtin_inff());
                }
                store(scores[r] + v * W, s);
                most = max(most, s);
            }
            float *sums = state.sums + (row + r) * LANES, *mosts = state.most + row + r;
            const float before = *mosts, after = greatest(before, max_of_all(most)[0]);
            factors[r] = before == after ? 1.0f : exp2(splat(before - after))[0];
            F sum = load<F>(sums) * factors[r];
            for (int64_t v = 0; v < vectors; v++) {
                const F weight = exp2(load<F>(scores[r] + v * W) - after);
                sum += weight;
                if constexpr (PAIRS)
                    store(weights[r] + v * W / 2, narrow(to_bf16(weight)));
                else
                    store(weights[r] + v * W, weight);
            }
            store(sums, sum);
            *mosts = after;
        }
        wide_product<R>(weights[0], KEYS / PER_UNIT, values, padded,
                        vectors * W / PER_UNIT, state.out + row * padded, padded, factors, padded / W);
    }

    template <int R = STRIP>
    void look_some(int64_t num, int64_t row, int64_t block, int64_t vectors, const State &state) {
        if constexpr (R > 1)
            if (num < R) return look_some<R - 1>(num, row, block, vectors, state);
        look<R>(row, block, vectors, state);
    }

    void run(const State &state) {
        const int64_t num_rows = tile.num_positions * group;
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t head = tile.kv_head * group + row % group;
            const Element *q = static_cast<const Element *>(call.q) + (first_token() + row / group) * call.q_stride +
                               head * call.head_dim;
            for (int64_t unit = 0; unit < units; unit += W)
                store(queries + row * units + unit, get_units(q, unit, units), units - unit);
        }
        for (int64_t i = 0; i < num_rows * padded; i++) state.out[i] = 0.0f;
        for (int64_t i = 0; i < num_rows * LANES; i++) state.sums[i] = 0.0f;
        for (int64_t i = 0; i < num_rows; i++) state.most[i] = UNSEEN;
        for (int64_t i = 0; i < call.head_dim; i++) zeros[i] = 0;
        find(tile.first_key / KEYS * KEYS);
        for (int64_t block = tile.first_key / KEYS * KEYS; block < tile.end_key; block += KEYS) {
            pack();
            find(block + KEYS);
            for (int64_t row = 0; row < num_rows; row += STRIP) {
                const int64_t num = least(STRIP, num_rows - row);
                const int64_t first = tile.first_position + row / group;
                const int64_t last = tile.first_position + (row + num - 1) / group;
                const int64_t seen = least(last + 1, tile.end_key) - block;
                if (seen <= 0 || (call.window && first - call.window + 1 >= block + KEYS)) continue;
                look_some(num, row, block, up_to(least(seen, KEYS), W) / W, state);
            }
        }
    }

    INLINE void put(Element *to, const F *sums, int64_t unit) const {
        if constexpr (PAIRS)
            store(to + 2 * unit, to_bf16(sums[0]) | (to_bf16(sums[1]) << 16), units - unit);
        else
            T::put(to + unit, sums[0], units - unit);
    }

    void finish(const State *pieces, int64_t num_pieces) const {
        const int64_t num_rows = tile.num_positions * group;
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t head = tile.kv_head * group + row % group;
            const float sink = call.sinks ? call.sinks[head] * LOG2E : UNSEEN;
            float most = sink;
            for (int64_t i = 0; i < num_pieces; i++) most = greatest(most, pieces[i].most[row]);
            float total = call.sinks ? exp2(splat(sink - most))[0] : 0.0f;
            for (int64_t i = 0; i < num_pieces; i++)
                total += sum_of_all(load<F>(pieces[i].sums + row * LANES))[0] * exp2(splat(pieces[i].most[row] - most))[0];
            Element *to = static_cast<Element *>(call.out) +
                          ((first_token() + row / group) * call.num_heads + head) * call.head_dim;
            for (int64_t unit = 0; unit < units; unit += W) {
                F sums[PER_UNIT] = {};
                for (int64_t i = 0; i < num_pieces; i++) {
                    const F factor = exp2(splat(pieces[i].most[row] - most));
                    for (int part = 0; part < PER_UNIT; part++)
                        sums[part] = fma(load<F>(pieces[i].out + row * padded + unit * PER_UNIT + part * W), factor,
                                         sums[part]);
                }
                for (int part = 0; part < PER_UNIT; part++) sums[part] = sums[part] / total;
                put(to, sums, unit);
            }
        }
    }
};

#ifdef HAS_BF16
using Narrow = Attend<BFloat16, true>;
#else
using Narrow = Attend<BFloat16, false>;
#endif
using Wide = Attend<Float, false>;

int64_t padded_dim(const PacelineAttention &call) {
    return call.is_bf16 ? Narrow::padded_dim(call) : Wide::padded_dim(call);
}

int64_t scratch_bytes(const PacelineAttention &call) {
    return call.is_bf16 ? Narrow::scratch_bytes(call) : Wide::scratch_bytes(call);
}

void attend(const PacelineAttention &call, const Tile &tile, const State &state, char *scratch) {
    if (call.is_bf16)
        Narrow(call, tile, scratch).run(state);
    else
        Wide(call, tile, scratch).run(state);
}

void finish(const PacelineAttention &call, const Tile &tile, const State *pieces, int64_t num_pieces) {
    if (call.is_bf16)
        Narrow(call, tile, nullptr).finish(pieces, num_pieces);
    else
        Wide(call, tile, nullptr).finish(pieces, num_pieces);
}

}  // namespace
