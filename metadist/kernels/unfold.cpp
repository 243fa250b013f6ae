// Unfold (im2col) and its transpose, fold (col2im). Images are (images, height, width, in), columns
// (images, height', width', out), with out values in a patch.

#include "conv_shape.h"
#include "export.h"

#include <algorithm>
#include <cstdint>

namespace {

// Calls `copy(offset in the image, offset in its columns, count)` for each contiguous span inside
// the image, and `pad(offset in its columns, count)` for each span of padding.
template <class Copy, class Pad>
void for_each_span(const ConvShape& s, Copy copy, Pad pad) {
    const int64_t C = s.in;
    int64_t to = 0;
    for (int64_t i = 0; i < s.out_height(); ++i)
        for (int64_t j = 0; j < s.out_width(); ++j) {
            const int64_t left = j * s.stride_w - s.padding_w;
            const int64_t first = std::min(std::max<int64_t>(0, -left), s.kernel_w);
            const int64_t end = std::max(first, std::min(s.kernel_w, s.width - left));
            for (int64_t k = 0; k < s.kernel_h; ++k, to += s.kernel_w * C) {
                const int64_t row = i * s.stride_h - s.padding_h + k;
                if (row < 0 || row >= s.height) {
                    pad(to, s.kernel_w * C);
                    continue;
                }
                pad(to, first * C);
                copy((row * s.width + left + first) * C, to + first * C, (end - first) * C);
                pad(to + end * C, (s.kernel_w - end) * C);
            }
        }
}

template <class R>
void unfold(ConvShape s, const R* images, R* columns) {
    const int64_t size = s.in_pixels() * s.in;
    for (int64_t n = 0; n < s.images; ++n, images += size, columns += s.out_pixels() * s.out)
        for_each_span(
            s,
            [&](int64_t at, int64_t to, int64_t count) {
                std::copy_n(images + at, count, columns + to);
            },
            [&](int64_t to, int64_t count) { std::fill_n(columns + to, count, R(0)); });
}

template <class R>
void fold(ConvShape s, const R* columns, R* images) {
    const int64_t size = s.in_pixels() * s.in;
    for (int64_t n = 0; n < s.images; ++n, images += size, columns += s.out_pixels() * s.out) {
        std::fill_n(images, size, R(0));
        for_each_span(
            s,
            [&](int64_t at, int64_t from, int64_t count) {
                R* __restrict to = images + at;
                const R* __restrict source = columns + from;
                for (int64_t k = 0; k < count; ++k) to[k] += source[k];
            },
            [](int64_t, int64_t) {});
    }
}

}  // namespace

EXPORT(unfold)
EXPORT(fold)
