import functools
import random

import numpy as np
import pytest
import torch
from omniglot_tree import write_zips
from torchvision.transforms import v2

from metadist.errors import UserError
from metadist.tasks import (
    CUB,
    FC100,
    SPLITS,
    Augment,
    CifarFS,
    FewShotTasks,
    Glyphs,
    ImageClasses,
    ImageDataset,
    ImageFolder,
    MiniImageNet,
    Normalize,
    Omniglot,
    SupervisedTasks,
    TieredImageNet,
    task_keys,
)
from metadist.tasks.transforms import apply_transforms

SPLIT_CLASSES = {"train": np.arange(8), "validation": np.arange(8, 14), "test": np.arange(14, 20)}


def labelled_pixels():
    """Images whose pixels tell class and example: all of row 0 the class, the rest the example."""
    images = np.empty((20, 10, 4, 4), dtype=np.uint8)
    images[:, :, 0] = np.arange(20)[:, None, None]
    images[:, :, 1:] = np.arange(10)[None, :, None, None]
    return images


def class_and_example(inputs):
    pixels = (inputs * 255).round().to(torch.int64)
    return pixels[:, 0, 0, 0].tolist(), pixels[:, 0, 1, 0].tolist()


def test_layout_labels_and_disjointness():
    tasks = FewShotTasks(ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES), 5, 2, 3)
    for split in SPLITS:
        for key in task_keys(0, split, 3, range(50)):
            episode = tasks.sample(key)
            assert episode.support.inputs.shape == (10, 1, 4, 4)
            assert episode.query.inputs.shape == (15, 1, 4, 4)
            assert episode.support.inputs.dtype == episode.query.inputs.dtype == torch.float32
            assert episode.support.targets.dtype == episode.query.targets.dtype == torch.int64
            assert episode.support.targets.tolist() == [c for c in range(5) for _ in range(2)]
            assert episode.query.targets.tolist() == [c for c in range(5) for _ in range(3)]
            support, support_examples = class_and_example(episode.support.inputs)
            query, query_examples = class_and_example(episode.query.inputs)
            drawn = support[::2]
            assert len(set(drawn)) == 5
            assert set(drawn) <= set(SPLIT_CLASSES[split].tolist())
            assert support == [c for c in drawn for _ in range(2)]
            assert query == [c for c in drawn for _ in range(3)]
            used = [*zip(support, support_examples, strict=True)]
            used += zip(query, query_examples, strict=True)
            assert len(set(used)) == len(used) == 25


def test_classes_labels_and_examples_are_sampled_uniformly():
    tasks = FewShotTasks(ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES), 2, 1, 1)
    first = np.zeros((8, 10))
    for key in task_keys(1, "train", 0, range(4000)):
        classes, examples = class_and_example(tasks.sample(key).support.inputs)
        first[classes[0], examples[0]] += 1
    # 4000 tasks: class 0 of a task is each of 8 classes 500 times, each example 400 times.
    assert abs(first.sum(axis=1) - 500).max() < 5 * 500**0.5
    assert abs(first.sum(axis=0) - 400).max() < 5 * 400**0.5


@pytest.mark.parametrize("channels", [(), (3,)])
def test_rotations_are_numpys(channels):
    images = np.random.default_rng(0).integers(0, 256, (20, 4, *channels, 6, 6), dtype=np.uint8)
    dataset = ImageClasses("noise", images, SPLIT_CLASSES, rotations=True, test_rotations=False)
    shape = channels or (1,)
    assert dataset.input_shape == (*shape, 6, 6)
    known = {
        np.rot90(images[c, e], turn, axes=(-2, -1)).tobytes(): (c, e, turn)
        for c in range(20)
        for e in range(4)
        for turn in range(4)
    }
    for split, turned in (("train", True), ("test", False)):
        seen = set()
        for key in task_keys(5, split, 0, range(60)):
            episode = FewShotTasks(dataset, 3, 2, 2).sample(key)
            whole = torch.stack(
                [episode.support.inputs.view(3, 2, *shape, 6, 6),
                 episode.query.inputs.view(3, 2, *shape, 6, 6)], dim=1,
            ).flatten(1, 2)  # fmt: skip
            assert whole.max() <= 1
            assert whole.min() >= 0
            found = [
                [known[(example * 255).round().to(torch.uint8).numpy().tobytes()] for example in c]
                for c in whole
            ]
            for examples in found:
                assert len({(c, turn) for c, _, turn in examples}) == 1
                assert len({e for _, e, _ in examples}) == 4
                seen.add(examples[0][2])
            # As in MAML's code, a character comes at most once in a task.
            assert len({examples[0][0] for examples in found}) == 3
        assert seen == ({0, 1, 2, 3} if turned else {0})


def test_sampling_leaves_the_images_unchanged():
    images = labelled_pixels()
    images.setflags(write=False)
    before = images.copy()
    tasks = FewShotTasks(ImageClasses("labels", images, SPLIT_CLASSES, True, True), 5, 2, 3)
    for key in task_keys(0, "train", 0, range(20)):
        tasks.sample(key)
    assert np.array_equal(images, before)


def test_equal_keys_give_equal_episodes_and_others_differ():
    images = np.random.default_rng(0).integers(0, 256, (20, 10, 5, 5), dtype=np.uint8)
    one = FewShotTasks(ImageClasses("noise", images, SPLIT_CLASSES, True, True), 4, 1, 4)
    two = FewShotTasks(ImageClasses("noise", images.copy(), SPLIT_CLASSES, True, True), 4, 1, 4)
    keys = torch.cat(
        [task_keys(s, split, i, range(3)) for s in (0, 1) for split in SPLITS for i in (0, 1)]
    )
    drawn = []
    for key in keys:
        a, b = one.sample(key), two.sample(key)
        for ours, theirs in zip((*a.support, *a.query), (*b.support, *b.query), strict=True):
            assert torch.equal(ours, theirs)
        drawn.append(a.query.inputs.numpy().tobytes())
    assert len(set(drawn)) == len(keys) == 36


def test_split_classes_and_the_interface():
    images = labelled_pixels()
    dataset = ImageClasses("labels", images, SPLIT_CLASSES, rotations=True)
    assert isinstance(dataset, ImageDataset)
    assert np.array_equal(dataset.split_classes("validation"), images[8:14])
    assert dataset.outputs(7) == 7
    assert not dataset.regression
    assert FewShotTasks(dataset, 2, 1, 3).protocol() == {
        "ways": 2, "shots": 1, "queries": 3, "dataset": "labels",
        "data_checksum": dataset.protocol()["data_checksum"],
        "rotations": True, "test_rotations": False,
    }  # fmt: skip


def test_the_checksum_depends_on_images_names_and_splits():
    images = labelled_pixels()
    names = [str(index) for index in range(len(images))]
    other_images, other_splits = images.copy(), {**SPLIT_CLASSES, "test": SPLIT_CLASSES["test"][1:]}
    other_images[3] += 1
    found = [
        ImageClasses("labels", of_classes, splits, class_names=of).protocol()["data_checksum"]
        for of_classes, splits, of in (
            (images, SPLIT_CLASSES, names),
            (list(images), SPLIT_CLASSES, names),
            (other_images, SPLIT_CLASSES, names),
            (images[:, :-1], SPLIT_CLASSES, names),
            (images, other_splits, names),
            (images, SPLIT_CLASSES, names[::-1]),
        )
    ]
    assert found[0] == found[1] and len(set(found)) == 5


def test_the_checksum_is_that_of_earlier_versions():
    found = ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES).protocol()["data_checksum"]
    assert found == "f2ea1b36"  # saved runs are compared by it


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ((7, 1, 1), ["task.ways is 7", "validation", "only 6 classes"]),
        ((5, 4, 7), ["task.shots + task.queries is 4 + 7 = 11", "only 10 examples"]),
        ((0, 1, 1), ["task.ways must be at least 1, got 0"]),
        ((5, 0, 1), ["task.shots must be at least 1, got 0"]),
        ((5, 1, -3), ["task.queries must be at least 1, got -3"]),
    ],
)
def test_impossible_tasks_are_refused(counts, parts):
    dataset = ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES)
    with pytest.raises(UserError) as error:
        FewShotTasks(dataset, *counts)
    assert all(text in str(error.value) for text in parts), error.value
    assert "\n" not in str(error.value)


def test_largest_possible_task_uses_everything():
    episode = FewShotTasks(
        ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES), 6, 4, 6
    ).sample(task_keys(0, "test", 0, range(1))[0])
    assert len(episode.support.targets) + len(episode.query.targets) == 60


def test_wrong_arrays_are_value_errors():
    with pytest.raises(ValueError, match="uint8"):
        ImageClasses("floats", np.zeros((20, 2, 4, 4)), SPLIT_CLASSES)
    with pytest.raises(ValueError, match="square"):
        ImageClasses(
            "oblong", np.zeros((20, 2, 4, 5), dtype=np.uint8), SPLIT_CLASSES, test_rotations=True
        )
    sizes = [np.zeros((2, 4, 4 + index // 19), dtype=np.uint8) for index in range(20)]
    with pytest.raises(ValueError, match="images must be uint8 of shape"):
        ImageClasses("of two sizes", sizes, SPLIT_CLASSES)


def test_tasks_within_groups():
    # Of the 8 training classes 0, 2, 4, 6 are of group a, 1 and 3 of b, 5 and 7 of c.
    groups = list("ababacac" + "ddddde" + "ffffff")
    dataset = ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES, groups=groups)
    drawn = {"a": 0, "b": 0, "c": 0}
    tasks = FewShotTasks(dataset, 2, 1, 1)
    for key in task_keys(0, "train", 0, range(600)):
        classes, _ = class_and_example(tasks.sample(key).support.inputs)
        [group] = {groups[index] for index in classes}
        drawn[group] += 1
    # Each group is as likely as another, however many classes it has.
    assert all(abs(count - 200) < 5 * 200**0.5 for count in drawn.values())
    only_a = [dataset.episode(np.random.default_rng(seed), "train", 4, 1, 1) for seed in range(20)]
    for episode in only_a:
        classes, _ = class_and_example(episode.support.inputs)
        assert {groups[index] for index in classes} == {"a"}
    message = r"largest group in the train split .* only 4 classes; .* set groups=None"
    with pytest.raises(UserError, match=message):
        dataset.check(5, 1, 1)


def test_the_same_drawers_need_as_many_examples_of_each_class():
    images = [np.zeros((count, 8, 8), np.uint8) for count in (4, 2, 4)]
    splits = {split: np.array([index]) for index, split in enumerate(SPLITS)}
    with pytest.raises(
        UserError, match=r"same number of examples in each class, and birds has from 2"
    ):
        ImageClasses("birds", images, splits, test_drawers=True)


def test_channels_that_come_last_are_refused():
    splits = {split: np.array([index]) for index, split in enumerate(SPLITS)}
    with pytest.raises(UserError, match="28 channels of 28 x 3 pixels"):
        ImageClasses("birds", np.zeros((3, 4, 28, 28, 3), np.uint8), splits)


def test_augmentation_depends_on_the_key_and_is_for_training_only():
    images = np.random.default_rng(0).integers(0, 256, (20, 4, 3, 8, 8), dtype=np.uint8)
    plain = FewShotTasks(ImageClasses("noise", images, SPLIT_CLASSES), 3, 1, 2)
    augment = Augment(crop_padding=2, flip=0.5, brightness=0.4, contrast=0.4, saturation=0.4)
    normalize = Normalize(mean=[0.5], std=[0.25])
    changed, again = (
        FewShotTasks(
            ImageClasses("noise", images, SPLIT_CLASSES, normalize=normalize, augment=augment),
            3,
            1,
            2,
        )
        for _ in range(2)
    )
    for split in SPLITS:
        for key in task_keys(0, split, 2, range(3)):
            one, two, before = (tasks.sample(key) for tasks in (changed, again, plain))
            for part in ("support", "query"):
                inputs = getattr(one, part).inputs
                assert torch.equal(inputs, getattr(two, part).inputs)
                normal = (getattr(before, part).inputs - 0.5) / 0.25
                assert torch.equal(inputs, normal) == (split != "train")
            assert torch.equal(one.query.targets, before.query.targets)


def test_split_classes_are_not_copied():
    images = labelled_pixels()
    offsets = {**SPLIT_CLASSES, "test": np.array([14, 16, 15, 17, 18, 19])}
    dataset = ImageClasses("labels", images, offsets)
    assert all(np.shares_memory(each, images) for each in dataset.split_classes("train"))
    assert np.array_equal(dataset.split_classes("test"), images[[14, 16, 15, 17, 18, 19]])


def unequal(**options) -> ImageClasses:
    """20 classes of 4 to 23 images; pixels tell class and example."""
    images = [np.empty((4 + index, 4, 4), dtype=np.uint8) for index in range(20)]
    for index, of_class in enumerate(images):
        of_class[:, 0] = index
        of_class[:, 1:] = np.arange(len(of_class))[:, None, None]
    names = [f"class{index:02d}" for index in range(20)]
    return ImageClasses("unequal", images, SPLIT_CLASSES, class_names=names, **options)


def test_classes_of_unequal_sizes_are_sampled_uniformly():
    tasks = FewShotTasks(unequal(), 2, 1, 3)
    drawn = np.zeros((20, 23))
    for key in task_keys(0, "test", 0, range(3000)):
        episode = tasks.sample(key)
        examples = [*zip(*class_and_example(episode.support.inputs), strict=True)]
        examples += zip(*class_and_example(episode.query.inputs), strict=True)
        assert len(set(examples)) == 8
        for example in examples:
            drawn[example] += 1
    for index in SPLIT_CLASSES["test"]:
        size = 4 + index
        assert not drawn[index, size:].any()
        # 3000 tasks, 2 of 6 classes, 4 of a class's examples.
        expected = 3000 * 2 / 6 * 4 / size
        assert abs(drawn[index, :size] - expected).max() < 5 * expected**0.5


def test_equal_sizes_as_a_list_give_the_same_tasks():
    images = labelled_pixels()
    for key in task_keys(3, "train", 1, range(5)):
        one, two = (
            FewShotTasks(ImageClasses("labels", given, SPLIT_CLASSES), 5, 2, 3).sample(key)
            for given in (images, list(images))
        )
        assert torch.equal(one.query.inputs, two.query.inputs)


def test_classes_that_are_too_small_are_named_or_left_out(caplog):
    with pytest.raises(UserError) as error:
        FewShotTasks(unequal(), 2, 1, 6)
    message = str(error.value)
    assert "1 + 6 = 7, but some classes of unequal have fewer examples" in message
    assert "class00 (4), class01 (5), class02 (6); lower" in message
    assert message.endswith("add images, or remove these classes.")
    names = np.array([f"name{index:02d}" for index in range(20)])
    named = ImageClasses("named", unequal().images, SPLIT_CLASSES, class_names=names)
    with pytest.raises(UserError, match=r"named have fewer examples: name00 \(4\), name01"):
        FewShotTasks(named, 2, 1, 6)
    with caplog.at_level("INFO", logger="metadist"):
        tasks = FewShotTasks(unequal(skip_small_classes=True), 2, 1, 6)
    [line] = caplog.messages
    assert line.startswith("classes of unequal with fewer than 7 examples are left out: cl")
    drawn = {
        index
        for key in task_keys(0, "train", 0, range(100))
        for index in class_and_example(tasks.sample(key).support.inputs)[0]
    }
    assert drawn == {3, 4, 5, 6, 7}
    with pytest.raises(UserError, match=r"train split of unequal has only 5 classes with 7 examp"):
        FewShotTasks(unequal(skip_small_classes=True), 6, 1, 6)
    with pytest.raises(UserError, match=r"of unequal has only 1 class with 11 examples; lower"):
        unequal(skip_small_classes=True).check(2, 1, 10, ("train",))
    with pytest.raises(UserError, match=r"class06 \(10\), class07 \(11\) and 2 more; lower"):
        unequal().check(2, 1, 13)


def test_supervised_training_leaves_small_classes_out(caplog):
    with caplog.at_level("INFO", logger="metadist"):
        tasks = SupervisedTasks(unequal(skip_small_classes=True), 200, held_out=6, queries=3)
    assert "3 training classes with 6 examples or fewer are left out" in caplog.messages
    assert tasks.outputs == 5 and "5 training classes" in tasks.split_descriptions["validation"]
    inputs, labels = tasks.sample(task_keys(0, "train", 0, range(1))[0]).query
    classes = class_and_example(inputs)[0]
    assert {*zip(classes, labels.tolist(), strict=True)} == {(3 + n, n) for n in range(5)}
    with pytest.raises(UserError, match="of a class's 11 to train on: hold out 10 at most"):
        SupervisedTasks(unequal(skip_small_classes=True), held_out=11, queries=3)


def test_a_training_class_of_one_image_is_to_be_removed():
    images = unequal().images
    splits = {**SPLIT_CLASSES, "train": np.arange(1)}
    single = ImageClasses("single", [images[0][:1], *images[1:]], splits)
    with pytest.raises(UserError, match=r"add images, or remove these classes\."):
        SupervisedTasks(single, held_out=1, queries=3)


def test_supervised_batches_of_unequal_classes():
    tasks = SupervisedTasks(unequal(), micro_batch_size=400, held_out=2, ways=2, queries=3)
    train, held_out = (
        {*zip(*class_and_example(tasks.sample(key).query.inputs), strict=True)}
        for split in ("train", "validation")
        for key in task_keys(0, split, 0, range(1))
    )
    assert held_out == {(index, 4 + index - back) for index in range(8) for back in (1, 2)}
    assert train <= {(index, example) for index in range(8) for example in range(2 + index)}
    with pytest.raises(UserError, match="leaves no example of a class's 4"):
        SupervisedTasks(unequal(), held_out=4, queries=3)


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomHorizontalFlip(),
        v2.RandomErasing(p=1.0),
        v2.RandomResizedCrop(8),
        v2.RandAugment(),
        v2.Compose([v2.ColorJitter(0.4), v2.GaussianNoise(clip=True)]),
        lambda image: image * random.random() * np.random.random(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_transforms_depend_on_the_key_and_are_for_training_only(transform):
    images = np.random.default_rng(0).integers(0, 256, (20, 4, 3, 8, 8), dtype=np.uint8)
    plain = FewShotTasks(ImageClasses("noise", images, SPLIT_CLASSES), 3, 1, 2)
    dataset = ImageClasses("noise", images, SPLIT_CLASSES, transforms=[transform])
    changed = FewShotTasks(dataset, 3, 1, 2)
    differs = False
    for split in SPLITS:
        for key in task_keys(0, split, 2, range(3)):
            one = changed.sample(key)
            # Other random numbers in between, as on another rank.
            torch.rand(1), np.random.random(), random.random()
            two, before = changed.sample(key), plain.sample(key)
            for part in ("support", "query"):
                inputs = getattr(one, part).inputs
                assert torch.equal(inputs, getattr(two, part).inputs)
                same = torch.equal(inputs, getattr(before, part).inputs)
                assert same or split == "train"
                differs |= not same
    assert differs
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    changed.sample(task_keys(0, "train", 2, range(1))[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state()), random.getstate()) == states[1:]
    [name] = changed.protocol()["transforms"]
    assert name.startswith(getattr(transform, "__qualname__", type(transform).__name__))


def test_each_image_has_its_own_transform_and_its_shape_is_kept():
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 3, 8, 8), dtype=np.uint8)
    flip = ImageClasses("noise", images, SPLIT_CLASSES, transforms=[v2.RandomHorizontalFlip()])
    found = flip.inputs(images[0], "train", np.random.default_rng(0)).numpy()
    plain = flip.inputs(images[0], "test", np.random.default_rng(0)).numpy()
    flipped = [np.array_equal(f, p[..., ::-1]) for f, p in zip(found, plain, strict=True)]
    kept = [np.array_equal(f, p) for f, p in zip(found, plain, strict=True)]
    assert any(flipped)
    assert any(kept)
    assert all(np.logical_xor(flipped, kept))
    smaller = ImageClasses("noise", images, SPLIT_CLASSES, transforms=[v2.CenterCrop(6)])
    with pytest.raises(UserError, match=r"shape \(3, 6, 6\), expected .* \(3, 8, 8\)"):
        smaller.inputs(images[0], "train", np.random.default_rng(0))
    double = ImageClasses("noise", images, SPLIT_CLASSES, transforms=[torch.Tensor.double])
    with pytest.raises(UserError, match=r"give torch.float64 of shape"):
        double.inputs(images[0], "train", np.random.default_rng(0))
    noise = ImageClasses("noise", images, SPLIT_CLASSES, transforms=[torch.rand_like])
    drawn = [noise.inputs(images[0, :1], "train", np.random.default_rng(s)) for s in range(9)]
    assert len({each.numpy().tobytes() for each in drawn}) == 9


@pytest.mark.parametrize("split", ["validation", "test"])
def test_all_classes_of_a_test_task_share_their_example_numbers_if_drawers_do(split):
    dataset = ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES, test_drawers=True)
    tasks = FewShotTasks(dataset, 5, 1, 2)
    pairs = set()
    for key in task_keys(0, split, 0, range(40)):
        episode = tasks.sample(key)
        _, support = class_and_example(episode.support.inputs)
        _, query = class_and_example(episode.query.inputs)
        first, second, third = support[0], *query[:2]
        assert support == [first] * 5 and query == [second, third] * 5
        assert len({first, second, third}) == 3
        pairs.add((first, second))
    assert len(pairs) > 20
    _, mixed = class_and_example(tasks.sample(task_keys(0, "train", 0, range(1))[0]).support.inputs)
    assert len(set(mixed)) > 1


@pytest.mark.parametrize("options", [{}, {"test_drawers": True}])
def test_descriptions_are_of_the_sampled_images(options):
    names = [f"split/class {index}" for index in range(20)]
    dataset = ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES, class_names=names, **options)
    tasks = FewShotTasks(dataset, 3, 1, 2)
    for key in task_keys(0, "test", 0, range(30)):
        classes, examples = class_and_example(tasks.sample(key).query.inputs)
        described = tasks.describe(key)
        assert described.classes == [f"class {index}" for index in classes[::2]]
        assert described.query_images == examples


def test_descriptions_name_rotations():
    # In the upper left corner the number of a class, in the others as many more as quarter turns.
    images = np.zeros((20, 3, 2, 2), dtype=np.uint8)
    for turns, (row, column) in enumerate([(0, 0), (1, 0), (1, 1), (0, 1)]):
        images[:, :, row, column] = 20 * turns + np.arange(20)[:, None]
    dataset = ImageClasses("turned", images, SPLIT_CLASSES, test_rotations=True)
    tasks = FewShotTasks(dataset, 3, 1, 1)
    found = set()
    for key in task_keys(0, "test", 0, range(30)):
        pixels = (tasks.sample(key).query.inputs * 255).round().to(torch.int64)
        for image, name in zip(pixels, tasks.describe(key).classes, strict=True):
            # np.rot90 turns counter-clockwise: the upper left corner moves to the lower left.
            turns = int((image[0] < 20).nonzero()[0] @ torch.tensor([2, 1]))
            angle = {0: "", 2: " (90°)", 3: " (180°)", 1: " (270°)"}[turns]
            assert name == f"{int(image.min())}{angle}"
            found.add(angle)
    assert len(found) == 4


def test_a_dataset_with_episodes_of_its_own_is_not_described():
    class Own(ImageClasses):
        def episode(self, generator, split, ways, shots, queries):
            generator.random()
            return super().episode(generator, split, ways, shots, queries)

    tasks = FewShotTasks(Own("own", labelled_pixels(), SPLIT_CLASSES), 3, 1, 2)
    assert tasks.describe(task_keys(0, "test", 0, range(1))[0]) is None


def test_augmentation_precedes_transforms_and_normalization():
    images = np.random.default_rng(0).integers(1, 256, (20, 4, 3, 8, 8), dtype=np.uint8)

    def clear_the_left_column(image):
        image[..., 0] = 0
        return image

    options = {"augment": Augment(flip=1.0), "transforms": [clear_the_left_column]}
    normalize = Normalize(mean=[0.5], std=[0.25])
    dataset = ImageClasses("noise", images, SPLIT_CLASSES, normalize=normalize, **options)
    expected = images[0, ..., ::-1] / 255
    expected[..., 0] = 0
    found = dataset.inputs(images[0], "train", np.random.default_rng(0))
    np.testing.assert_allclose(found, (expected - 0.5) / 0.25, atol=1e-6)
    protocol = dataset.protocol()
    assert protocol["normalize"] == {"mean": [0.5], "std": [0.25]}
    assert protocol["augment"] == {"flip": 1.0}
    with pytest.raises(UserError, match=r"normalize\.mean has 2 numbers: give 1, or 3, one per ch"):
        ImageClasses("noise", images, SPLIT_CLASSES, normalize=Normalize(mean=[0.5, 0.5]))


def test_tasks_with_a_sampling_of_their_own_are_not_described():
    class Own(FewShotTasks):
        def sample(self, key):
            return super().sample(key.flip(0))

    tasks = Own(ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES), 3, 1, 2)
    assert tasks.describe(task_keys(0, "test", 0, range(1))[0]) is None


def tiny_omniglot(tmp_path):
    options = {"test_drawers": True, "within_alphabet": True}
    return functools.partial(Omniglot, str(write_zips(tmp_path)), **options)


@pytest.mark.usefixtures("small_omniglot")
@pytest.mark.parametrize(
    "make",
    [
        tiny_omniglot,
        lambda _: functools.partial(
            Glyphs, train_classes=2, validation_classes=2, test_classes=2, examples=2
        ),
        *(
            lambda tmp_path, c=c: functools.partial(c, str(tmp_path))
            for c in (CUB, FC100, CifarFS, ImageFolder, MiniImageNet, TieredImageNet)
        ),
    ],
)
def test_every_dataset_takes_the_options_of_its_images(tmp_path, monkeypatch, make):
    images, names = np.zeros((3, 4, 3, 8, 8), np.uint8), ["train/a", "validation/b", "test/c"]
    splits = {split: np.array([index]) for index, split in enumerate(SPLITS)}
    for each in (CUB, FC100, CifarFS, ImageFolder, MiniImageNet, TieredImageNet):
        monkeypatch.setattr(each, "_load", lambda *_: (images, names))
        monkeypatch.setattr(each, "_split", lambda *_: splits)
    normalize, augment = Normalize(mean=[0.5]), Augment(flip=0.5)
    transforms = [v2.RandomErasing()]
    build = make(tmp_path)
    dataset = build(normalize=normalize, augment=augment, transforms=transforms)
    assert (dataset.normalize, dataset.augment) == (normalize, augment)
    assert dataset.transforms is transforms
    for drawers in {"test_drawers"} & build.keywords.keys():
        assert dataset.test_drawers and dataset.protocol()[drawers] is True
    if build.func is Glyphs:
        return
    for rotations in ((True, False), (False, True)):
        turned = build(rotations=rotations[0], test_rotations=rotations[1])
        assert (turned.rotations, turned.test_rotations) == rotations


def test_transforms_that_do_not_fit_are_one_sentence():
    images = torch.zeros(2, 1, 28, 28)
    with pytest.raises(UserError, match=r"transforms cannot be applied to images of shape \(1, 28"):
        apply_transforms([v2.RandomCrop(64)], images, np.random.default_rng(0))

    def fails(image):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        apply_transforms([fails], images, np.random.default_rng(0))


def test_small_classes_of_a_group_are_left_out():
    images = [np.zeros((count, 8, 8), np.uint8) for count in (3, 3, 9, 9) * len(SPLITS)]
    dataset = ImageClasses(
        "uneven",
        images,
        {split: np.arange(4) + 4 * index for index, split in enumerate(SPLITS)},
        groups=["few", "few", "many", "many"] * len(SPLITS),
        skip_small_classes=True,
        rotations=False,
    )
    tasks = FewShotTasks(dataset, ways=2, shots=2, queries=4)
    for key in task_keys(0, "test", 0, range(8)):
        assert tasks.sample(key).query.inputs.shape[0] == 8
    with pytest.raises(UserError, match=r"ways is 3, but the .* split of uneven has only 2"):
        FewShotTasks(dataset, ways=3, shots=2, queries=4)


def test_tasks_that_a_dataset_cannot_sample_are_refused():
    dataset, generator = Glyphs(), np.random.default_rng(0)
    with pytest.raises(UserError, match="a task has 25 examples of each class, but a class of"):
        dataset.episode(generator, "train", 5, 10, 15)
    with pytest.raises(UserError, match="ways is 5000, but the train split"):
        dataset.episode(generator, "train", 5000, 1, 1)
    with pytest.raises(UserError, match="there is no split 'val': choose one of train, validation"):
        dataset.episode(generator, "val", 5, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": np.array([14, 15, 15])}, "the split test of labels has a class twice"),
        ({"test": np.arange(-6, 0)}, r"has the class -6, and its 20 classes are 0 to 19"),
        ({"test": np.array([14, 20])}, "the split test of labels has the class 20"),
        ({"test": np.arange(20) > 13}, "has values of type bool and shape"),
        ({"test": np.array([14.0, 15.0])}, "has values of type float64"),
        ({"test": np.array([[14], [15]])}, r"and shape \(2, 1\): give a list of the indices"),
        ({"test": np.array([3, 15])}, "class 3 of labels is in train and in test"),
        ({"test": np.array([9, 15])}, "class 9 of labels is in validation and in test"),
    ],
)
def test_splits_that_are_no_indices_of_classes_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES | changes)


def test_what_is_given_for_each_class_is_given_for_all():
    without = {split: SPLIT_CLASSES[split] for split in ("train", "test")}
    with pytest.raises(UserError, match="the splits of labels are train, test, and validation is"):
        ImageClasses("labels", labelled_pixels(), without)
    for option in ("class_names", "groups"):
        with pytest.raises(UserError, match=f"labels has 20 classes and 19 {option}"):
            ImageClasses("labels", labelled_pixels(), SPLIT_CLASSES, **{option: ["a"] * 19})
    with pytest.raises(UserError, match="is no list"):
        Normalize(mean=0.5)
