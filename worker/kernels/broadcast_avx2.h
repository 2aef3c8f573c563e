// A row's unit, broadcast, times 16 floats, for AVX2. Written out, for where it is used all registers are: GCC 12 keeps
// broadcast units or its own copies of sums in some of them, and sums that go through memory wait for each other.
// Included after the instruction set has been switched on.

#pragma once

#include <cstdint>
#include <immintrin.h>

namespace {

inline void add_products(__m256 &sum_a, __m256 &sum_b, __m256i a, __m256i b, const int32_t *unit) {
    __m256i in;
    asm volatile(
        "vpbroadcastd %3, %2\n\t"
        "vfmadd231ps %2, %4, %0\n\t"
        "vfmadd231ps %2, %5, %1"
        : "+x"(sum_a), "+x"(sum_b), "=&x"(in)
        : "m"(*unit), "x"(a), "x"(b));
}

}  // namespace
