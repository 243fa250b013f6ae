// Building blocks of batch norm, ReLU and pooling: sums over rows, and the maximum of a window.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

constexpr int64_t BLOCK_ROWS = 64;  // rows or windows that are summed in R before in double

// Sums over the rows of a task, per channel. In each step (a row, or a window of up to four) the
// caller updates every channel in order: `load` returns the partial sums, `store` writes them back.
// `flush` adds the last partial sums to the totals.
template <class R, int COUNT>
struct Sums {
    using L = Lanes<R>;
    using V = typename L::Vector;
    std::vector<double> totals;
    Buffer<R> partial;  // aligned: loads and stores in every step
    int64_t channels, steps = 0;

    explicit Sums(int64_t channels)
        : totals(COUNT * channels, 0.0), partial(COUNT * channels), channels(channels) {
        clear();
    }

    double operator()(int k, int64_t channel) const { return totals[k * channels + channel]; }

    void load(int64_t channel, V (&sums)[COUNT]) const {
        for (int k = 0; k < COUNT; ++k) sums[k] = L::load(partial + k * channels + channel);
    }
    void store(int64_t channel, const V (&sums)[COUNT]) {
        for (int k = 0; k < COUNT; ++k) L::store(partial + k * channels + channel, sums[k]);
        if (channel + L::count == channels && ++steps == BLOCK_ROWS) flush();
    }
    void flush() {
        for (size_t i = 0; i < totals.size(); ++i) totals[i] += partial[i];
        clear();
    }

   private:
    void clear() {
        std::fill_n(static_cast<R*>(partial), totals.size(), R(0));
        steps = 0;
    }
};

// Mean and variance of a task's rows, per channel, from blocks of rows. Each block is shifted by
// its first row, which avoids cancellation for means that are large beside the deviation; blocks
// are merged as in Chan, Golub and LeVeque (1983).
template <class R>
class Moments {
    using L = Lanes<R>;
    using V = typename L::Vector;

   public:
    explicit Moments(int64_t channels) : channels(channels), mean(channels), squares(channels) {}

    void add(const R* rows, int64_t count) {
        const double previous = seen_rows, total = previous + count;
        for (int64_t c = 0; c < channels; c += L::count) {
            const V origin = L::load(rows + c);
            V sum = {}, square = {};
            for (int64_t row = 0; row < count; ++row) {
                const V d = L::load(rows + row * channels + c) - origin;
                sum += d;
                square += d * d;
            }
            for (int64_t l = 0; l < L::count; ++l) {
                const double offset = double(sum[l]) / count;
                const double delta = origin[l] + offset - mean[c + l];
                squares[c + l] +=
                    square[l] - offset * sum[l] + delta * delta * previous * count / total;
                mean[c + l] += delta * count / total;
            }
        }
        seen_rows = total;
    }

    // The unbiased variance is not stored if its pointer is null.
    void finalize(double eps, R* mean_out, R* inverse_out, R* unbiased_variance) const {
        for (int64_t c = 0; c < channels; ++c) {
            const double square = std::max(squares[c], 0.0);
            mean_out[c] = R(mean[c]);
            inverse_out[c] = R(1 / std::sqrt(square / seen_rows + eps));
            if (unbiased_variance) unbiased_variance[c] = R(square / (seen_rows - 1));
        }
    }

   private:
    const int64_t channels;
    std::vector<double> mean, squares;
    double seen_rows = 0;
};

// The norm as an affine map: y * scale + shift.
template <class R>
void affine(int64_t channels, const R* weight, const R* bias, const R* mean, const R* inverse,
            R* scale, R* shift) {
    for (int64_t c = 0; c < channels; ++c) {
        scale[c] = weight[c] * inverse[c];
        shift[c] = bias[c] - mean[c] * scale[c];
    }
}

// Coefficients of the gradient by y, scale * z + slope * (y - mean) + constant, with z the gradient
// by the norm's output, from the sums of z and z (y - mean). Also the means of z and of z h, with h
// the normalized y.
template <class R>
void backward_coefficients(int64_t channels, int64_t rows, const Sums<R, 2>& sums, const R* scale,
                           const R* inverse, R* mean_z, R* mean_zh, R* slope, R* constant) {
    for (int64_t c = 0; c < channels; ++c) {
        mean_z[c] = R(sums(0, c) / rows);
        mean_zh[c] = R(sums(1, c) / rows * inverse[c]);
        constant[c] = -scale[c] * mean_z[c];
        slope[c] = -scale[c] * mean_zh[c] * inverse[c];
    }
}

// A pooling window: its normalized values and their maximum. The gradient of max-pooling behind
// ReLU goes to the first of the largest values, if it is positive.
template <class R, int WINDOW>
struct Window {
    using L = Lanes<R>;
    using V = typename L::Vector;
    static constexpr int size = WINDOW * WINDOW;
    V y[size], value[size];
    V max;

    Window(const R* corner, int64_t row_stride, int64_t channels, V scale, V shift) {
        for (int i = 0; i < size; ++i) {
            y[i] = L::load(corner + (i / WINDOW) * row_stride + (i % WINDOW) * channels);
            value[i] = y[i] * scale + shift;
            max = i == 0 ? value[i] : (value[i] > max ? value[i] : max);
        }
    }

    // `gradient` at the position of the maximum, zero elsewhere.
    void unpool(V gradient, V (&z)[size]) const {
        V zero = {};
        V remaining = max > zero ? gradient : zero;
        for (int i = 0; i < size; ++i) {
            auto is_max = value[i] == max;
            z[i] = is_max ? remaining : zero;
            remaining = is_max ? zero : remaining;
        }
    }

    // The one of `values` at the position of the maximum, zero if the maximum is not positive.
    V gather_max(const V (&values)[size]) const {
        V zero = {};
        V result = zero;
        for (int i = size - 1; i >= 0; --i) {
            auto is_max = value[i] == max;
            result = is_max ? values[i] : result;
        }
        return max > zero ? result : zero;
    }
};
