// Submits products with packed weights: linear.h. How they are computed is in linear_*.cpp.

#include "linear.h"

#include "attention.h"

namespace {

using paceline::Call;
using paceline::LinearCall;
using paceline::Team;
using paceline::kernels;

constexpr int64_t ALONE = 1 << 18;  // products, below which waking another thread takes longer

class Linear final : public Call {
public:
    explicit Linear(const LinearCall &call) : call_(call) {}

    Call *copy() const override { return new Linear(*this); }

    bool is_small(int64_t num_rows) const override { return num_rows * call_.w.in_size * call_.w.out_size < ALONE; }

    int64_t shared_bytes(int64_t num_rows) const override { return kernels().products->shared_bytes(call_.w, num_rows); }

    void run(int64_t num_rows, const Team &team) const override { kernels().products->run(call_, num_rows, team); }

private:
    LinearCall call_;
};

}  // namespace

extern "C" {

// Whether this processor has an instruction set that products are written for. The other call needs one.
int paceline_linear_runs(void) { return kernels().products != nullptr; }

void paceline_linear(const PacelineWeight *w, const void *x, int x_is_bf16, int64_t num_rows, const float *add, void *y,
                     int y_is_bf16) {
    paceline::submit(Linear({*w, x, add, y, x_is_bf16 != 0, y_is_bf16 != 0}), num_rows);
}
}
