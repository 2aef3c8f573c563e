// Attention and the small kernels for AVX2.

#include "attention.h"
#include "linear.h"

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#define W 8

#include "elements.h"
#include "tile.h"

#pragma GCC pop_options

namespace paceline {

static bool runs() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

extern const Kernels avx2_kernels = {"avx2", runs, padded_dim, scratch_bytes, attend, finish, rms_norm, rotate, gate,
    rescore, &avx2_products};

}  // namespace paceline

#endif
