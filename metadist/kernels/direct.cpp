// Convolution with many channels and any kernel, stride and padding. The numbers of channels are
// multiples of the vector length; `conv_shape.h` has the layouts.
//
// The products are those of unfolded inputs (im2col), which are read where they are instead of
// being copied. The order of summation depends on the shape of one task alone.

#include "conv_shape.h"
#include "export.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace {

constexpr int ROWS = 6;
constexpr int64_t BLOCK_PIXELS = 80;  // of gradients that stay in the cache

// The pixel of an input image that a tap of an output pixel reads; -1 in the padding.
int64_t source_pixel(const ConvShape& s, int64_t out_pixel, int64_t tap) {
    const int64_t row = out_pixel / s.out_width() * s.stride_h + tap / s.kernel_w - s.padding_h;
    const int64_t column = out_pixel % s.out_width() * s.stride_w + tap % s.kernel_w - s.padding_w;
    const bool inside = 0 <= row && row < s.height && 0 <= column && column < s.width;
    return inside ? row * s.width + column : -1;
}

// Pixels of an image whose sums have the same taps, and the pixels that these read.
struct Sums {
    std::vector<int64_t> taps, pixels;
    std::vector<int64_t> sources;  // (pixels, taps)
};

// Groups pixels by their taps: at the edges some are in the padding, and with a stride some reach
// no pixel. `sources` is (pixels, taps), -1 for none.
std::vector<Sums> grouped_by_taps(const std::vector<int64_t>& sources, int64_t taps) {
    std::map<std::vector<int64_t>, Sums> groups;
    const int64_t pixels = sources.size() / taps;
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
        std::vector<int64_t> used, read;
        for (int64_t tap = 0; tap < taps; ++tap)
            if (const int64_t source = sources[pixel * taps + tap]; source >= 0) {
                used.push_back(tap);
                read.push_back(source);
            }
        Sums& group = groups[used];
        group.taps = used;
        group.pixels.push_back(pixel);
        group.sources.insert(group.sources.end(), read.begin(), read.end());
    }
    std::vector<Sums> sums;
    for (const auto& group : groups) sums.push_back(group.second);
    return sums;
}

std::vector<Sums> sums_of_outputs(const ConvShape& s) {
    std::vector<int64_t> sources;
    for (int64_t pixel = 0; pixel < s.out_pixels(); ++pixel)
        for (int64_t tap = 0; tap < s.taps(); ++tap) sources.push_back(source_pixel(s, pixel, tap));
    return grouped_by_taps(sources, s.taps());
}

std::vector<Sums> sums_of_inputs(const ConvShape& s) {
    std::vector<int64_t> readers(s.in_pixels() * s.taps(), -1);
    for (int64_t pixel = 0; pixel < s.out_pixels(); ++pixel)
        for (int64_t tap = 0; tap < s.taps(); ++tap)
            if (const int64_t at = source_pixel(s, pixel, tap); at >= 0)
                readers[at * s.taps() + tap] = pixel;
    return grouped_by_taps(readers, s.taps());
}

// to[r] = start + sum over taps t and k < depth of from[t * ROWS + r][k] weight[t][k], for COUNT
// rows of VECTORS vectors, accumulated in registers.
template <class R, int COUNT, int VECTORS>
void sum_taps(const R* const* from, const R* const* weight, int64_t taps, int64_t depth,
              int64_t width, const R* start, int64_t column, R* const* to) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    V sums[COUNT][VECTORS];
    for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = start ? L::load(start + column + v * L::count) : V{};
    for (int64_t tap = 0; tap < taps; ++tap) {
        const R* a[COUNT];
        for (int r = 0; r < COUNT; ++r) a[r] = from[tap * ROWS + r];
        const R* b = weight[tap] + column;
        for (int64_t k = 0; k < depth; ++k, b += width) {
            V factors[VECTORS];
            for (int v = 0; v < VECTORS; ++v) factors[v] = L::load(b + v * L::count);
            for (int r = 0; r < COUNT; ++r)
                for (int v = 0; v < VECTORS; ++v) sums[r][v] += a[r][k] * factors[v];
        }
    }
    for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < VECTORS; ++v) L::store(to[r] + column + v * L::count, sums[r][v]);
}

// The same for `count` rows, at most COUNT.
template <class R, int COUNT, int VECTORS>
void sum_rows(int64_t count, const R* const* from, const R* const* weight, int64_t taps,
              int64_t depth, int64_t width, const R* start, int64_t column, R* const* to) {
    if constexpr (COUNT > 1)
        if (count < COUNT)
            return sum_rows<R, COUNT - 1, VECTORS>(count, from, weight, taps, depth, width, start,
                                                   column, to);
    sum_taps<R, COUNT, VECTORS>(from, weight, taps, depth, width, start, column, to);
}

// One task: sums (images, to_pixels, width) over values (images, from_pixels, depth), with weights
// (taps, depth, width). The bias may be null.
template <class R>
void convolve_task(const std::vector<Sums>& groups, int64_t images, int64_t from_pixels,
                   int64_t to_pixels, int64_t depth, int64_t width, const R* values,
                   const R* weight, const R* bias, R* sums) {
    constexpr int64_t lanes = Lanes<R>::count;
    std::vector<const R*> from, weights;
    R* to[ROWS];
    for (const Sums& group : groups) {
        const int64_t taps = group.taps.size(), pixels = group.pixels.size();
        from.resize(taps * ROWS);
        weights.clear();
        for (int64_t tap : group.taps) weights.push_back(weight + tap * depth * width);
        const int64_t rows = images * pixels, blocks = (rows + ROWS - 1) / ROWS;
        auto input = [&](int64_t row, int64_t tap) {
            const int64_t source = group.sources[row % pixels * taps + tap];
            return values + (row / pixels * from_pixels + source) * depth;
        };
        auto output = [&](int64_t row) {
            return sums + (row / pixels * to_pixels + group.pixels[row % pixels]) * width;
        };
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * rows / blocks;
            const int64_t count = (block + 1) * rows / blocks - first;
            for (int64_t row = first; row < first + count; ++row) {
                to[row - first] = output(row);
                for (int64_t tap = 0; tap < taps; ++tap)
                    from[tap * ROWS + row - first] = input(row, tap);
                const int64_t next = row + ROWS;  // of the next block
                if (next >= rows) continue;
                prefetch<1>(output(next), width);
                for (int64_t tap = 0; tap < taps; ++tap) prefetch<0>(input(next, tap), depth);
            }
            int64_t column = 0;
            for (; column + MOST_VECTORS * lanes <= width; column += MOST_VECTORS * lanes)
                sum_rows<R, ROWS, MOST_VECTORS>(count, from.data(), weights.data(), taps, depth,
                                                width, bias, column, to);
            for (; column < width; column += lanes)
                sum_rows<R, ROWS, 1>(count, from.data(), weights.data(), taps, depth, width, bias,
                                     column, to);
        }
    }
}

template <class R>
void convolve(ConvShape s, const R* inputs, const R* weight, const R* bias, R* outputs) {
    const std::vector<Sums> groups = sums_of_outputs(s);
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.images * s.in_pixels() * s.in,
                 outputs += s.images * s.out_pixels() * s.out, weight += s.taps() * s.in * s.out,
                 bias += bias ? s.out : 0)
        convolve_task<R>(groups, s.images, s.in_pixels(), s.out_pixels(), s.in, s.out, inputs,
                         weight, bias, outputs);
}

// The gradient with respect to the inputs of <gradient, convolution of the inputs>.
template <class R>
void conv_transpose(ConvShape s, const R* gradient, const R* weight, R* inputs) {
    const std::vector<Sums> groups = sums_of_inputs(s);
    Buffer<R> transposed(s.taps() * s.in * s.out);
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.images * s.in_pixels() * s.in,
                 gradient += s.images * s.out_pixels() * s.out,
                 weight += s.taps() * s.in * s.out) {
        for (int64_t tap = 0; tap < s.taps(); ++tap)
            transpose(weight + tap * s.in * s.out, s.in, s.out,
                      transposed + tap * s.in * s.out);
        convolve_task<R>(groups, s.images, s.out_pixels(), s.in_pixels(), s.out, s.in, gradient,
                         transposed, nullptr, inputs);
    }
}

// c[r][:] += sum over pairs p of left[p][r] right[p][:], for COUNT rows of VECTORS vectors.
template <class R, int COUNT, int VECTORS>
void sum_pairs(const R* const* left, const R* const* right, int64_t pairs, int64_t row,
               int64_t column, int64_t width, R* c) {
    using L = Lanes<R>;
    // Added to c at the end: sums over all pixels of all images one by one would round more.
    typename L::Vector sums[COUNT][VECTORS] = {};
    c += row * width + column;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const R *a = left[pair] + row, *b = right[pair] + column;
        typename L::Vector factors[VECTORS];
        for (int v = 0; v < VECTORS; ++v) factors[v] = L::load(b + v * L::count);
        for (int r = 0; r < COUNT; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += a[r] * factors[v];
    }
    for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < VECTORS; ++v) {
            R* to = c + r * width + v * L::count;
            L::store(to, L::load(to) + sums[r][v]);
        }
}

template <class R, int VECTORS>
void sum_columns(const R* const* left, const R* const* right, int64_t pairs, int64_t rows,
                 int64_t column, int64_t width, R* c) {
    int64_t row = 0;
    for (; row + 6 <= rows; row += 6)
        sum_pairs<R, 6, VECTORS>(left, right, pairs, row, column, width, c);
    for (; row + 4 <= rows; row += 4)
        sum_pairs<R, 4, VECTORS>(left, right, pairs, row, column, width, c);
    for (; row + 2 <= rows; row += 2)
        sum_pairs<R, 2, VECTORS>(left, right, pairs, row, column, width, c);
    if (row < rows) sum_pairs<R, 1, VECTORS>(left, right, pairs, row, column, width, c);
}

// The gradients with respect to weight and bias of <gradient, convolution of the inputs>.
template <class R>
void weight_grad(ConvShape s, const R* inputs, const R* gradient, R* weight, R* bias) {
    using L = Lanes<R>;
    const int64_t block = std::max<int64_t>(1, BLOCK_PIXELS / s.out_pixels());
    struct Pair {
        int64_t input, output;
    };
    std::vector<std::vector<Pair>> pairs(s.taps());  // the pixels of an image that a tap multiplies
    for (int64_t tap = 0; tap < s.taps(); ++tap)
        for (int64_t pixel = 0; pixel < s.out_pixels(); ++pixel)
            if (const int64_t source = source_pixel(s, pixel, tap); source >= 0)
                pairs[tap].push_back({source, pixel});
    std::vector<const R*> left(block * s.out_pixels()), right(block * s.out_pixels());
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.images * s.in_pixels() * s.in,
                 gradient += s.images * s.out_pixels() * s.out, weight += s.taps() * s.in * s.out,
                 bias += s.out) {
        std::fill_n(weight, s.taps() * s.in * s.out, R(0));
        std::fill_n(bias, s.out, R(0));
        const int64_t image_size = s.out_pixels() * s.out;
        for (const R* image = gradient; image < gradient + s.images * image_size;
             image += image_size)
            add_rows(image, image + image_size, s.out, bias);
        for (int64_t first = 0; first < s.images; first += block)
            for (int64_t tap = 0; tap < s.taps(); ++tap) {
                int64_t count = 0;
                for (int64_t image = first; image < std::min(first + block, s.images); ++image) {
                    const R* image_inputs = inputs + image * s.in_pixels() * s.in;
                    const R* image_gradient = gradient + image * s.out_pixels() * s.out;
                    for (const Pair& pair : pairs[tap]) {
                        left[count] = image_inputs + pair.input * s.in;
                        right[count] = image_gradient + pair.output * s.out;
                        if (image + block < s.images) {
                            prefetch<0>(left[count] + block * s.in_pixels() * s.in, s.in);
                            prefetch<0>(right[count] + block * s.out_pixels() * s.out, s.out);
                        }
                        ++count;
                    }
                }
                R* c = weight + tap * s.in * s.out;
                int64_t column = 0;
                for (; column + MOST_VECTORS * L::count <= s.out; column += MOST_VECTORS * L::count)
                    sum_columns<R, MOST_VECTORS>(left.data(), right.data(), count, s.in, column,
                                                 s.out, c);
                for (; column < s.out; column += L::count)
                    sum_columns<R, 1>(left.data(), right.data(), count, s.in, column, s.out, c);
            }
    }
}

}  // namespace

EXPORT(convolve)
EXPORT(conv_transpose)
EXPORT(weight_grad)
