// The convolution of `few_channels.h` and its gradients with respect to weight and bias.

#include "export.h"
#include "few_channels.h"

namespace {

constexpr int64_t BLOCK = 96;  // pixels whose outputs stay in the cache

template <class R>
void convolve(ConvShape s, const R* inputs, const R* weight, const R* bias, R* outputs) {
    FewChannels<R> convolution(s, BLOCK);
    const int64_t pixels = s.images * s.out_pixels();
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.images * s.in_pixels() * s.in,
                 outputs += pixels * s.out, weight += s.taps() * s.in * s.out,
                 bias += bias ? s.out : 0) {
        convolution.use_weight(weight);
        for (int64_t first = 0; first < pixels; first += BLOCK) {
            const int64_t count = std::min(BLOCK, pixels - first);
            convolution.unfold(inputs, first, count);
            convolution.forward(count, bias, outputs + first * s.out);
        }
    }
}

// The gradients with respect to weight and bias of <gradient, convolution of the inputs>.
template <class R>
void weight_grad(ConvShape s, const R* inputs, const R* gradient, R* weight, R* bias) {
    FewChannels<R> convolution(s, BLOCK);
    const int64_t pixels = s.images * s.out_pixels();
    for (int64_t task = 0; task < s.tasks; ++task, inputs += s.images * s.in_pixels() * s.in,
                 gradient += pixels * s.out, weight += s.taps() * s.in * s.out, bias += s.out) {
        convolution.zero_grad();
        for (int64_t first = 0; first < pixels; first += BLOCK) {
            const int64_t count = std::min(BLOCK, pixels - first);
            convolution.unfold(inputs, first, count);
            convolution.accumulate_grad(count, gradient + first * s.out);
        }
        convolution.store_grad(weight, bias);
    }
}

}  // namespace

EXPORT(convolve)
EXPORT(weight_grad)
