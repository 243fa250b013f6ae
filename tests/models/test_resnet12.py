import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from torchvision.ops import drop_block2d

from metadist.errors import UserError
from metadist.models import ResNet12
from metadist.models.resnet12 import DropBlock

WIDTHS = (4, 5, 6, 8)


@pytest.mark.parametrize(
    ("widths", "published"), [((64, 160, 320, 640), 12.4), ((64, 128, 256, 512), 8.0)]
)
def test_numbers_of_parameters_are_the_published_ones(widths, published):
    """In millions, before the head: Tian et al. 2020, table 1 (12.4); Chen et al. 2021 (8.0)."""
    with torch.device("meta"):
        model = ResNet12((3, 84, 84), 5, widths)
    body = sum(each.numel() for each in model.blocks.parameters())
    expected = sum(
        9 * before * after + 2 * 9 * after**2 + before * after + 8 * after
        for before, after in zip((3, *widths[:-1]), widths, strict=True)
    )
    assert body == expected
    assert round(body / 1e6, 1) == published


@pytest.mark.parametrize(("flatten", "features"), [(False, 8), (True, 8 * 25)])
def test_shapes(flatten, features):
    model = ResNet12((3, 84, 84), 5, WIDTHS, flatten=flatten)
    images = torch.rand(2, 3, 84, 84)
    assert model.features(images).shape == (2, features)
    assert model(images).shape == (2, 5)


def test_a_block_is_the_published_one():
    model = ResNet12((3, 32, 32), 5, WIDTHS)
    block, images = model.blocks[0], torch.rand(4, 3, 32, 32)

    def norm(values):
        centred = values - values.mean((0, 2, 3), keepdim=True)
        return centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()

    values = images
    for index, convolution in enumerate(block.convolutions):
        values = norm(F.conv2d(values, convolution.weight, padding=1))
        values = torch.where(values > 0, values, 0.1 * values) if index < 2 else values
    values = values + norm(F.conv2d(images, block.shortcut.weight))
    values = torch.where(values > 0, values, 0.1 * values)
    torch.testing.assert_close(block(images), F.max_pool2d(values, 2), atol=1e-5, rtol=1e-4)


def test_dropblock_drops_squares_in_training_only():
    torch.manual_seed(0)
    model = ResNet12((1, 64, 64), 5, WIDTHS, drop_rate=0.3, dropblock_size=3)
    dropout = model.blocks[2].dropout
    zeros = dropout(torch.ones(1, 1, 40, 40))[0, 0] == 0
    assert 0.1 < zeros.float().mean() < 0.5
    # Every dropped feature is in a dropped square of three.
    padded = F.pad(zeros.float()[None, None], (2, 2, 2, 2))
    squares = F.avg_pool2d(padded, 3, 1) > 0.99
    covered = F.max_pool2d(F.pad(squares.float(), (0, 0, 0, 0)), 3, 1)[0, 0] > 0
    assert torch.equal(covered[2:-2, 2:-2], zeros[2:-2, 2:-2])
    images = torch.rand(4, 1, 64, 64)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


def test_the_last_two_blocks_drop_squares():
    kinds = [torch.nn.Dropout, torch.nn.Dropout, DropBlock, DropBlock]
    model = ResNet12((1, 64, 64), 5, WIDTHS, drop_rate=0.3, dropblock_size=3)
    assert [type(block.dropout) for block in model.blocks] == kinds


@pytest.mark.parametrize(("side", "size"), [(84, 5), (32, 2), (28, 5)])
def test_dropblock_takes_the_documented_sizes(side, size):
    torch.manual_seed(0)
    model = ResNet12((1, side, side), 5, WIDTHS, drop_rate=0.1, dropblock_size=size)
    model(torch.rand(4, 1, side, side)).sum().backward()
    assert all(each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize(("side", "size"), [(5, 5), (10, 5), (8, 2), (3, 5), (1, 2)])
def test_dropblock_drops_the_given_share_and_keeps_the_mean(side, size):
    torch.manual_seed(0)
    outputs = DropBlock(0.1, size)(torch.ones(200, 50, side, side))
    assert 0.08 < (outputs == 0).float().mean() < 0.11  # squares may overlap
    assert outputs.mean().item() == pytest.approx(1)


@pytest.mark.parametrize("shape", [(10, 10), (7, 4), (3, 3)])
def test_dropblock_of_odd_sizes_is_that_of_torchvision(shape):
    features = torch.rand(4, 6, *shape)
    torch.manual_seed(0)
    found = DropBlock(0.3, 3)(features)
    torch.manual_seed(0)
    torch.testing.assert_close(found, drop_block2d(features, 0.3, 3))


def test_dropblock_may_drop_every_feature():
    assert not DropBlock(1 - 1e-9, 2)(torch.ones(1, 1, 2, 2)).any()


def test_batch_statistics_and_running_statistics():
    images = torch.rand(4, 1, 16, 16)
    model = ResNet12((1, 16, 16), 5, WIDTHS)
    assert not list(model.buffers())
    assert torch.equal(model.train()(images), model.eval()(images))
    running = ResNet12((1, 16, 16), 5, WIDTHS, running_statistics=True).eval()
    torch.testing.assert_close(running(images)[:1], running(images[:1]))


def test_torch_func_gives_the_gradients_of_each_task():
    torch.manual_seed(0)
    model = ResNet12((1, 16, 16), 3, WIDTHS).double()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    images = torch.rand(2, 6, 1, 16, 16, dtype=torch.float64)
    targets = torch.arange(3).repeat(2)

    def loss(given, inputs):
        return F.cross_entropy(functional_call(model, given, (inputs,)), targets)

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, images)
    for task in range(2):
        single = grad(loss)(parameters, images[task])
        for name, each in single.items():
            torch.testing.assert_close(batched[name][task], each)


@pytest.mark.parametrize("shape", [(7,), (3, 15, 20)])
def test_unsupported_inputs_are_refused(shape):
    with pytest.raises(UserError, match="model=mlp or conv4"):
        ResNet12(shape, 5)


def test_initialization():
    torch.manual_seed(0)
    model = ResNet12((3, 32, 32), 5, (32, 48, 64, 80))
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):  # He et al. 2015 for the slope 0.1, by fan-out
            fan = module.out_channels * module.kernel_size[0] ** 2
            expected = (2 / (1 + 0.1**2) / fan) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.1)
    assert not model.head.bias.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dropblock_keeps_the_mean_in_16_bits(dtype):
    drop, features = DropBlock(0.1, 5).train(), torch.ones(75, 640, 5, 5, dtype=dtype)
    torch.manual_seed(0)
    found = drop(features)
    assert found.dtype == dtype
    kept = (found > 0).double().mean()
    scale = found.max().double()
    assert abs(scale * kept - 1) < torch.finfo(dtype).eps
