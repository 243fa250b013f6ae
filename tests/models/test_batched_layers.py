"""Batched layers against PyTorch's, per task, up to the second derivative."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from metadist.kernels import fused_block, library
from metadist.models import MLP, Conv4
from metadist.models.batched_layers import Conv2d, Linear, conv_block, norm_relu


class Norm(nn.Module):
    """Batch norm, ReLU and pooling as models use them."""

    def __init__(self, norm, pool=False, native=False):
        super().__init__()
        self.norm, self.pool, self.native = norm, pool, native

    def forward(self, inputs):
        return norm_relu(self.norm, inputs, self.pool, self.native)


def norm(channels, eps=1e-5):
    return nn.BatchNorm2d(channels, eps, track_running_stats=False)


def norm_without_bias(channels):
    layer = norm(channels)
    layer.register_parameter("bias", None)  # as with `bias=False`, which PyTorch 2.9 does not have
    return layer


CASES = {
    "linear": (Linear(4, 3), nn.Linear(4, 3), (5, 4)),
    "linear without bias": (Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False), (5, 4)),
    **{
        f"{name}{', in PyTorch' * (not native)}": (
            Conv2d(*sizes, native=native, **options),
            nn.Conv2d(*sizes, **options),
            shape,
        )
        for native in (True, False)
        for name, sizes, options, shape in [
            ("convolution", (2, 3, 3), {"padding": 1}, (4, 2, 5, 6)),
            ("with stride", (2, 3, 3), {"stride": 2, "padding": 1}, (4, 2, 7, 6)),
            (
                "oblong",
                (1, 2, (2, 3)),
                {"stride": (1, 2), "padding": (0, 1), "bias": False},
                (3, 1, 5, 6),
            ),
            ("without padding", (1, 2, 3), {}, (3, 1, 6, 5)),
            ("mostly padding", (2, 3, 3), {"stride": 3, "padding": 2}, (2, 2, 1, 2)),
        ]
    },
    "norm of vectors": (
        Norm(nn.BatchNorm1d(3, track_running_stats=False)),
        nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.ReLU()),
        (6, 3),
    ),
    "norm of maps": (Norm(norm(3)), nn.Sequential(norm(3), nn.ReLU()), (4, 3, 3, 2)),
    "norm with a large eps": (
        Norm(norm(3, 0.5)),
        nn.Sequential(norm(3, 0.5), nn.ReLU()),
        (4, 3, 2, 2),
    ),
    "native norm with a large eps": (
        Norm(norm(16, 0.5), native=True),
        nn.Sequential(norm(16, 0.5), nn.ReLU()),
        (4, 16, 2, 2),
    ),
    **{
        f"norm of {channels} channels without bias": (
            Norm(norm_without_bias(channels), native=True),
            nn.Sequential(norm_without_bias(channels), nn.ReLU()),
            (4, channels, 2, 2),
        )
        for channels in (3, 16)
    },
    "norm and pooling": (
        Norm(norm(3), pool=True),
        nn.Sequential(norm(3), nn.ReLU(), nn.MaxPool2d(2)),
        (4, 3, 5, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_pytorchs_for_every_task(name):
    """Value, derivative, and the derivative of a function of the derivative."""
    ours, theirs, shape = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    tasks = 3
    inputs = random(tasks, *shape)
    parameters = [random(tasks, *p.shape) for p in theirs.parameters()]
    by = random(*parameters[0].shape[1:])

    def results(layer, inputs, parameters):
        tensors = [each.clone().requires_grad_() for each in [inputs, *parameters]]
        names = [name for name, _ in layer.named_parameters()]
        out = functional_call(layer, dict(zip(names, tensors[1:], strict=True)), (tensors[0],))
        first = torch.autograd.grad(out.tanh().sum(), tensors, create_graph=True)
        scalar = sum((g.sin() * g).sum() for g in first) + (first[1] * by).sum()
        return [out, *first, *torch.autograd.grad(scalar, tensors)]

    batched = results(ours, inputs, parameters)
    unbatched = zip(
        *(results(theirs, inputs[task], [p[task] for p in parameters]) for task in range(tasks)),
        strict=True,
    )
    for got, expected in zip(batched, unbatched, strict=True):
        assert got.shape == torch.stack(expected).shape
        assert torch.allclose(got, torch.stack(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "model",
    [
        Conv4((1, 28, 28), 5, filters=6),
        Conv4((2, 16, 17), 3, filters=4, pooling="max"),
        Conv4((2, 16, 17), 3, filters=16, pooling="max"),
        Conv4((1, 28, 28), 5, filters=16),
        MLP((1, 6, 6), 5, hidden=[8, 7]),
        MLP((1,), 1, hidden=[8], batch_norm=False),
    ],
    ids=["stride", "max", "max native", "stride native", "mlp", "mlp without norm"],
)
def test_a_batched_model_is_bit_identical_for_any_number_of_tasks(model):
    assert model.supports_batched_tasks
    shape = (
        {1: (1, 28, 28), 2: (2, 16, 17)}[model.convolutions[0].in_channels]
        if isinstance(model, Conv4)
        else ((1, 6, 6) if model.layers[0].in_features == 36 else (1,))
    )
    inputs = torch.rand(5, 4, *shape)
    parameters = {
        name: (p.detach() + 0.1 * torch.rand(5, *p.shape)) for name, p in model.named_parameters()
    }

    def run(first, last):
        some = {name: p[first:last] for name, p in parameters.items()}
        return functional_call(model, some, (inputs[first:last],))

    batched = run(0, 5)
    assert torch.equal(batched, torch.cat([run(0, 1), run(1, 3), run(3, 5)]))
    for task in range(5):
        unbatched = functional_call(
            model, {n: p[task] for n, p in parameters.items()}, inputs[task]
        )
        assert torch.allclose(batched[task], unbatched, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_batch_norm_without_kernels_is_as_accurate_as_pytorchs(batched):
    torch.manual_seed(0)
    inputs = (torch.randn(5, 32, 84, 84) + 1.5).to(memory_format=torch.channels_last)
    expected = nn.functional.batch_norm(inputs.double(), None, None, training=True).relu()
    layer = norm(32)
    if batched:
        layer.weight, layer.bias = nn.Parameter(layer.weight[None]), nn.Parameter(layer.bias[None])
        inputs, expected = inputs[None], expected[None]
    found = norm_relu(layer, inputs, native=False)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("pooling", ["stride", "max"])
def test_no_tasks(pooling, native, monkeypatch):
    monkeypatch.setattr(fused_block, "MIN_BYTES", 0)
    model = Conv4((1, 16, 16), 3, filters=16, pooling=pooling, native=native)
    parameters = {name: p.detach().new_empty(0, *p.shape) for name, p in model.named_parameters()}
    weight = parameters["norms.0.weight"].requires_grad_()
    outputs = functional_call(model, parameters, (torch.rand(0, 5, 1, 16, 16),))
    assert outputs.shape == (0, 5, 3)
    assert torch.autograd.grad(outputs.sum(), weight)[0].shape == (0, 16)


def test_models_with_running_statistics_or_dropout_are_not_batched():
    assert not Conv4((1, 28, 28), 5, running_statistics=True).supports_batched_tasks
    assert not Conv4((1, 28, 28), 5, dropout=0.1).supports_batched_tasks
    assert not MLP((3,), 5, running_statistics=True).supports_batched_tasks
    assert MLP((3,), 5, batch_norm=False, running_statistics=True).supports_batched_tasks


class OwnLinear(nn.Linear):
    pass


def test_models_with_a_linear_layer_of_pytorch_in_the_head_are_not_batched():
    for model in (Conv4((1, 28, 28), 5), MLP((3,), 5)):
        features = model.head.in_features
        for linear in (nn.Linear, OwnLinear):
            for head in (linear(features, 5), nn.Sequential(linear(features, 5))):
                model.head = head
                assert not model.supports_batched_tasks
        model.head = nn.Sequential(Linear(features, 5))
        assert model.supports_batched_tasks


@pytest.mark.parametrize(
    "options", [{"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding_mode": "reflect"}]
)
def test_unsupported_convolutions_are_refused(options):
    with pytest.raises(ValueError, match="batched Conv2d"):
        Conv2d(2, 2, 3, **options)


def test_a_single_image_is_convolved_as_by_torch():
    layer = Conv2d(4, 3, 3, padding=1)
    plain = nn.Conv2d(4, 3, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    image = torch.rand(4, 8, 8)
    torch.testing.assert_close(layer(image), plain(image))


@pytest.mark.parametrize("wrapped", [("inputs",), ("parameters",), ("inputs", "parameters")])
@pytest.mark.parametrize("tasks", [(), (2,)])
@pytest.mark.parametrize("pooling", ["stride", "max"])
def test_tensors_without_memory_are_left_to_pytorch(wrapped, tasks, pooling, monkeypatch):
    monkeypatch.setattr(fused_block, "MIN_BYTES", 0)
    model = Conv4((1, 16, 16), 3, filters=16, pooling=pooling)
    parameters = {name: p.detach().expand(*tasks, *p.shape) for name, p in model.named_parameters()}
    parts = {"parameters": parameters, "inputs": torch.rand(*tasks, 4, 1, 16, 16)}

    def run(convert):
        some = {name: pytree.tree_map(convert, parts[name]) for name in wrapped}
        return functional_call(model, *{**parts, **some}.values())

    expected, found = run(torch.clone), run(lambda tensor: TwoTensor(tensor, tensor))
    assert isinstance(found, TwoTensor)
    torch.testing.assert_close(found.a, expected)
    if len(wrapped) == 2:  # fake tensors, outside of their mode
        assert run(FakeTensorMode().from_tensor).shape == expected.shape


@pytest.mark.parametrize("layer", [Conv2d(16, 16, 3, padding=1), Norm(norm(16), native=True)])
def test_a_gradient_without_memory_is_refused(layer):
    if library("norm_relu_pool") is None:
        pytest.skip("there is no C++ compiler")
    outputs = layer(torch.rand(4, 16, 8, 8))
    factor = torch.rand_like(outputs)
    loss = (outputs * TwoTensor(factor, factor)).sum()
    with pytest.raises(RuntimeError, match="native=False"):
        loss.backward()


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return None


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("pool", [True, False])
def test_no_gradient_arrives(pool, native, monkeypatch):
    monkeypatch.setattr(fused_block, "MIN_BYTES", 0)
    layers = Conv2d(1, 16, 3, padding=1, native=native), norm(16)
    for layer in layers:
        for name, parameter in [*layer.named_parameters()]:
            setattr(layer, name, nn.Parameter(parameter.expand(2, *parameter.shape)))
    outputs = conv_block(*layers, torch.rand(2, 5, 1, 8, 8), pool, native)
    WithoutGradient.apply(outputs).sum().backward()
    assert all(p.grad is None for p in layers[1].parameters())
