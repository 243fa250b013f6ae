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
        for (int64_t c = 0; c < C; ++c) {
            scale[c] = weight[c] * inverse[c];
            shift[c] = bias[c] - mean[c] * scale[c];
        }
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
        for (int64_t c = 0; c < C; ++c) {
            scale[c] = weight[c] * inverse[c];
            shift[c] = bias[c] - mean[c] * scale[c];
        }
        Sums<R, 2> sums(C);
        each_window(
            s,
            [&](int64_t at, int64_t to) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(&scale[c]), b = L::load(&shift[c]), m = L::load(mean + c);
                    const W w(y + at + c, s.width * C, C, a, b);
                    V z[W::size];
                    w.route(L::load(gradient + to + c), z);
                    V parts[2];
                    sums.load(c, parts);
                    for (int i = 0; i < W::size; ++i) {
                        parts[0] += z[i];
                        parts[1] += z[i] * (w.y[i] - m);
                    }
                    sums.store(c, parts);
                }
                sums.next();
            },
            [](int64_t) {});
        sums.flush();
        for (int64_t c = 0; c < C; ++c) {
            mean_z[c] = R(sums(0, c) / rows);
            mean_zh[c] = R(sums(1, c) / rows * inverse[c]);
            constant[c] = -scale[c] * mean_z[c];
            slope[c] = -scale[c] * mean_zh[c] * inverse[c];
        }
        each_window(
            s,
            [&](int64_t at, int64_t to) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(&scale[c]), b = L::load(&shift[c]), m = L::load(mean + c);
                    const V k = L::load(&constant[c]), by = L::load(&slope[c]);
                    const W w(y + at + c, s.width * C, C, a, b);
                    V z[W::size];
                    w.route(L::load(gradient + to + c), z);
                    for (int i = 0; i < W::size; ++i)
                        L::store(dy + at + (i / WINDOW) * s.width * C + (i % WINDOW) * C + c,
                                 a * z[i] + by * (w.y[i] - m) + k);
                }
            },
            [&](int64_t at) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V d = L::load(y + at + c) - L::load(mean + c);
                    L::store(dy + at + c, L::load(&slope[c]) * d + L::load(&constant[c]));
                }
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
        for (int64_t c = 0; c < C; ++c) {
            scale[c] = weight[c] * inverse[c];
            shift[c] = bias[c] - mean[c] * scale[c];
        }
        Sums<R, 3> sums(C);  // of t, t (y - mean), t z
        auto offset = [&](int i) { return (i / WINDOW) * s.width * C + (i % WINDOW) * C; };
        each_window(
            s,
            [&](int64_t at, int64_t to) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(&scale[c]), b = L::load(&shift[c]), m = L::load(mean + c);
                    const W w(y + at + c, s.width * C, C, a, b);
                    V z[W::size];
                    w.route(L::load(gradient + to + c), z);
                    V parts[3];
                    sums.load(c, parts);
                    for (int i = 0; i < W::size; ++i) {
                        const V ti = L::load(t + at + offset(i) + c);
                        parts[0] += ti;
                        parts[1] += ti * (w.y[i] - m);
                        parts[2] += ti * z[i];
                    }
                    sums.store(c, parts);
                }
                sums.next();
            },
            [&](int64_t at) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V ti = L::load(t + at + c), d = L::load(y + at + c) - L::load(mean + c);
                    V parts[3];
                    sums.load(c, parts);
                    parts[0] += ti;
                    parts[1] += ti * d;
                    sums.store(c, parts);
                }
                sums.next();
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
        each_window(
            s,
            [&](int64_t at, int64_t to) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V a = L::load(&scale[c]), b = L::load(&shift[c]), m = L::load(mean + c);
                    const W w(y + at + c, s.width * C, C, a, b);
                    V z[W::size], by[W::size];
                    w.route(L::load(gradient + to + c), z);
                    for (int i = 0; i < W::size; ++i) {
                        const V ti = L::load(t + at + offset(i) + c), d = w.y[i] - m;
                        by[i] = a * ti + L::load(&z_slope[c]) * d + L::load(&z_constant[c]);
                        L::store(dy + at + offset(i) + c,
                                 L::load(&by_t[c]) * ti + L::load(&by_z[c]) * z[i] +
                                     L::load(&slope[c]) * d + L::load(&constant[c]));
                    }
                    L::store(d_gradient + to + c, w.pick(by));
                }
            },
            [&](int64_t at) {
                for (int64_t c = 0; c < C; c += L::count) {
                    const V ti = L::load(t + at + c), d = L::load(y + at + c) - L::load(mean + c);
                    L::store(dy + at + c, L::load(&by_t[c]) * ti + L::load(&slope[c]) * d +
                                              L::load(&constant[c]));
                }
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
