// A convolution of inputs with few channels, such as images, as a matrix product of unfolded blocks
// of pixels (im2col). `conv_shape.h` has the layouts; biases are (tasks, out).

#pragma once

#include "conv_shape.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>

template <class R>
class FewChannels {
   public:
    FewChannels(const ConvShape& shape, int64_t max_pixels)
        : s(shape),
          depth(s.taps() * s.in),
          columns(max_pixels * (depth + 1)),
          partial((depth + 1) * s.out),
          sums((depth + 1) * s.out) {}

    // Sets the weight of a task.
    void use_weight(const R* given) { weight = given; }

    // Unfolds the inputs of `count` pixels of a task's outputs, from `first` on, to
    // (count, depth + 1). The last column is 1, the factor of the bias.
    void unfold(const R* inputs, int64_t first, int64_t count) {
        if (s.kernel_w * s.in == 3)
            unfold_rows<3>(inputs, first, count);
        else if (s.kernel_w * s.in == 9)
            unfold_rows<9>(inputs, first, count);
        else
            unfold_rows<0>(inputs, first, count);
    }

    // Outputs of the unfolded pixels, (count, out); the bias may be null.
    void forward(int64_t count, const R* bias, R* outputs) {
        multiply<R, 6>(count, bias, 0, +columns, depth + 1, 1, weight, s.out, depth, outputs);
    }

    void zero_grad() { std::fill_n(+sums, (depth + 1) * s.out, R(0)); }

    // Adds the gradients by weight and bias of the unfolded pixels, given that by their outputs.
    void accumulate_grad(int64_t count, const R* gradient) {
        // Five rows at a time: a 3x3 kernel with one channel has nine rows and that of the bias.
        multiply<R, 5>(depth + 1, nullptr, 0, +columns, 1, depth + 1, gradient, s.out, count,
                       +partial);
        for (int64_t k = 0; k < (depth + 1) * s.out; ++k) sums[k] += partial[k];
    }

    // Writes the gradients accumulated since `zero_grad`.
    void store_grad(R* grad_weight, R* grad_bias) {
        std::copy_n(+sums, depth * s.out, grad_weight);
        std::copy_n(sums + depth * s.out, s.out, grad_bias);
    }

   private:
    // VALUES is the number of values in a row of the kernel, 0 if it is not known at compile time.
    template <int VALUES>
    void unfold_rows(const R* inputs, int64_t first, int64_t count) {
        const int64_t values = VALUES ? VALUES : s.kernel_w * s.in, width = s.width * s.in;
        const int64_t out_height = s.out_height(), out_width = s.out_width();
        int64_t out_row = first / out_width % out_height, out_column = first % out_width;
        const R* image = inputs + first / s.out_pixels() * s.height * width;
        R* to = columns;
        for (int64_t pixel = 0; pixel < count; ++pixel) {
            const int64_t top = out_row * s.stride_h - s.padding_h;
            const int64_t left = (out_column * s.stride_w - s.padding_w) * s.in;  // in values
            const bool inside = 0 <= left && left + values <= width;
            for (int64_t row = top; row < top + s.kernel_h; ++row, to += values) {
                const R* from = image + row * width + left;
                if (row < 0 || row >= s.height) {
                    std::fill_n(to, values, R(0));
                } else if (inside) {
                    for (int64_t k = 0; k < values; ++k) to[k] = from[k];
                } else {
                    for (int64_t k = 0; k < values; ++k)
                        to[k] = 0 <= left + k && left + k < width ? from[k] : R(0);
                }
            }
            *to++ = 1;
            if (++out_column == out_width) {
                out_column = 0;
                if (++out_row == out_height) {
                    out_row = 0;
                    image += s.height * width;
                }
            }
        }
    }

    const ConvShape s;
    const int64_t depth;  // values that an output is computed from
    const R* weight = nullptr;
    Buffer<R> columns, partial, sums;
};
