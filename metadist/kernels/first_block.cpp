// A convolution of few channels, batch norm, ReLU and 2x2 max-pooling as one, with the first
// derivative: the large maps between them stay in the cache, two rows at a time, and are computed
// anew wherever they are needed. `native` compiles it, `first_block.py` says what it computes.
// Memory is as in `few_channels.cpp` and `norm_relu_pool.cpp`.

#include "few_channels.h"
#include "windows.h"

namespace {

// Calls `visit(image, pair of rows, first pixel, pixels)` for each pair; the last may be one row.
template <class Visit>
void each_pair(const ImageShape& s, Visit visit) {
    for (int64_t n = 0; n < s.images; ++n)
        for (int64_t row = 0; row < s.height; row += 2)
            visit(n, row / 2, (n * s.height + row) * s.width,
                  std::min<int64_t>(2, s.height - row) * s.width);
}

template <class R>
void forward(const ImageShape& s, const R* maps, const R* weight, const R* bias, const R* gamma,
             const R* beta, double eps, R* out, R* mean, R* inverse) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t C = s.out, rows = s.pixels(), high = s.height / 2, wide = s.width / 2;
    FewChannels<R> convolution(s, 2 * s.width);
    Buffer<R> y(2 * s.width * C), scale(C), shift(C);
    for (int64_t g = 0; g < s.groups; ++g, maps += rows * s.in, weight += 9 * s.in * C, bias += C,
                 gamma += C, beta += C, out += s.images * high * wide * C, mean += C,
                 inverse += C) {
        convolution.take(weight);
        Moments<R> moments(C);
        each_pair(s, [&](int64_t, int64_t, int64_t first, int64_t count) {
            convolution.look(maps, first, count);
            convolution.outputs(count, bias, +y);
            moments.add(y, count);
        });
        moments.give(eps, mean, inverse);
        affine(C, gamma, beta, mean, inverse, +scale, +shift);
        each_pair(s, [&](int64_t n, int64_t pair, int64_t first, int64_t count) {
            if (pair == high) return;
            convolution.look(maps, first, count);
            convolution.outputs(count, bias, +y);
            for (int64_t j = 0; j < wide; ++j)
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(scale + c), b = L::load(shift + c), zero = {};
                    const Window<R, 2> w(y + 2 * j * C + c, s.width * C, C, a, b);
                    L::store(out + ((n * high + pair) * wide + j) * C + c,
                             w.most < zero ? zero : w.most);
                }
        });
    }
}

// As `backward` of `norm_relu_pool.cpp`, and on through the convolution.
template <class R>
void backward(const ImageShape& s, const R* gradient, const R* maps, const R* weight,
              const R* bias, const R* gamma, const R* beta, const R* mean, const R* inverse,
              R* by_weight, R* by_bias, R* mean_z, R* mean_zh) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    using W = Window<R, 2>;
    const int64_t C = s.out, rows = s.pixels(), high = s.height / 2, wide = s.width / 2;
    FewChannels<R> convolution(s, 2 * s.width);
    Buffer<R> y(2 * s.width * C), scale(C), shift(C), constant(C), slope(C);
    for (int64_t g = 0; g < s.groups; ++g, maps += rows * s.in, weight += 9 * s.in * C, bias += C,
                 gamma += C, beta += C, gradient += s.images * high * wide * C, mean += C,
                 inverse += C, by_weight += 9 * s.in * C, by_bias += C, mean_z += C,
                 mean_zh += C) {
        convolution.take(weight);
        affine(C, gamma, beta, mean, inverse, +scale, +shift);
        // The windows of a pair of rows, with the gradient that reaches each of their pixels.
        auto each_window = [&](int64_t n, int64_t pair, auto visit) {
            for (int64_t j = 0; j < wide; ++j)
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(scale + c), b = L::load(shift + c);
                    R* corner = y + 2 * j * C + c;
                    const W w(corner, s.width * C, C, a, b);
                    V z[W::size];
                    w.route(L::load(gradient + ((n * high + pair) * wide + j) * C + c), z);
                    visit(c, corner, w, z);
                }
        };
        Sums<R, 2> sums(C);
        each_pair(s, [&](int64_t n, int64_t pair, int64_t first, int64_t count) {
            if (pair == high) return;
            convolution.look(maps, first, count);
            convolution.outputs(count, bias, +y);
            each_window(n, pair, [&](int64_t c, R*, const W& w, const V(&z)[W::size]) {
                V parts[2];
                sums.load(c, parts);
                for (int i = 0; i < W::size; ++i) {
                    parts[0] += z[i];
                    parts[1] += z[i] * (w.y[i] - L::load(mean + c));
                }
                sums.store(c, parts);
            });
            sums.flush();
        });
        centre(C, rows, sums, +scale, inverse, mean_z, mean_zh, +slope, +constant);
        convolution.begin();
        each_pair(s, [&](int64_t n, int64_t pair, int64_t first, int64_t count) {
            convolution.look(maps, first, count);
            convolution.outputs(count, bias, +y);
            auto alone = [&](int64_t pixel) {  // covered by no window
                for (int64_t c = 0; c < C; c += L::count) {
                    const V d = L::load(y + pixel * C + c) - L::load(mean + c);
                    L::store(y + pixel * C + c, L::load(slope + c) * d + L::load(constant + c));
                }
            };
            const bool windows = pair < high;
            for (int64_t pixel = 0; pixel < count; ++pixel)
                if (!windows || pixel % s.width >= 2 * wide) alone(pixel);
            if (windows)
                each_window(n, pair, [&](int64_t c, R* corner, const W& w, const V(&z)[W::size]) {
                    const V a = L::load(scale + c), m = L::load(mean + c);
                    const V k = L::load(constant + c), by = L::load(slope + c);
                    for (int i = 0; i < W::size; ++i)
                        L::store(corner + (i / 2) * s.width * C + (i % 2) * C,
                                 a * z[i] + by * (w.y[i] - m) + k);
                });
            convolution.add(count, +y);
        });
        convolution.give(by_weight, by_bias);
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                         \
    extern "C" void forward_##SUFFIX(ImageShape s, const R* maps, const R* weight, const R* bias, \
                                     const R* gamma, const R* beta, double eps, R* out, R* mean,  \
                                     R* inverse) {                                                \
        forward(s, maps, weight, bias, gamma, beta, eps, out, mean, inverse);                     \
    }                                                                                             \
    extern "C" void backward_##SUFFIX(ImageShape s, const R* gradient, const R* maps,             \
                                      const R* weight, const R* bias, const R* gamma,             \
                                      const R* beta, const R* mean, const R* inverse,             \
                                      R* by_weight, R* by_bias, R* mean_z, R* mean_zh) {          \
        backward(s, gradient, maps, weight, bias, gamma, beta, mean, inverse, by_weight, by_bias, \
                 mean_z, mean_zh);                                                                \
    }

EXPORT(float, f32)
EXPORT(double, f64)
