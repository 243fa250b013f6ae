"""Shapes, numbers of parameters and errors of the networks."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

from metadist.errors import UserError
from metadist.kernels import loader
from metadist.models import MLP, Conv4


@pytest.mark.parametrize(
    ("shape", "pooling", "features"),
    [
        ((1, 28, 28), "stride", 64),
        ((1, 28, 28), "max", 64),
        ((3, 84, 84), "stride", 64),
        ((3, 84, 84), "max", 1600),
        ((3, 90, 80), "max", 5 * 5 * 64),
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
        # A normal distribution that is cut at two standard deviations has 0.88 of its own.
        assert layer.weight.std().item() == pytest.approx(0.0088, rel=0.1)
        assert layer.weight.abs().max() <= 0.02
        assert not layer.bias.any()


def test_mlp_shapes_and_the_linear_model():
    inputs = torch.rand(6, 1, 28, 28)
    assert MLP((1, 28, 28), 5)(inputs).shape == (6, 5)
    linear = MLP((1, 28, 28), 5, hidden=[])
    assert sum(p.numel() for p in linear.parameters()) == 784 * 5 + 5
    assert torch.equal(linear(inputs), linear.head(inputs.flatten(1)))
    assert MLP((1,), 1, hidden=[40, 40], batch_norm=False)(torch.rand(3, 1)).shape == (3, 1)


def test_the_stride_form_can_flatten_its_last_feature_map():
    images = torch.rand(6, 1, 28, 40)
    flat = Conv4((1, 28, 40), 5, filters=4, flatten=True)
    assert flat.features(images).shape == (6, 2 * 3 * 4)
    averaged = Conv4((1, 28, 40), 5, filters=4)
    averaged.convolutions.load_state_dict(flat.convolutions.state_dict())
    torch.testing.assert_close(
        averaged.features(images), flat.features(images).view(6, 4, 6).mean(2)
    )


@pytest.mark.parametrize("make", [partial(Conv4, (1, 16, 16), 5), partial(MLP, (1, 16, 16), 5)])
def test_dropout_is_of_the_features_in_training(make):
    inputs, model = torch.rand(6, 1, 16, 16), make(dropout=0.25)
    assert torch.equal(model.eval()(inputs), model.head(model.features(inputs)))
    assert not torch.equal(model.train()(inputs), model(inputs))
    torch.manual_seed(0)
    found = model(inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(found, model.head(model.features(inputs)))
    kept = make()
    kept.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(kept.features(inputs), 0.25)
    torch.testing.assert_close(model.head(dropped), found)


@pytest.mark.parametrize("make", [partial(Conv4, (1, 16, 16), 5), partial(MLP, (1, 16, 16), 5)])
def test_tasks_cannot_be_batched_with_running_statistics_or_dropout(make):
    assert make().supports_batched_tasks
    assert not make(dropout=0.1).supports_batched_tasks
    assert not make(running_statistics=True).supports_batched_tasks
    assert [name for name, _ in make(running_statistics=True).named_buffers()]


@pytest.mark.parametrize(
    "make",
    [
        partial(Conv4, (1, 16, 16), 16, filters=16),
        partial(Conv4, (3, 16, 16), 16, filters=16, pooling="max"),
        partial(MLP, (1, 4, 4), 16, hidden=[16, 16]),
    ],
)
def test_without_native_no_kernel_is_used(make, monkeypatch):
    asked = []
    monkeypatch.setattr(loader, "has_cpp", lambda: asked.append(True))  # None: there are no kernels
    for native in (True, False):
        model = make(native=native)
        channels, side = (
            (model.convolutions[0].in_channels, 16) if isinstance(model, Conv4) else (1, 4)
        )
        inputs = torch.rand(2, 3, channels, side, side)
        model(inputs[0])
        assert bool(asked) == native
        asked.clear()
        tasks = {name: torch.stack([each] * 2) for name, each in model.named_parameters()}
        functional_call(model, tasks, (inputs,))
        assert bool(asked) == native
        asked.clear()


def test_an_mlp_without_batch_norm_has_pytorchs_initialization():
    torch.manual_seed(0)
    model = MLP((40,), 1, hidden=[40, 40], batch_norm=False)
    torch.manual_seed(0)
    for layer in (*model.layers, model.head):
        assert torch.equal(layer.weight, torch.nn.Linear(40, layer.out_features).weight)
