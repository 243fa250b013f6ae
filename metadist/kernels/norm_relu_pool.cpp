// Batch norm, ReLU and 2x2 max-pooling in as few passes over memory as the statistics allow, with
// the first and the second derivative. `native` compiles it, `norm_relu_pool.py` says what it
// computes. Maps lie in memory as (groups, images, height, width, channels); `window` is 2 with
// pooling, else 1. All statistics are of one group and channel, over the `rows` of its images.

#include "windows.h"

#include <cstdint>
#include <vector>

namespace {

struct Shape {
    int64_t groups, images, height, width, channels, window;
    int64_t rows() const { return images * height * width; }
    int64_t high() const { return height / window; }
    int64_t wide() const { return width / window; }
    // Of a window's pixel i from its first.
    template <int WINDOW>
    int64_t offset(int i) const {
        return (i / WINDOW * width + i % WINDOW) * channels;
    }
};

// Calls `visit(offset in maps, offset in pooled maps)` for each window of a group, in turn, and
// `rest(offset in maps)` for the pixels that no window covers.
template <class Visit, class Rest>
void each_window(const Shape& s, Visit visit, Rest rest) {
    for (int64_t n = 0; n < s.images; ++n) {
        for (int64_t i = 0; i < s.high(); ++i) {
            for (int64_t j = 0; j < s.wide(); ++j)
                visit(((n * s.height + i * s.window) * s.width + j * s.window) * s.channels,
                      ((n * s.high() + i) * s.wide() + j) * s.channels);
        }
        for (int64_t i = 0; i < s.height; ++i)
            for (int64_t j = i < s.high() * s.window ? s.wide() * s.window : 0; j < s.width; ++j)
                rest(((n * s.height + i) * s.width + j) * s.channels);
    }
}

// The same a vector of channels at a time, for derivatives: calls `visit(offset in maps, offset in
// pooled maps, channel, window, z)`, with z the gradient where the maximum came from and zero
// elsewhere, and `rest(offset in maps, channel)`.
template <class R, int WINDOW, class Visit, class Rest>
void each_routed(const Shape& s, const R* gradient, const R* y, const R* scale, const R* shift,
                 Visit visit, Rest rest) {
    using L = Lanes<R>;
    const int64_t C = s.channels;
    each_window(
        s,
        [&](int64_t at, int64_t to) {
            for (int64_t c = 0; c < C; c += L::count) {
                const Window<R, WINDOW> w(y + at + c, s.width * C, C, L::load(scale + c),
                                          L::load(shift + c));
                typename L::Vector z[w.size];
                w.route(L::load(gradient + to + c), z);
                visit(at + c, to + c, c, w, z);
            }
        },
        [&](int64_t at) {
            for (int64_t c = 0; c < C; c += L::count) rest(at + c, c);
        });
}

template <class R, int WINDOW>
void forward(const Shape& s, const R* y, const R* weight, const R* bias, double eps, R* out,
             R* mean, R* inverse) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.images * s.high() * s.wide();
    std::vector<R> scale(C), shift(C);
    for (int64_t g = 0; g < s.groups; ++g, y += rows * C, out += pooled * C, weight += C,
                 bias += C, mean += C, inverse += C) {
        Moments<R> moments(C);
        for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE)
            moments.add(y + first * C, std::min(ROWS_AT_ONCE, rows - first));
        moments.give(eps, mean, inverse);
        affine(C, weight, bias, mean, inverse, scale.data(), shift.data());
        each_window(
            s,
            [&](int64_t at, int64_t to) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(&scale[c]), b = L::load(&shift[c]), zero = {};
                    const Window<R, WINDOW> w(y + at + c, s.width * C, C, a, b);
                    L::store(out + to + c, w.most < zero ? zero : w.most);
                }
            },
            [](int64_t) {});
    }
}

// dy = scale (z - <z> - h <zh>), with z the gradient where the maxima came from, h the normalised
// y and <.> the mean over rows; and <z>, <zh>, of which the derivatives by weight and bias are
// multiples.
template <class R, int WINDOW>
void backward(const Shape& s, const R* gradient, const R* y, const R* weight, const R* bias,
              const R* mean, const R* inverse, R* dy, R* mean_z, R* mean_zh) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    using W = Window<R, WINDOW>;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.images * s.high() * s.wide();
    std::vector<R> scale(C), shift(C), constant(C), slope(C);
    for (int64_t g = 0; g < s.groups; ++g, y += rows * C, dy += rows * C, gradient += pooled * C,
                 weight += C, bias += C, mean += C, inverse += C, mean_z += C, mean_zh += C) {
        affine(C, weight, bias, mean, inverse, scale.data(), shift.data());
        Sums<R, 2> sums(C);
        auto routed = [&](auto visit, auto rest) {
            each_routed<R, WINDOW>(s, gradient, y, scale.data(), shift.data(), visit, rest);
        };
        routed(
            [&](int64_t, int64_t, int64_t c, const W& w, const V(&z)[W::size]) {
                const V m = L::load(mean + c);
                V parts[2];
                sums.load(c, parts);
                for (int i = 0; i < W::size; ++i) {
                    parts[0] += z[i];
                    parts[1] += z[i] * (w.y[i] - m);
                }
                sums.store(c, parts);
            },
            [](int64_t, int64_t) {});
        sums.flush();
        centre(C, rows, sums, scale.data(), inverse, mean_z, mean_zh, slope.data(),
               constant.data());
        routed(
            [&](int64_t at, int64_t, int64_t c, const W& w, const V(&z)[W::size]) {
                const V a = L::load(&scale[c]), m = L::load(mean + c);
                const V k = L::load(&constant[c]), by = L::load(&slope[c]);
                for (int i = 0; i < W::size; ++i)
                    L::store(dy + at + s.offset<WINDOW>(i), a * z[i] + by * (w.y[i] - m) + k);
            },
            [&](int64_t at, int64_t c) {
                const V d = L::load(y + at) - L::load(mean + c);
                L::store(dy + at, L::load(&slope[c]) * d + L::load(&constant[c]));
            });
    }
}

// The derivative of `backward`: t, t_weight and t_bias are the gradients by its dy and by the
// derivatives by weight and bias; it gives those by its `gradient`, y and weight.
template <class R, int WINDOW>
void second(const Shape& s, const R* t, const R* t_weight, const R* t_bias, const R* gradient,
            const R* y, const R* weight, const R* bias, const R* mean, const R* inverse,
            const R* mean_z, const R* mean_zh, R* d_gradient, R* dy, R* d_weight) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    using W = Window<R, WINDOW>;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.images * s.high() * s.wide();
    std::vector<R> scale(C), shift(C), z_constant(C), z_slope(C), constant(C), by_t(C), by_z(C),
        slope(C);
    for (int64_t g = 0; g < s.groups;
         ++g, t += rows * C, y += rows * C, dy += rows * C, gradient += pooled * C,
                 d_gradient += pooled * C, weight += C, bias += C, mean += C, inverse += C,
                 mean_z += C, mean_zh += C, t_weight += C, t_bias += C, d_weight += C) {
        affine(C, weight, bias, mean, inverse, scale.data(), shift.data());
        Sums<R, 3> sums(C);  // of t, t (y - mean), t z
        auto routed = [&](auto visit, auto rest) {
            each_routed<R, WINDOW>(s, gradient, y, scale.data(), shift.data(), visit, rest);
        };
        routed(
            [&](int64_t at, int64_t, int64_t c, const W& w, const V(&z)[W::size]) {
                const V m = L::load(mean + c);
                V parts[3];
                sums.load(c, parts);
                for (int i = 0; i < W::size; ++i) {
                    const V ti = L::load(t + at + s.offset<WINDOW>(i));
                    parts[0] += ti;
                    parts[1] += ti * (w.y[i] - m);
                    parts[2] += ti * z[i];
                }
                sums.store(c, parts);
            },
            [&](int64_t at, int64_t c) {
                const V ti = L::load(t + at), d = L::load(y + at) - L::load(mean + c);
                V parts[3];
                sums.load(c, parts);
                parts[0] += ti;
                parts[1] += ti * d;
                sums.store(c, parts);
            });
        sums.flush();
        for (int64_t c = 0; c < C; ++c) {
            const double inv = inverse[c], a = weight[c] * inv, z = mean_z[c], zh = mean_zh[c];
            const double mean_t = sums(0, c) / rows, mean_th = sums(1, c) / rows * inv,
                         mean_tz = sums(2, c) / rows;
            // By z, where the window lets it through.
            const double by_h = t_weight[c] - a * mean_th;
            z_constant[c] = R(t_bias[c] - a * mean_t);
            z_slope[c] = R(by_h * inv);
            // Through scale = weight / deviation.
            const double through = rows * (mean_tz - mean_t * z - mean_th * zh);
            d_weight[c] = R(inv * through);
            // By h it is q = by_h z - scale <zh> t; y gets q normalised, and its share of the
            // deviation.
            const double mean_q = by_h * z - a * zh * mean_t;
            const double mean_qh = by_h * zh - a * zh * mean_th;
            constant[c] = R(-inv * mean_q);
            by_t[c] = R(-inv * a * zh);
            by_z[c] = R(inv * by_h);
            slope[c] = R(-inv * (inv * mean_qh + weight[c] * through * inv * inv / rows));
        }
        routed(
            [&](int64_t at, int64_t to, int64_t c, const W& w, const V(&z)[W::size]) {
                const V a = L::load(&scale[c]), m = L::load(mean + c);
                V by[W::size];
                for (int i = 0; i < W::size; ++i) {
                    const V ti = L::load(t + at + s.offset<WINDOW>(i)), d = w.y[i] - m;
                    by[i] = a * ti + L::load(&z_slope[c]) * d + L::load(&z_constant[c]);
                    L::store(dy + at + s.offset<WINDOW>(i),
                             L::load(&by_t[c]) * ti + L::load(&by_z[c]) * z[i] +
                                 L::load(&slope[c]) * d + L::load(&constant[c]));
                }
                L::store(d_gradient + to, w.pick(by));
            },
            [&](int64_t at, int64_t c) {
                const V ti = L::load(t + at), d = L::load(y + at) - L::load(mean + c);
                L::store(dy + at, L::load(&by_t[c]) * ti + L::load(&slope[c]) * d +
                                      L::load(&constant[c]));
            });
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                         \
    extern "C" void forward_##SUFFIX(Shape s, const R* y, const R* weight, const R* bias,         \
                                     double eps, R* out, R* mean, R* inverse) {                   \
        (s.window == 2 ? forward<R, 2> : forward<R, 1>)(s, y, weight, bias, eps, out, mean,       \
                                                        inverse);                                 \
    }                                                                                             \
    extern "C" void backward_##SUFFIX(Shape s, const R* gradient, const R* y, const R* weight,    \
                                      const R* bias, const R* mean, const R* inverse, R* dy,      \
                                      R* mean_z, R* mean_zh) {                                    \
        (s.window == 2 ? backward<R, 2> : backward<R, 1>)(s, gradient, y, weight, bias, mean,     \
                                                          inverse, dy, mean_z, mean_zh);          \
    }                                                                                             \
    extern "C" void second_##SUFFIX(Shape s, const R* t, const R* t_weight, const R* t_bias,      \
                                    const R* gradient, const R* y, const R* weight,               \
                                    const R* bias, const R* mean, const R* inverse,               \
                                    const R* mean_z, const R* mean_zh, R* d_gradient, R* dy,      \
                                    R* d_weight) {                                                \
        (s.window == 2 ? second<R, 2> : second<R, 1>)(s, t, t_weight, t_bias, gradient, y,        \
                                                      weight, bias, mean, inverse, mean_z,        \
                                                      mean_zh, d_gradient, dy, d_weight);         \
    }

EXPORT(float, f32)
EXPORT(double, f64)
