"""A dataset: images of random blobs, generated."""

import numpy as np

from metadist.tasks import SPLITS, ImageClasses


class MyDataset(ImageClasses):
    """Classes of images: a class is a pattern, an example is the pattern with noise.

    Replace the images by your own: a uint8 array of shape (classes, examples, height, width) or
    (classes, examples, channels, height, width). A dataset of other inputs implements
    `metadist.tasks.TaskDataset`.

    Args:
        classes: the number of classes, divided among training, validation and test.
        examples: images per class.
        seed: the seed of the images.
    """

    def __init__(self, classes: int = 60, examples: int = 20, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        patterns = generator.integers(0, 256, size=(classes, 1, 8, 8))
        noise = generator.normal(scale=60, size=(classes, examples, 8, 8))
        images = (patterns + noise).clip(0, 255).astype(np.uint8)
        parts = np.split(np.arange(classes), [classes // 2, classes * 3 // 4])
        super().__init__("my_dataset", images, dict(zip(SPLITS, parts, strict=True)))
