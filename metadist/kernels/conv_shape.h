// The shape of a convolution of batched tasks. Inputs are (tasks, images, height, width, in),
// weights (tasks, kernel height, kernel width, in, out), outputs (tasks, images, height', width',
// out).

#pragma once

#include <cstdint>

struct ConvShape {
    int64_t tasks, images, height, width, in, out;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;

    int64_t out_height() const { return (height + 2 * padding_h - kernel_h) / stride_h + 1; }
    int64_t out_width() const { return (width + 2 * padding_w - kernel_w) / stride_w + 1; }
    int64_t in_pixels() const { return height * width; }
    int64_t out_pixels() const { return out_height() * out_width(); }
    int64_t taps() const { return kernel_h * kernel_w; }
};
