"""FC100: the 100 classes of CIFAR-100 for few-shot tasks, divided by superclasses."""

from metadist.tasks.cifar_fs import CifarFS

SUPERCLASSES = {
    "train": {
        "fish": "aquarium_fish flatfish ray shark trout",
        "flowers": "orchid poppy rose sunflower tulip",
        "food_containers": "bottle bowl can cup plate",
        "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
        "household_electrical_devices": "clock keyboard lamp telephone television",
        "household_furniture": "bed chair couch table wardrobe",
        "large_man-made_outdoor_things": "bridge castle house road skyscraper",
        "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
        "reptiles": "crocodile dinosaur lizard snake turtle",
        "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
        "vehicles_1": "bicycle bus motorcycle pickup_truck train",
        "vehicles_2": "lawn_mower rocket streetcar tank tractor",
    },
    "validation": {
        "large_carnivores": "bear leopard lion tiger wolf",
        "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
        "non-insect_invertebrates": "crab lobster snail spider worm",
        "small_mammals": "hamster mouse rabbit shrew squirrel",
    },
    "test": {
        "aquatic_mammals": "beaver dolphin otter seal whale",
        "insects": "bee beetle butterfly caterpillar cockroach",
        "medium_mammals": "fox porcupine possum raccoon skunk",
        "people": "baby boy girl man woman",
    },
}
"""CIFAR-100's 20 superclasses and the classes of each, by split (Oreshkin et al. 2018)."""


class FC100(CifarFS):
    """FC100 (Oreshkin et al. 2018, arXiv 1805.10123): CIFAR-100 in 60, 20 and 20 classes.

    The superclasses of CIFAR-100 are divided into 12, 4 and 4, so that test classes are less
    similar to training classes than in CIFAR-FS. Files, arguments and cache are the same as for
    `CifarFS`.

    Attributes:
        input_shape: (3, 32, 32).
        regression: False.
    """

    dataset_name = "fc100"
    class_split = "oreshkin"
    classes = {  # noqa: RUF012  (constant)
        split: sorted(" ".join(superclasses.values()).split())
        for split, superclasses in SUPERCLASSES.items()
    }
