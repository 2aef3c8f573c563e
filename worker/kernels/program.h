// Kernel calls that a team of threads makes one after the other, each thread a share of every call. A call that comes
// alone is run at once; between paceline_record and paceline_recorded calls are only written down, to be run again and
// again for any number of tokens: what CUDA graphs are for a GPU. Threads wake once for all calls, and nothing is decided
// between them.
//
// Knows no kernel: each is a `Call`.

#pragma once

#include <cstdint>

namespace paceline {

// Where threads wait for each other, and what they take work from. Of one run.
struct Meeting {
    alignas(64) int64_t arrived = 0;
    alignas(64) int64_t round = 0;
};

struct alignas(64) Counter {
    int64_t value;
};

// How far a thread has counted through the pieces of a call.
struct Walk {
    int64_t number = 0, begin = 0;
};

// The threads of a run, as one of them sees them.
struct Team {
    int thread;
    int num_threads;
    char *shared;      // memory of the call that is run, as much as it asked for, at 64 bytes
    Counter *counter;  // of the call that is run, 0 at its beginning
    Meeting *meeting;

    // Returns when all threads are here.
    void meet() const;

    // The number of the next piece of work that nobody has taken, counted from 0.
    int64_t take() const { return __atomic_fetch_add(&counter->value, 1, __ATOMIC_RELAXED); }

    // As `take`, of `num` equal pieces at once those that are left to a thread's share: many at first, in the end one, so
    // that all are done at the same time. `from` remembers where the thread was. Returns whether there is one: [begin, end).
    bool take_some(int64_t num, Walk &from, int64_t &begin, int64_t &end) const;

    // This thread's part of n things begins here and ends where the next one's begins.
    int64_t begin(int64_t n) const { return n * thread / num_threads; }
    int64_t end(int64_t n) const { return n * (thread + 1) / num_threads; }
};

// A kernel with its arguments, for any number of rows.
class Call {
public:
    virtual ~Call();
    virtual Call *copy() const = 0;
    // Whether one thread has done it before another is awake.
    virtual bool is_small(int64_t num_rows) const = 0;
    // Bytes that its threads share.
    virtual int64_t shared_bytes(int64_t num_rows) const;
    // All threads of a team come here; when all have returned it is done.
    virtual void run(int64_t num_rows, const Team &team) const = 0;
};

// Runs it, or writes it down.
void submit(const Call &call, int64_t num_rows);

// Memory that a thread keeps from call to call. Grows, at 64 bytes; what was in it is lost when it does.
class Scratch {
public:
    ~Scratch();
    char *of(int64_t bytes);

private:
    char *memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace paceline
