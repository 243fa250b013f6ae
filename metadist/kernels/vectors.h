// SIMD vectors, aligned buffers, and products of matrices that fit into the cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

constexpr int64_t CACHE_LINE = 64;  // bytes

// Bytes of a vector register, and the vectors of a row whose sums stay in registers for six rows.
#if defined(__AVX512F__)
constexpr int64_t BYTES = 64;
constexpr int MOST_VECTORS = 4;  // 24 of 32 registers
#elif defined(__AVX__)
constexpr int64_t BYTES = 32;
constexpr int MOST_VECTORS = 2;  // 12 of 16
#elif defined(__aarch64__)
constexpr int64_t BYTES = 16;
constexpr int MOST_VECTORS = 4;  // 24 of 32
#else
constexpr int64_t BYTES = 16;
constexpr int MOST_VECTORS = 2;  // 12 of 16
#endif

template <class R>
struct Lanes {
    typedef R Vector __attribute__((vector_size(BYTES)));
    static constexpr int64_t count = BYTES / sizeof(R);
    static Vector load(const R* from) {
        Vector vector;
        std::memcpy(&vector, from, BYTES);
        return vector;
    }
    static void store(R* to, Vector vector) { std::memcpy(to, &vector, BYTES); }
};

// Starts to load values into the cache, to read them or, with WRITE = 1, to store.
template <int WRITE, class R>
void prefetch(const R* from, int64_t count) {
    for (int64_t k = 0; k < count; k += CACHE_LINE / sizeof(R))
        __builtin_prefetch(from + k, WRITE, 2);
}

template <class R>
class Buffer {
   public:
    explicit Buffer(int64_t count)
        : memory(static_cast<R*>(::operator new(count * sizeof(R), std::align_val_t(BYTES)))) {}
    ~Buffer() { ::operator delete(memory, std::align_val_t(BYTES)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator R*() const { return memory; }

   private:
    R* memory;
};

// to (columns, rows) = from (rows, columns) transposed; the number of rows is a multiple of the
// vector length.
template <class R>
void transpose(const R* from, int64_t rows, int64_t columns, R* to) {
    using L = Lanes<R>;
    for (int64_t row = 0; row < rows; row += L::count)
        for (int64_t column = 0; column < columns; ++column) {
            typename L::Vector gathered;
            for (int64_t l = 0; l < L::count; ++l) gathered[l] = from[(row + l) * columns + column];
            L::store(to + column * rows + row, gathered);
        }
}

// Adds the sum of rows of `width` values, a multiple of the vector length, to one row.
template <class R>
void add_rows(const R* rows, const R* end, int64_t width, R* to) {
    using L = Lanes<R>;
    for (int64_t c = 0; c < width; c += L::count) {
        typename L::Vector sum = {};
        for (const R* row = rows; row < end; row += width) sum += L::load(row + c);
        L::store(to + c, L::load(to + c) + sum);
    }
}

// c[r][:] = start[r][:] + sum over k < depth of a[r * a_row + k * a_step] b[k][:], for ROWS rows of
// VECTORS vectors, accumulated in registers. `start` may be null (zeros); `start_row` = 0
// broadcasts one row.
template <class R, int ROWS, int VECTORS>
void product(const R* start, int64_t start_row, const R* a, int64_t a_row, int64_t a_step,
             const R* b, int64_t width, int64_t depth, R* c) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    V sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = start ? L::load(start + r * start_row + v * L::count) : V{};
    for (int64_t k = 0; k < depth; ++k, a += a_step, b += width) {
        V factors[VECTORS];
        for (int v = 0; v < VECTORS; ++v) factors[v] = L::load(b + v * L::count);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += a[r * a_row] * factors[v];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) L::store(c + r * width + v * L::count, sums[r][v]);
}

template <class R, int ROWS, int VECTORS>
void columns_of_product(int64_t rows, const R* start, int64_t start_row, const R* a, int64_t a_row,
                        int64_t a_step, const R* b, int64_t width, int64_t depth, R* c) {
    int64_t row = 0;
    auto from = [&] { return start ? start + row * start_row : nullptr; };
    for (; row + ROWS <= rows; row += ROWS)
        product<R, ROWS, VECTORS>(from(), start_row, a + row * a_row, a_row, a_step, b, width,
                                  depth, c + row * width);
    if constexpr (ROWS > 1)
        if (row < rows)
            columns_of_product<R, ROWS / 2, VECTORS>(rows - row, from(), start_row, a + row * a_row,
                                                     a_row, a_step, b, width, depth,
                                                     c + row * width);
}

// C = start + A B, with a[row * a_row + k * a_step], b (depth, width) and c (rows, width); the
// width is a multiple of the vector length; `start` as in `product`. Sums are in the order of k,
// for any ROWS.
template <class R, int ROWS>
void multiply(int64_t rows, const R* start, int64_t start_row, const R* a, int64_t a_row,
              int64_t a_step, const R* b, int64_t width, int64_t depth, R* c) {
    constexpr int64_t lanes = Lanes<R>::count;
    auto from = [&](int64_t column) { return start ? start + column : nullptr; };
    int64_t column = 0;
    for (; column + MOST_VECTORS * lanes <= width; column += MOST_VECTORS * lanes)
        columns_of_product<R, ROWS, MOST_VECTORS>(rows, from(column), start_row, a, a_row, a_step,
                                                  b + column, width, depth, c + column);
    for (; column < width; column += lanes)
        columns_of_product<R, ROWS, 1>(rows, from(column), start_row, a, a_row, a_step, b + column,
                                       width, depth, c + column);
}
