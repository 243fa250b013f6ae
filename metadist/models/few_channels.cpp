// Convolution of 3x3 with stride 1 and padding 1 of maps with few channels, such as images, and its
// derivative by the weights. `native.py` compiles it, `convolution.py` says what it computes. Maps lie
// in memory as (groups, images, height, width, channels), weights as (groups, out, in, 3, 3).

#include "native.h"

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t PIXELS_AT_ONCE = 96;  // whose outputs stay in the cache

struct Shape {
    int64_t groups, images, height, width, in, out;
    int64_t pixels() const { return images * height * width; }
};

// What `count` pixels from `first` on see: (count, 9 in).
template <class R>
void cut(const Shape& s, const R* maps, int64_t first, int64_t count, R* to) {
    int64_t row = first / s.width % s.height, column = first % s.width;
    for (int64_t pixel = first; pixel < first + count; ++pixel) {
        for (int64_t i = -1; i <= 1; ++i) {
            const R* from = maps + (pixel + i * s.width - 1) * s.in;
            if (row + i < 0 || row + i >= s.height) {
                to = std::fill_n(to, 3 * s.in, R(0));
            } else if (0 < column && column < s.width - 1) {
                for (int64_t k = 0; k < 3 * s.in; ++k) *to++ = from[k];
            } else {
                for (int64_t j = 0; j < 3; ++j) {
                    const bool inside = 0 <= column + j - 1 && column + j - 1 < s.width;
                    for (int64_t c = 0; c < s.in; ++c) *to++ = inside ? from[j * s.in + c] : R(0);
                }
            }
        }
        if (++column == s.width) {
            column = 0;
            if (++row == s.height) row = 0;
        }
    }
}

template <class R>
void convolve(const Shape& s, const R* maps, const R* weight, R* outputs) {
    const int64_t taps = 9 * s.in;
    Buffer<R> factors(taps * s.out), seen(PIXELS_AT_ONCE * taps);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 outputs += s.pixels() * s.out, weight += taps * s.out) {
        for (int64_t out = 0; out < s.out; ++out)
            for (int64_t in = 0; in < s.in; ++in)
                for (int64_t p = 0; p < 9; ++p)
                    factors[(p * s.in + in) * s.out + out] = weight[(out * s.in + in) * 9 + p];
        for (int64_t first = 0; first < s.pixels(); first += PIXELS_AT_ONCE) {
            const int64_t count = std::min(PIXELS_AT_ONCE, s.pixels() - first);
            cut(s, maps, first, count, +seen);
            multiply<R, 6, false>(count, +seen, taps, 1, +factors, s.out, taps,
                                  outputs + first * s.out);
        }
    }
}

// The derivative by the weights of <gradient, convolution of maps>.
template <class R>
void by_weight(const Shape& s, const R* maps, const R* gradient, R* weight) {
    const int64_t taps = 9 * s.in;
    Buffer<R> sums(taps * s.out), seen(PIXELS_AT_ONCE * taps);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 gradient += s.pixels() * s.out, weight += taps * s.out) {
        std::fill_n(+sums, taps * s.out, R(0));
        for (int64_t first = 0; first < s.pixels(); first += PIXELS_AT_ONCE) {
            const int64_t count = std::min(PIXELS_AT_ONCE, s.pixels() - first);
            cut(s, maps, first, count, +seen);
            multiply<R, 3, true>(taps, +seen, 1, taps, gradient + first * s.out, s.out, count,
                                 +sums);
        }
        for (int64_t out = 0; out < s.out; ++out)
            for (int64_t in = 0; in < s.in; ++in)
                for (int64_t p = 0; p < 9; ++p)
                    weight[(out * s.in + in) * 9 + p] = sums[(p * s.in + in) * s.out + out];
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                        \
    extern "C" void convolve_##SUFFIX(Shape s, const R* maps, const R* weight, R* outputs) {     \
        convolve(s, maps, weight, outputs);                                                      \
    }                                                                                            \
    extern "C" void by_weight_##SUFFIX(Shape s, const R* maps, const R* gradient, R* weight) {   \
        by_weight(s, maps, gradient, weight);                                                    \
    }

EXPORT(float, f32)
EXPORT(double, f64)
