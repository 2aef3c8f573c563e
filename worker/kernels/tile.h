// A tile of attention: queries that share a KV head over one piece of their context, with the softmax computed as keys
// come (Milakov and Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135).
//
// Keys and values lie in the cache as products read them, 16 keys side by side: a slab. A strip of six query rows at a time
// goes through both products over four slabs, so that its scores never leave the nearest cache. Both are products of one
// kind, rows of units times slabs of units, where a unit is 32 bits: one float, or a pair of bf16. Where no instruction
// multiplies pairs, rows are floats, and each slab's pairs are split as they are read.
//
//     scores [rows, keys]  =  q [rows, dim units]     keys    [dim units][16]   a pair: entries 2i and 2i + 1 of a key
//     out    [rows, dim]  +=  weights [rows, units]   values  [key units][dim]  a pair: keys 2i and 2i + 1
//
// What a row computes depends on its own query, its keys and their positions alone: not on the strip, tile, chunk or
// batch that it is in. Rows that do not see a key give it the weight 0.

#pragma once

#include "attention.h"
#include "vectors.h"

#if W == 8
#include "broadcast_avx2.h"
#endif

namespace {

using paceline::KEYS;
using paceline::LANES;
using paceline::MOST_ROWS;
using paceline::SLAB;
using paceline::State;
using paceline::STRIP;
using paceline::Tile;

constexpr int WIDEST = W == 16 ? 4 : 2;  // vectors of a row whose sums stay in registers
constexpr int SLABS = KEYS / SLAB;
#ifdef HAS_BF16
constexpr bool TAKES_PAIRS = true;
#else
constexpr bool TAKES_PAIRS = false;
#endif
constexpr float UNSEEN = -1e30f;  // below every score, and finite: the difference of two is 0

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE float greatest(float a, float b) { return a > b ? a : b; }

template <int... j>
INLINE I count_up(std::integer_sequence<int, j...>) {
    return I{j...};
}

template <class T>
struct Attend {
    using Element = typename T::Element;
    static constexpr int PER_UNIT = 4 / sizeof(Element);
    static constexpr int KEY_UNITS = SLAB / PER_UNIT;  // of a slab of values
    static constexpr int PARTS = TAKES_PAIRS ? 1 : PER_UNIT;  // products that a unit takes
    static constexpr int ROW_UNITS = KEYS / PER_UNIT * PARTS;  // of a row of weights

    const PacelineAttention &call;
    const Tile &tile, &next;  // and the one whose turn it is then
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t dim = call.head_dim, units = dim / PER_UNIT;
    const int64_t padded = padded_dim(call);
    const int64_t slab_units = SLAB * units;
    const bool in_slabs = paceline::in_slabs(*call.rows);
    int32_t *zeros;                                        // a slab
    int32_t *own_keys, *own_values;                        // slabs that do not lie in the cache as they are needed
    int32_t *queries;                                      // of each strip [units][PARTS][rows]
    const int32_t *keys[SLABS], *values[SLABS];            // of the positions that are looked at
    const int32_t *next_keys[SLABS], *next_values[SLABS];  // of those that come next

    static int64_t padded_dim(const PacelineAttention &call) { return up_to(call.head_dim, W); }

    static int64_t scratch_bytes(const PacelineAttention &call) {
        const int64_t rows = greatest(MOST_ROWS, call.num_heads / call.num_kv_heads);
        return 4 * call.head_dim / PER_UNIT * ((2 * SLABS + 1) * SLAB + rows * PARTS);
    }

    Attend(const PacelineAttention &call, const Tile &tile, const Tile &next, char *scratch)
        : call(call), tile(tile), next(next) {
        zeros = reinterpret_cast<int32_t *>(scratch);
        own_keys = zeros + slab_units;
        own_values = own_keys + SLABS * slab_units;
        queries = own_values + SLABS * slab_units;
    }

    // Of the tile.
    INLINE int64_t first_token() const {
        return call.rows->first_tokens[tile.row] + tile.first_position - call.rows->starts[tile.row];
    }

    // One product of a slab's unit, which all rows share.
    template <class Unit>
    static INLINE Unit part_of(Unit unit, int part) {
        if constexpr (PARTS == 1) return unit;
        return part ? unit & ~0xffff : unit << 16;
    }

    static INLINE F multiply(I a, I b, F sum) {
#ifdef HAS_BF16
        if constexpr (PER_UNIT == 2) return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
        return fma((F)a, (F)b, sum);
    }

    // A row's unit times V vectors.
    template <int V>
    static INLINE void add_products(F (&sum)[V], const int32_t *unit, const I (&b)[V]) {
#if W == 8
        if constexpr (V == 2) return ::add_products((__m256 &)sum[0], (__m256 &)sum[1], (__m256i)b[0], (__m256i)b[1], unit);
#endif
        const I a = splat(*unit);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[v] = multiply(a, b[v], sum[v]);
    }

    INLINE const char *in_cache(const void *cache, const Tile &at, int64_t block, int64_t bytes) const {
        const int64_t of_block = call.rows->block_size * call.num_kv_heads * dim * sizeof(Element);
        return static_cast<const char *>(cache) + call.rows->tables[at.row * call.rows->table_width + block] * of_block +
               bytes;
    }

    INLINE const int32_t *slab_in(const void *cache, const Tile &at, int64_t position) const {
        const int64_t block_size = call.rows->block_size;
        const int64_t slab = at.kv_head * (block_size / SLAB) + position % block_size / SLAB;
        return reinterpret_cast<const int32_t *>(in_cache(cache, at, position / block_size, 4 * slab_units * slab));
    }

    // Where the slabs of positions [block, block + KEYS) lie; zeros stand for those outside of the tile's piece.
    void find(int64_t block) {
        for (int64_t s = 0; s < SLABS; s++) {
            const int64_t position = block + s * SLAB;
            const int64_t first = greatest(tile.first_key - position, 0), end = least(tile.end_key - position, SLAB);
            keys[s] = values[s] = zeros;
            if (first >= end) continue;
            int32_t *own = own_values + s * slab_units;
            if (!in_slabs) {
                assemble(position, first, end, own_keys + s * slab_units, own);
                keys[s] = own_keys + s * slab_units, values[s] = own;
                continue;
            }
            keys[s] = slab_in(call.keys, tile, position), values[s] = slab_in(call.values, tile, position);
            if (end - first < SLAB) {
                copy_values(values[s], first, end, own);
                values[s] = own;
            }
        }
    }

    // The slabs that come next are asked of memory while these are multiplied, line for line.
    void look_ahead(const Tile &at, int64_t block) {
        for (int64_t s = 0; s < SLABS; s++) {
            const int64_t position = block + s * SLAB;
            next_keys[s] = keys[s], next_values[s] = values[s];
            if (!in_slabs || position >= at.end_key || position + SLAB <= at.first_key) continue;
            next_keys[s] = slab_in(call.keys, at, position);
            next_values[s] = slab_in(call.values, at, position);
        }
    }

    // Keys [first, end) of a slab of values, and zeros beside them: what others left there may be no number.
    void copy_values(const int32_t *from, int64_t first, int64_t end, int32_t *to) const {
        for (int64_t unit = 0; unit < KEY_UNITS; unit++) {
            int32_t mask = 0;
            for (int part = 0; part < PER_UNIT; part++) {
                const int64_t key = unit * PER_UNIT + part;
                if (key >= first && key < end) mask |= PER_UNIT == 1 ? -1 : 0xffff << 16 * part;
            }
            for (int64_t i = 0; i < dim; i += W)
                store(to + unit * dim + i, load<I>(from + unit * dim + i, dim - i) & mask, dim - i);
        }
    }

    // The same of a cache whose blocks are not made of slabs, key by key.
    void assemble(int64_t position, int64_t first, int64_t end, int32_t *to_keys, int32_t *to_values) const {
        const int64_t block_size = call.rows->block_size, bytes = dim * sizeof(Element);
        std::memset(to_keys, 0, 4 * slab_units);
        std::memset(to_values, 0, 4 * slab_units);
        for (int64_t key = first; key < end; key++) {
            const int64_t index = (position + key) / block_size, offset = (position + key) % block_size;
            const int64_t at = (offset * call.num_kv_heads + tile.kv_head) * bytes;
            const char *of_key = in_cache(call.keys, tile, index, at);
            const char *of_value = in_cache(call.values, tile, index, at);
            for (int64_t unit = 0; unit < units; unit++) std::memcpy(to_keys + unit * SLAB + key, of_key + 4 * unit, 4);
            Element *to = reinterpret_cast<Element *>(to_values + key / PER_UNIT * dim) + key % PER_UNIT;
            for (int64_t i = 0; i < dim; i++) std::memcpy(to + i * PER_UNIT, of_value + i * sizeof(Element), sizeof(Element));
        }
    }

    INLINE F score(F product) const {
        if (call.softcap == 0.0f) return product * (call.scale * LOG2E);
        return tanh(product * (call.scale / call.softcap)) * (call.softcap * LOG2E);
    }

    // scores[R][KEYS] of V vectors of keys, from vector `first` on.
    template <int R, bool ASKS, int V>
    INLINE void multiply_keys(const int32_t *q, int64_t first, float *scores) const {
        const int32_t *from[V], *ahead[V];
        F sum[R][V] = {};
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const int64_t slab = (first + v) * W / SLAB, lane = (first + v) * W % SLAB;
            from[v] = keys[slab] + lane, ahead[v] = next_keys[slab] + lane;
        }
        for (int64_t k = 0; k < units; k++) {
            if constexpr (ASKS)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) __builtin_prefetch(ahead[v] + k * SLAB, 0, 3);
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                I b[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) b[v] = part_of(load<I>(from[v] + k * SLAB), part);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) add_products(sum[r], q + (k * PARTS + part) * R + r, b);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) store(scores + r * KEYS + (first + v) * W, sum[r][v]);
    }

    // out[R][padded] = out * factors + weights[R][KEYS / PER_UNIT][PARTS] values, of V vectors from entry `at` on. Of a
    // single vector there may be less.
    template <int R, bool ASKS, int V>
    INLINE void add_values(const int32_t *weights, int64_t slabs, int64_t at, const float *factors, float *out) const {
        const int64_t some = V == 1 ? dim - at : W;
        F sum[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] = load<F>(out + r * padded + at + v * W) * factors[r];
        for (int64_t s = 0; s < slabs; s++) {
            const int32_t *from = values[s] + at, *ahead = next_values[s] + at, *by = weights + s * KEY_UNITS * PARTS;
            for (int64_t k = 0; k < KEY_UNITS; k++) {
                if constexpr (ASKS)
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++) __builtin_prefetch(ahead + k * dim + v * W, 0, 3);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) {
                    I b[V];
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++) b[v] = part_of(load<I>(from + k * dim + v * W, some), part);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) add_products(sum[r], by + r * ROW_UNITS + k * PARTS + part, b);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) store(out + r * padded + at + v * W, sum[r][v]);
    }

    template <int R, bool ASKS, int V = WIDEST>
    INLINE void multiply_all_keys(const int32_t *q, int64_t first, int64_t vectors, float *scores) const {
        for (; first + V <= vectors; first += V) multiply_keys<R, ASKS, V>(q, first, scores);
        if constexpr (V > 1)
            if (first < vectors) multiply_all_keys<R, ASKS, V - 1>(q, first, vectors, scores);
    }

    template <int R, bool ASKS, int V = WIDEST>
    INLINE void add_all_values(const int32_t *weights, int64_t slabs, int64_t at, const float *factors, float *out) const {
        for (; at + (V == 1 ? 1 : V * W) <= dim; at += V * W) add_values<R, ASKS, V>(weights, slabs, at, factors, out);
        if constexpr (V > 1)
            if (at < dim) add_all_values<R, ASKS, V - 1>(weights, slabs, at, factors, out);
    }

    // Rows [row, row + R) look at so many slabs of keys, from position `block` on. ASKS: memory for those that come next.
    template <int R, bool ASKS>
    void look(int64_t row, int64_t block, int64_t slabs, const State &state) {
        alignas(64) float scores[R][KEYS];
        alignas(64) int32_t weights[R][ROW_UNITS];
        float factors[R];
        const int64_t vectors = slabs * SLAB / W;
        multiply_all_keys<R, ASKS>(queries + row * units * PARTS, 0, vectors, scores[0]);
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
                if constexpr (PER_UNIT > PARTS)
                    store(weights[r] + v * W / 2, to_bf16(weight));
                else
                    store(weights[r] + v * W, weight);
            }
            store(sums, sum);
            *mosts = after;
        }
        add_all_values<R, ASKS>(weights[0], slabs, 0, factors, state.out + row * padded);
    }

    template <int R = STRIP>
    void look_some(int64_t num, int64_t row, int64_t block, int64_t slabs, const State &state) {
        if constexpr (R > 1)
            if (num < R) return look_some<R - 1>(num, row, block, slabs, state);
        if (row == 0)
            look<R, true>(row, block, slabs, state);
        else
            look<R, false>(row, block, slabs, state);
    }

    void run(const State &state) {
        const int64_t num_rows = tile.num_positions * group;
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t head = tile.kv_head * group + row % group;
            const Element *q = static_cast<const Element *>(call.q) + (first_token() + row / group) * call.q_stride +
                               head * dim;
            const int64_t strip = row / STRIP * STRIP, step = least(STRIP, num_rows - strip);
            int32_t *to = queries + strip * units * PARTS + row - strip;
            for (int64_t unit = 0; unit < units; unit++) {
                int32_t whole;
                std::memcpy(&whole, q + unit * PER_UNIT, 4);
                for (int part = 0; part < PARTS; part++, to += step) *to = part_of(whole, part);
            }
        }
        std::memset(state.out, 0, 4 * num_rows * padded);
        std::memset(state.sums, 0, 4 * num_rows * LANES);
        for (int64_t i = 0; i < num_rows; i++) state.most[i] = UNSEEN;
        std::memset(zeros, 0, 4 * slab_units);
        for (int64_t block = tile.first_key / KEYS * KEYS; block < tile.end_key; block += KEYS) {
            find(block);
            if (block + KEYS < tile.end_key)
                look_ahead(tile, block + KEYS);
            else
                look_ahead(next, next.first_key / KEYS * KEYS);
            for (int64_t row = 0; row < num_rows; row += STRIP) {
                const int64_t num = least(STRIP, num_rows - row);
                const int64_t first = tile.first_position + row / group;
                const int64_t last = tile.first_position + (row + num - 1) / group;
                const int64_t seen = least(last + 1, tile.end_key) - block;
                if (seen <= 0 || (call.window && first - call.window + 1 >= block + KEYS)) continue;
                look_some(num, row, block, up_to(least(seen, KEYS), SLAB) / SLAB, state);
            }
        }
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
                          ((first_token() + row / group) * call.num_heads + head) * dim;
            for (int64_t at = 0; at < dim; at += W) {
                F sum = {};
                for (int64_t i = 0; i < num_pieces; i++)
                    sum = fma(load<F>(pieces[i].out + row * padded + at), exp2(splat(pieces[i].most[row] - most)), sum);
                T::put(to + at, sum / total, dim - at);
            }
        }
    }
};

using Narrow = Attend<BFloat16>;
using Wide = Attend<Float>;

int64_t padded_dim(const PacelineAttention &call) {
    return call.is_bf16 ? Narrow::padded_dim(call) : Wide::padded_dim(call);
}

int64_t scratch_bytes(const PacelineAttention &call) {
    return call.is_bf16 ? Narrow::scratch_bytes(call) : Wide::scratch_bytes(call);
}

void attend(const PacelineAttention &call, const Tile &tile, const Tile &next, const State &state, char *scratch) {
    if (call.is_bf16)
        Narrow(call, tile, next, scratch).run(state);
    else
        Wide(call, tile, next, scratch).run(state);
}

void finish(const PacelineAttention &call, const Tile &tile, const State *pieces, int64_t num_pieces) {
    if (call.is_bf16)
        Narrow(call, tile, tile, nullptr).finish(pieces, num_pieces);
    else
        Wide(call, tile, tile, nullptr).finish(pieces, num_pieces);
}

}  // namespace
