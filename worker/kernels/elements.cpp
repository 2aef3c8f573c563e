// The small kernels over many rows. What becomes of a row is in elements.h.

#include "attention.h"

#include <omp.h>

namespace {

constexpr int64_t ALONE = 1 << 15;  // elements, below which waking another thread takes longer

}  // namespace

extern "C" {

void paceline_rms_norm(const float *x, const float *weight, void *out, int out_is_bf16, int64_t num_rows, int64_t size,
                       float eps) {
    const paceline::Kernels &with = paceline::kernels();
    const int64_t bytes = out_is_bf16 ? 2 : 4;
    char *to = static_cast<char *>(out);
#pragma omp parallel for if (num_rows * size >= ALONE && omp_get_max_threads() > 1)
    for (int64_t row = 0; row < num_rows; row++)
        with.rms_norm(x + row * size, weight, to + row * size * bytes, out_is_bf16, size, eps);
}

void paceline_rotate(void *x, int is_bf16, const void *cos, const void *sin, int64_t num_tokens, int64_t stride,
                     int64_t num_heads, int64_t head_dim, int64_t dim) {
    const paceline::Kernels &with = paceline::kernels();
    const int64_t bytes = is_bf16 ? 2 : 4;
    char *to = static_cast<char *>(x);
    const char *of_cos = static_cast<const char *>(cos), *of_sin = static_cast<const char *>(sin);
#pragma omp parallel for if (num_tokens * num_heads * dim >= ALONE && omp_get_max_threads() > 1)
    for (int64_t token = 0; token < num_tokens; token++)
        with.rotate(to + token * stride * bytes, is_bf16, of_cos + token * dim * bytes, of_sin + token * dim * bytes,
                    num_heads, head_dim, dim);
}

void paceline_gate(const void *gate_up, void *out, int is_bf16, int64_t num_rows, int64_t size, int activation) {
    const paceline::Kernels &with = paceline::kernels();
    const int64_t bytes = is_bf16 ? 2 : 4;
    const char *from = static_cast<const char *>(gate_up);
    char *to = static_cast<char *>(out);
#pragma omp parallel for if (num_rows * size >= ALONE && omp_get_max_threads() > 1)
    for (int64_t row = 0; row < num_rows; row++)
        with.gate(from + row * 2 * size * bytes, to + row * size * bytes, is_bf16, size, activation);
}
}
