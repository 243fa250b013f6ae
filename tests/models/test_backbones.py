import builtins
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from metadist.errors import UserError
from metadist.models import Timm, Torchvision


def count(model):
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [("resnet18", 11_689_512), ("mobilenet_v3_small", 2_542_856), ("densenet121", 7_978_856)],
)
def test_torchvision_has_the_published_number_of_parameters(name, published):
    """With the 1000 classes of ImageNet: the tables of torchvision's documentation."""
    model = Torchvision((3, 32, 32), 1000, name)
    assert count(model) == published
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 1000)


def test_channels_and_options():
    assert Torchvision((1, 32, 32), 5)(torch.rand(2, 1, 32, 32)).shape == (2, 5)
    with pytest.raises(UserError, match=r"vit_b_16 cannot be created \(.*no_such"):
        Torchvision((3, 32, 32), 5, "vit_b_16", options={"no_such": 1})


@pytest.mark.parametrize("create", [Torchvision, pytest.param(Timm, marks=pytest.mark.slow)])
def test_batch_norm(create):
    torch.manual_seed(0)
    images = torch.rand(4, 3, 32, 32)
    model = create((3, 32, 32), 5)
    assert not list(model.buffers())
    assert torch.equal(model.train()(images), model.eval()(images))
    assert not any(
        each.track_running_stats for each in model.modules() if isinstance(each, _BatchNorm)
    )
    running = create((3, 32, 32), 5, running_statistics=True).eval()
    torch.testing.assert_close(running(images)[:1], running(images[:1]))
    assert model.features(images).shape == (4, 512)
    assert not model.head.bias.any()
    # Counting the features has left the network as it was.
    statistics = [m for m in running.modules() if isinstance(m, _BatchNorm)]
    assert all(not each.num_batches_tracked and not each.running_mean.any() for each in statistics)
    assert create((3, 32, 32), 5).body.training


@pytest.mark.slow
def test_timm():
    model = Timm((1, 32, 32), 1000, "resnet18")
    # 11,689,512 with three channels; timm's first convolution takes one.
    assert count(model) == 11_689_512 - 2 * 64 * 49
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 1000)


def test_torch_func_gives_the_gradients_of_each_task():
    torch.manual_seed(0)
    model = Torchvision((3, 32, 32), 3).double()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    images = torch.rand(2, 3, 3, 32, 32, dtype=torch.float64)

    def loss(given, inputs):
        return F.cross_entropy(functional_call(model, given, (inputs,)), torch.arange(3))

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, images)
    single = grad(loss)(parameters, images[1])
    for name, each in single.items():
        torch.testing.assert_close(batched[name][1], each)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_are_removed(name, monkeypatch):
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # slow
    model = Torchvision((3, 84, 84), 5, name)
    assert model.train()(torch.rand(2, 3, 84, 84)).shape == (2, 5)
    assert not [name for name, _ in model.named_parameters() if "aux" in name.lower()]
    with pytest.raises(UserError, match="in training and evaluation: choose another network"):
        Torchvision((3, 128, 128), 5, "googlenet", options={"aux_logits": True})


def test_counting_the_features_draws_no_random_numbers():
    torch.manual_seed(0)
    model = Torchvision((3, 32, 32), 5, "efficientnet_b0", running_statistics=True)
    torch.manual_seed(0)
    torchvision.models.efficientnet_b0()
    assert torch.equal(model.head.weight, nn.Linear(1280, 5).weight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "resnet81"}, r"resnet81 is no network of torchvision \(did you mean resnet"),
        ({"name": "squeezenet1_0"}, "no linear head"),
        ({"weights": "NO_SUCH"}, "cannot be created"),
        ({"input_shape": (2, 32, 32)}, r"does not take inputs of shape \(2, 32, 32\)"),
        ({"input_shape": (7,)}, r"does not take inputs of shape \(7,\)"),
    ],
)
def test_what_cannot_be_built_is_refused(given, message):
    with pytest.raises(UserError, match=message) as error:
        Torchvision(**{"input_shape": (3, 32, 32), "outputs": 5, **given})
    assert "\n" not in str(error.value)


def test_timm_is_optional(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *rest):
        if name == "timm":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install -e '\.\[timm\]'"):
        Timm((3, 32, 32), 5)


def test_what_timm_is_asked_for(monkeypatch):
    asked = []

    def create_model(name, **options):
        asked.append((name, options))
        if "no_such" in options:
            raise TypeError("no\nsuch option " * 100)
        return nn.Flatten() if "map" not in options else nn.Identity()

    library = SimpleNamespace(create_model=create_model, list_models=lambda: ["resnet18"])
    monkeypatch.setitem(sys.modules, "timm", library)
    options = {"num_classes": 0, "in_chans": 1, "pretrained": True, "drop_rate": 0.1}
    model = Timm((1, 8, 8), 5, "resnet18.a1_in1k", pretrained=True, options={"drop_rate": 0.1})
    assert asked == [("resnet18.a1_in1k", options)] and model.head.in_features == 64
    with pytest.raises(UserError, match="one vector per image"):
        Timm((1, 8, 8), 5, options={"map": True})
    with pytest.raises(UserError, match="cannot be created") as error:
        Timm((1, 8, 8), 5, options={"no_such": 1})
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    for name in ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        asked.clear()
        with pytest.raises(UserError, match=rf"model\.options\.{name}: .*init_from=FILE"):
            Timm((1, 8, 8), 5, options={name: "weights.bin"})
        assert not asked
