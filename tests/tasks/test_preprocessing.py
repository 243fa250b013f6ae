"""Images of any kind as the inputs of a trained model: as a dataset prepares its own files."""

import numpy as np
import pytest
import torch
from omniglot_tree import ink, png
from PIL import Image

from metadist.errors import UserError
from metadist.tasks import ImagePreprocessing, Normalize

DATA = png(3, 7)
STROKES = torch.from_numpy(ink(DATA, 28).copy())[None] / 255
"""Of an Omniglot file, decoded by other means than the package's."""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "character.png"
    path.write_bytes(DATA)
    return path


def kinds(file) -> list:
    """The same image in every form in which it may be given."""
    with Image.open(file) as opened:
        image = opened.convert("L")
    pixels = np.asarray(image)
    tensor = torch.from_numpy(pixels.copy())
    color = np.stack([pixels] * 3, -1)
    alpha = np.concatenate([color, np.full_like(color[..., :1], 255)], -1)
    return [
        *(file, str(file), image, image.convert("RGB"), pixels, pixels.astype(np.int64)),
        *(pixels / 255, (pixels / 255).astype(np.float32), pixels > 0, pixels[..., None]),
        *(pixels[None], color, color.transpose(2, 0, 1), alpha, tensor, tensor[None]),
        *((tensor / 255).requires_grad_(), torch.from_numpy(color).permute(2, 0, 1)),
    ]


def test_every_kind_of_image_gives_what_the_dataset_has(file):
    prepare = ImagePreprocessing((1, 28, 28), inverted=True)
    images = kinds(file)
    inputs = prepare(images)
    assert inputs.shape == (len(images), 1, 28, 28) and inputs.dtype == torch.float32
    assert all(torch.equal(each, STROKES) for each in inputs)


def test_normalization_channels_and_pixels_of_the_right_size():
    images = np.random.default_rng(0).integers(256, size=(4, 12, 12, 3), dtype=np.uint8)
    prepare = ImagePreprocessing((3, 12, 12), normalize=Normalize([0.1, 0.2, 0.3], [0.5]))
    mean = np.array([0.1, 0.2, 0.3])
    expected = torch.from_numpy((images / 255 - mean) / 0.5).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(prepare(images), expected)
    torch.testing.assert_close(prepare(torch.from_numpy(images).permute(0, 3, 1, 2)), expected)


def test_an_image_of_three_rows_is_read_in_the_order_of_its_library():
    pixels = np.random.default_rng(0).integers(256, size=(3, 9, 3), dtype=np.uint8)
    prepare = ImagePreprocessing((3, 9, 9))
    last, first = prepare([pixels])[0], prepare([torch.from_numpy(pixels)])[0]
    expected = [Image.fromarray(each) for each in (pixels, pixels.transpose(1, 2, 0))]
    for found, image in zip((last, first), expected, strict=True):
        resized = np.asarray(image.resize((9, 9), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
        assert torch.equal(found, torch.from_numpy(resized.copy()) / 255)


@pytest.mark.parametrize("image", [np.zeros((9, 9, 3), np.uint8), torch.zeros(3, 9, 9)])
def test_one_image_in_color_is_no_batch(image):
    with pytest.raises(UserError, match="was given instead of several"):
        ImagePreprocessing((3, 9, 9))(image)
    assert len(ImagePreprocessing((3, 9, 9))([image])) == 1


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("character.png", "one image was given"),
        (Image.new("L", (5, 5)), "one image was given"),
        (np.zeros((5, 5)), r"an image of shape \(5, 5\) was given instead of several"),
        (np.zeros((5, 5, 1)), r"an image of shape \(5, 5, 1\) was given instead of several"),
        ([[[1, 2], [3]]], "an image is not an array .*: give integers from 0 to 255"),
        ([np.zeros((5, 5, 2))], r"the shape \(5, 5, 2\)"),
        ([np.zeros(5)], r"the shape \(5,\)"),
        ([np.zeros((0, 5))], r"the shape \(0, 5\)"),
        ([np.full((5, 5), 2.0)], "values from 2 to 2"),
        ([np.full((5, 5), 300)], "values from 300 to 300"),
        ([np.full((5, 5), np.nan)], "values from nan to nan"),
        ([np.full((5, 5), "a")], "the type <U1"),
        ([Image.new("I", (5, 5))], "a Pillow image cannot be converted to L .its mode is I"),
        ([Image.new("F", (5, 5))], "its mode is F, expected 8 or 16 bits per channel.: give"),
        (["missing.png"], "no file or folder .*missing.png"),
    ],
)
def test_what_is_no_image_is_refused(images, message):
    with pytest.raises(UserError, match=message):
        ImagePreprocessing((1, 28, 28))(images)


def test_other_inputs_than_images_are_refused():
    for shape in ((40,), (1, 28, 20), (2, 28, 28)):
        with pytest.raises(UserError, match="no square images"):
            ImagePreprocessing(shape)


def test_floats_are_rounded_to_the_nearest_pixel():
    image = torch.full((1, 1, 28, 28), 0.501)  # 127.755 of 255
    assert torch.equal(ImagePreprocessing((1, 28, 28))(image), torch.full_like(image, 128 / 255))


def test_floats_may_exceed_the_range_by_rounding():
    image = torch.full((1, 1, 28, 28), 1.0000001)
    image[..., 0] = -1e-7
    expected = torch.ones_like(image)
    expected[..., 0] = 0
    assert torch.equal(ImagePreprocessing((1, 28, 28))(image), expected)


def test_bfloat16_is_a_type_of_images():
    image = torch.linspace(0, 1, 28 * 28).reshape(1, 1, 28, 28).bfloat16()
    prepare = ImagePreprocessing((1, 28, 28))
    assert torch.equal(prepare(image), prepare(image.float()))


def test_an_image_file_of_unknown_range_is_refused(tmp_path):
    file = tmp_path / "depth.tif"
    Image.new("F", (5, 5)).save(file)
    with pytest.raises(UserError, match=r"depth\.tif cannot be decoded .*its mode is F"):
        ImagePreprocessing((1, 28, 28))([file])
