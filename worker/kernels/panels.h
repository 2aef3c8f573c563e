// How rows and panels are cut into tiles. Included by linear_*.cpp after they have switched the instruction set on; all in
// a namespace without a name, so that no other file can be linked to code that does not run on its processor.

#pragma once

#include "linear.h"

namespace {

constexpr int PANEL = 32;
constexpr int64_t AHEAD = 2048;  // bytes of weights that are asked of memory before they are needed
constexpr int64_t ALIGNED = 64;

inline int64_t up(int64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

// Of a panel.
constexpr int64_t quad_bytes(int bits) { return bits == 4 ? 64 : 128; }
constexpr int quad_inputs(int bits) { return bits == 16 ? 2 : 4; }

// Rows are multiplied in strips, whose sums stay in registers: of about the same number of rows, at most so many.
struct Strips {
    int64_t num_rows, count;

    Strips(int64_t num_rows, int64_t most) : num_rows(num_rows), count((num_rows + most - 1) / most) {}

    int64_t begin(int64_t strip) const { return num_rows * strip / count; }
    int64_t size(int64_t strip) const { return begin(strip + 1) - begin(strip); }
};

// What a tile asks of memory, a step for each quad of its own.
struct Ahead {
    const char *at;
    int64_t step;
};

// A team's share: pieces of some panels for a block of strips, `at_once`, as they come. tile(rows, panel, row, ahead) is
// one panel for a strip's rows, the first of which is given.
template <int BITS, class Tile>
void each_tile(const PacelineWeight &w, const Strips &strips, int64_t at_once, const paceline::Team &team, Tile tile) {
    constexpr int64_t STEP = quad_bytes(BITS);
    const int64_t panels = (w.out_size + PANEL - 1) / PANEL, bytes = w.in_size / quad_inputs(BITS) * STEP;
    const int64_t blocks = (strips.count + at_once - 1) / at_once;
    const char *at = static_cast<const char *>(w.values);
    paceline::Walk walk;
    for (int64_t begin, end; team.take_some(blocks * panels, walk, begin, end);)
        for (int64_t piece = begin; piece < end; piece++) {
            const int64_t panel = piece % panels, first = piece / panels * at_once;
            const int64_t count = strips.count - first < at_once ? strips.count - first : at_once;
            for (int64_t s = 0; s < count; s++) {
                // A single strip reads as fast as memory gives; of several each asks for a part of the next panel.
                const Ahead next = count == 1 ? Ahead{at + panel * bytes + AHEAD, STEP}
                                              : Ahead{at + (panel + 1) * bytes + bytes * s / count, STEP / count};
                tile(strips.size(first + s), panel, strips.begin(first + s), next);
            }
        }
}

}  // namespace
