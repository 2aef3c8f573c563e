// What one call of attention is about. Shared by the part that cuts it into tiles (attention.cpp) and by the parts that
// compute a tile, one for each instruction set (kernels_*.cpp). Plain pointers; sizes in elements unless they say bytes.

#pragma once

#include <cstdint>

extern "C" {

// One step's rows, of a group of layers that share a block table. Made once a step by worker/attention/cpu.py.
struct PacelineRows {
    int64_t num_rows;
    int64_t num_tokens;
    int64_t table_width;
    int64_t block_size;
    const int32_t *tables;        // [rows][table_width] block ids
    const int64_t *first_tokens;  // [rows] where a row's tokens begin
    const int64_t *starts;        // [rows] position of its first token
    const int64_t *lengths;       // [rows] tokens
    const int64_t *write_to;      // [tokens] block * block_size + offset
};

// One layer's call. Blocks of the cache are as large as [block_size][num_kv_heads][head_dim], and where that many tokens
// are whole slabs of 16, a slab's keys and values lie as products read them, in units of 32 bits: a float or a pair of bf16.
//
//     keys    [blocks][num_kv_heads][slabs][head_dim units][16 keys]    a pair: entries 2i and 2i + 1 of a key
//     values  [blocks][num_kv_heads][slabs][16 keys' units][head_dim]   a pair: keys 2i and 2i + 1
//
// Others are [blocks][block_size][num_kv_heads][head_dim].
struct PacelineAttention {
    const PacelineRows *rows;
    const void *q;        // [tokens][q_stride], a token's heads side by side
    const void *k;        // [tokens][k_stride]
    const void *v;        // [tokens][v_stride]
    void *keys;           // as below
    void *values;
    void *out;            // [tokens][num_heads][head_dim]
    const float *sinks;   // [num_heads], or null
    int64_t q_stride;
    int64_t k_stride;
    int64_t v_stride;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;     // a multiple of 8
    int64_t window;       // 0: all
    float scale;
    float softcap;        // 0: none
    int32_t is_bf16;      // q, k, v, cache and output; else fp32
};
}

namespace paceline {

constexpr int SLAB = 16;      // keys that lie side by side
constexpr int KEYS = 128;     // keys that a tile looks at in one go; they begin at multiples of it
constexpr int PIECE = 1024;   // keys of one piece of a context, a multiple of KEYS; also from a multiple of it on
constexpr int STRIP = 6;      // query rows whose sums stay in registers
constexpr int MOST_ROWS = 96; // query rows of a tile, which share its packed keys and values
constexpr int LANES = 16;     // floats of a row's running sum
constexpr int GELU_TANH = 1;  // activations of `gate`; 0 is silu

inline bool in_slabs(const PacelineRows &rows) { return rows.block_size % SLAB == 0; }

// Some queries of one row and one KV head over one piece of the context. Query rows are (position, head of the group).
struct Tile {
    int64_t row;
    int64_t kv_head;
    int64_t first_position;
    int64_t num_positions;
    int64_t first_key;  // of the piece
    int64_t end_key;
};

// The running softmax of a tile's query rows: output that is not divided yet, sums of weights, greatest scores.
struct State {
    float *out;   // [rows][padded_dim]
    float *sums;  // [rows][LANES]
    float *most;  // [rows], in units of log 2
};

struct Products;  // linear.h

// An instruction set's share. `scratch` holds scratch_bytes; padded_dim is how many floats a row of State::out has.
struct Kernels {
    const char *name;
    bool (*runs)();
    int64_t (*padded_dim)(const PacelineAttention &);
    int64_t (*scratch_bytes)(const PacelineAttention &);
    // `next` is the tile after this one.
    void (*attend)(const PacelineAttention &, const Tile &, const Tile &next, const State &, char *scratch);
    // Joins the states of a tile's pieces into the first, in order, and writes the output.
    void (*finish)(const PacelineAttention &, const Tile &, const State *, int64_t num_pieces);
    void (*rms_norm)(const float *x, const float *weight, void *out, int out_is_bf16, int64_t size, float eps);
    void (*rotate)(void *x, int is_bf16, const void *cos, const void *sin, int64_t num_heads, int64_t head_dim,
                   int64_t dim);
    void (*gate)(const void *gate_up, void *out, int is_bf16, int64_t size, int activation);
    void (*rescore)(float *scores, int64_t num, const float *x, const void *weights, int is_bf16, int64_t size,
                    int64_t num_best);
    const Products *products;  // null where it has none
};

extern const Kernels plain_kernels, avx2_kernels, avx512_kernels, avx512_bf16_kernels;

// The best that runs here.
const Kernels &kernels();

}  // namespace paceline
