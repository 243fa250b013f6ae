// Winograd convolution, 3x3 with stride 1 and padding 1, as F(2x2, 3x3) of Lavin and Gray (2015,
// arXiv 1509.09308): a 2x2 output tile takes 16 products per pair of channels instead of 36, and so
// does the weight gradient. The numbers of channels are multiples of the vector length;
// `conv_shape.h` has the layouts.

#include "conv_shape.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace {

constexpr int64_t BLOCK_TILES = 36;  // tiles whose 16 transformed values fit into the cache
constexpr int POINTS = 16;

struct Shape : ConvShape {
    int64_t tile_rows() const { return (height + 1) / 2; }
    int64_t tile_columns() const { return (width + 1) / 2; }
    int64_t tiles() const { return images * tile_rows() * tile_columns(); }
    int64_t pixels() const { return images * in_pixels(); }
};

// The distance between the matrices of `count` values of the 16 points. A cache line is between
// them: of values that are a multiple of 4096 bytes apart, few fit into the first-level cache.
template <class R>
constexpr int64_t point_step(int64_t count) {
    return count + CACHE_LINE / sizeof(R);
}

// B^T d B, with B^T = (1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1): transforms a 4x4 input tile.
template <class V>
void transform_input(V (&d)[POINTS]) {
    auto transform = [](V& a, V& b, V& c, V& e) {
        const V first = a - c, second = b + c, third = c - b, last = b - e;
        a = first, b = second, c = third, e = last;
    };
    for (int j = 0; j < 4; ++j) transform(d[j], d[4 + j], d[8 + j], d[12 + j]);
    for (int i = 0; i < 16; i += 4) transform(d[i], d[i + 1], d[i + 2], d[i + 3]);
}

// A^T m A, with A^T = (1 1 1 0; 0 1 -1 -1): the 2x2 output tile from the products.
template <class V>
void transform_products(const V (&m)[POINTS], V (&y)[4]) {
    V rows[8];
    for (int j = 0; j < 4; ++j) {
        rows[j] = m[j] + m[4 + j] + m[8 + j];
        rows[4 + j] = m[4 + j] - m[8 + j] - m[12 + j];
    }
    for (int i = 0; i < 2; ++i) {
        const V* row = rows + 4 * i;
        y[2 * i] = row[0] + row[1] + row[2];
        y[2 * i + 1] = row[1] - row[2] - row[3];
    }
}

// A y A^T: the gradient by the products from the gradient by the outputs.
template <class V>
void transform_gradient(const V (&y)[4], V (&m)[POINTS]) {
    auto transform = [](V a, V b, V* to, int step) {
        to[0] = a, to[step] = a + b, to[2 * step] = a - b, to[3 * step] = -b;
    };
    V rows[8];  // 4x2
    for (int j = 0; j < 2; ++j) transform(y[j], y[2 + j], rows + j, 2);
    for (int i = 0; i < 4; ++i) transform(rows[2 * i], rows[2 * i + 1], m + 4 * i, 1);
}

// G g G^T, with G = (1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1): transforms a 3x3 weight.
template <class V>
void transform_weight(const V (&g)[9], V (&u)[POINTS]) {
    auto transform = [](V a, V b, V c, V* to, int step) {
        const V even = (a + c) / 2, odd = b / 2;
        to[0] = a, to[step] = even + odd, to[2 * step] = even - odd, to[3 * step] = c;
    };
    V rows[12];  // 4x3
    for (int j = 0; j < 3; ++j) transform(g[j], g[3 + j], g[6 + j], rows + j, 3);
    for (int i = 0; i < 4; ++i)
        transform(rows[3 * i], rows[3 * i + 1], rows[3 * i + 2], u + 4 * i, 1);
}

// G^T u G: the gradient by the weight from the gradient by the transformed weight.
template <class V>
void transform_weight_gradient(const V (&u)[POINTS], V (&g)[9]) {
    auto transform = [](V a, V b, V c, V d, V* to, int step) {
        const V even = (b + c) / 2;
        to[0] = a + even, to[step] = (b - c) / 2, to[2 * step] = even + d;
    };
    V rows[12];  // 3x4
    for (int j = 0; j < 4; ++j) transform(u[j], u[4 + j], u[8 + j], u[12 + j], rows + j, 4);
    for (int i = 0; i < 3; ++i) {
        const V* row = rows + 4 * i;
        transform(row[0], row[1], row[2], row[3], g + 3 * i, 1);
    }
}

// Pixel indices of a SIDE x SIDE tile within a task's images; -1 outside the image.
template <int SIDE>
void tile_pixels(const Shape& s, int64_t tile, int64_t padding, int64_t (&at)[SIDE * SIDE]) {
    const int64_t n = tile / (s.tile_rows() * s.tile_columns()),
                  in_image = tile % (s.tile_rows() * s.tile_columns());
    const int64_t top = in_image / s.tile_columns() * 2 - padding,
                  left = in_image % s.tile_columns() * 2 - padding;
    for (int64_t i = 0; i < SIDE; ++i)
        for (int64_t j = 0; j < SIDE; ++j) {
            const int64_t row = top + i, column = left + j;
            const bool inside = 0 <= row && row < s.height && 0 <= column && column < s.width;
            at[i * SIDE + j] = inside ? (n * s.height + row) * s.width + column : -1;
        }
}

// Transforms `count` tiles from `first` on, to a matrix of (BLOCK_TILES, channels) for each point.
template <class R, int SIDE, class Transform>
void transform_tiles(const Shape& s, const R* inputs, int64_t channels, int64_t first,
                     int64_t count, Transform transform, R* to) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t step = point_step<R>(BLOCK_TILES * channels);
    for (int64_t tile = 0; tile < count; ++tile) {
        int64_t at[SIDE * SIDE];
        tile_pixels<SIDE>(s, first + tile, SIDE / 4, at);
        for (int64_t c = 0; c < channels; c += L::count) {
            V pixels[SIDE * SIDE], points[POINTS];
            for (int p = 0; p < SIDE * SIDE; ++p)
                pixels[p] = at[p] < 0 ? V{} : L::load(inputs + at[p] * channels + c);
            transform(pixels, points);
            for (int k = 0; k < POINTS; ++k)
                L::store(to + k * step + tile * channels + c, points[k]);
        }
    }
}

template <class R>
void transform_inputs(const Shape& s, const R* inputs, int64_t first, int64_t count, R* to) {
    using V = typename Lanes<R>::Vector;
    transform_tiles<R, 4>(
        s, inputs, s.in, first, count,
        [](const V(&pixels)[POINTS], V(&points)[POINTS]) {
            std::copy(pixels, pixels + POINTS, points);
            transform_input(points);
        },
        to);
}

// The convolution, or the transposed convolution with the same weight, (tasks, 3, 3, in, out) or
// (tasks, 3, 3, out, in). The bias is (tasks, channels of the outputs) or null.
template <class R>
void convolve(const Shape& s, bool transposed, const R* inputs, const R* weight, const R* bias,
              R* outputs) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t weight_step = point_step<R>(s.in * s.out),
                  in_step = point_step<R>(BLOCK_TILES * s.in),
                  out_step = point_step<R>(BLOCK_TILES * s.out);
    Buffer<R> packed_weight(POINTS * weight_step), points(POINTS * in_step),
        sums(POINTS * out_step);
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.pixels() * s.in,
                 outputs += s.pixels() * s.out, weight += s.in * s.out * 9,
                 bias += bias ? s.out : 0) {
        for (int64_t in = 0; in < s.in; ++in)
            for (int64_t out = 0; out < s.out; out += L::count) {
                V taps[9], transformed[POINTS];
                for (int p = 0; p < 9; ++p) {
                    const R* tap = weight + (transposed ? 8 - p : p) * s.in * s.out;
                    if (!transposed)
                        taps[p] = L::load(tap + in * s.out + out);
                    else
                        for (int64_t l = 0; l < L::count; ++l)
                            taps[p][l] = tap[(out + l) * s.in + in];
                }
                transform_weight(taps, transformed);
                for (int k = 0; k < POINTS; ++k)
                    L::store(packed_weight + k * weight_step + in * s.out + out, transformed[k]);
            }
        for (int64_t first = 0; first < s.tiles(); first += BLOCK_TILES) {
            const int64_t count = std::min(BLOCK_TILES, s.tiles() - first);
            transform_inputs(s, inputs, first, count, +points);
            for (int64_t k = 0; k < POINTS; ++k)
                multiply<R, 6>(count, nullptr, 0, points + k * in_step, s.in, 1,
                               packed_weight + k * weight_step, s.out, s.in, sums + k * out_step);
            for (int64_t tile = 0; tile < count; ++tile) {
                int64_t at[4];
                tile_pixels<2>(s, first + tile, 0, at);
                for (int64_t c = 0; c < s.out; c += L::count) {
                    V products[POINTS], pixels[4];
                    for (int k = 0; k < POINTS; ++k)
                        products[k] = L::load(sums + k * out_step + tile * s.out + c);
                    transform_products(products, pixels);
                    const V shift = bias ? L::load(bias + c) : V{};
                    for (int p = 0; p < 4; ++p)
                        if (at[p] >= 0) L::store(outputs + at[p] * s.out + c, pixels[p] + shift);
                }
            }
        }
    }
}

// The gradients with respect to weight and bias of <gradient, convolution of the inputs>.
template <class R>
void weight_grad(const Shape& s, const R* inputs, const R* gradient, R* weight, R* bias) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    const int64_t weight_step = point_step<R>(s.in * s.out),
                  in_step = point_step<R>(BLOCK_TILES * s.in),
                  out_step = point_step<R>(BLOCK_TILES * s.out);
    Buffer<R> points(POINTS * in_step), grad_points(POINTS * out_step), sums(POINTS * weight_step);
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.pixels() * s.in,
                 gradient += s.pixels() * s.out, weight += s.in * s.out * 9, bias += s.out) {
        std::fill_n(+sums, POINTS * weight_step, R(0));
        std::fill_n(bias, s.out, R(0));
        for (int64_t first = 0; first < s.tiles(); first += BLOCK_TILES) {
            const int64_t count = std::min(BLOCK_TILES, s.tiles() - first);
            transform_inputs(s, inputs, first, count, +points);
            transform_tiles<R, 2>(
                s, gradient, s.out, first, count,
                [](const V(&pixels)[4], V(&points)[POINTS]) { transform_gradient(pixels, points); },
                +grad_points);
            const R* tile_sums = grad_points + 5 * out_step;  // (A y A^T)[1][1] is a tile's sum
            for (int64_t tile = 0; tile < count; ++tile)
                for (int64_t c = 0; c < s.out; c += L::count)
                    L::store(bias + c, L::load(bias + c) + L::load(tile_sums + tile * s.out + c));
            for (int64_t k = 0; k < POINTS; ++k)
                multiply<R, 6>(s.in, sums + k * weight_step, s.out, points + k * in_step, 1, s.in,
                               grad_points + k * out_step, s.out, count, sums + k * weight_step);
        }
        for (int64_t in = 0; in < s.in; ++in)
            for (int64_t out = 0; out < s.out; out += L::count) {
                V transformed[POINTS], taps[9];
                for (int k = 0; k < POINTS; ++k)
                    transformed[k] = L::load(sums + k * weight_step + in * s.out + out);
                transform_weight_gradient(transformed, taps);
                for (int p = 0; p < 9; ++p)
                    L::store(weight + (p * s.in + in) * s.out + out, taps[p]);
            }
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                        \
    extern "C" void convolve_##SUFFIX(Shape s, const R* inputs, const R* weight, const R* bias,  \
                                      R* outputs) {                                              \
        convolve(s, false, inputs, weight, bias, outputs);                                       \
    }                                                                                            \
    extern "C" void conv_transpose_##SUFFIX(Shape s, const R* gradient, const R* weight,         \
                                            R* inputs) {                                         \
        std::swap(s.in, s.out);                                                                  \
        convolve<R>(s, true, gradient, weight, nullptr, inputs);                                 \
    }                                                                                            \
    extern "C" void weight_grad_##SUFFIX(Shape s, const R* inputs, const R* gradient, R* weight, \
                                         R* bias) {                                              \
        weight_grad(s, inputs, gradient, weight, bias);                                          \
    }

EXPORT(float, f32)
EXPORT(double, f64)
