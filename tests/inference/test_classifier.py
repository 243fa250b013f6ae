"""FewShotClassifier: a trained model with scikit-learn's conventions."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from omniglot_tree import SMALL_COUNTS, ink, png, write_zips
from PIL import Image
from tiny import build
from worlds import run_world

from metadist import FewShotClassifier
from metadist.algorithms import MAML
from metadist.config import load_learner
from metadist.errors import UserError
from metadist.models import MLP
from metadist.tasks import (
    Examples,
    Glyphs,
    ImagePreprocessing,
    Normalize,
    Omniglot,
    omniglot,
)
from metadist.training import Trainer, predict_unlabeled

DATASET = Glyphs(seed=1, train_classes=1, validation_classes=1, test_classes=5, examples=7)
PIXELS = np.stack(DATASET.split_classes("test"))
"""Other characters than in training: uint8 (5, 7, 28, 28)."""
LEARN = (
    *("trainer.iterations=30", "trainer.eval_every=0", "++dataset.train_classes=100"),
    *("model.filters=16", "model.pooling=max", "trainer.checkpoint_every=0"),
)
NAMES = ["gimel", "alef", "dalet", "bet", "he"]


def trained(directory, *overrides, omit=()) -> None:
    Trainer(build(directory, "strategy=local", *overrides, omit=omit)).run()


def run_of(tmp_path_factory, algorithm: str, *overrides: str) -> Path:
    directory = tmp_path_factory.mktemp("runs") / algorithm
    options = (f"algorithm={algorithm}", "task.ways=5", "dataset.normalize.mean=[0.1]")
    run_world(trained, 1, directory, *options, *overrides)
    return directory


@pytest.fixture(scope="module")
def maml(tmp_path_factory):
    return run_of(tmp_path_factory, "maml", *LEARN)


@pytest.fixture(scope="module")
def prototypical(tmp_path_factory):
    return run_of(tmp_path_factory, "prototypical", *LEARN)


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_a_device_that_is_not_here_is_refused_before_anything_is_read(tmp_path, device):
    with pytest.raises(
        UserError, match=f"device={device} cannot be used here .*: choose cpu, cuda"
    ):
        FewShotClassifier.load(tmp_path / "none", device=device)


def task(ways: int = 5, shots: int = 2) -> tuple[np.ndarray, list[str], np.ndarray, list[str]]:
    """Images and labels of the support set, then of the queries; the classes interleaved."""
    support = PIXELS[:ways, :shots].swapaxes(0, 1).reshape(-1, 28, 28)
    query = PIXELS[:ways, shots:].swapaxes(0, 1).reshape(-1, 28, 28)
    return support, NAMES[:ways] * shots, query, NAMES[:ways] * (7 - shots)


@pytest.mark.parametrize("name", ["maml", "prototypical"])
def test_one_image_per_call_gives_what_all_together_give(request, name):
    classifier = FewShotClassifier.load(request.getfixturevalue(name))
    support, labels, query, truth = task()
    assert classifier.fit(support, labels) is classifier
    jointly = classifier.predict_proba(query)
    assert classifier.classes_.tolist() == sorted(NAMES) and jointly.shape == (25, 5)
    np.testing.assert_allclose(jointly.sum(1), 1, rtol=1e-5)
    some = slice(0, 7)  # of every class
    alone = np.concatenate([classifier.predict_proba([image]) for image in query[some]])
    np.testing.assert_allclose(alone, jointly[some], rtol=1e-3, atol=1e-4)
    predicted = classifier.predict(query)
    assert np.array_equal(predicted[:3], [classifier.predict([each])[0] for each in query[:3]])
    assert np.mean(predicted == truth) > 0.6  # chance: 0.2


def test_inputs_are_prepared_as_by_the_dataset_of_the_run(maml):
    support, labels, query, _ = task()
    saved = load_learner(maml)
    own = FewShotClassifier(saved.learner, saved.outputs, batch_statistics="transductive")
    inputs = [torch.from_numpy(each)[:, None] / 255 - 0.1 for each in (support, query)]
    own.fit(inputs[0].double().numpy(), labels)  # of any type
    loaded = FewShotClassifier.load(maml, batch_statistics="transductive").fit(support, labels)
    np.testing.assert_allclose(
        loaded.predict_proba(query), own.predict_proba(inputs[1]), rtol=1e-4, atol=1e-5
    )


def test_queries_are_prepared_as_they_are_predicted(maml):
    support, labels, query, _ = task()
    prepare = ImagePreprocessing((1, 28, 28), inverted=False, normalize=Normalize([0.1]))
    sizes = []

    def counted(images):
        sizes.append(len(images))
        return prepare(images)

    classifier = FewShotClassifier.load(maml, preprocess=counted).fit(support, labels)
    many = np.concatenate([query] * (600 // len(query) + 1))[:600]
    found = classifier.predict_proba(image for image in many)
    assert sizes == [len(support), 256, 256, 88]
    np.testing.assert_allclose(found[: len(query)], classifier.predict_proba(query), atol=1e-6)


def test_another_preprocessing_can_be_given(maml):
    support, labels, query, _ = task()
    prepare = ImagePreprocessing((1, 28, 28), inverted=True, normalize=Normalize([0.1]))
    inverted = FewShotClassifier.load(maml, preprocess=prepare).fit(255 - support, labels)
    expected = FewShotClassifier.load(maml).fit(support, labels).predict_proba(query)
    found = inverted.predict_proba(255 - query)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_preprocessing_that_returns_no_tensor_is_refused(maml):
    support, labels, _, _ = task()
    classifier = FewShotClassifier.load(maml, preprocess=list)
    with pytest.raises(UserError, match="preprocess returned a list: return a tensor"):
        classifier.fit(support, labels)


def test_many_images_are_predicted_in_parts(prototypical):
    classifier = FewShotClassifier.load(prototypical)
    support, labels, query, _ = task()
    many = np.concatenate([query] * 11)
    found = classifier.fit(support, labels).predict(many)
    assert np.array_equal(found, np.tile(classifier.predict(query), 11))


@pytest.mark.parametrize("count", [256, 259, 260])
def test_grey_images_of_a_model_of_colors_are_predicted_in_parts(count):
    prepare = ImagePreprocessing((3, 2, 2))
    classifier = FewShotClassifier(
        MAML(MLP(prepare.input_shape, 3, [4], batch_norm=False)), 3, preprocess=prepare
    )
    grey = torch.rand(count, 2, 2)
    classifier.fit(grey[:6], [0, 1, 2] * 2)
    expected = classifier.predict_proba([image.expand(3, 2, 2) for image in grey])
    np.testing.assert_allclose(classifier.predict_proba(grey), expected, rtol=1e-6)


def test_transductive_images_are_one_batch_of_any_size(maml):
    saved = load_learner(maml)
    found = FewShotClassifier(saved.learner, saved.outputs, batch_statistics="transductive")
    inputs = torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    support = Examples(inputs[:5], torch.arange(5))
    expected = predict_unlabeled(saved.learner, support, inputs, "transductive").softmax(1)
    probabilities = found.fit(inputs[:5], range(5)).predict_proba(inputs)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4, atol=1e-6)
    halves = [found.predict_proba(each) for each in inputs.split(150)]
    assert not np.allclose(np.concatenate(halves), probabilities, rtol=1e-4, atol=1e-6)


def test_the_score_is_the_accuracy(prototypical):
    classifier = FewShotClassifier.load(prototypical)
    assert repr(classifier) == "FewShotClassifier(prototypical networks, outputs=5)"
    classifier.fit(PIXELS[:3, 0], ["a", "b", "c"])
    assert repr(classifier).endswith("outputs=5, classes=['a', 'b', 'c'])")
    images, labels = PIXELS[:3, 1], np.array(["a", "b", "c"])
    correct = classifier.predict(images) == labels
    assert classifier.score(images, labels) == correct.mean()
    assert classifier.score(images, classifier.predict(images)) == 1.0
    assert classifier.score(images, labels.astype(object)) == correct.mean()
    with pytest.raises(UserError, match=r"3 images and labels of shape \(2,\): give one"):
        classifier.score(images, labels[:2])
    with pytest.raises(UserError, match="labels of type int64 cannot be compared with classes"):
        classifier.score(images, [0, 1, 2])


@pytest.mark.parametrize("labels", [torch.tensor([7, -1]), np.array([7, -1]), [7, -1]])
def test_labels_of_any_type(prototypical, labels):
    classifier = FewShotClassifier.load(prototypical).fit(PIXELS[:2, 0], labels)
    assert classifier.classes_.tolist() == [-1, 7]
    assert classifier.predict(PIXELS[:2, 0]).tolist() == [7, -1]


def test_fewer_classes_and_unequal_numbers_of_examples(maml):
    classifier = FewShotClassifier.load(maml)
    classifier.fit([*PIXELS[0, :3], PIXELS[1, 0], *PIXELS[2, :2]], [0, 0, 0, 1, 2, 2])
    found = classifier.predict_proba(PIXELS[0])
    assert found.shape == (7, 3)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


def test_an_algorithm_of_features_takes_more_classes_than_in_training(tmp_path_factory):
    run = run_of(tmp_path_factory, "prototypical", "task.ways=2", "trainer.iterations=1")
    support, labels, query, _ = task()
    assert FewShotClassifier.load(run).fit(support, labels).predict_proba(query).shape == (25, 5)


@pytest.mark.parametrize(
    ("count", "labels", "message"),
    [
        (6, [0, 1, 2, 3, 4, 5], "6 classes, and MAML was trained with 5 outputs"),
        (6, [0] * 6, "the labels are of fewer than two classes"),
        (6, [0, 1], r"6 images, and labels of shape \(2,\)"),
        (0, [], "there are no images: give at least one"),
    ],
)
def test_labels_that_do_not_fit_are_refused(maml, count, labels, message):
    with pytest.raises(UserError, match=message):
        FewShotClassifier.load(maml).fit(PIXELS.reshape(-1, 28, 28)[:count], labels)


@pytest.mark.parametrize("labels", [["a", None], [["a"], ["b", "c"]]])
def test_labels_that_cannot_be_sorted_are_refused(prototypical, labels):
    images = np.zeros((2, 28, 28), np.uint8)
    with pytest.raises(UserError, match=r"the labels|labels of shape"):
        FewShotClassifier.load(prototypical).fit(images, labels)


def test_one_image_is_no_list_and_a_generator_is_one(prototypical):
    classifier, image = FewShotClassifier.load(prototypical), Image.new("L", (28, 28))
    for one in (image, "a.png", Path("a.png")):
        with pytest.raises(UserError, match="one image was given instead of several"):
            classifier.fit(one, ["a"])
    with pytest.raises(UserError, match="images are of type NoneType: give a list"):
        classifier.fit(None, ["a"])
    classifier.fit([image, image], ["a", "b"])
    assert len(classifier.predict(image for _ in range(3))) == 3


def test_loading_in_inference_mode_changes_nothing(maml):
    images, labels = torch.rand(4, 20, 20), [0, 1, 0, 1]
    expected = FewShotClassifier.load(maml).fit(images, labels).predict_proba(images)
    with torch.inference_mode():
        found = FewShotClassifier.load(maml).fit(images, labels).predict_proba(images)
    assert np.array_equal(found, expected)


def test_unknown_batch_statistics_are_refused(prototypical):
    with pytest.raises(
        UserError, match="batch_statistics='Support' is unknown: choose \"support\""
    ):
        FewShotClassifier.load(prototypical, batch_statistics="Support")


def test_a_prediction_needs_examples_and_images(maml):
    classifier = FewShotClassifier.load(maml)
    with pytest.raises(UserError, match="call fit"):
        classifier.predict(PIXELS[0])
    support, labels, *_ = task()
    with pytest.raises(UserError, match="there are no images"):
        classifier.fit(support, labels).predict([])


def test_a_regression_is_refused(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "sinusoid"
    options = ("dataset=sinusoid", "model=mlp", "model.hidden=[4]", "model.batch_norm=false")
    omit = ("++dataset", "model.filters", "task.ways")
    run_world(partial(trained, omit=omit), 1, directory, *options, "task.shots=5")
    with pytest.raises(UserError, match="predicts real numbers"):
        FewShotClassifier.load(directory)


def small_omniglot() -> None:
    """Omniglot is taken to have 7 characters: 3 for training, 2 for validation, 2 for test."""
    Omniglot.expected = SMALL_COUNTS
    omniglot.NON_TEST_CHARACTERS = 5
    omniglot.VALIDATION_CHARACTERS = 2


def trained_on_small_omniglot(directory, root) -> None:
    small_omniglot()
    options = ("dataset=omniglot", f"dataset.root={root}", "task.ways=2", "task.queries=2")
    trained(directory, *options, "dataset.normalize.std=[0.3]", omit=("++dataset", "task"))


def test_omniglots_files_are_prepared_as_by_the_dataset(tmp_path):
    root = write_zips(tmp_path / "omniglot")
    run_world(trained_on_small_omniglot, 1, tmp_path / "run", root)
    data = [png(character, example) for example in range(1, 5) for character in (1, 3)]
    files = [tmp_path / f"{number}.png" for number in range(len(data))]
    for file, contents in zip(files, data, strict=True):
        file.write_bytes(contents)
    found = FewShotClassifier.load(tmp_path / "run").fit(files[:2], ["a", "b"])
    strokes = np.stack([ink(contents, 28) for contents in data])[:, None]
    inputs = torch.from_numpy(strokes) / 255 / 0.3
    saved = load_learner(tmp_path / "run")
    support = Examples(inputs[:2], torch.arange(2))
    expected = predict_unlabeled(saved.learner, support, inputs[2:]).softmax(1)
    np.testing.assert_allclose(found.predict_proba(files[2:]), expected, rtol=1e-4, atol=1e-6)


def small_classifier(inner_lr=0.1):
    torch.manual_seed(0)
    model = MLP((4,), 3, hidden=[16], batch_norm=False)
    return FewShotClassifier(MAML(model, inner_lr=inner_lr, inner_steps=30), 3)


def test_examples_are_kept_when_the_callers_array_changes():
    examples = np.random.default_rng(0).random((6, 4), np.float32)
    classifier = small_classifier().fit(examples, [0, 1, 2] * 2)
    expected = classifier.predict_proba(examples.copy())
    queries = examples.copy()
    examples[:] = 0
    assert np.array_equal(classifier.predict_proba(queries), expected)


def test_an_adaptation_that_diverges_is_an_error():
    examples = np.random.default_rng(0).random((6, 4), np.float32)
    classifier = small_classifier(inner_lr=1e30).fit(examples, ["cat", "dog", "emu"] * 2)
    with pytest.raises(UserError, match=r"predictions are not finite: .* lower inner_lr"):
        classifier.predict(examples)


def test_images_of_an_unfit_shape_or_type_are_refused():
    classifier = small_classifier()
    with pytest.raises(UserError, match="images cannot be prepared for this model"):
        classifier.fit([torch.zeros(4), torch.zeros(5)], [0, 1])
    with pytest.raises(UserError, match="a number was given instead of images"):
        classifier.fit(torch.tensor(1.0), [0])
    classifier.fit(np.zeros((2, 4), np.float32), [0, 1])
    with pytest.raises(UserError, match=r"images have the shape \(5,\), and the labeled examples"):
        classifier.predict(np.zeros((3, 5), np.float32))
    classifier.fit(np.zeros((2, 5), np.float32), [0, 1])
    with pytest.raises(UserError, match=r"inputs of torch.float32 and shape \(5,\) \(.*mat1 and"):
        classifier.predict(np.zeros((3, 5), np.float32))
    classifier.preprocess = torch.as_tensor
    classifier.fit(np.zeros((2, 4)), [0, 1])
    with pytest.raises(UserError, match=r"MLP cannot process inputs of torch.float64 and shape"):
        classifier.predict(np.zeros((3, 4)))


@pytest.mark.parametrize(
    "labels",
    [
        [1, "a"],
        ["a", float("nan")],
        [0.0, float("nan")],
        [[0], [1, 2]],
        [torch.tensor(0.0, requires_grad=True), torch.tensor(1.0)],
        np.array([0.0, np.nan], dtype=object),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
    ],
)
def test_labels_of_several_types_and_missing_ones_are_refused(labels):
    images = np.zeros((2, 4), np.float32)
    with pytest.raises(UserError, match="the labels cannot be sorted"):
        small_classifier().fit(images, labels)
    with pytest.raises(UserError, match="the labels cannot be sorted"):
        small_classifier().fit(images, [0, 1]).score(images, labels)


def test_labels_that_require_gradients_are_detached():
    images, labels = torch.eye(4)[:2], torch.tensor([7.0, -1.0], requires_grad=True)
    classifier = small_classifier().fit(images, labels)
    assert classifier.classes_.tolist() == [-1, 7]
    assert classifier.score(images, labels) == 1.0


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, bool])
def test_pixels_of_a_model_without_preprocessing_are_refused(dtype):
    with pytest.raises(UserError, match="cannot be prepared without preprocess"):
        small_classifier().fit(np.zeros((2, 4), dtype), [0, 1])
