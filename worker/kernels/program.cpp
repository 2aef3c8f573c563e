// How calls are run and written down: program.h.
//
// Threads are torch's, as many as it was told: compiled for OpenMP but not linked to it, the library calls the runtime
// that torch has loaded.

#include "program.h"

#include <cstdlib>
#include <memory>
#include <vector>

#include <omp.h>
#include <sched.h>

namespace paceline {

namespace {

// How often a thread looks whether the others have come before it offers its core to who else wants it. Calls take a few
// microseconds to a few hundred, and a waiting thread that keeps a core which another of the team needs costs far more.
constexpr int PATIENCE = 2000;

struct Step {
    std::unique_ptr<Call> call;
    int64_t rows_per_token;
};

thread_local Scratch shared;
thread_local std::vector<Counter> counters;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

Call::~Call() = default;

int64_t Call::shared_bytes(int64_t) const { return 0; }

void Team::meet() const {
    if (num_threads == 1) return;
    const int64_t round = __atomic_load_n(&meeting->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_ACQ_REL) == num_threads) {
        __atomic_store_n(&meeting->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&meeting->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int looks = 0; __atomic_load_n(&meeting->round, __ATOMIC_ACQUIRE) == round; looks++)
        looks < PATIENCE ? pause() : (void)sched_yield();
}

bool Team::take_some(int64_t num, Walk &from, int64_t &begin, int64_t &end) const {
    const int64_t taken = take();
    for (; from.begin < num; from.number++) {
        const int64_t size = (num - from.begin + 2 * num_threads - 1) / (2 * num_threads);  // guided self-scheduling
        if (from.number == taken) {
            begin = from.begin, end = begin + size;
            return true;
        }
        from.begin += size;
    }
    return false;
}

Scratch::~Scratch() { std::free(memory_); }

char *Scratch::of(int64_t bytes) {
    if (bytes > size_) {
        std::free(memory_);
        size_ = (bytes + 4095) / 4096 * 4096;
        memory_ = static_cast<char *>(std::aligned_alloc(64, size_));
        if (!memory_) std::abort();
    }
    return memory_;
}

}  // namespace paceline

struct PacelineProgram {
    int64_t num_tokens;  // that it was written down with
    bool is_whole = true;
    std::vector<paceline::Step> steps;
};

namespace paceline {

namespace {

thread_local PacelineProgram *recording = nullptr;

// of(i): the i-th call, and its rows.
template <class Of>
void run(int64_t num_calls, int num_threads, Of of) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < num_calls; i++) {
        const auto [call, num_rows] = of(i);
        const int64_t wanted = call->shared_bytes(num_rows);
        if (wanted > bytes) bytes = wanted;
    }
    counters.assign(num_calls, Counter{0});
    Meeting meeting;
    const Team all{0, num_threads, shared.of(bytes), counters.data(), &meeting};
    auto work = [&](int thread) {
        Team team = all;
        team.thread = thread;
        for (int64_t i = 0; i < num_calls; i++) {
            const auto [call, num_rows] = of(i);
            team.counter = all.counter + i;
            call->run(num_rows, team);
            if (i + 1 < num_calls) team.meet();
        }
    };
    if (num_threads == 1) return work(0);
#pragma omp parallel num_threads(num_threads)
    work(omp_get_thread_num());
}

}  // namespace

void submit(const Call &call, int64_t num_rows) {
    if (!recording) {
        const int num_threads = call.is_small(num_rows) ? 1 : omp_get_max_threads();
        return run(1, num_threads, [&](int64_t) { return std::pair(&call, num_rows); });
    }
    if (num_rows % recording->num_tokens) recording->is_whole = false;
    recording->steps.push_back({std::unique_ptr<Call>(call.copy()), num_rows / recording->num_tokens});
}

}  // namespace paceline

extern "C" {

// From now on this thread's calls are written down, as those of so many tokens.
void paceline_record(int64_t num_tokens) {
    paceline::recording = new PacelineProgram;
    paceline::recording->num_tokens = num_tokens;
}

// Ends it. Null where the rows of a call were no multiple of the tokens. The memory that calls were given pointers to
// must live as long as what is returned.
PacelineProgram *paceline_recorded(void) {
    PacelineProgram *program = paceline::recording;
    paceline::recording = nullptr;
    if (program->is_whole) return program;
    delete program;
    return nullptr;
}

void paceline_replay(const PacelineProgram *program, int64_t num_tokens) {
    paceline::run(program->steps.size(), omp_get_max_threads(), [&](int64_t i) {
        const paceline::Step &step = program->steps[i];
        return std::pair<const paceline::Call *, int64_t>(step.call.get(), step.rows_per_token * num_tokens);
    });
}

int64_t paceline_num_calls(const PacelineProgram *program) { return program->steps.size(); }

void paceline_forget(PacelineProgram *program) { delete program; }
}
