// Attention over the paged cache: cuts a step's rows into tiles and gives them to threads. What a tile computes is in
// tile.h, by which instructions kernels_*.cpp say.
//
// Threads are torch's, as many as it was told: compiled for OpenMP but not linked to it, the library calls the runtime
// that torch has loaded.

#include "attention.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include <omp.h>

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

// Memory of one thread, kept for the next call.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    char *of(size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_ = static_cast<char *>(std::aligned_alloc(64, size_));
            if (!memory_) std::abort();
        }
        return memory_;
    }

private:
    char *memory_ = nullptr;
    size_t size_ = 0;
};

thread_local Scratch packed, states;

struct Job {
    Tile tile;           // of one piece
    int64_t first;       // job of the tile's first piece
    int64_t num_pieces;
    int64_t state;       // where its state begins, in floats; only of tiles with several pieces
    int left;            // pieces that are not computed, counted at the first
};

int64_t num_query_rows(const PacelineAttention &call, const Tile &tile) {
    return tile.num_positions * (call.num_heads / call.num_kv_heads);
}

int64_t state_floats(int64_t num_rows, int64_t padded) { return (num_rows * (padded + LANES + 1) + 15) / 16 * 16; }

State state_at(float *memory, int64_t num_rows, int64_t padded) {
    return {memory, memory + num_rows * padded, memory + num_rows * (padded + LANES)};
}

// Later queries have more to do and come first, so that the last jobs are small ones.
void cut(const PacelineAttention &call, int64_t padded, std::vector<Job> &jobs, int64_t &floats) {
    const PacelineRows &rows = *call.rows;
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t step = group < MOST_ROWS ? MOST_ROWS / group : 1;
    jobs.clear();
    floats = 0;
    for (int64_t row = rows.num_rows - 1; row >= 0; row--)
        for (int64_t at = (rows.lengths[row] - 1) / step * step; at >= 0; at -= step)
            for (int64_t head = 0; head < call.num_kv_heads; head++) {
                const int64_t first = rows.starts[row] + at;
                const int64_t num = rows.lengths[row] - at < step ? rows.lengths[row] - at : step;
                const int64_t end = first + num;
                const int64_t begin = call.window && first >= call.window ? first - call.window + 1 : 0;
                const int64_t num_pieces = (end - 1) / PIECE - begin / PIECE + 1;
                const int64_t job = jobs.size();
                for (int64_t piece = begin / PIECE * PIECE; piece < end; piece += PIECE) {
                    Tile tile{row, head, first, num, piece > begin ? piece : begin, piece + PIECE < end ? piece + PIECE : end};
                    jobs.push_back({tile, job, num_pieces, floats, int(num_pieces)});
                    if (num_pieces > 1) floats += state_floats(num * group, padded);
                }
            }
}

void write(const PacelineAttention &call, int64_t first, int64_t stop) {
    const int64_t bytes = call.is_bf16 ? 2 : 4, entry = call.num_kv_heads * call.head_dim * bytes;
    for (int64_t token = first; token < stop; token++) {
        const int64_t at = call.rows->write_to[token] * entry;
        std::memcpy(static_cast<char *>(call.keys) + at, static_cast<const char *>(call.k) + token * call.k_stride * bytes, entry);
        std::memcpy(static_cast<char *>(call.values) + at, static_cast<const char *>(call.v) + token * call.v_stride * bytes, entry);
    }
}

void run(const PacelineAttention &call, const Kernels &with, int64_t padded, std::vector<Job> &jobs, Job &job, float *memory) {
    const int64_t num_rows = num_query_rows(call, job.tile), floats = state_floats(num_rows, padded);
    const int64_t scratch_bytes = (with.scratch_bytes(call) + 63) / 64 * 64;
    char *scratch = packed.of(scratch_bytes + 4 * floats);
    if (job.num_pieces == 1) {
        const State state = state_at(reinterpret_cast<float *>(scratch + scratch_bytes), num_rows, padded);
        with.attend(call, job.tile, state, scratch);
        with.finish(call, job.tile, &state, 1);
        return;
    }
    with.attend(call, job.tile, state_at(memory + job.state, num_rows, padded), scratch);
    Job *pieces = &jobs[job.first];
    if (__atomic_sub_fetch(&pieces->left, 1, __ATOMIC_ACQ_REL)) return;
    std::vector<State> all;
    for (int64_t i = 0; i < job.num_pieces; i++) all.push_back(state_at(memory + pieces[i].state, num_rows, padded));
    with.finish(call, job.tile, all.data(), job.num_pieces);
}

constexpr int64_t ALONE = 2048;  // rows times keys, below which waking another thread takes longer

bool is_small(const PacelineAttention &call, const std::vector<Job> &jobs) {
    int64_t work = 0;
    for (const Job &job : jobs) work += num_query_rows(call, job.tile) * (job.tile.end_key - job.tile.first_key);
    return work * call.head_dim < ALONE * 64;
}

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

void paceline_attention(const PacelineAttention *pointer) {
    using namespace paceline;
    const PacelineAttention &call = *pointer;
    const Kernels &with = kernels();
    const int64_t padded = with.padded_dim(call), num_tokens = call.rows->num_tokens;
    static thread_local std::vector<Job> kept;
    std::vector<Job> &jobs = kept;
    int64_t floats;
    cut(call, padded, jobs, floats);
    float *memory = reinterpret_cast<float *>(states.of(4 * floats + 64));
    if (omp_get_max_threads() == 1 || is_small(call, jobs)) {
        write(call, 0, num_tokens);
        for (Job &job : jobs) run(call, with, padded, jobs, job, memory);
        return;
    }
    int64_t next = 0, num_jobs = jobs.size();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < (num_tokens + 15) / 16; block++)
            write(call, block * 16, block * 16 + 16 < num_tokens ? block * 16 + 16 : num_tokens);
        int64_t job;
        while ((job = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < num_jobs)
            run(call, with, padded, jobs, jobs[job], memory);
    }
}
}
