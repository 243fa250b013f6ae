// Convolution of 3x3 with stride 1 and padding 1 by minimal filtering, F(2x2, 3x3) of Lavin and Gray
// (2015, arXiv 1509.09308): a 2x2 tile of outputs takes 16 products a pair of channels instead of
// 36. And the derivative by the weights, which takes as many. `native` compiles it,
// `convolution.py` says what it computes. Maps lie in memory as (groups, images, height, width,
// channels), weights as (groups, out, in, 3, 3); channels fill whole vectors.

#include "vectors.h"

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t TILES_AT_ONCE = 48;  // with their 16 transformed values they stay in the cache
constexpr int POINTS = 16;

struct Shape {
    int64_t groups, images, height, width, in, out;
    int64_t high() const { return (height + 1) / 2; }
    int64_t wide() const { return (width + 1) / 2; }
    int64_t tiles() const { return images * high() * wide(); }
    int64_t pixels() const { return images * height * width; }
};

// B^T d B, with B^T = (1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1): what 4x4 inputs are to the products.
template <class V>
void transform_input(V (&d)[POINTS]) {
    auto four = [](V& a, V& b, V& c, V& e) {
        const V first = a - c, second = b + c, third = c - b, last = b - e;
        a = first, b = second, c = third, e = last;
    };
    for (int j = 0; j < 4; ++j) four(d[j], d[4 + j], d[8 + j], d[12 + j]);
    for (int i = 0; i < 16; i += 4) four(d[i], d[i + 1], d[i + 2], d[i + 3]);
}

// A^T m A, with A^T = (1 1 1 0; 0 1 -1 -1): 2x2 outputs of the products.
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

// A y A^T: the gradient by the products, of that by the outputs.
template <class V>
void transform_gradient(const V (&y)[4], V (&m)[POINTS]) {
    auto four = [](V a, V b, V* to, int step) {
        to[0] = a, to[step] = a + b, to[2 * step] = a - b, to[3 * step] = -b;
    };
    V rows[8];  // 4x2
    for (int j = 0; j < 2; ++j) four(y[j], y[2 + j], rows + j, 2);
    for (int i = 0; i < 4; ++i) four(rows[2 * i], rows[2 * i + 1], m + 4 * i, 1);
}

// G g G^T, with G = (1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1): what 3x3 weights are to the products.
template <class V>
void transform_weight(const V (&g)[9], V (&u)[POINTS]) {
    auto four = [](V a, V b, V c, V* to, int step) {
        const V even = (a + c) / 2, odd = b / 2;
        to[0] = a, to[step] = even + odd, to[2 * step] = even - odd, to[3 * step] = c;
    };
    V rows[12];  // 4x3
    for (int j = 0; j < 3; ++j) four(g[j], g[3 + j], g[6 + j], rows + j, 3);
    for (int i = 0; i < 4; ++i) four(rows[3 * i], rows[3 * i + 1], rows[3 * i + 2], u + 4 * i, 1);
}

// G^T u G: the gradient by the weights, of that by what they are to the products.
template <class V>
void transform_weight_gradient(const V (&u)[POINTS], V (&g)[9]) {
    auto three = [](V a, V b, V c, V d, V* to, int step) {
        const V even = (b + c) / 2;
        to[0] = a + even, to[step] = (b - c) / 2, to[2 * step] = even + d;
    };
    V rows[12];  // 3x4
    for (int j = 0; j < 4; ++j) three(u[j], u[4 + j], u[8 + j], u[12 + j], rows + j, 4);
    for (int i = 0; i < 3; ++i) {
        const V* row = rows + 4 * i;
        three(row[0], row[1], row[2], row[3], g + 3 * i, 1);
    }
}

// Where the pixels of a tile lie in the maps of a group, counted in pixels: SIDE x SIDE of them
// from (top, left); -1 for what lies outside.
template <int SIDE>
void locate(const Shape& s, int64_t tile, int64_t before, int64_t (&at)[SIDE * SIDE]) {
    const int64_t n = tile / (s.high() * s.wide()), in_image = tile % (s.high() * s.wide());
    const int64_t top = in_image / s.wide() * 2 - before, left = in_image % s.wide() * 2 - before;
    for (int64_t i = 0; i < SIDE; ++i)
        for (int64_t j = 0; j < SIDE; ++j) {
            const int64_t row = top + i, column = left + j;
            const bool inside = 0 <= row && row < s.height && 0 <= column && column < s.width;
            at[i * SIDE + j] = inside ? (n * s.height + row) * s.width + column : -1;
        }
}

// The pixels of `count` tiles from `first` on, transformed: (POINTS, TILES_AT_ONCE, channels).
template <class R, int SIDE, class Transform>
void transform_tiles(const Shape& s, const R* maps, int64_t channels, int64_t first, int64_t count,
                     Transform transform, R* to) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    for (int64_t tile = 0; tile < count; ++tile) {
        int64_t at[SIDE * SIDE];
        locate<SIDE>(s, first + tile, SIDE / 4, at);
        for (int64_t c = 0; c < channels; c += L::count) {
            V pixels[SIDE * SIDE], points[POINTS];
            for (int p = 0; p < SIDE * SIDE; ++p)
                pixels[p] = at[p] < 0 ? V{} : L::load(maps + at[p] * channels + c);
            transform(pixels, points);
            for (int k = 0; k < POINTS; ++k)
                L::store(to + (k * TILES_AT_ONCE + tile) * channels + c, points[k]);
        }
    }
}

template <class R>
void transform_inputs(const Shape& s, const R* maps, int64_t first, int64_t count, R* to) {
    using V = typename Lanes<R>::Vector;
    transform_tiles<R, 4>(
        s, maps, s.in, first, count,
        [](const V(&pixels)[POINTS], V(&points)[POINTS]) {
            std::copy(pixels, pixels + POINTS, points);
            transform_input(points);
        },
        to);
}

// The maps' convolution with the weights; `transposed`, its transpose: from maps like its outputs
// to maps like its inputs. Weights are (groups, out, in, 3, 3) of the convolution in both cases; the
// bias is (groups, channels of the outputs) or null.
template <class R>
void convolve(const Shape& s, bool transposed, const R* maps, const R* weight, const R* bias,
              R* outputs) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    Buffer<R> factors(POINTS * s.in * s.out), points(POINTS * TILES_AT_ONCE * s.in),
        sums(POINTS * TILES_AT_ONCE * s.out);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 outputs += s.pixels() * s.out, weight += s.in * s.out * 9,
                 bias += bias ? s.out : 0) {
        for (int64_t in = 0; in < s.in; ++in)
            for (int64_t out = 0; out < s.out; out += L::count) {
                V taps[9], transformed[POINTS];
                for (int64_t l = 0; l < L::count; ++l) {
                    const int64_t to = out + l;
                    const R* from = weight + 9 * (transposed ? in * s.out + to : to * s.in + in);
                    for (int p = 0; p < 9; ++p) taps[p][l] = from[transposed ? 8 - p : p];
                }
                transform_weight(taps, transformed);
                for (int k = 0; k < POINTS; ++k)
                    L::store(factors + (k * s.in + in) * s.out + out, transformed[k]);
            }
        for (int64_t first = 0; first < s.tiles(); first += TILES_AT_ONCE) {
            const int64_t count = std::min(TILES_AT_ONCE, s.tiles() - first);
            transform_inputs(s, maps, first, count, +points);
            for (int64_t k = 0; k < POINTS; ++k)
                multiply<R, 6>(count, nullptr, 0, points + k * TILES_AT_ONCE * s.in, s.in, 1,
                                      factors + k * s.in * s.out, s.out, s.in,
                                      sums + k * TILES_AT_ONCE * s.out);
            for (int64_t tile = 0; tile < count; ++tile) {
                int64_t at[4];
                locate<2>(s, first + tile, 0, at);
                for (int64_t c = 0; c < s.out; c += L::count) {
                    V products[POINTS], pixels[4];
                    for (int k = 0; k < POINTS; ++k)
                        products[k] = L::load(sums + (k * TILES_AT_ONCE + tile) * s.out + c);
                    transform_products(products, pixels);
                    const V plus = bias ? L::load(bias + c) : V{};
                    for (int p = 0; p < 4; ++p)
                        if (at[p] >= 0) L::store(outputs + at[p] * s.out + c, pixels[p] + plus);
                }
            }
        }
    }
}

// The derivatives by the weights and the bias of <gradient, convolution of maps>.
template <class R>
void by_weight(const Shape& s, const R* maps, const R* gradient, R* weight, R* bias) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    Buffer<R> points(POINTS * TILES_AT_ONCE * s.in), others(POINTS * TILES_AT_ONCE * s.out),
        sums(POINTS * s.in * s.out);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 gradient += s.pixels() * s.out, weight += s.in * s.out * 9, bias += s.out) {
        std::fill_n(+sums, POINTS * s.in * s.out, R(0));
        std::fill_n(bias, s.out, R(0));
        for (int64_t first = 0; first < s.tiles(); first += TILES_AT_ONCE) {
            const int64_t count = std::min(TILES_AT_ONCE, s.tiles() - first);
            transform_inputs(s, maps, first, count, +points);
            transform_tiles<R, 2>(
                s, gradient, s.out, first, count,
                [](const V(&pixels)[4], V(&made)[POINTS]) { transform_gradient(pixels, made); },
                +others);
            // (A y A^T)[1][1] is the sum of a tile.
            for (int64_t tile = 0; tile < count; ++tile)
                for (int64_t c = 0; c < s.out; c += L::count)
                    L::store(bias + c, L::load(bias + c) +
                                           L::load(others + (5 * TILES_AT_ONCE + tile) * s.out + c));
            for (int64_t k = 0; k < POINTS; ++k)
                multiply<R, 4>(s.in, sums + k * s.in * s.out, s.out,
                               points + k * TILES_AT_ONCE * s.in, 1, s.in,
                               others + k * TILES_AT_ONCE * s.out, s.out, count,
                               sums + k * s.in * s.out);
        }
        for (int64_t in = 0; in < s.in; ++in)
            for (int64_t out = 0; out < s.out; out += L::count) {
                V transformed[POINTS], taps[9];
                for (int k = 0; k < POINTS; ++k)
                    transformed[k] = L::load(sums + (k * s.in + in) * s.out + out);
                transform_weight_gradient(transformed, taps);
                for (int64_t l = 0; l < L::count; ++l)
                    for (int p = 0; p < 9; ++p) weight[((out + l) * s.in + in) * 9 + p] = taps[p][l];
            }
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                         \
    extern "C" void convolve_##SUFFIX(Shape s, const R* maps, const R* weight, const R* bias,     \
                                      R* outputs) {                                               \
        convolve(s, false, maps, weight, bias, outputs);                                          \
    }                                                                                             \
    extern "C" void transposed_##SUFFIX(Shape s, const R* maps, const R* weight, R* outputs) {    \
        convolve<R>(s, true, maps, weight, nullptr, outputs);                                     \
    }                                                                                             \
    extern "C" void by_weight_##SUFFIX(Shape s, const R* maps, const R* gradient, R* weight,      \
                                       R* bias) {                                                 \
        by_weight(s, maps, gradient, weight, bias);                                               \
    }

EXPORT(float, f32)
EXPORT(double, f64)
