// Fused convolution of few channels, batch norm, ReLU and 2x2 max-pooling, with the first
// derivative. The large feature maps between them are never stored: two rows at a time, in the
// cache, are recomputed wherever they are needed. Layouts are those of `few_channels.h` and
// `norm_relu_pool.cpp`.

#include "export.h"
#include "few_channels.h"
#include "norm_pool.h"

namespace {

// Calls `callback(image, row pair, first pixel, pixel count)`; the last pair may be a single row.
template <class Callback>
void for_each_row_pair(const ConvShape& s, Callback callback) {
    for (int64_t n = 0; n < s.images; ++n)
        for (int64_t row = 0; row < s.height; row += 2)
            callback(n, row / 2, (n * s.height + row) * s.width,
                     std::min<int64_t>(2, s.height - row) * s.width);
}

template <class R>
void forward(ConvShape s, const R* inputs, const R* weight, const R* bias, const R* gamma,
             const R* beta, double eps, R* out, R* mean, R* inverse, R* unbiased_variance) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t C = s.out, rows = s.images * s.in_pixels(), out_height = s.height / 2,
                  out_width = s.width / 2;
    FewChannels<R> convolution(s, 2 * s.width);
    Buffer<R> y(2 * s.width * C), scale(C), shift(C);
    for (int64_t task = 0; task < s.tasks; ++task, inputs += rows * s.in, weight += 9 * s.in * C,
                 bias += C, gamma += C, beta += C, out += s.images * out_height * out_width * C,
                 mean += C, inverse += C) {
        convolution.use_weight(weight);
        Moments<R> moments(C);
        for_each_row_pair(s, [&](int64_t, int64_t, int64_t first, int64_t count) {
            convolution.unfold(inputs, first, count);
            convolution.forward(count, bias, +y);
            moments.add(y, count);
        });
        moments.finalize(eps, mean, inverse, unbiased_variance);
        if (unbiased_variance) unbiased_variance += C;
        affine(C, gamma, beta, mean, inverse, +scale, +shift);
        for_each_row_pair(s, [&](int64_t n, int64_t pair, int64_t first, int64_t count) {
            if (pair == out_height) return;
            convolution.unfold(inputs, first, count);
            convolution.forward(count, bias, +y);
            for (int64_t j = 0; j < out_width; ++j)
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(scale + c), b = L::load(shift + c), zero = {};
                    const Window<R, 2> w(y + 2 * j * C + c, s.width * C, C, a, b);
                    L::store(out + ((n * out_height + pair) * out_width + j) * C + c,
                             w.max < zero ? zero : w.max);
                }
        });
    }
}

// `backward` of `norm_relu_pool.cpp` followed by the weight gradient of the convolution.
template <class R>
void backward(ConvShape s, const R* gradient, const R* inputs, const R* weight,
              const R* bias, const R* gamma, const R* beta, const R* mean, const R* inverse,
              R* grad_weight, R* grad_bias, R* mean_z, R* mean_zh) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    using W = Window<R, 2>;
    const int64_t C = s.out, rows = s.images * s.in_pixels(), out_height = s.height / 2,
                  out_width = s.width / 2;
    FewChannels<R> convolution(s, 2 * s.width);
    Buffer<R> y(2 * s.width * C), scale(C), shift(C), constant(C), slope(C);
    for (int64_t task = 0; task < s.tasks; ++task, inputs += rows * s.in, weight += 9 * s.in * C,
                 bias += C, gamma += C, beta += C,
                 gradient += s.images * out_height * out_width * C, mean += C, inverse += C,
                 grad_weight += 9 * s.in * C, grad_bias += C, mean_z += C, mean_zh += C) {
        convolution.use_weight(weight);
        affine(C, gamma, beta, mean, inverse, +scale, +shift);
        // The windows of a pair of rows, with the gradient by each of their pixels.
        auto for_each_window = [&](int64_t n, int64_t pair, auto callback) {
            for (int64_t j = 0; j < out_width; ++j)
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(scale + c), b = L::load(shift + c);
                    R* corner = y + 2 * j * C + c;
                    const W w(corner, s.width * C, C, a, b);
                    V z[W::size];
                    w.unpool(L::load(gradient + ((n * out_height + pair) * out_width + j) * C + c),
                             z);
                    callback(c, corner, w, z);
                }
        };
        Sums<R, 2> sums(C);
        for_each_row_pair(s, [&](int64_t n, int64_t pair, int64_t first, int64_t count) {
            if (pair == out_height) return;
            convolution.unfold(inputs, first, count);
            convolution.forward(count, bias, +y);
            for_each_window(n, pair, [&](int64_t c, R*, const W& w, const V(&z)[W::size]) {
                V partial[2];
                sums.load(c, partial);
                for (int i = 0; i < W::size; ++i) {
                    partial[0] += z[i];
                    partial[1] += z[i] * (w.y[i] - L::load(mean + c));
                }
                sums.store(c, partial);
            });
            sums.flush();
        });
        backward_coefficients(C, rows, sums, +scale, inverse, mean_z, mean_zh, +slope, +constant);
        convolution.zero_grad();
        for_each_row_pair(s, [&](int64_t n, int64_t pair, int64_t first, int64_t count) {
            convolution.unfold(inputs, first, count);
            convolution.forward(count, bias, +y);
            auto uncovered = [&](int64_t pixel) {  // outside all windows
                for (int64_t c = 0; c < C; c += L::count) {
                    const V d = L::load(y + pixel * C + c) - L::load(mean + c);
                    L::store(y + pixel * C + c, L::load(slope + c) * d + L::load(constant + c));
                }
            };
            const bool has_windows = pair < out_height;
            for (int64_t pixel = 0; pixel < count; ++pixel)
                if (!has_windows || pixel % s.width >= 2 * out_width) uncovered(pixel);
            if (has_windows)
                for_each_window(n, pair,
                                [&](int64_t c, R* corner, const W& w, const V(&z)[W::size]) {
                                    const V a = L::load(scale + c), m = L::load(mean + c);
                                    const V k = L::load(constant + c), by = L::load(slope + c);
                                    for (int i = 0; i < W::size; ++i)
                                        L::store(corner + (i / 2) * s.width * C + (i % 2) * C,
                                                 a * z[i] + by * (w.y[i] - m) + k);
                                });
            convolution.accumulate_grad(count, +y);
        });
        convolution.store_grad(grad_weight, grad_bias);
    }
}

}  // namespace

EXPORT(forward)
EXPORT(backward)
