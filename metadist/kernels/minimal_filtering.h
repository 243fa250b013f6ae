// Minimal filtering (Winograd, 1980; Lavin and Gray, 2015, arXiv 1509.09308) of a convolution with
// three taps, a stride of 1 or 2 and a padding of 0 or 1, along one dimension.
//
// The convolution is computed from products of a sum of inputs, called a point, and a sum of taps.
// Two outputs with stride 1 take four products instead of six, F(2, 3). Three outputs with stride 2
// take seven instead of nine: F(3, 2) for the first and the last tap, which multiply every other
// input, and the products of the middle tap. The outputs that remain are computed tap by tap.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

// Sums of taps: g0, g1, g2; with stride 1 (g0 + g1 + g2) / 2 and (g0 - g1 + g2) / 2, with stride 2
// (g0 + g2) / 2 and (g0 - g2) / 2.
enum Type { FIRST, MIDDLE, LAST, SUM, DIFFERENCE, TYPES };

template <class V>
void sum_taps(const V (&taps)[3], int64_t stride, V (&types)[TYPES]) {
    std::copy_n(taps, 3, types);
    const V even = (taps[0] + taps[2]) / 2,
            odd = stride == 1 ? taps[1] / 2 : (taps[0] - taps[2]) / 2;
    types[SUM] = stride == 1 ? even + odd : even;
    types[DIFFERENCE] = stride == 1 ? even - odd : odd;
}

// The gradient by the taps from the gradient by their sums.
template <class V>
void tap_gradients(const V (&types)[TYPES], int64_t stride, V (&taps)[3]) {
    const V even = (types[SUM] + types[DIFFERENCE]) / 2, odd = (types[SUM] - types[DIFFERENCE]) / 2;
    taps[0] = types[FIRST] + even;
    taps[1] = stride == 1 ? types[MIDDLE] + odd : types[MIDDLE];
    taps[2] = types[LAST] + (stride == 1 ? even : odd);
}

struct Term {
    int64_t index;
    int sign;
};
using Terms = std::vector<Term>;

// A linear map between the pixels, which are inputs or outputs, and the points of one dimension.
struct Map {
    std::vector<Terms> of_point, of_pixel;
    std::vector<int64_t> quads;  // points from which on there are a - c, b + c, c - b and d - b

    explicit Map(int64_t pixels) : of_pixel(pixels) {}
    void add_point(const Terms& terms) {
        for (const Term& term : terms)
            of_pixel[term.index].push_back({int64_t(of_point.size()), term.sign});
        of_point.push_back(terms);
    }
    bool is_quad(int64_t point) const {
        return std::binary_search(quads.begin(), quads.end(), point);
    }
    // The pixels a, b, c and d of a quad.
    std::array<int64_t, 4> quad(int64_t point) const {
        const Terms &first = of_point[point], &last = of_point[point + 3];
        return {first[0].index, last[1].index, first[1].index, last[0].index};
    }
};

// The points of one dimension.
struct Points {
    std::vector<Type> types;
    std::vector<int64_t> indices;  // of a point among those of its type
    std::vector<int64_t> ends;    // of groups; each output is computed from the points of one
    int64_t counts[TYPES] = {};
    Map inputs, outputs;

    Points(int64_t size, int64_t out_size, int64_t stride, int64_t padding)
        : inputs(size), outputs(out_size) {
        const int64_t tile = stride == 1 ? 2 : 3;
        int64_t out = 0;
        for (; out < out_size % tile; ++out) {
            const int64_t first = out * stride - padding;
            for (const Type tap : {FIRST, MIDDLE, LAST}) add(tap, {{first + tap, 1}}, {{out, 1}});
            ends.push_back(count());
        }
        for (; out < out_size; out += tile) {
            const int64_t last = out + tile - 1, a = out * stride - padding, b = a + stride,
                          c = b + stride, d = c + stride;
            if (a >= 0 && d < size) inputs.quads.push_back(count());
            Terms sum{{out, 1}, {out + 1, 1}}, difference{{out, 1}, {out + 1, -1}};
            if (stride == 2) sum.push_back({last, 1}), difference.push_back({last, 1});
            add(FIRST, {{a, 1}, {c, -1}}, {{out, 1}});
            add(SUM, {{b, 1}, {c, 1}}, sum);
            add(DIFFERENCE, {{c, 1}, {b, -1}}, difference);
            add(LAST, {{d, 1}, {b, -1}}, {{last, 1}});
            for (int64_t i = 0; stride == 2 && i < tile; ++i)
                add(MIDDLE, {{a + 2 * i + 1, 1}}, {{out + i, 1}});
            ends.push_back(count());
        }
    }

    int64_t count() const { return types.size(); }
    // The types before `type` of which there are points.
    int64_t types_before(int type) const {
        return type - std::count(counts, counts + type, 0);
    }

   private:
    // Adds a point, unless its inputs are in the padding.
    void add(Type type, Terms ins, const Terms& outs) {
        const int64_t size = inputs.of_pixel.size();
        auto outside = [&](const Term& term) { return term.index < 0 || term.index >= size; };
        ins.erase(std::remove_if(ins.begin(), ins.end(), outside), ins.end());
        if (ins.empty()) return;
        inputs.add_point(ins);
        outputs.add_point(outs);
        types.push_back(type);
        indices.push_back(counts[type]++);
    }
};
