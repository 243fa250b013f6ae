// 3x3 convolution with strides of 1 or 2 and paddings of 0 or 1 by minimal filtering. In two
// dimensions, rows are added up first, then the pixels of each sum of rows. The numbers of channels
// are multiples of the vector length; `conv_shape.h` has the layouts.

#include "conv_shape.h"
#include "export.h"
#include "minimal_filtering.h"
#include "vectors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

constexpr int64_t BLOCK_BYTES = 1 << 17;           // of the points of a block, of one side
constexpr int64_t GRADIENT_BLOCK_BYTES = 1 << 18;  // larger: each block adds to all weights
constexpr int64_t MIN_POINTS = 1280;  // of a block, since it is multiplied by all weights
constexpr int MOST_TERMS = 4;

// The points of an image, of which a row has those of each type one after another.
struct Grid {
    const Points rows, columns;
    int64_t starts[TYPES];  // of the columns of a type

    explicit Grid(const ConvShape& s)
        : rows(s.height, s.out_height(), s.stride_h, s.padding_h),
          columns(s.width, s.out_width(), s.stride_w, s.padding_w) {
        int64_t start = 0;
        for (int u = 0; u < TYPES; start += columns.counts[u++]) starts[u] = start;
    }
};

// Rows of points [begin, end), counted over the images of a task.
struct Block {
    int64_t begin, end;
    int64_t before[TYPES], counts[TYPES];  // rows of a type before the block, and in it
};

// Splits the rows of a task, between groups, into blocks of about `most` rows.
std::vector<Block> split_rows(const Points& rows, int64_t images, int64_t most) {
    std::vector<Block> blocks;
    Block block{};
    auto close = [&](int64_t end) {
        for (block.end = block.begin; block.end < end; ++block.end)
            ++block.counts[rows.types[block.end % rows.count()]];
        blocks.push_back(block);
        for (int t = 0; t < TYPES; ++t) block.before[t] += block.counts[t], block.counts[t] = 0;
        block.begin = end;
    };
    int64_t previous = 0;
    for (int64_t image = 0; image < images; ++image)
        for (int64_t end : rows.ends) {
            end += image * rows.count();
            if (end - block.begin > most && previous > block.begin) close(previous);
            previous = end;
        }
    if (previous > block.begin) close(previous);
    return blocks;
}

// The points of a block: a matrix (points, channels) for each type of rows and columns.
template <class R>
class Matrices {
   public:
    Matrices(const Grid& grid, const std::vector<Block>& blocks, int64_t channels)
        : grid(grid), channels(channels), memory(size(blocks)) {}

    void use(const Block& given) {
        block = &given;
        int64_t start = 0;
        for (int t = 0; t < TYPES; ++t)
            for (int u = 0; u < TYPES; ++u) {
                starts[t][u] = start;
                start += count(t, u) * channels + GAP;
            }
    }
    int64_t count(int t, int u) const { return block->counts[t] * grid.columns.counts[u]; }
    R* matrix(int t, int u) const { return memory + starts[t][u]; }
    // The points in a row of an image whose columns have a type.
    R* row(int64_t image, int64_t point, int u) const {
        const int t = grid.rows.types[point];
        const int64_t before = image * grid.rows.counts[t] - block->before[t];
        return matrix(t, u) +
               (before + grid.rows.indices[point]) * grid.columns.counts[u] * channels;
    }

   private:
    // Of values that are a multiple of 4096 bytes apart, few fit into the first-level cache.
    static constexpr int64_t GAP = CACHE_LINE / sizeof(R);

    int64_t size(const std::vector<Block>& blocks) const {
        int64_t most = 0;
        for (const Block& block : blocks) most = std::max(most, block.end - block.begin);
        return most * grid.columns.count() * channels + TYPES * TYPES * GAP;
    }

    const Grid& grid;
    const int64_t channels;
    const Block* block = nullptr;
    int64_t starts[TYPES][TYPES];
    Buffer<R> memory;
};

// to[k] = start[k] + sum over sources i < COUNT of factors[i] sources[i][k]; `start` may be null.
template <class R, int COUNT>
inline void add_up(const R* const* sources, const R* factors, int64_t count, const R* start,
                   R* to) {
    using L = Lanes<R>;
    for (int64_t k = 0; k < count; k += L::count) {
        typename L::Vector sum = start ? L::load(start + k) : typename L::Vector{};
        for (int i = 0; i < COUNT; ++i) sum += factors[i] * L::load(sources[i] + k);
        L::store(to + k, sum);
    }
}

// The points of a quad; see `Map`.
template <class R>
void store_quad(const R* a, const R* b, const R* c, const R* d, int64_t count, R* const (&to)[4]) {
    using L = Lanes<R>;
    for (int64_t k = 0; k < count; k += L::count) {
        const auto bk = L::load(b + k), ck = L::load(c + k);
        L::store(to[0] + k, L::load(a + k) - ck);
        L::store(to[1] + k, bk + ck);
        L::store(to[2] + k, ck - bk);
        L::store(to[3] + k, L::load(d + k) - bk);
    }
}

// The sum of rows, which are given by [begin, end) and a function of a term's index.
template <class R, class Source>
void add_up_rows(const Term* begin, const Term* end, int64_t count, Source source, R* to) {
    const R* sources[MOST_TERMS];
    R factors[MOST_TERMS];
    int terms = 0;
    for (; begin < end; ++begin)
        sources[terms] = source(begin->index), factors[terms++] = begin->sign;
    (terms == 4   ? add_up<R, 4>
     : terms == 3 ? add_up<R, 3>
     : terms == 2 ? add_up<R, 2>
     : terms == 1 ? add_up<R, 1>
                  : add_up<R, 0>)(sources, factors, count, nullptr, to);
}

// Sums of pixels, or points, of a row, by the number of terms.
template <class R>
class RowSums {
   public:
    explicit RowSums(int64_t channels) : channels(channels) {}

    // Adds a sum that is stored at an index of one of several arrays.
    void add(int array, int64_t index, const Terms& terms) {
        Item item{array, index * channels, {}, {}};
        for (size_t i = 0; i < terms.size(); ++i)
            item.from[i] = terms[i].index * channels, item.factors[i] = R(terms[i].sign);
        items[terms.size()].push_back(item);
    }

    // Adds the points of a quad; see `Map`.
    void add_quad(const Type* types, const int64_t* indices, std::array<int64_t, 4> pixels) {
        Quad quad;
        for (int i = 0; i < 4; ++i) {
            quad.arrays[i] = types[i];
            quad.to[i] = indices[i] * channels;
            quad.from[i] = pixels[i] * channels;
        }
        quads.push_back(quad);
    }

    // Stores the sums plus `bias`, which may be null, or adds them to what the arrays have.
    void store(const R* row, const R* bias, bool add, R* const* arrays) const {
        store_items<0>(row, bias, add, arrays);
        store_items<1>(row, bias, add, arrays);
        store_items<2>(row, bias, add, arrays);
        store_items<3>(row, bias, add, arrays);
        store_items<4>(row, bias, add, arrays);
        for (const Quad& q : quads) {
            R* to[4];
            for (int i = 0; i < 4; ++i) to[i] = arrays[q.arrays[i]] + q.to[i];
            store_quad(row + q.from[0], row + q.from[1], row + q.from[2], row + q.from[3],
                       channels, to);
        }
    }

   private:
    struct Item {
        int array;
        int64_t to, from[MOST_TERMS];
        R factors[MOST_TERMS];
    };
    struct Quad {
        int arrays[4];
        int64_t to[4], from[4];
    };

    template <int COUNT>
    void store_items(const R* row, const R* bias, bool add, R* const* arrays) const {
        for (const Item& item : items[COUNT]) {
            const R* sources[COUNT + 1];
            for (int i = 0; i < COUNT; ++i) sources[i] = row + item.from[i];
            R* to = arrays[item.array] + item.to;
            add_up<R, COUNT>(sources, item.factors, channels, add ? to : bias, to);
        }
    }

    const int64_t channels;
    std::vector<Item> items[MOST_TERMS + 1];
    std::vector<Quad> quads;
};

// The inputs or outputs of the images of a task, and how points are computed from them and they
// from points.
template <class R>
class Side {
   public:
    Side(const Grid& grid, const Map& rows, const Map& columns, int64_t channels)
        : channels(channels),
          height(rows.of_pixel.size()),
          width(columns.of_pixel.size()),
          grid(grid),
          rows(rows),
          to_points(channels),
          from_points(channels),
          row(std::max(4 * width, grid.columns.count()) * channels) {
        const Points& points = grid.columns;
        for (int64_t point = 0; point < points.count(); ++point)
            if (columns.is_quad(point)) {
                to_points.add_quad(&points.types[point], &points.indices[point],
                                   columns.quad(point));
                point += 3;
            } else {
                to_points.add(points.types[point], points.indices[point], columns.of_point[point]);
            }
        for (int64_t pixel = 0; pixel < width; ++pixel) {
            Terms terms = columns.of_pixel[pixel];
            for (Term& term : terms)
                term.index = grid.starts[points.types[term.index]] + points.indices[term.index];
            from_points.add(0, pixel, terms);
        }
    }

    // The rows that the points of a block belong to: all rows of outputs, since with a padding of
    // at most 1 the first and the last point have the first and the last output; most rows of
    // inputs, which suffices to prefetch them.
    std::pair<const R*, const R*> rows_of(const Block& block, const R* images) const {
        auto of_point = [&](int64_t point, bool last) {
            const Terms& terms = rows.of_point[point % grid.rows.count()];
            const auto [least, most] = std::minmax_element(
                terms.begin(), terms.end(),
                [](const Term& a, const Term& b) { return a.index < b.index; });
            const int64_t image = point / grid.rows.count();
            return images + (image * height + (last ? most->index + 1 : least->index)) * row_size();
        };
        return {of_point(block.begin, false), of_point(block.end - 1, true)};
    }

    void compute_points(const Block& block, const R* images, const Matrices<R>& points) const {
        R* const sums[4] = {row, row + row_size(), row + 2 * row_size(), row + 3 * row_size()};
        for (int64_t at = block.begin; at < block.end; ++at) {
            const int64_t image = at / grid.rows.count(), point = at % grid.rows.count();
            const Terms& terms = rows.of_point[point];
            auto source = [&](int64_t pixel) {
                return images + (image * height + pixel) * row_size();
            };
            auto store = [&](int64_t to_point, const R* sum) {
                R* arrays[TYPES];
                for (int u = 0; u < TYPES; ++u) arrays[u] = points.row(image, to_point, u);
                to_points.store(sum, nullptr, false, arrays);
            };
            if (rows.is_quad(point)) {
                const auto [a, b, c, d] = rows.quad(point);
                store_quad(source(a), source(b), source(c), source(d), row_size(), sums);
                for (int i = 0; i < 4; ++i) store(point + i, sums[i]);
                at += 3;
            } else if (terms.size() == 1 && terms[0].sign == 1) {
                store(point, source(terms[0].index));
            } else {
                add_up_rows(terms.data(), terms.data() + terms.size(), row_size(), source, sums[0]);
                store(point, sums[0]);
            }
        }
    }

    // A row of pixels is stored with the first block that has points of it; those of further blocks
    // are added, so that its rounding depends on the blocks. The bias may be null.
    void compute_pixels(const Block& block, const Matrices<R>& points, const R* bias,
                        R* images) const {
        const int64_t per_image = grid.rows.count();
        for (int64_t image = block.begin / per_image; image * per_image < block.end; ++image) {
            const int64_t begin = block.begin - image * per_image,
                          end = block.end - image * per_image;
            for (int64_t pixel = 0; pixel < height; ++pixel) {
                const Terms& terms = rows.of_pixel[pixel];
                const Term *first = terms.data(), *last = first + terms.size();
                while (first < last && first->index < begin) ++first;
                while (first < last && last[-1].index >= end) --last;
                if (first == last && !(terms.empty() && begin <= 0)) continue;
                for (int u = 0; u < TYPES; ++u)
                    if (const int64_t count = grid.columns.counts[u] * channels)
                        add_up_rows(
                            first, last, count,
                            [&](int64_t point) { return points.row(image, point, u); },
                            row + grid.starts[u] * channels);
                R* to = images + (image * height + pixel) * row_size();
                from_points.store(row, bias, first > terms.data(), &to);
            }
        }
    }

    int64_t size(int64_t count) const { return count * height * row_size(); }

    const int64_t channels;

   private:
    int64_t row_size() const { return width * channels; }

    const int64_t height, width;
    const Grid& grid;
    const Map& rows;
    RowSums<R> to_points, from_points;
    Buffer<R> row;
};

// Values to prefetch in equal parts.
template <class R, int WRITE>
class Ahead {
   public:
    Ahead() = default;
    explicit Ahead(std::pair<const R*, const R*> range) : from(range.first), to(range.second) {}
    void prefetch_part(int64_t parts) {
        const int64_t count = (to - from) / parts;
        prefetch<WRITE>(from, count);
        from += count;
    }

   private:
    const R *from = nullptr, *to = nullptr;
};

template <class R>
class Convolution {
    using L = Lanes<R>;
    using V = typename L::Vector;

   public:
    Convolution(const ConvShape& s, int64_t block_bytes)
        : s(s),
          grid(s),
          blocks(split_rows(grid.rows, s.images,
                            std::max(block_bytes / (std::max(s.in, s.out) * int64_t(sizeof(R))),
                                     MIN_POINTS) /
                                grid.columns.count())),
          inputs(grid, grid.rows.inputs, grid.columns.inputs, s.in),
          outputs(grid, grid.rows.outputs, grid.columns.outputs, s.out),
          in_points(grid, blocks, s.in),
          out_points(grid, blocks, s.out),
          weights(weight_start(TYPES, 0)) {
        for_each_pair([&](int t, int u) { starts[t][u] = weight_start(t, u); });
    }

    void convolve(const R* values, const R* weight, const R* bias, R* results) {
        for (int64_t task = 0; task < s.tasks; ++task) {
            multiply_by(weight, inputs, in_points, values, bias, outputs, out_points, results);
            values += inputs.size(s.images), results += outputs.size(s.images);
            weight += 9 * s.in * s.out, bias += bias ? s.out : 0;
        }
    }

    void conv_transpose(const R* gradient, const R* weight, R* results) {
        Buffer<R> transposed(9 * s.in * s.out);
        for (int64_t task = 0; task < s.tasks; ++task) {
            for (int64_t at = 0; at < 9 * s.in * s.out; at += s.in * s.out)
                transpose(weight + at, s.in, s.out, transposed + at);
            multiply_by(+transposed, outputs, out_points, gradient, nullptr, inputs, in_points,
                        results);
            gradient += outputs.size(s.images), results += inputs.size(s.images);
            weight += 9 * s.in * s.out;
        }
    }

    // The gradients with respect to weight and bias of <gradient, convolution of the values>.
    void weight_grad(const R* values, const R* gradient, R* weight, R* bias) {
        for (int64_t task = 0; task < s.tasks; ++task) {
            if (blocks.empty()) std::fill_n(+weights, weight_start(TYPES, 0), R(0));
            std::fill_n(bias, s.out, R(0));
            for (const Block& block : blocks) {
                in_points.use(block), out_points.use(block);
                inputs.compute_points(block, values, in_points);
                outputs.compute_points(block, gradient, out_points);
                const auto [begin, end] = outputs.rows_of(block, gradient);
                add_rows(begin, end, s.out, bias);
                auto next_values = next_rows(inputs, block, values);
                auto next_gradient = next_rows(outputs, block, gradient);
                const bool first = &block == &blocks.front();
                int64_t parts = 0;
                for_each_pair([&](int, int) { parts += parts_of(s.in); });
                for_each_pair([&](int t, int u) {
                    R* sums = packed(t, u);
                    for (int64_t row = 0; row < s.in; row += part_rows, --parts) {
                        next_values.prefetch_part(parts);
                        next_gradient.prefetch_part(parts);
                        multiply<R, 6>(std::min(part_rows, s.in - row),
                                       first ? nullptr : sums + row * s.out, s.out,
                                       in_points.matrix(t, u) + row, 1, s.in,
                                       out_points.matrix(t, u), s.out, in_points.count(t, u),
                                       sums + row * s.out);
                    }
                });
            }
            store_gradient(weight);
            values += inputs.size(s.images), gradient += outputs.size(s.images);
            weight += 9 * s.in * s.out, bias += s.out;
        }
    }

   private:
    // Computes the images of one side of a task from those of the other, with a weight of
    // (3, 3, channels of `from`, channels of `to`).
    void multiply_by(const R* weight, const Side<R>& from, Matrices<R>& from_points,
                     const R* values, const R* bias, const Side<R>& to, Matrices<R>& to_points,
                     R* results) {
        pack_weight(weight);
        for (const Block& block : blocks) {
            from_points.use(block), to_points.use(block);
            from.compute_points(block, values, from_points);
            auto next_values = next_rows(from, block, values);
            Ahead<R, 1> own_results(to.rows_of(block, results));
            int64_t parts = 0;
            for_each_pair([&](int t, int u) { parts += parts_of(from_points.count(t, u)); });
            for_each_pair([&](int t, int u) {
                const int64_t count = from_points.count(t, u);
                for (int64_t row = 0; row < count; row += part_rows, --parts) {
                    next_values.prefetch_part(parts);
                    own_results.prefetch_part(parts);
                    multiply<R, 6>(std::min(part_rows, count - row), nullptr, 0,
                                   from_points.matrix(t, u) + row * from.channels, from.channels,
                                   1, packed(t, u), to.channels, from.channels,
                                   to_points.matrix(t, u) + row * to.channels);
                }
            });
            to.compute_pixels(block, to_points, bias, results);
        }
    }

    // The rows that the points of the next block are computed from.
    Ahead<R, 0> next_rows(const Side<R>& side, const Block& block, const R* images) const {
        const bool last = &block == &blocks.back();
        return last ? Ahead<R, 0>() : Ahead<R, 0>(side.rows_of((&block)[1], images));
    }

    int64_t parts_of(int64_t rows) const { return (rows + part_rows - 1) / part_rows; }
    bool has_points(int t, int u) const { return grid.rows.counts[t] && grid.columns.counts[u]; }
    // Of the weights of a pair, and with TYPES and 0 the number of values of all pairs.
    int64_t weight_start(int t, int u) const {
        const int64_t before = grid.rows.types_before(t) * grid.columns.types_before(TYPES);
        const int64_t step = s.in * s.out + CACHE_LINE / sizeof(R);
        return (before + grid.columns.types_before(u)) * step;
    }
    R* packed(int t, int u) const { return weights + starts[t][u]; }

    // Calls a function of the types of rows and columns of which there are points.
    template <class Function>
    void for_each_pair(Function function) const {
        for (int t = 0; t < TYPES; ++t)
            for (int u = 0; u < TYPES; ++u)
                if (has_points(t, u)) function(t, u);
    }

    void pack_weight(const R* weight) {
        const int64_t step = s.in * s.out;
        for (int64_t at = 0; at < step; at += L::count) {
            V rows[3][TYPES], types[TYPES];
            for (int i = 0; i < 3; ++i) {
                const R* taps = weight + 3 * i * step + at;
                sum_taps<V>({L::load(taps), L::load(taps + step), L::load(taps + 2 * step)},
                            s.stride_w, rows[i]);
            }
            for (int u = 0; u < TYPES; ++u) {
                if (!grid.columns.counts[u]) continue;
                sum_taps<V>({rows[0][u], rows[1][u], rows[2][u]}, s.stride_h, types);
                for (int t = 0; t < TYPES; ++t)
                    if (grid.rows.counts[t]) L::store(packed(t, u) + at, types[t]);
            }
        }
    }

    void store_gradient(R* weight) const {
        const int64_t step = s.in * s.out;
        for (int64_t at = 0; at < step; at += L::count) {
            V columns[3][TYPES], types[TYPES], taps[3];
            for (int t = 0; t < TYPES; ++t) {
                for (int u = 0; u < TYPES; ++u)
                    types[u] = has_points(t, u) ? L::load(packed(t, u) + at) : V{};
                tap_gradients<V>(types, s.stride_w, taps);
                for (int j = 0; j < 3; ++j) columns[j][t] = taps[j];
            }
            for (int j = 0; j < 3; ++j) {
                tap_gradients<V>(columns[j], s.stride_h, taps);
                for (int i = 0; i < 3; ++i) L::store(weight + (3 * i + j) * step + at, taps[i]);
            }
        }
    }

    const ConvShape s;
    const Grid grid;
    const std::vector<Block> blocks;
    const Side<R> inputs, outputs;
    // Rows that are multiplied between two prefetches: more by weights that exceed the cache.
    const int64_t part_rows = std::max<int64_t>(12, s.in * s.out / 1024);
    Matrices<R> in_points, out_points;
    int64_t starts[TYPES][TYPES];
    Buffer<R> weights;  // for each pair of types of rows and columns; or their gradients
};

template <class R>
void convolve(ConvShape s, const R* inputs, const R* weight, const R* bias, R* outputs) {
    Convolution<R>(s, BLOCK_BYTES).convolve(inputs, weight, bias, outputs);
}

template <class R>
void conv_transpose(ConvShape s, const R* gradient, const R* weight, R* inputs) {
    Convolution<R>(s, BLOCK_BYTES).conv_transpose(gradient, weight, inputs);
}

template <class R>
void weight_grad(ConvShape s, const R* inputs, const R* gradient, R* weight, R* bias) {
    Convolution<R>(s, GRADIENT_BLOCK_BYTES).weight_grad(inputs, gradient, weight, bias);
}

}  // namespace

EXPORT(convolve)
EXPORT(conv_transpose)
EXPORT(weight_grad)
