// Attention and the small kernels for AVX-512.

#include "attention.h"
#include "linear.h"

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")

#define W 16

#include "elements.h"
#include "tile.h"

#pragma GCC pop_options

namespace paceline {

static bool runs() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

extern const Kernels avx512_kernels = {"avx512", runs, padded_dim, scratch_bytes, attend, finish, rms_norm, rotate, gate,
    rescore, &avx2_products};

}  // namespace paceline

#endif
