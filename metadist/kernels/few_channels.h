// A convolution of 3x3 with stride 1 and padding 1 of maps with few channels, such as images, a stretch
// of pixels at a time.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cstdint>

struct ImageShape {
    int64_t groups, images, height, width, in, out;
    int64_t pixels() const { return images * height * width; }
};

template <class R>
class FewChannels {
   public:
    FewChannels(const ImageShape& shape, int64_t pixels_at_once)
        : s(shape),
          taps(9 * shape.in),
          factors(taps * shape.out),
          seen(pixels_at_once * taps),
          part((taps + 1) * shape.out),
          sums((taps + 1) * shape.out) {}

    // Take the weights of a group, (out, in, 3, 3).
    void take(const R* weight) {
        for (int64_t out = 0; out < s.out; ++out)
            for (int64_t tap = 0; tap < taps; ++tap)
                factors[tap * s.out + out] = weight[out * taps + place(tap)];
    }

    // Look at `count` pixels of a group's maps, from `first` on.
    void look(const R* maps, int64_t first, int64_t count) {
        if (s.in == 1) look_at<1>(maps, first, count);
        else if (s.in == 3) look_at<3>(maps, first, count);
        else look_at<0>(maps, first, count);
    }

    // Their outputs, (count, out); the bias may be null.
    void outputs(int64_t count, const R* bias, R* to) {
        multiply<R, 6>(count, bias, 0, +seen, taps, 1, +factors, s.out, taps, to);
    }

    void begin() { std::fill_n(+sums, (taps + 1) * s.out, R(0)); }

    // Add the derivatives by weights and bias, given that by the outputs of the pixels looked at.
    void add(int64_t count, const R* gradient) {
        const R one = 1;
        multiply<R, 3>(taps, nullptr, 0, +seen, 1, taps, gradient, s.out, count, +part);
        multiply<R, 1>(1, nullptr, 0, &one, 0, 0, gradient, s.out, count, part + taps * s.out);
        for (int64_t k = 0; k < (taps + 1) * s.out; ++k) sums[k] += part[k];
    }

    // The sums since `begin`.
    void give(R* weight, R* bias) {
        for (int64_t out = 0; out < s.out; ++out)
            for (int64_t tap = 0; tap < taps; ++tap)
                weight[out * taps + place(tap)] = sums[tap * s.out + out];
        std::copy_n(sums + taps * s.out, s.out, bias);
    }

   private:
    // With IN channels; 0 for any number of them.
    template <int IN>
    void look_at(const R* maps, int64_t first, int64_t count) {
        const int64_t in = IN ? IN : s.in;
        R* to = seen;
        int64_t row = first / s.width % s.height, column = first % s.width;
        for (int64_t pixel = first; pixel < first + count; ++pixel, to += 9 * in) {
            const bool within = 0 < column && column < s.width - 1;
            for (int64_t i = 0; i < 3; ++i) {
                const int64_t from = (pixel + (i - 1) * s.width - 1) * in;
                R* three = to + 3 * i * in;
                if (row + i == 0 || row + i > s.height) {
                    std::fill_n(three, 3 * in, R(0));
                } else if (within) {
                    for (int64_t k = 0; k < 3 * in; ++k) three[k] = maps[from + k];
                } else {
                    for (int64_t k = 0; k < 3 * in; ++k) {
                        const int64_t at = column + k / in - 1;
                        three[k] = 0 <= at && at < s.width ? maps[from + k] : R(0);
                    }
                }
            }
            if (++column == s.width) {
                column = 0;
                if (++row == s.height) row = 0;
            }
        }
    }

    // Of a tap among an output's weights, where channels come before pixels.
    int64_t place(int64_t tap) const { return tap % s.in * 9 + tap / s.in; }

    const ImageShape s;
    const int64_t taps;
    Buffer<R> factors, seen, part, sums;
};
