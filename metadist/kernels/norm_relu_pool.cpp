// Fused batch norm, ReLU and 2x2 max-pooling, with first and second derivatives. Inputs are (tasks,
// images, height, width, channels); `window` is 2 with pooling, else 1. Statistics are per task and
// channel, over the `rows` (pixels) of all images.

#include "export.h"
#include "norm_pool.h"

#include <cstdint>
#include <vector>

namespace {

struct Shape {
    int64_t tasks, images, height, width, channels, window;
    int64_t rows() const { return images * height * width; }
    int64_t out_height() const { return height / window; }
    int64_t out_width() const { return width / window; }
    int64_t out_rows() const { return images * out_height() * out_width(); }
    // Offset of pixel i of a window from its first pixel.
    template <int WINDOW>
    int64_t offset(int i) const {
        return (i / WINDOW * width + i % WINDOW) * channels;
    }
};

// Calls `on_window(input offset, output offset)` for each pooling window of a task in order, and
// `on_uncovered(input offset)` for the pixels outside all windows.
template <class OnWindow, class OnUncovered>
void for_each_window(const Shape& s, OnWindow on_window, OnUncovered on_uncovered) {
    for (int64_t n = 0; n < s.images; ++n) {
        for (int64_t i = 0; i < s.out_height(); ++i) {
            for (int64_t j = 0; j < s.out_width(); ++j)
                on_window(((n * s.height + i * s.window) * s.width + j * s.window) * s.channels,
                          ((n * s.out_height() + i) * s.out_width() + j) * s.channels);
        }
        for (int64_t i = 0; i < s.height; ++i)
            for (int64_t j = i < s.out_height() * s.window ? s.out_width() * s.window : 0;
                 j < s.width; ++j)
                on_uncovered(((n * s.height + i) * s.width + j) * s.channels);
    }
}

// The same per vector of channels, with z the gradient at the position of the maximum and zero
// elsewhere: calls `on_window(input offset, output offset, channel, window, z)` and
// `on_uncovered(input offset, channel)`.
template <class R, int WINDOW, class OnWindow, class OnUncovered>
void for_each_unpooled(const Shape& s, const R* gradient, const R* y, const R* scale,
                       const R* shift, OnWindow on_window, OnUncovered on_uncovered) {
    using L = Lanes<R>;
    const int64_t C = s.channels;
    for_each_window(
        s,
        [&](int64_t at, int64_t to) {
            for (int64_t c = 0; c < C; c += L::count) {
                const Window<R, WINDOW> w(y + at + c, s.width * C, C, L::load(scale + c),
                                          L::load(shift + c));
                typename L::Vector z[w.size];
                w.unpool(L::load(gradient + to + c), z);
                on_window(at + c, to + c, c, w, z);
            }
        },
        [&](int64_t at) {
            for (int64_t c = 0; c < C; c += L::count) on_uncovered(at + c, c);
        });
}

template <class R, int WINDOW>
void forward(Shape s, const R* y, const R* weight, const R* bias, double eps, R* out,
             R* mean, R* inverse, R* unbiased_variance) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.out_rows();
    Buffer<R> scale(C), shift(C);
    for (int64_t task = 0; task < s.tasks; ++task, y += rows * C, out += pooled * C, weight += C,
                 bias += C, mean += C, inverse += C) {
        Moments<R> moments(C);
        for (int64_t first = 0; first < rows; first += BLOCK_ROWS)
            moments.add(y + first * C, std::min(BLOCK_ROWS, rows - first));
        moments.finalize(eps, mean, inverse, unbiased_variance);
        if (unbiased_variance) unbiased_variance += C;
        affine<R>(C, weight, bias, mean, inverse, scale, shift);
        for_each_window(
            s,
            [&](int64_t at, int64_t to) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(scale + c), b = L::load(shift + c), zero = {};
                    const Window<R, WINDOW> w(y + at + c, s.width * C, C, a, b);
                    L::store(out + to + c, w.max < zero ? zero : w.max);
                }
            },
            [](int64_t) {});
    }
}

// dy = scale (z - <z> - h <zh>), with z the gradient at the positions of the maxima, h the
// normalized y and <.> the mean over rows; and <z>, <zh>, to which the gradients by bias and weight
// are proportional.
template <class R, int WINDOW>
void backward(Shape s, const R* gradient, const R* y, const R* weight, const R* bias,
              const R* mean, const R* inverse, R* dy, R* mean_z, R* mean_zh) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    using W = Window<R, WINDOW>;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.out_rows();
    Buffer<R> scale(C), shift(C), constant(C), slope(C);
    for (int64_t task = 0; task < s.tasks; ++task, y += rows * C, dy += rows * C,
                 gradient += pooled * C, weight += C, bias += C, mean += C, inverse += C,
                 mean_z += C, mean_zh += C) {
        affine<R>(C, weight, bias, mean, inverse, scale, shift);
        Sums<R, 2> sums(C);
        auto for_each = [&](auto on_window, auto on_uncovered) {
            for_each_unpooled<R, WINDOW>(s, gradient, y, scale, shift, on_window,
                                         on_uncovered);
        };
        for_each(
            [&](int64_t, int64_t, int64_t c, const W& w, const V(&z)[W::size]) {
                const V m = L::load(mean + c);
                V partial[2];
                sums.load(c, partial);
                for (int i = 0; i < W::size; ++i) {
                    partial[0] += z[i];
                    partial[1] += z[i] * (w.y[i] - m);
                }
                sums.store(c, partial);
            },
            [](int64_t, int64_t) {});
        sums.flush();
        backward_coefficients<R>(C, rows, sums, scale, inverse, mean_z, mean_zh, slope,
                              constant);
        for_each(
            [&](int64_t at, int64_t, int64_t c, const W& w, const V(&z)[W::size]) {
                const V a = L::load(scale + c), m = L::load(mean + c);
                const V k = L::load(constant + c), by = L::load(slope + c);
                for (int i = 0; i < W::size; ++i)
                    L::store(dy + at + s.offset<WINDOW>(i), a * z[i] + by * (w.y[i] - m) + k);
            },
            [&](int64_t at, int64_t c) {
                const V d = L::load(y + at) - L::load(mean + c);
                L::store(dy + at, L::load(slope + c) * d + L::load(constant + c));
            });
    }
}

// Double backward: t, t_weight and t_bias are the gradients by the outputs of `backward`; computes
// the gradients by its `gradient`, y and weight.
template <class R, int WINDOW>
void double_backward(Shape s, const R* t, const R* t_weight, const R* t_bias,
                     const R* gradient, const R* y, const R* weight, const R* bias, const R* mean,
                     const R* inverse, const R* mean_z, const R* mean_zh, R* d_gradient, R* dy,
                     R* d_weight) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    using W = Window<R, WINDOW>;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.out_rows();
    Buffer<R> scale(C), shift(C), z_constant(C), z_slope(C);
    Buffer<R> constant(C), by_t(C), by_z(C), slope(C);
    for (int64_t task = 0; task < s.tasks; ++task, t += rows * C, y += rows * C, dy += rows * C,
                 gradient += pooled * C, d_gradient += pooled * C, weight += C, bias += C,
                 mean += C, inverse += C, mean_z += C, mean_zh += C, t_weight += C, t_bias += C,
                 d_weight += C) {
        affine<R>(C, weight, bias, mean, inverse, scale, shift);
        Sums<R, 3> sums(C);  // of t, t (y - mean), t z
        auto for_each = [&](auto on_window, auto on_uncovered) {
            for_each_unpooled<R, WINDOW>(s, gradient, y, scale, shift, on_window,
                                         on_uncovered);
        };
        for_each(
            [&](int64_t at, int64_t, int64_t c, const W& w, const V(&z)[W::size]) {
                const V m = L::load(mean + c);
                V partial[3];
                sums.load(c, partial);
                for (int i = 0; i < W::size; ++i) {
                    const V ti = L::load(t + at + s.offset<WINDOW>(i));
                    partial[0] += ti;
                    partial[1] += ti * (w.y[i] - m);
                    partial[2] += ti * z[i];
                }
                sums.store(c, partial);
            },
            [&](int64_t at, int64_t c) {
                const V ti = L::load(t + at), d = L::load(y + at) - L::load(mean + c);
                V partial[3];
                sums.load(c, partial);
                partial[0] += ti;
                partial[1] += ti * d;
                sums.store(c, partial);
            });
        sums.flush();
        for (int64_t c = 0; c < C; ++c) {
            const double inv = inverse[c], a = weight[c] * inv, z = mean_z[c], zh = mean_zh[c];
            const double mean_t = sums(0, c) / rows, mean_th = sums(1, c) / rows * inv,
                         mean_tz = sums(2, c) / rows;
            // By z, where the maximum is positive.
            const double by_h = t_weight[c] - a * mean_th;
            z_constant[c] = R(t_bias[c] - a * mean_t);
            z_slope[c] = R(by_h * inv);
            // Through scale = weight / deviation.
            const double through = rows * (mean_tz - mean_t * z - mean_th * zh);
            d_weight[c] = R(inv * through);
            // By h: q = by_h z - scale <zh> t. By y: through h, and through the deviation.
            const double mean_q = by_h * z - a * zh * mean_t;
            const double mean_qh = by_h * zh - a * zh * mean_th;
            constant[c] = R(-inv * mean_q);
            by_t[c] = R(-inv * a * zh);
            by_z[c] = R(inv * by_h);
            slope[c] = R(-inv * (inv * mean_qh + weight[c] * through * inv * inv / rows));
        }
        for_each(
            [&](int64_t at, int64_t to, int64_t c, const W& w, const V(&z)[W::size]) {
                const V a = L::load(scale + c), m = L::load(mean + c);
                V by[W::size];
                for (int i = 0; i < W::size; ++i) {
                    const V ti = L::load(t + at + s.offset<WINDOW>(i)), d = w.y[i] - m;
                    by[i] = a * ti + L::load(z_slope + c) * d + L::load(z_constant + c);
                    L::store(dy + at + s.offset<WINDOW>(i),
                             L::load(by_t + c) * ti + L::load(by_z + c) * z[i] +
                                 L::load(slope + c) * d + L::load(constant + c));
                }
                L::store(d_gradient + to, w.gather_max(by));
            },
            [&](int64_t at, int64_t c) {
                const V ti = L::load(t + at), d = L::load(y + at) - L::load(mean + c);
                L::store(dy + at,
                         L::load(by_t + c) * ti + L::load(slope + c) * d + L::load(constant + c));
            });
    }
}

}  // namespace

// The pointers NAME_1_f32, NAME_2_f32 and so on, by the window.
#define EXPORT_WINDOWS(NAME)                      \
    EXPORT_POINTER(NAME##_1_f32, NAME<float, 1>)  \
    EXPORT_POINTER(NAME##_2_f32, NAME<float, 2>)  \
    EXPORT_POINTER(NAME##_1_f64, NAME<double, 1>) \
    EXPORT_POINTER(NAME##_2_f64, NAME<double, 2>)

EXPORT_WINDOWS(forward)
EXPORT_WINDOWS(backward)
EXPORT_WINDOWS(double_backward)
