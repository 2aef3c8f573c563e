// Attention and the small kernels for any processor.

#define W 4

#include "elements.h"
#include "tile.h"

namespace paceline {

static bool runs() { return true; }

extern const Kernels plain_kernels = {"plain", runs, padded_dim, scratch_bytes, attend, finish, rms_norm, rotate, gate,
    rescore, nullptr};

}  // namespace paceline
