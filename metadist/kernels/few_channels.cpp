// The convolution of `few_channels.h` and its derivatives by the weights and the bias. `native`
// compiles it, `convolution.py` says what it computes. Maps lie in memory as (groups, images, height,
// width, channels), weights as (groups, out, in, 3, 3), biases as (groups, out).

#include "few_channels.h"

namespace {

constexpr int64_t PIXELS_AT_ONCE = 96;  // whose outputs stay in the cache

template <class R>
void convolve(const ImageShape& s, const R* maps, const R* weight, const R* bias, R* outputs) {
    FewChannels<R> convolution(s, PIXELS_AT_ONCE);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 outputs += s.pixels() * s.out, weight += 9 * s.in * s.out,
                 bias += bias ? s.out : 0) {
        convolution.take(weight);
        for (int64_t first = 0; first < s.pixels(); first += PIXELS_AT_ONCE) {
            const int64_t count = std::min(PIXELS_AT_ONCE, s.pixels() - first);
            convolution.look(maps, first, count);
            convolution.outputs(count, bias, outputs + first * s.out);
        }
    }
}

// The derivatives by the weights and the bias of <gradient, convolution of maps>.
template <class R>
void by_weight(const ImageShape& s, const R* maps, const R* gradient, R* weight, R* bias) {
    FewChannels<R> convolution(s, PIXELS_AT_ONCE);
    for (int64_t g = 0; g < s.groups; ++g, maps += s.pixels() * s.in,
                 gradient += s.pixels() * s.out, weight += 9 * s.in * s.out, bias += s.out) {
        convolution.begin();
        for (int64_t first = 0; first < s.pixels(); first += PIXELS_AT_ONCE) {
            const int64_t count = std::min(PIXELS_AT_ONCE, s.pixels() - first);
            convolution.look(maps, first, count);
            convolution.add(count, gradient + first * s.out);
        }
        convolution.give(weight, bias);
    }
}

}  // namespace

#define EXPORT(R, SUFFIX)                                                                        \
    extern "C" void convolve_##SUFFIX(ImageShape s, const R* maps, const R* weight,              \
                                      const R* bias, R* outputs) {                               \
        convolve(s, maps, weight, bias, outputs);                                                \
    }                                                                                            \
    extern "C" void by_weight_##SUFFIX(ImageShape s, const R* maps, const R* gradient,           \
                                       R* weight, R* bias) {                                     \
        by_weight(s, maps, gradient, weight, bias);                                              \
    }

EXPORT(float, f32)
EXPORT(double, f64)
