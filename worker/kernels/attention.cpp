// Attention over the paged cache: cuts a step's rows into tiles and gives them to threads. What a tile computes is in
// tile.h, by which instructions kernels_*.cpp say.

#include "attention.h"

#include "program.h"

#include <cstring>
#include <vector>

namespace paceline {

namespace {

// Every set that was built, the best first.
const Kernels *const all[] = {
#if defined(__x86_64__)
    &avx512_bf16_kernels, &avx512_kernels, &avx2_kernels,
#endif
    &plain_kernels};

const Kernels *best() {
    for (const Kernels *each : all)
        if (each->runs()) return each;
    return &plain_kernels;
}

const Kernels *chosen = nullptr;

}  // namespace

const Kernels &kernels() {
    if (!chosen) chosen = best();
    return *chosen;
}

namespace {

// A piece of a tile.
struct Job {
    Tile tile;
    int64_t num_pieces;  // of the tile
    int64_t state;       // where its state begins, in floats; only of tiles with several pieces
};

thread_local Scratch packed;
thread_local std::vector<Job> cut_jobs;
thread_local std::vector<State> joined;

int64_t num_query_rows(const PacelineAttention &call, const Tile &tile) {
    return tile.num_positions * (call.num_heads / call.num_kv_heads);
}

int64_t state_floats(int64_t num_rows, int64_t padded) { return (num_rows * (padded + LANES + 1) + 15) / 16 * 16; }

State state_at(float *memory, int64_t num_rows, int64_t padded) {
    return {memory, memory + num_rows * padded, memory + num_rows * (padded + LANES)};
}

// Later queries have more to do and come first, so that the last jobs are small ones. Returns the floats of all states.
int64_t cut(const PacelineAttention &call, int64_t padded, std::vector<Job> &jobs) {
    const PacelineRows &rows = *call.rows;
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t step = group < MOST_ROWS ? MOST_ROWS / group : 1;
    int64_t floats = 0;
    jobs.clear();
    for (int64_t row = rows.num_rows - 1; row >= 0; row--)
        for (int64_t at = (rows.lengths[row] - 1) / step * step; at >= 0; at -= step)
            for (int64_t head = 0; head < call.num_kv_heads; head++) {
                const int64_t first = rows.starts[row] + at;
                const int64_t num = rows.lengths[row] - at < step ? rows.lengths[row] - at : step;
                const int64_t end = first + num;
                const int64_t begin = call.window && first >= call.window ? first - call.window + 1 : 0;
                const int64_t num_pieces = (end - 1) / PIECE - begin / PIECE + 1;
                for (int64_t piece = begin / PIECE * PIECE; piece < end; piece += PIECE) {
                    Tile tile{row, head, first, num, piece > begin ? piece : begin, piece + PIECE < end ? piece + PIECE : end};
                    jobs.push_back({tile, num_pieces, floats});
                    if (num_pieces > 1) floats += state_floats(num * group, padded);
                }
            }
    return floats;
}

// A token's key or value, of Elements, into its slab; the first unit of the token's own is at `to`.
template <class Element>
void write_key(const char *from, char *to, int64_t dim) {
    for (int64_t unit = 0; unit < dim * int64_t(sizeof(Element)) / 4; unit++)
        std::memcpy(to + unit * SLAB * 4, from + unit * 4, 4);
}

template <class Element>
void write_value(const char *from, char *to, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) std::memcpy(to + i * 4, from + i * sizeof(Element), sizeof(Element));
}

template <class Element>
void write(const PacelineAttention &call, int64_t first, int64_t stop) {
    const int64_t dim = call.head_dim, bytes = dim * sizeof(Element), entry = call.num_kv_heads * bytes;
    const int64_t block_size = call.rows->block_size, per_unit = 4 / sizeof(Element);
    for (int64_t token = first; token < stop; token++) {
        const int64_t to = call.rows->write_to[token];
        const char *k = static_cast<const char *>(call.k) + token * call.k_stride * sizeof(Element);
        const char *v = static_cast<const char *>(call.v) + token * call.v_stride * sizeof(Element);
        char *keys = static_cast<char *>(call.keys), *values = static_cast<char *>(call.values);
        if (!in_slabs(*call.rows)) {
            std::memcpy(keys + to * entry, k, entry);
            std::memcpy(values + to * entry, v, entry);
            continue;
        }
        const int64_t offset = to % block_size, key = offset % SLAB;
        for (int64_t head = 0; head < call.num_kv_heads; head++) {
            const int64_t slab = (to - offset) * entry + (head * block_size + offset - key) * bytes;
            write_key<Element>(k + head * bytes, keys + slab + key * 4, dim);
            write_value<Element>(v + head * bytes, values + slab + key / per_unit * dim * 4 + key % per_unit * sizeof(Element),
                                 dim);
        }
    }
}

void attend(const PacelineAttention &call, const Kernels &with, int64_t padded, const Job &job, const Tile &next,
            float *states) {
    const int64_t num_rows = num_query_rows(call, job.tile);
    const int64_t scratch_bytes = (with.scratch_bytes(call) + 63) / 64 * 64;
    char *scratch = packed.of(scratch_bytes + 4 * state_floats(num_rows, padded));
    if (job.num_pieces > 1) return with.attend(call, job.tile, next, state_at(states + job.state, num_rows, padded), scratch);
    const State state = state_at(reinterpret_cast<float *>(scratch + scratch_bytes), num_rows, padded);
    with.attend(call, job.tile, next, state, scratch);
    with.finish(call, job.tile, &state, 1);
}

// Joins the pieces of a tile, whose first is given.
void join(const PacelineAttention &call, const Kernels &with, int64_t padded, const Job *pieces, float *states) {
    const int64_t num_rows = num_query_rows(call, pieces->tile);
    joined.clear();
    for (int64_t i = 0; i < pieces->num_pieces; i++)
        joined.push_back(state_at(states + pieces[i].state, num_rows, padded));
    with.finish(call, pieces->tile, joined.data(), pieces->num_pieces);
}

constexpr int64_t ALONE = 2048 * 64;  // products, below which waking another thread takes longer

class Attention final : public Call {
public:
    explicit Attention(const PacelineAttention &call) : call_(call) {}

    Call *copy() const override { return new Attention(*this); }

    bool is_small(int64_t) const override {
        const PacelineRows &rows = *call_.rows;
        int64_t products = 0;
        for (int64_t row = 0; row < rows.num_rows; row++)
            products += rows.lengths[row] * (rows.starts[row] + rows.lengths[row]);
        return products * call_.num_heads * call_.head_dim < ALONE;
    }

    int64_t shared_bytes(int64_t) const override {
        const PacelineRows &rows = *call_.rows;
        for (int64_t row = 0; row < rows.num_rows; row++)
            if (rows.starts[row] + rows.lengths[row] > PIECE) return 4 * cut(call_, kernels().padded_dim(call_), cut_jobs);
        return 0;
    }

    void run(int64_t, const Team &team) const override {
        const Kernels &with = kernels();
        const int64_t padded = with.padded_dim(call_), num_tokens = call_.rows->num_tokens;
        float *states = reinterpret_cast<float *>(team.shared);
        (call_.is_bf16 ? write<uint16_t> : write<float>)(call_, team.begin(num_tokens), team.end(num_tokens));
        std::vector<Job> &jobs = cut_jobs;  // every thread cuts for itself, which is quicker than handing over
        const int64_t floats = cut(call_, padded, jobs), num_jobs = jobs.size();
        team.meet();
        for (int64_t job = team.take(), next; job < num_jobs; job = next) {
            next = team.take();
            attend(call_, with, padded, jobs[job], jobs[next < num_jobs ? next : job].tile, states);
        }
        if (!floats) return;
        team.meet();
        int64_t number = 0;
        for (int64_t job = 0; job < num_jobs; job += jobs[job].num_pieces)
            if (jobs[job].num_pieces > 1 && number++ % team.num_threads == team.thread)
                join(call_, with, padded, &jobs[job], states);
    }

private:
    PacelineAttention call_;
};

}  // namespace
}  // namespace paceline

extern "C" {

// The name of the instruction set in use.
const char *paceline_instructions(void) { return paceline::kernels().name; }

// Takes another than the best, for tests. Not beside a running call. Returns whether it is known and runs here.
int paceline_use_instructions(const char *name) {
    for (const paceline::Kernels *each : paceline::all)
        if (!std::strcmp(each->name, name) && each->runs()) {
            paceline::chosen = each;
            return 1;
        }
    return 0;
}

// Writes k and v, all of them before any read, and attends.
void paceline_attention(const PacelineAttention *call) {
    paceline::submit(paceline::Attention(*call), 0);  // its rows are the step's, wherever it is written down
}
}
