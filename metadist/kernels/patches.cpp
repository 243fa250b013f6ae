// The patches of an image that a convolution sees, and their transpose. `native` compiles it,
// `patches.py` says what it computes. Images lie in memory as (images, height, width, channels),
// patches as (images, out_height, out_width, rows, columns, channels).

#include <algorithm>
#include <cstdint>

namespace {

struct Geometry {
    int64_t images, height, width, channels;
    int64_t rows, columns;  // of the kernel
    int64_t down, across;   // strides
    int64_t above, beside;  // padding
    int64_t high() const { return (height + 2 * above - rows) / down + 1; }
    int64_t wide() const { return (width + 2 * beside - columns) / across + 1; }
};

// Calls `visit(offset in the image, offset in its patches, numbers)` for each stretch of memory
// that lies in both, and `blank(offset in its patches, numbers)` for what lies in the padding.
template <class Visit, class Blank>
void each_stretch(const Geometry& g, Visit visit, Blank blank) {
    const int64_t C = g.channels;
    int64_t to = 0;
    for (int64_t i = 0; i < g.high(); ++i)
        for (int64_t j = 0; j < g.wide(); ++j) {
            const int64_t left = j * g.across - g.beside;
            const int64_t first = std::min(std::max<int64_t>(0, -left), g.columns);
            const int64_t end = std::max(first, std::min(g.columns, g.width - left));
            for (int64_t k = 0; k < g.rows; ++k, to += g.columns * C) {
                const int64_t row = i * g.down - g.above + k;
                if (row < 0 || row >= g.height) {
                    blank(to, g.columns * C);
                    continue;
                }
                blank(to, first * C);
                visit((row * g.width + left + first) * C, to + first * C, (end - first) * C);
                blank(to + end * C, (g.columns - end) * C);
            }
        }
}

template <class R>
void cut(const Geometry& g, const R* images, R* patches) {
    const int64_t size = g.height * g.width * g.channels;
    const int64_t cuts = g.high() * g.wide() * g.rows * g.columns * g.channels;
    for (int64_t n = 0; n < g.images; ++n, images += size, patches += cuts)
        each_stretch(
            g,
            [&](int64_t at, int64_t to, int64_t count) {
                std::copy_n(images + at, count, patches + to);
            },
            [&](int64_t to, int64_t count) { std::fill_n(patches + to, count, R(0)); });
}

template <class R>
void add_up(const Geometry& g, const R* patches, R* images) {
    const int64_t size = g.height * g.width * g.channels;
    const int64_t cuts = g.high() * g.wide() * g.rows * g.columns * g.channels;
    for (int64_t n = 0; n < g.images; ++n, images += size, patches += cuts) {
        std::fill_n(images, size, R(0));
        each_stretch(
            g,
            [&](int64_t at, int64_t from, int64_t count) {
                R* __restrict to = images + at;
                const R* __restrict source = patches + from;
                for (int64_t k = 0; k < count; ++k) to[k] += source[k];
            },
            [](int64_t, int64_t) {});
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                          \
    extern "C" void cut_##SUFFIX(Geometry g, const R* images, R* patches) {        \
        cut(g, images, patches);                                                   \
    }                                                                              \
    extern "C" void add_up_##SUFFIX(Geometry g, const R* patches, R* images) {     \
        add_up(g, patches, images);                                                \
    }

EXPORT(float, f32)
EXPORT(double, f64)
