// Batched matrix products, C = A B + bias, one per task. The order of summation depends on the
// shape of one product alone, not on the number of tasks, the number of cores or the alignment of
// the operands.
//
// A panel of ROWS rows of A and a panel of VECTORS vectors of columns of B are packed for each
// block of the depth; their product stays in registers (Goto and van de Geijn, "Anatomy of
// high-performance matrix multiplication", ACM TOMS 2008).

#include "export.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int ROWS = 6;
constexpr int64_t DEPTH = 256;  // of a block: its panel of B fits into the first-level cache

struct Shape {
    int64_t tasks, rows, depth, width;
    int64_t transpose_a, transpose_b;  // A is stored as (depth, rows), B as (width, depth)
};

// Packs A as [panel][k][row], with ROWS rows per panel, zero-padded.
template <class R>
void pack_a(const R* a, int64_t row_step, int64_t depth_step, int64_t rows, int64_t depth,
            R* packed) {
    for (int64_t row = 0; row < rows; row += ROWS, packed += depth * ROWS)
        for (int r = 0; r < ROWS; ++r)
            for (int64_t k = 0; k < depth; ++k)
                packed[k * ROWS + r] =
                    row + r < rows ? a[(row + r) * row_step + k * depth_step] : R(0);
}

// Packs `columns` columns of B as [k][column], zero-padded to `width`.
template <class R>
void pack_b(const R* b, int64_t depth_step, int64_t column_step, int64_t columns, int64_t width,
            int64_t depth, R* packed) {
    if (column_step == 1) {
        for (int64_t k = 0; k < depth; ++k) {
            std::copy_n(b + k * depth_step, columns, packed + k * width);
            std::fill(packed + k * width + columns, packed + (k + 1) * width, R(0));
        }
        return;
    }
    for (int64_t column = 0; column < width; ++column)
        for (int64_t k = 0; k < depth; ++k)
            packed[k * width + column] =
                column < columns ? b[k * depth_step + column * column_step] : R(0);
}

// sums (ROWS, width) += a panel of A times a panel of B.
template <class R, int VECTORS>
void multiply_panels(const R* a, const R* b, int64_t depth, R* sums) {
    using L = Lanes<R>;
    typename L::Vector totals[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            totals[r][v] = L::load(sums + (r * VECTORS + v) * L::count);
    for (int64_t k = 0; k < depth; ++k, a += ROWS, b += VECTORS * L::count) {
        typename L::Vector factors[VECTORS];
        for (int v = 0; v < VECTORS; ++v) factors[v] = L::load(b + v * L::count);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) totals[r][v] += a[r] * factors[v];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            L::store(sums + (r * VECTORS + v) * L::count, totals[r][v]);
}

// Computes a stripe of at most VECTORS vectors of columns of C.
template <class R, int VECTORS>
void multiply_stripe(const R* a, const R* b, int64_t rows, int64_t depth, int64_t columns,
                     const R* start, int64_t start_row, R* c, int64_t c_row) {
    constexpr int64_t width = VECTORS * Lanes<R>::count;
    alignas(BYTES) R sums[ROWS * width];
    for (int64_t row = 0; row < rows; row += ROWS, a += depth * ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, rows - row);
        std::fill_n(sums, ROWS * width, R(0));
        if (start)
            for (int64_t r = 0; r < count; ++r)
                std::copy_n(start + (row + r) * start_row, columns, sums + r * width);
        multiply_panels<R, VECTORS>(a, b, depth, sums);
        for (int64_t r = 0; r < count; ++r)
            std::copy_n(sums + r * width, columns, c + (row + r) * c_row);
    }
}

template <class R>
void matmul(Shape s, const R* a, const R* b, const R* bias, R* c) {
    constexpr int64_t lanes = Lanes<R>::count;
    const int64_t panels = (s.rows + ROWS - 1) / ROWS;
    Buffer<R> packed_a(panels * ROWS * DEPTH), packed_b(MOST_VECTORS * lanes * DEPTH);
    const int64_t a_row = s.transpose_a ? 1 : s.depth, a_step = s.transpose_a ? s.rows : 1;
    const int64_t b_step = s.transpose_b ? 1 : s.width, b_column = s.transpose_b ? s.depth : 1;
    for (int64_t task = 0; task < s.tasks; ++task, a += s.rows * s.depth, b += s.depth * s.width,
                 c += s.rows * s.width, bias += bias ? s.width : 0)
        for (int64_t first = 0; first == 0 || first < s.depth; first += DEPTH) {
            const int64_t depth = std::min(DEPTH, s.depth - first);
            pack_a(a + first * a_step, a_row, a_step, s.rows, depth, +packed_a);
            for (int64_t column = 0; column < s.width;) {
                const int64_t left = s.width - column;
                int vectors = MOST_VECTORS;
                while (vectors > 1 && left <= vectors / 2 * lanes) vectors /= 2;
                const int64_t columns = std::min(left, vectors * lanes);
                pack_b(b + first * b_step + column * b_column, b_step, b_column, columns,
                       vectors * lanes, depth, +packed_b);
                const R* start = first ? c + column : bias ? bias + column : nullptr;
                const auto stripe = vectors == MOST_VECTORS ? multiply_stripe<R, MOST_VECTORS>
                                    : vectors == 2          ? multiply_stripe<R, 2>
                                                            : multiply_stripe<R, 1>;
                stripe(packed_a, packed_b, s.rows, depth, columns, start, first ? s.width : 0,
                       c + column, s.width);
                column += columns;
            }
        }
}

}  // namespace

EXPORT(matmul)
