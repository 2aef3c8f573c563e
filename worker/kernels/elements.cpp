// The small kernels over many rows. What becomes of a row is in elements.h.

#include "attention.h"
#include "program.h"

namespace {

using paceline::Call;
using paceline::Team;
using paceline::kernels;

constexpr int64_t ALONE = 1 << 15;  // elements, below which waking another thread takes longer

// What a kernel does with each row, a row of so many elements.
template <class Row>
class EachRow final : public Call {
public:
    EachRow(Row row, int64_t size) : row_(row), size_(size) {}

    Call *copy() const override { return new EachRow(*this); }

    bool is_small(int64_t num_rows) const override { return num_rows * size_ < ALONE; }

    void run(int64_t num_rows, const Team &team) const override {
        for (int64_t row = team.begin(num_rows); row < team.end(num_rows); row++) row_(row);
    }

private:
    Row row_;
    int64_t size_;
};

template <class Row>
void submit(int64_t num_rows, int64_t size, Row row) {
    paceline::submit(EachRow<Row>(row, size), num_rows);
}

}  // namespace

extern "C" {

void paceline_rms_norm(const float *x, const float *weight, void *out, int out_is_bf16, int64_t num_rows, int64_t size,
                       float eps) {
    char *to = static_cast<char *>(out);
    const int64_t bytes = out_is_bf16 ? 2 : 4;
    submit(num_rows, size, [=, &with = kernels()](int64_t row) {
        with.rms_norm(x + row * size, weight, to + row * size * bytes, out_is_bf16, size, eps);
    });
}

void paceline_rotate(void *x, int is_bf16, const void *cos, const void *sin, int64_t num_tokens, int64_t stride,
                     int64_t num_heads, int64_t head_dim, int64_t dim) {
    const int64_t bytes = is_bf16 ? 2 : 4;
    char *to = static_cast<char *>(x);
    const char *of_cos = static_cast<const char *>(cos), *of_sin = static_cast<const char *>(sin);
    submit(num_tokens, num_heads * dim, [=, &with = kernels()](int64_t token) {
        with.rotate(to + token * stride * bytes, is_bf16, of_cos + token * dim * bytes, of_sin + token * dim * bytes,
                    num_heads, head_dim, dim);
    });
}

void paceline_gate(const void *gate_up, void *out, int is_bf16, int64_t num_rows, int64_t size, int activation) {
    const int64_t bytes = is_bf16 ? 2 : 4;
    const char *from = static_cast<const char *>(gate_up);
    char *to = static_cast<char *>(out);
    submit(num_rows, size, [=, &with = kernels()](int64_t row) {
        with.gate(from + row * 2 * size * bytes, to + row * size * bytes, is_bf16, size, activation);
    });
}

void paceline_rescore(float *scores, const float *x, const void *weights, int is_bf16, int64_t num_rows, int64_t num,
                      int64_t size, int64_t num_best) {
    submit(num_rows, num, [=, &with = kernels()](int64_t row) {
        with.rescore(scores + row * num, num, x + row * size, weights, is_bf16, size, num_best);
    });
}
}
