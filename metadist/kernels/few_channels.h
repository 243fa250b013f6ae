// A 3x3 convolution with stride 1 and padding 1 of inputs with few channels, such as images, as a
// matrix product of unfolded blocks of pixels (im2col). Inputs are (tasks, images, height, width,
// channels), weights (tasks, 3, 3, in, out), biases (tasks, out).

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cstdint>

struct ConvShape {
    int64_t tasks, images, height, width, in, out;
    int64_t pixels() const { return images * height * width; }
};

template <class R>
class FewChannels {
   public:
    FewChannels(const ConvShape& shape, int64_t max_pixels)
        : s(shape),
          taps(9 * shape.in),
          columns(max_pixels * taps),
          partial((taps + 1) * shape.out),
          sums((taps + 1) * shape.out) {}

    // Sets the weight of a task.
    void use_weight(const R* given) { weight = given; }

    // Unfolds `count` pixels of a task's inputs, from `first` on, to (count, taps).
    void unfold(const R* inputs, int64_t first, int64_t count) {
        if (s.in == 1)
            unfold_channels<1>(inputs, first, count);
        else if (s.in == 3)
            unfold_channels<3>(inputs, first, count);
        else
            unfold_channels<0>(inputs, first, count);
    }

    // Outputs of the unfolded pixels, (count, out); the bias may be null.
    void forward(int64_t count, const R* bias, R* outputs) {
        multiply<R, 6>(count, bias, 0, +columns, taps, 1, weight, s.out, taps, outputs);
    }

    void zero_grad() { std::fill_n(+sums, (taps + 1) * s.out, R(0)); }

    // Adds the gradients by weight and bias of the unfolded pixels, given that by their outputs.
    void accumulate_grad(int64_t count, const R* gradient) {
        const R one = 1;
        multiply<R, 6>(taps, nullptr, 0, +columns, 1, taps, gradient, s.out, count, +partial);
        multiply<R, 1>(1, nullptr, 0, &one, 0, 0, gradient, s.out, count, partial + taps * s.out);
        for (int64_t k = 0; k < (taps + 1) * s.out; ++k) sums[k] += partial[k];
    }

    // Writes the gradients accumulated since `zero_grad`.
    void store_grad(R* grad_weight, R* grad_bias) {
        std::copy_n(+sums, taps * s.out, grad_weight);
        std::copy_n(sums + taps * s.out, s.out, grad_bias);
    }

   private:
    // IN is the number of channels, 0 if it is not known at compile time.
    template <int IN>
    void unfold_channels(const R* inputs, int64_t first, int64_t count) {
        const int64_t in = IN ? IN : s.in;
        R* to = columns;
        int64_t row = first / s.width % s.height, column = first % s.width;
        for (int64_t pixel = first; pixel < first + count; ++pixel, to += 9 * in) {
            const bool inner = 0 < column && column < s.width - 1;
            for (int64_t i = 0; i < 3; ++i) {
                const int64_t from = (pixel + (i - 1) * s.width - 1) * in;
                R* kernel_row = to + 3 * i * in;
                if (row + i == 0 || row + i > s.height) {
                    std::fill_n(kernel_row, 3 * in, R(0));
                } else if (inner) {
                    for (int64_t k = 0; k < 3 * in; ++k) kernel_row[k] = inputs[from + k];
                } else {
                    for (int64_t k = 0; k < 3 * in; ++k) {
                        const int64_t at = column + k / in - 1;
                        kernel_row[k] = 0 <= at && at < s.width ? inputs[from + k] : R(0);
                    }
                }
            }
            if (++column == s.width) {
                column = 0;
                if (++row == s.height) row = 0;
            }
        }
    }

    const ConvShape s;
    const int64_t taps;
    const R* weight = nullptr;
    Buffer<R> columns, partial, sums;
};
