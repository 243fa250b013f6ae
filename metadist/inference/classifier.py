"""A classifier that follows the conventions of scikit-learn, made of a trained model."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from metadist.algorithms import Learner
from metadist.config import image_preprocessing, load_learner
from metadist.errors import UserError, first_line, user_frame
from metadist.tasks import Examples, ImagePreprocessing
from metadist.training import predict_unlabeled, resolve_device
from metadist.training.prediction import check_batch_statistics
from metadist.training.pretrained import find_weights

_BATCH = 256
"""The number of queries that are decoded and predicted at once, which bounds the memory."""

_TEXT_KINDS = "UT"
"""Kinds of NumPy's types that hold texts: of fixed and of variable width."""


class FewShotClassifier:
    """Classifies images from a few labeled examples of each class.

    `fit` stores the examples, the support set; it does not change the learner's parameters. Each
    prediction adapts to the support set. A prediction sets and restores the states of the global
    random generators, so that threads must not predict at the same time.

    Attributes:
        classes_: the distinct labels, sorted; set by `fit`.

    Args:
        learner: a trained learner of any algorithm.
        outputs: the width of the model's last layer.
        preprocess: a function that converts images, as given to `fit` and the other methods, to the
            model's inputs, a tensor of shape (n, *input shape). Default: images are already such
            inputs, floating-point numbers.
        batch_statistics: the statistics that batch norm without running statistics uses; see
            `metadist.training.predict_unlabeled`. With "support" the prediction for an image does
            not depend on the other images; with "transductive" it does, as in MAML's evaluation.

    Raises:
        UserError: `batch_statistics` has another value.
    """

    classes_: np.ndarray

    def __init__(
        self,
        learner: Learner,
        outputs: int,
        preprocess: Callable[[Any], Tensor] | None = None,
        batch_statistics: Literal["support", "transductive"] = "support",
    ) -> None:
        check_batch_statistics(batch_statistics)
        self.learner = learner
        self.outputs = outputs
        self.preprocess = preprocess
        self.batch_statistics = batch_statistics
        self._support: Examples | None = None

    @classmethod
    @torch.inference_mode(False)
    def load(
        cls,
        path: str | Path,
        *,
        preprocess: Callable[[Any], Tensor] | None = None,
        batch_statistics: Literal["support", "transductive"] = "support",
        device: str = "cpu",
        trust_code: bool = False,
    ) -> "FewShotClassifier":
        """Load a classifier from a run, a file or pretrained weights. No dataset is needed.

        Args:
            path: the path of a run directory (its tested state is loaded), of a checkpoint, or of a
                weights file written by `metadist export`; or the name of pretrained weights, such
                as "maml_omniglot_5w1s_cosine"; see `metadist.training.pretrained`.
            preprocess: see the class. Default: `metadist.tasks.ImagePreprocessing` with the image
                size, channels, inversion and normalization of the run's dataset.
            batch_statistics: see the class.
            device: the learner's device; see `metadist.training.resolve_device`.
            trust_code: whether any class that the checkpoint names may be built, such as your own
                algorithm.

        Raises:
            UserError: there is no such device, there is no checkpoint, or the checkpoint cannot be
                used or is of a regression problem.
        """
        resolved = resolve_device(device)
        saved = load_learner(find_weights(path), trust_code=trust_code)
        if saved.regression:
            raise UserError(
                f"{saved.checkpoint} predicts real numbers: choose a run of classification, or "
                "predict with metadist.training.predict_unlabeled."
            )
        if preprocess is None:
            preprocess = image_preprocessing(saved, trust_code=trust_code)
        return cls(saved.learner.to(resolved), saved.outputs, preprocess, batch_statistics)

    def fit(self, images: Any, labels: Sequence[Any] | np.ndarray | Tensor) -> "FewShotClassifier":
        """Store the labeled examples of a few-shot task.

        Args:
            images: the images; see `metadist.tasks.ImagePreprocessing`. Without `preprocess`, the
                model's inputs.
            labels: one label per image, all numbers or all strings.

        Returns:
            The classifier.

        Raises:
            UserError: the numbers of images and labels differ, labels are of several types or NaN,
                an image cannot be used, or the algorithm does not support the number of classes.
        """
        images = _as_sequence(images)
        array, classes, targets = _sorted_labels(labels)
        if array.shape != (len(images),):
            raise UserError(
                f"there are {len(images)} images, and labels of shape {array.shape}: give one "
                "label for each image."
            )
        if len(classes) < 2:
            raise UserError("the labels are of fewer than two classes: give at least two.")
        if self.learner.outputs_are_classes and len(classes) > self.outputs:
            raise UserError(
                f"the labels have {len(classes)} classes, and {type(self.learner).__name__} was "
                f"trained with {self.outputs} outputs, one per class: give at most {self.outputs} "
                "classes, or train an algorithm whose outputs are features, such as "
                "algorithm=prototypical."
            )
        inputs = self._inputs(images)
        inputs = inputs.clone()  # it may share the memory of the caller's array
        self._support = Examples(inputs, torch.from_numpy(targets).to(inputs.device))
        self.classes_ = classes
        return self

    def predict(self, images: Any) -> np.ndarray:
        """Predict the label of each image, shape (n,).

        Args:
            images: any number of images; see `fit`.

        Raises:
            UserError: see `predict_proba`.
        """
        best = self.predict_proba(images).argmax(1)
        return self.classes_[best]

    def score(self, images: Any, labels: Sequence[Any] | np.ndarray | Tensor) -> float:
        """The accuracy of the predictions, from 0 to 1.

        Args:
            images: any number of images; see `fit`.
            labels: the true label of each image.

        Raises:
            UserError: see `predict_proba`; labels are of several types or NaN; or there are fewer
                or more labels than images.
        """
        predictions = self.predict(images)
        true, *_ = _sorted_labels(labels)
        if _are_texts(true) != _are_texts(predictions):
            raise UserError(
                f"labels of type {true.dtype} cannot be compared with classes of type "
                f"{predictions.dtype}: give labels as in fit."
            )
        if true.shape != predictions.shape:
            raise UserError(
                f"there are {len(predictions)} images and labels of shape {true.shape}: give one "
                "label for each image."
            )
        return float((predictions == true).mean())

    def __repr__(self) -> str:
        classes = "" if self._support is None else f", classes={self.classes_.tolist()}"
        name = self.learner.algorithm_name
        return f"{type(self).__name__}({name}, outputs={self.outputs}{classes})"

    def predict_proba(self, images: Any) -> np.ndarray:
        """Predict class probabilities, float32 (n, classes) in the order of `classes_`.

        Args:
            images: any number of images; see `fit`.

        Raises:
            UserError: `fit` has not been called, an image cannot be used or has another shape than
                the labeled images, the model cannot process that type or shape, or predictions are
                not finite.
        """
        if self._support is None:
            raise UserError("the classifier has no labeled examples: call fit(images, labels).")
        images = _as_sequence(images)
        if isinstance(self.preprocess, ImagePreprocessing):
            images = self.preprocess.as_list(images)
        size = len(images) if self.batch_statistics == "transductive" else _BATCH
        logits = torch.cat(
            [
                self._logits(self._support, images[start : start + size])
                for start in range(0, len(images), size)
            ]
        )
        # Outputs beyond the classes belong to no label.
        probabilities = logits[:, : len(self.classes_)].softmax(1)
        if not probabilities.isfinite().all():
            raise UserError(
                "the predictions are not finite: the adaptation to the labeled examples diverged, "
                "or an image has NaN; check the images, or give the algorithm a lower inner_lr."
            )
        return probabilities.cpu().numpy()

    def _logits(self, support: Examples, images: Any) -> Tensor:
        inputs, expected = self._inputs(images), tuple(support.inputs.shape[1:])
        if inputs.shape[1:] != expected:
            raise UserError(
                f"images have the shape {tuple(inputs.shape[1:])}, and the labeled examples "
                f"{expected}: give images of that shape."
            )
        try:
            return predict_unlabeled(self.learner, support, inputs, self.batch_statistics)
        except RuntimeError as error:
            of_inputs = not isinstance(error, torch.OutOfMemoryError) and not user_frame(error)
            if isinstance(self.preprocess, ImagePreprocessing) or not of_inputs:
                raise
            raise UserError(
                f"{type(self.learner.model).__name__} cannot process inputs of {inputs.dtype} and "
                f"shape {expected} ({first_line(error)}): give inputs of the type and shape that "
                "it was trained with."
            ) from error

    def _inputs(self, images: Any) -> Tensor:
        inputs = (self.preprocess or _as_inputs)(images)
        if not isinstance(inputs, Tensor):
            raise UserError(
                f"preprocess returned a {type(inputs).__name__}: return a tensor of the model's "
                "inputs, of shape (n, *input shape)."
            )
        return inputs.to(next(self.learner.parameters()).device)


def _as_sequence(images: Any) -> Any:
    """Images as an array, a tensor, or a list.

    Raises:
        UserError: `images` is a single image or no iterable, or there are none.
    """
    if isinstance(images, str | PathLike | Image):
        raise UserError("one image was given instead of several: give a list, [image].")
    if isinstance(images, np.ndarray | Tensor) and not images.ndim:
        raise UserError("a number was given instead of images: give a list, array or tensor.")
    try:
        sequence = images if isinstance(images, np.ndarray | Tensor) else list(images)
    except TypeError:
        kind = type(images).__name__
        raise UserError(f"images are of type {kind}: give a list, array or tensor.") from None
    if not len(sequence):
        raise UserError("there are no images: give at least one.")
    return sequence


def _sorted_labels(labels: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels as an array, the classes in order, and the index of the class of each label.

    Raises:
        UserError: labels are of several types, of unequal lengths or NaN.
    """
    try:
        array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
        if array.dtype.kind == "U" and not all(isinstance(label, str) for label in labels):
            raise TypeError("some are strings and others are not")
        if np.any(array != array):  # NaN of any type, also in an array of objects
            raise ValueError("some are NaN")
        return (array, *np.unique(array, return_inverse=True))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the labels cannot be sorted ({first_line(error)}): give numbers or strings, one "
            "for each image."
        ) from None


def _are_texts(labels: np.ndarray) -> bool:
    return labels.dtype.kind in _TEXT_KINDS or (
        labels.dtype.kind == "O" and any(isinstance(label, str) for label in labels.flat)
    )


def _as_inputs(images: Any) -> Tensor:
    try:
        if isinstance(images, Sequence) and all(isinstance(image, Tensor) for image in images):
            images = torch.stack(list(images))
        inputs = torch.as_tensor(images)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"images cannot be prepared for this model ({first_line(error)}): give an array or "
            "tensor of its inputs, or FewShotClassifier.load(…, preprocess=…)."
        ) from None
    if not inputs.is_floating_point():
        raise UserError(
            f"images of {inputs.dtype} cannot be prepared without preprocess: give the model's "
            "inputs as floating-point numbers, scaled and normalized as in training, or a function "
            "as preprocess."
        )
    return inputs.float()
