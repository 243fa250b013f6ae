// What batch norm, ReLU and pooling are made of: sums over rows, and the maximum of a window.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

constexpr int64_t ROWS_AT_ONCE = 64;  // or turns, summed in R before they join sums in double

// Sums over the rows of a group, channel by channel. In each turn (a row, or a window of up to four)
// every channel is brought forward in order, `load` giving the sums in R so far and `store` taking
// them back; `flush` ends it.
template <class R, int COUNT>
struct Sums {
    using L = Lanes<R>;
    using V = typename L::Vector;
    std::vector<double> totals;
    std::vector<R> partial;
    int64_t channels, turns = 0;

    explicit Sums(int64_t channels)
        : totals(COUNT * channels, 0.0), partial(COUNT * channels, R(0)), channels(channels) {}

    double operator()(int k, int64_t channel) const { return totals[k * channels + channel]; }

    void load(int64_t channel, V (&parts)[COUNT]) const {
        for (int k = 0; k < COUNT; ++k) parts[k] = L::load(&partial[k * channels + channel]);
    }
    void store(int64_t channel, const V (&parts)[COUNT]) {
        for (int k = 0; k < COUNT; ++k) L::store(&partial[k * channels + channel], parts[k]);
        if (channel + L::count == channels && ++turns == ROWS_AT_ONCE) flush();
    }
    void flush() {
        for (size_t i = 0; i < totals.size(); ++i) totals[i] += partial[i];
        std::fill(partial.begin(), partial.end(), R(0));
        turns = 0;
    }
};

// Mean and variance of a group's rows, channel by channel, a stretch of rows at a time. Each stretch
// has an origin of its own, so that squares cancel little wherever the rows lie.
template <class R>
class Moments {
    using L = Lanes<R>;
    using V = typename L::Vector;

   public:
    explicit Moments(int64_t channels) : channels(channels), mean(channels), squares(channels) {}

    void add(const R* rows, int64_t count) {
        const double before = seen, all = before + count;
        for (int64_t c = 0; c < channels; c += L::count) {
            const V origin = L::load(rows + c);
            V sum = {}, square = {};
            for (int64_t row = 0; row < count; ++row) {
                const V d = L::load(rows + row * channels + c) - origin;
                sum += d;
                square += d * d;
            }
            for (int64_t l = 0; l < L::count; ++l) {
                const double off = double(sum[l]) / count;
                const double apart = origin[l] + off - mean[c + l];
                squares[c + l] += square[l] - off * sum[l] + apart * apart * before * count / all;
                mean[c + l] += apart * count / all;
            }
        }
        seen = all;
    }

    void give(double eps, R* means, R* inverses) const {
        for (int64_t c = 0; c < channels; ++c) {
            means[c] = R(mean[c]);
            inverses[c] = R(1 / std::sqrt(std::max(squares[c] / seen, 0.0) + eps));
        }
    }

   private:
    const int64_t channels;
    std::vector<double> mean, squares;
    double seen = 0;
};

// What the norm does to y is y * scale + shift.
template <class R>
void affine(int64_t channels, const R* weight, const R* bias, const R* mean, const R* inverse,
            R* scale, R* shift) {
    for (int64_t c = 0; c < channels; ++c) {
        scale[c] = weight[c] * inverse[c];
        shift[c] = bias[c] - mean[c] * scale[c];
    }
}

// The derivative by y is scale * z + slope * (y - mean) + constant, with z the derivative behind the
// norm. From the sums of z and z (y - mean); it gives the means of z and z h too, h the normalised y.
template <class R>
void centre(int64_t channels, int64_t rows, const Sums<R, 2>& sums, const R* scale,
            const R* inverse, R* mean_z, R* mean_zh, R* slope, R* constant) {
    for (int64_t c = 0; c < channels; ++c) {
        mean_z[c] = R(sums(0, c) / rows);
        mean_zh[c] = R(sums(1, c) / rows * inverse[c]);
        constant[c] = -scale[c] * mean_z[c];
        slope[c] = -scale[c] * mean_zh[c] * inverse[c];
    }
}

// A window's values behind the norm, and which of them the maximum takes: the first of the
// largest, if it is above zero.
template <class R, int WINDOW>
struct Window {
    using L = Lanes<R>;
    using V = typename L::Vector;
    static constexpr int size = WINDOW * WINDOW;
    V y[size], value[size];
    V most;

    Window(const R* corner, int64_t row_stride, int64_t channels, V scale, V shift) {
        for (int i = 0; i < size; ++i) {
            y[i] = L::load(corner + (i / WINDOW) * row_stride + (i % WINDOW) * channels);
            value[i] = y[i] * scale + shift;
            most = i == 0 ? value[i] : (value[i] > most ? value[i] : most);
        }
    }

    // `gradient` where the maximum came from, zero elsewhere.
    void route(V gradient, V (&z)[size]) const {
        V zero = {};
        V left = most > zero ? gradient : zero;
        for (int i = 0; i < size; ++i) {
            auto hit = value[i] == most;
            z[i] = hit ? left : zero;
            left = hit ? zero : left;
        }
    }

    // The one of `values` that the maximum came from, zero where the ReLU shuts.
    V pick(const V (&values)[size]) const {
        V zero = {};
        V found = zero;
        for (int i = size - 1; i >= 0; --i) {
            auto hit = value[i] == most;
            found = hit ? values[i] : found;
        }
        return most > zero ? found : zero;
    }
};
