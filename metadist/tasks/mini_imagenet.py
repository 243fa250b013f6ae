"""MiniImageNet: 100 classes of ImageNet, 600 images each, 84 by 84 pixels."""

import functools
from pathlib import Path
from typing import ClassVar

from metadist.tasks import image_files, mini_imagenet_files
from metadist.tasks.decoded_images import Counts, DecodedImages, Source, image_source

_PUBLISHED = {
    "train": (
        "n01532829 n01558993 n01704323 n01749939 n01770081 n01843383 n01910747 n02074367 "
        "n02089867 n02091831 n02101006 n02105505 n02108089 n02108551 n02108915 n02111277 "
        "n02113712 n02120079 n02165456 n02457408 n02606052 n02687172 n02747177 n02795169 "
        "n02823428 n02966193 n03017168 n03047690 n03062245 n03207743 n03220513 n03337140 "
        "n03347037 n03400231 n03476684 n03527444 n03676483 n03838899 n03854065 n03888605 "
        "n03908618 n03924679 n03998194 n04067472 n04243546 n04251144 n04258138 n04275548 "
        "n04296562 n04389033 n04435653 n04443257 n04509417 n04515003 n04596742 n04604644 "
        "n04612504 n06794110 n07584110 n07697537 n07747607 n09246464 n13054560 n13133613"
    ),
    "validation": (
        "n01855672 n02091244 n02114548 n02138441 n02174001 n02950826 n02971356 n02981792 "
        "n03075370 n03417042 n03535780 n03584254 n03770439 n03773504 n03980874 n09256479"
    ),
    "test": (
        "n01930112 n01981276 n02099601 n02110063 n02110341 n02116738 n02129165 n02219486 "
        "n02443484 n02871525 n03127925 n03146219 n03272010 n03544143 n03775546 n04146614 "
        "n04149813 n04418357 n04522168 n07613480"
    ),
}
PUBLISHED = {split: names.split() for split, names in _PUBLISHED.items()}
"""Ravi and Larochelle's split (2017, openreview rJY0-Kcll), by WordNet identifiers, sorted."""

EXAMPLES = 600
"""Images per class."""


class MiniImageNet(DecodedImages):
    """MiniImageNet in the split of Ravi and Larochelle (2017, openreview rJY0-Kcll).

    64 classes for training, 16 for validation and 20 for test, in RGB. Images of another size are
    resized to 84 x 84 with the Lanczos filter, as in MAML's code. `metadist fetch mini_imagenet`
    downloads the images, after showing ImageNet's terms.

    `root` has one of these layouts, in this order of precedence: folders `train`, `val` and `test`
    with a folder of images for each class; `images/` with `train.csv`, `val.csv` and `test.csv`
    (`filename,label`), the images in it or in a subfolder for each class;
    `mini-imagenet-cache-train.pkl`, `-val.pkl` (learn2learn: `-validation.pkl`) and `-test.pkl`;
    `miniImageNet_category_split_train_phase_train.pickle`, `_val.pickle` and `_test.pickle`. Images
    are decoded into a file of 1.27 GB.

    The split in `protocol` is "unknown" unless the classes' names are the WordNet identifiers of
    Ravi and Larochelle's split.

    See `DecodedImages` for the arguments.

    Attributes:
        input_shape: (3, 84, 84).
        regression: False.
        classes: for each split the names of its classes, such as `n01532829`.
    """

    dataset_name = "mini_imagenet"
    title = "MiniImageNet"
    class_split = "ravi_larochelle"
    expected: ClassVar = {split: Counts(len(names), EXAMPLES) for split, names in PUBLISHED.items()}

    def _find(self, root: Path) -> Source:
        if classes := image_files.find_classes_of_splits(root):
            return image_source(self.dataset_name, classes, mini_imagenet_files.SIDE)
        pickles = mini_imagenet_files.find(root)
        files = [(file.name, file) for file in pickles.values()]
        decode = functools.partial(mini_imagenet_files.decode, pickles)
        return Source(self.dataset_name, files, (), decode, pickles)

    def _split_protocol(self) -> dict[str, object]:
        # Some copies have other classes, or other names for them.
        return (
            super()._split_protocol() if self.classes == PUBLISHED else {"class_split": "unknown"}
        )
