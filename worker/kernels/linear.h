// Products with packed weights: y = x W^T (+ bias) (+ add), for few rows and for many. What a call is about, shared by the
// part that submits it (linear.cpp) and the parts that compute it, one for each instruction set (linear_*.cpp).
//
// Weights lie in panels of 32 outputs, one after the other, and each panel in quads of inputs:
//
//     bits 8    [panel][in / 4][32 outputs][4 inputs], a byte each, 128 added
//     bits 4    [panel][in / 4][16 outputs][4 inputs], outputs 0-15 in the low nibbles, 16-31 in the high ones
//     bits 16   [panel][in / 2][32 outputs][2 inputs], bf16
//
// so that a product reads memory once, from one end to the other.
//
// A weight of 4 or 8 bits belongs to a group of its output's inputs, with a scale and, maybe, a minimum. Rows of x become
// integers as they come: of 8 bits with a scale per group, or of 16 bits with a scale per row. Sums of integers are exact,
// and groups are added up in order, so a row's result does not depend on the rows beside it, nor on the number of
// threads. The same holds for bf16, whose products are added up in order.
//
// Knows no torch: pointers in, pointers out.

#pragma once

#include "program.h"

#include <cstdint>

extern "C" {

// Made once for each weight, by worker/quant/product.py, in this order.
struct PacelineWeight {
    const void *values;
    const void *scales;    // fp16 [panel][group][32]; none for bits 16
    const void *minimums;  // as scales, or null
    const float *bias;     // [panels * 32], or null
    int64_t in_size;       // a multiple of `group`
    int64_t out_size;
    int64_t group;   // inputs that share a scale, a multiple of 16, at most 256: sums fit 32 bits
    int32_t bits;    // of a weight: 4, 8 or 16
    int32_t zero;    // the value that stands for 0, where there are no minimums
    int32_t planes;  // of x: 1 or 2, of 8 bits each; 1 goes with bits 8 and minimums
};
}

namespace paceline {

struct LinearCall {
    const PacelineWeight &w;
    const void *x;
    const float *add;  // or null
    void *y;
    bool x_is_bf16, y_is_bf16;
};

// An instruction set's share.
struct Products {
    int64_t (*shared_bytes)(const PacelineWeight &, int64_t num_rows);
    void (*run)(const LinearCall &, int64_t num_rows, const Team &team);
};

extern const Products avx2_products, avx512_products;

}  // namespace paceline
