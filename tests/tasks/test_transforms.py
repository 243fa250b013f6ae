import functools

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import ColorJitter, RandomApply, functional

from metadist.errors import UserError
from metadist.tasks import Augment, Normalize
from metadist.tasks.transforms import transform_names


@pytest.fixture
def images():
    return np.random.default_rng(0).random((30, 3, 10, 12), dtype=np.float32)


class Fixed:
    """A generator whose uniform numbers are given."""

    def __init__(self, factors) -> None:
        self.factors = np.array(factors)

    def uniform(self, low, high, size):
        return (low + (high - low) * self.factors).reshape(size)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("brightness", functional.adjust_brightness),
        ("contrast", functional.adjust_contrast),
        ("saturation", functional.adjust_saturation),
    ],
)
def test_colours_are_torchvisions(images, name, reference):
    shares = np.linspace(0, 1, len(images))
    changed = Augment(**{name: 0.4})(images.copy(), Fixed(shares))
    for image, share, found in zip(images, shares, changed, strict=True):
        expected = reference(torch.from_numpy(image), 0.6 + 0.8 * share)
        assert np.allclose(found, expected.numpy(), atol=1e-5)


def test_flip(images):
    changed = Augment(flip=0.3)(images.copy(), np.random.default_rng(1))
    mirrored = np.array(
        [np.array_equal(c, i[..., ::-1]) for c, i in zip(changed, images, strict=True)]
    )
    same = np.array([np.array_equal(c, i) for c, i in zip(changed, images, strict=True)])
    assert (mirrored ^ same).all()
    assert 0 < mirrored.sum() < 20
    always = Augment(flip=1.0)(images.copy(), np.random.default_rng(1))
    assert np.array_equal(always, images[..., ::-1])


def test_crops_are_windows_of_the_padded_image(images):
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    offsets = set()
    for seed in range(20):
        changed = Augment(crop_padding=2)(images.copy(), np.random.default_rng(seed))
        for before, after in zip(padded, changed, strict=True):
            [offset] = [
                (top, left)
                for top in range(5)
                for left in range(5)
                if np.array_equal(before[:, top : top + 10, left : left + 12], after)
            ]
            offsets.add(offset)
    assert len(offsets) == 25


def test_results_are_images_and_depend_on_the_generator_alone(images):
    augment = Augment(crop_padding=3, flip=0.5, brightness=1.0, contrast=1.0, saturation=1.0)
    one = augment(images.copy(), np.random.default_rng(3))
    assert one.dtype == np.float32
    assert one.min() >= 0
    assert one.max() <= 1
    assert np.array_equal(one, augment(images.copy(), np.random.default_rng(3)))
    assert not np.array_equal(one, augment(images.copy(), np.random.default_rng(4)))


def test_one_channel(images):
    grey = images[:, :1].copy()
    assert np.array_equal(Augment(saturation=1.0)(grey.copy(), np.random.default_rng(0)), grey)
    expected = functional.adjust_contrast(torch.from_numpy(grey[0]), 1.4)
    changed = Augment(contrast=0.4)(grey.copy(), Fixed(np.ones(len(grey))))
    assert np.allclose(changed[0], expected.numpy(), atol=1e-5)


def test_normalize(images):
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    expected = functional.normalize(torch.from_numpy(images.copy()), mean, std)
    found = Normalize(mean, std)(torch.from_numpy(images.copy()))
    assert torch.allclose(found, expected, atol=1e-6)
    assert Normalize().is_identity
    assert Augment().is_identity
    assert not Normalize(mean=[0.5]).is_identity
    assert not Normalize(std=[2.0]).is_identity
    assert not Augment(flip=0.1).is_identity


def test_a_std_of_zero_is_refused():
    with pytest.raises(UserError, match=r"dataset.normalize.std=\[0.0\] must be above 0"):
        Normalize(std=[0.0])


class Brighten:
    """A transform of the user's own."""

    def __init__(self, amount, table=None):
        self.amount, self.table, self.calls = amount, table, 0

    def __call__(self, image):
        self.calls += 1
        return image + self.amount


def test_names_tell_functions_and_their_options_apart():
    invert, adjust = functional.invert, functional.adjust_brightness
    assert transform_names(
        [
            invert,
            functools.partial(adjust, brightness_factor=2.0),
            functools.partial(functools.partial(adjust, 0.5), inpt=invert, mode="a"),
            ColorJitter(hue=0.25),
            Augment(flip=0.25),
            Brighten(0.5, table=object()),
            Brighten([0.5, 1]),
            RandomApply([Brighten(0.5), invert], p=0.25),
        ]
    ) == [
        "invert",
        "adjust_brightness(brightness_factor=2.0)",
        "adjust_brightness(0.5, inpt=invert, mode='a')",
        "ColorJitter(hue=(-0.25, 0.25))",
        "Augment(crop_padding=0, flip=0.25, brightness=0.0, contrast=0.0, saturation=0.0)",
        "Brighten(amount=0.5)",
        "Brighten(amount=[0.5, 1])",
        f"RandomApply( <{__name__}.Brighten object> <function invert> )",
    ]
