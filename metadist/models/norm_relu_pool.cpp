// Batch norm, ReLU and 2x2 max-pooling in as few passes over memory as the statistics allow, with
// the first and the second derivative. `native.py` compiles it, `norm_relu_pool.py` says what it
// computes. Maps lie in memory as (groups, images, height, width, channels); `window` is 2 with
// pooling, else 1. All statistics are of one group and channel, over the `rows` of its images.

#include "native.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t ROWS_AT_ONCE = 64;  // summed in R before they join a sum in double

struct Shape {
    int64_t groups, images, height, width, channels, window;
    int64_t rows() const { return images * height * width; }
    int64_t high() const { return height / window; }
    int64_t wide() const { return width / window; }
};

// Sums over the rows of a group, channel by channel. What is summed in R elsewhere joins by `add`;
// else `load` gives the sums in R so far, `store` takes them back, and `next` ends each turn.
template <class R, int COUNT>
struct Sums {
    using L = Lanes<R>;
    using V = typename L::Vector;
    std::vector<double> totals;
    std::vector<R> partial;
    int64_t channels, turns = 0;

    explicit Sums(int64_t channels)
        : totals(COUNT * channels, 0.0), partial(COUNT * channels, R(0)), channels(channels) {}

    void add(int64_t channel, const V (&parts)[COUNT]) {
        for (int k = 0; k < COUNT; ++k)
            for (int64_t l = 0; l < L::count; ++l) totals[k * channels + channel + l] += parts[k][l];
    }
    double operator()(int k, int64_t channel) const { return totals[k * channels + channel]; }

    void load(int64_t channel, V (&parts)[COUNT]) const {
        for (int k = 0; k < COUNT; ++k) parts[k] = L::load(&partial[k * channels + channel]);
    }
    void store(int64_t channel, const V (&parts)[COUNT]) {
        for (int k = 0; k < COUNT; ++k) L::store(&partial[k * channels + channel], parts[k]);
    }
    void next() {
        if (++turns == ROWS_AT_ONCE) flush();
    }
    void flush() {
        for (int64_t c = 0; c < channels; c += L::count) {
            V parts[COUNT];
            load(c, parts);
            add(c, parts);
        }
        std::fill(partial.begin(), partial.end(), R(0));
        turns = 0;
    }
};

// A window's values behind the norm, and which of them the maximum takes: the first of the
// largest, if it is above zero.
template <class R, int WINDOW>
struct Window {
    using L = Lanes<R>;
    using V = typename L::Vector;
    static constexpr int size = WINDOW * WINDOW;
    V y[size];
    V most;

    Window(const R* corner, int64_t row_stride, int64_t channels, V scale, V shift) {
        for (int i = 0; i < size; ++i) {
            y[i] = L::load(corner + (i / WINDOW) * row_stride + (i % WINDOW) * channels);
            V value = y[i] * scale + shift;
            most = i == 0 ? value : (value > most ? value : most);
        }
    }

    // `gradient` where the maximum came from, zero elsewhere.
    void route(V gradient, V scale, V shift, V (&z)[size]) const {
        V zero = {};
        V left = most > zero ? gradient : zero;
        for (int i = 0; i < size; ++i) {
            auto hit = (y[i] * scale + shift) == most;
            z[i] = hit ? left : zero;
            left = hit ? zero : left;
        }
    }

    // The one of `values` that the maximum came from, zero where the ReLU shuts.
    V pick(const V (&values)[size], V scale, V shift) const {
        V zero = {};
        V found = zero;
        for (int i = size - 1; i >= 0; --i) {
            auto hit = (y[i] * scale + shift) == most;
            found = hit ? values[i] : found;
        }
        return most > zero ? found : zero;
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

template <class R, int WINDOW>
void forward(const Shape& s, const R* y, const R* weight, const R* bias, double eps, R* out,
             R* mean, R* inverse) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t C = s.channels, rows = s.rows(), pooled = s.images * s.high() * s.wide();
    std::vector<R> scale(C), shift(C);
    for (int64_t g = 0; g < s.groups; ++g, y += rows * C, out += pooled * C, weight += C,
                 bias += C, mean += C, inverse += C) {
        Sums<R, 2> sums(C);  // of differences from the first row: their squares cancel little
        for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
            const int64_t end = first + ROWS_AT_ONCE < rows ? first + ROWS_AT_ONCE : rows;
            for (int64_t c = 0; c < C; c += L::count) {
                const V origin = L::load(y + c);
                V parts[2] = {};
                for (int64_t row = first; row < end; ++row) {
                    const V d = L::load(y + row * C + c) - origin;
                    parts[0] += d;
                    parts[1] += d * d;
                }
                sums.add(c, parts);
            }
        }
        for (int64_t c = 0; c < C; ++c) {
            const double off = sums(0, c) / rows;
            double variance = sums(1, c) / rows - off * off;
            if (variance < 0) variance = 0;
            mean[c] = R(y[c] + off);
            inverse[c] = R(1 / std::sqrt(variance + eps));
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
                    w.route(L::load(gradient + to + c), a, b, z);
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
                    w.route(L::load(gradient + to + c), a, b, z);
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
                    w.route(L::load(gradient + to + c), a, b, z);
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
                    w.route(L::load(gradient + to + c), a, b, z);
                    for (int i = 0; i < W::size; ++i) {
                        const V ti = L::load(t + at + offset(i) + c), d = w.y[i] - m;
                        by[i] = a * ti + L::load(&z_slope[c]) * d + L::load(&z_constant[c]);
                        L::store(dy + at + offset(i) + c,
                                 L::load(&by_t[c]) * ti + L::load(&by_z[c]) * z[i] +
                                     L::load(&slope[c]) * d + L::load(&constant[c]));
                    }
                    L::store(d_gradient + to + c, w.pick(by, a, b));
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
