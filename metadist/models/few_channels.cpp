// Convolution of 3x3 with stride 1 and padding 1 of maps with few channels, such as images, and its
// derivatives by the weights and the bias. `native.py` compiles it, `convolution.py` says what it computes. Maps lie
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
void convolve(const Shape& s, const R* maps, const R* weight, const R* bias, R* outputs) {
    const int64_t taps = 9 * s.in;
    Buffer<R> factors(taps * s.out), seen(PIXELS_AT_ONCE * taps);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 outputs += s.pixels() * s.out, weight += taps * s.out,
                 bias += bias ? s.out : 0) {
        for (int64_t out = 0; out < s.out; ++out)
            for (int64_t in = 0; in < s.in; ++in)
                for (int64_t p = 0; p < 9; ++p)
                    factors[(p * s.in + in) * s.out + out] = weight[(out * s.in + in) * 9 + p];
        for (int64_t first = 0; first < s.pixels(); first += PIXELS_AT_ONCE) {
            const int64_t count = std::min(PIXELS_AT_ONCE, s.pixels() - first);
            cut(s, maps, first, count, +seen);
            R* to = outputs + first * s.out;
            if (bias)
                for (int64_t pixel = 0; pixel < count; ++pixel)
                    std::copy_n(bias, s.out, to + pixel * s.out);
            else
                std::fill_n(to, count * s.out, R(0));
            multiply<R, 6, true>(count, +seen, taps, 1, +factors, s.out, taps, to);
        }
    }
}

// The derivatives by the weights and the bias of <gradient, convolution of maps>.
template <class R>
void by_weight(const Shape& s, const R* maps, const R* gradient, R* weight, R* bias) {
    const R one = 1;
    const int64_t taps = 9 * s.in, rows = taps + 1;  // the last one for the bias
    Buffer<R> part(rows * s.out), sums(rows * s.out), seen(PIXELS_AT_ONCE * taps);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 gradient += s.pixels() * s.out, weight += taps * s.out, bias += s.out) {
        std::fill_n(+sums, rows * s.out, R(0));
        for (int64_t first = 0; first < s.pixels(); first += PIXELS_AT_ONCE) {
            const int64_t count = std::min(PIXELS_AT_ONCE, s.pixels() - first);
            cut(s, maps, first, count, +seen);
            const R* by = gradient + first * s.out;
            multiply<R, 3, false>(taps, +seen, 1, taps, by, s.out, count, +part);
            multiply<R, 1, false>(1, &one, 0, 0, by, s.out, count, part + taps * s.out);
            for (int64_t k = 0; k < rows * s.out; ++k) sums[k] += part[k];
        }
        for (int64_t out = 0; out < s.out; ++out)
            for (int64_t in = 0; in < s.in; ++in)
                for (int64_t p = 0; p < 9; ++p)
                    weight[(out * s.in + in) * 9 + p] = sums[(p * s.in + in) * s.out + out];
        std::copy_n(sums + taps * s.out, s.out, bias);
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                        \
    extern "C" void convolve_##SUFFIX(Shape s, const R* maps, const R* weight, const R* bias,    \
                                      R* outputs) {                                              \
        convolve(s, maps, weight, bias, outputs);                                                \
    }                                                                                            \
    extern "C" void by_weight_##SUFFIX(Shape s, const R* maps, const R* gradient, R* weight,     \
                                       R* bias) {                                                \
        by_weight(s, maps, gradient, weight, bias);                                              \
    }

EXPORT(float, f32)
EXPORT(double, f64)
