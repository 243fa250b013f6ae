// What the sources beside it share: vectors that fill a register, memory for them, and products of
// matrices that lie in the cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

constexpr int64_t BYTES = 64;

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

template <class R>
class Buffer {
   public:
    explicit Buffer(int64_t count)
        : memory(static_cast<R*>(::operator new(count * sizeof(R), std::align_val_t(BYTES)))) {}
    ~Buffer() { ::operator delete(memory, std::align_val_t(BYTES)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator R*() { return memory; }

   private:
    R* memory;
};

// c[r][:] (+)= sum over k < depth of a[r * a_row + k * a_step] b[k][:], for ROWS rows of as many
// vectors, which stay in registers.
template <class R, int ROWS, int VECTORS, bool ADD>
void product(const R* a, int64_t a_row, int64_t a_step, const R* b, int64_t b_step, int64_t depth,
             R* c, int64_t c_row) {
    using L = Lanes<R>;
    using V = typename L::Vector;
    V sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = ADD ? L::load(c + r * c_row + v * L::count) : V{};
    for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
        V factors[VECTORS];
        for (int v = 0; v < VECTORS; ++v) factors[v] = L::load(b + v * L::count);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += a[r * a_row] * factors[v];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) L::store(c + r * c_row + v * L::count, sums[r][v]);
}

template <class R, int ROWS, int VECTORS, bool ADD>
void columns_of_product(int64_t rows, const R* a, int64_t a_row, int64_t a_step, const R* b,
                        int64_t width, int64_t depth, R* c) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        product<R, ROWS, VECTORS, ADD>(a + row * a_row, a_row, a_step, b, width, depth,
                                       c + row * width, width);
    for (; row < rows; ++row)
        product<R, 1, VECTORS, ADD>(a + row * a_row, a_row, a_step, b, width, depth,
                                    c + row * width, width);
}

// C (+)= A B, with a[row * a_row + k * a_step], b (depth, width) and c (rows, width), where vectors
// divide the width. Each number is summed in the order of k, whatever ROWS is.
template <class R, int ROWS, bool ADD>
void multiply(int64_t rows, const R* a, int64_t a_row, int64_t a_step, const R* b, int64_t width,
              int64_t depth, R* c) {
    constexpr int64_t lanes = Lanes<R>::count;
    int64_t column = 0;
    for (; column + 4 * lanes <= width; column += 4 * lanes)
        columns_of_product<R, ROWS, 4, ADD>(rows, a, a_row, a_step, b + column, width, depth,
                                            c + column);
    for (; column < width; column += lanes)
        columns_of_product<R, ROWS, 1, ADD>(rows, a, a_row, a_step, b + column, width, depth,
                                            c + column);
}
