"""Shapes, numbers of parameters and errors of the networks."""

import pytest
import torch

from metadist.errors import UserError
from metadist.models import MLP, Conv4


@pytest.mark.parametrize(
    ("shape", "pooling", "features"),
    [
        ((1, 28, 28), "stride", 64),
        ((1, 28, 28), "max", 64),
        ((3, 84, 84), "stride", 64),
        ((3, 84, 84), "max", 1600),
    ],
)
def test_conv4_shapes(shape, pooling, features):
    model = Conv4(shape, 5, filters=64, pooling=pooling)
    images = torch.rand(6, *shape)
    assert model.features(images).shape == (6, features)
    assert model(images).shape == (6, 5)


def test_conv4_has_the_papers_number_of_parameters():
    # 3·3·1·64 + 3·(3·3·64·64) weights, 4·64 biases, 4·128 of batch norm, 64·5 + 5 of the head.
    assert sum(p.numel() for p in Conv4((1, 28, 28), 5).parameters()) == 112_261


def test_conv4_uses_batch_statistics_in_evaluation():
    model = Conv4((1, 28, 28), 5, filters=4)
    assert not list(model.buffers())
    images = torch.rand(4, 1, 28, 28)
    assert torch.equal(model.train()(images), model.eval()(images))


def test_conv4_raises_for_unsupported_inputs():
    with pytest.raises(UserError, match="model=mlp"):
        Conv4((7,), 5)
    with pytest.raises(UserError, match="pooling=stride"):
        Conv4((1, 14, 14), 5, pooling="max")
    with pytest.raises(UserError, match='"stride" or "max"'):
        Conv4((1, 28, 28), 5, pooling="mean")


def test_conv4_initialization():
    model = Conv4((3, 32, 32), 5, filters=64)
    for layer in model.convolutions:
        fans = 9 * (layer.in_channels + layer.out_channels)
        assert layer.weight.std().item() == pytest.approx((2 / fans) ** 0.5, rel=0.1)
        assert not layer.bias.any()
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.2)


def test_mlp_initialization():
    model = MLP((1, 28, 28), 5, hidden=[256, 64])
    for layer in (*model.layers, model.head):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.2)
        assert not layer.bias.any()


def test_mlp_shapes_and_the_linear_model():
    inputs = torch.rand(6, 1, 28, 28)
    assert MLP((1, 28, 28), 5)(inputs).shape == (6, 5)
    linear = MLP((1, 28, 28), 5, hidden=[])
    assert sum(p.numel() for p in linear.parameters()) == 784 * 5 + 5
    assert torch.equal(linear(inputs), linear.head(inputs.flatten(1)))
    assert MLP((1,), 1, hidden=[40, 40], batch_norm=False)(torch.rand(3, 1)).shape == (3, 1)
