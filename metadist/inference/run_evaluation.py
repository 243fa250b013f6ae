"""Test a trained run under another protocol."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from metadist.algorithms import Ensemble, Learner
from metadist.config import load_experiment
from metadist.errors import UserError, did_you_mean, state_dict_reason
from metadist.files import prepare_output
from metadist.reports import CHECKPOINT_DIRECTORY, read_results
from metadist.reports.comparison import TRAINING_COUNTS
from metadist.training import Experiment, Trainer, TrainState
from metadist.training.checkpoints import Checkpoints
from metadist.training.pretrained import pretrained_weights
from metadist.training.results import BEST_CHECKPOINT
from metadist.training.saved_state import (
    CONTENTS_ERRORS,
    load_learner_state,
    split_differences,
    tested_checkpoint,
)
from metadist.training.weights_file import WEIGHTS_SUFFIX

_TRAINING_GROUPS = (
    "allreduce_engine", "callbacks", "default_partition", "hydra", "init_from", "launcher",
    "logger", "optimizer", "partition", "reducer", "rendezvous_timeout_seconds", "resume",
    "scheduler", "seed", "strategy", "sweep", "timeout_seconds",
)  # fmt: skip
_TRAINING_OPTIONS = (*TRAINING_COUNTS, "held_out", "micro_batch_size")
"""The options of `task` that do not affect a test."""
_TEST_OPTIONS = ("eval_tasks", "eval_seed", "task_chunk_size", "precision")
"""The options of `trainer` that affect a test."""
_HEAD = ("model.head.weight", "model.head.bias")


class _Checkpoint(NamedTuple):
    """A checkpoint to test.

    Attributes:
        file: the file.
        name: the name in the protocol.
        learner: the learner with its weights.
        iteration: the iterations of its training.
        protocol: the protocol of its training; {} if it is not known.
    """

    file: Path
    name: str
    learner: Learner
    iteration: int
    protocol: Mapping[str, Any]


def evaluate_run(
    run: Path | str,
    *overrides: str,
    checkpoint: Path | str | Sequence[Path | str] | None = None,
    trust_code: bool = False,
    predictions: Path | None = None,
) -> dict[str, Any]:
    """Test the learner of a run, with some options replaced.

    Args:
        run: the run's directory.
        overrides: the overrides, as on the command line.
        checkpoint: the checkpoint, weights file or other run to test, or pretrained weights by
            their name. The predictions of several are averaged, see `metadist.algorithms.Ensemble`.
            Default: the state that the run tests.
        trust_code: see `metadist.config.load_experiment`.
        predictions: the file to write the predictions to. Default: none.

    Returns:
        The results, as in `results.json`, with the `overrides`, the `checkpoint`, the checkpoints
        that were trained on another division of the classes (`trained_on_other_classes`), and the
        run's protocol and method as `trained_protocol` and `trained_method`, which are None if the
        run has not finished. Iterations are a list if there are several checkpoints.

    Raises:
        UserError: the run cannot be read, or its learner does not fit the tasks.
    """
    run = Path(run)
    _check_overrides(overrides)
    _check_run(run)
    experiment = load_experiment(run, *overrides, trust_code=trust_code, splits=["test"])
    _check_options_of_algorithm(overrides, experiment.learner)
    checkpoints = _load_checkpoints(experiment, run, _checkpoint_files(run, checkpoint))
    if len(checkpoints) > 1:
        experiment.learner = Ensemble([each.learner for each in checkpoints])
        experiment.state = TrainState()  # that of none of them
    experiment.trainer_config = replace(experiment.trainer_config, test_checkpoint="last")
    if predictions is not None:
        prepare_output(predictions)
    results = Trainer(experiment).test(predictions)
    trainings = [each.protocol for each in checkpoints]
    _set_training_counts(results["protocol"], trainings)
    results["protocol"]["checkpoint"] = ", ".join(each.name for each in checkpoints)
    if len(checkpoints) > 1:
        iterations = [each.iteration for each in checkpoints]
        results["iterations"] = results["tested_iteration"] = iterations
    own = experiment.tasks.protocol()
    options = {
        "overrides": list(overrides),
        "checkpoint": ", ".join(str(each.file) for each in checkpoints),
        "trained_on_other_classes": [
            str(each.file) for each in checkpoints if split_differences(each.protocol, own)
        ],
    }
    training = read_results(run) or {}
    trained = {f"trained_{key}": training.get(key) for key in ("protocol", "method")}
    return {**results, **options, **trained}


def _load_checkpoints(experiment: Experiment, run: Path, paths: list[Path]) -> list[_Checkpoint]:
    """Load checkpoints, each into a learner; the experiment has the state of the last one.

    Raises:
        UserError: a checkpoint cannot be read, or does not fit the tasks.
    """
    untrained, checkpoints = experiment.learner, []
    for path in paths:
        file, contents = tested_checkpoint(path)
        experiment.learner = untrained if len(paths) == 1 else copy.deepcopy(untrained)
        load_for_tasks(experiment, file, contents)
        checkpoints.append(
            _Checkpoint(
                file,
                _checkpoint_in_protocol(run, file, contents),
                experiment.learner,
                experiment.state.iteration,
                contents.get("protocol") or {},
            )
        )
    return checkpoints


def _set_training_counts(protocol: dict[str, Any], trainings: list[Mapping[str, Any]]) -> None:
    """Replace what describes the training in a protocol by the values of the checkpoints.

    These are its inner steps and its ways, shots and queries; as in `FewShotTasks.protocol`, there
    are no counts that are equal to those of the test.

    Args:
        protocol: the protocol of the test.
        trainings: the protocol in each checkpoint.
    """
    if any("micro_batch_size" in each for each in trainings):  # supervised training
        return
    for key in (*TRAINING_COUNTS, "inner_steps"):
        name = key.removeprefix("train_")
        counts = {str(each.get(key, each.get(name, protocol.get(name)))) for each in trainings}
        protocol.pop(key, None)
        if counts != {str(protocol.get(name))}:
            text = ", ".join(sorted(counts, key=lambda count: (len(count), count)))
            protocol[key] = int(text) if text.isdecimal() else text


def _check_overrides(overrides: Sequence[str]) -> None:
    """Require that each override affects the test of a trained run.

    Options of the algorithm depend on its class; see `_check_options_of_algorithm`.
    """
    for override in overrides:
        group, name = _split_key(override)
        if not group:
            raise UserError(f"the override {override!r} cannot be read: write KEY=VALUE.")
        if group == "experiment":
            raise UserError(
                f"{override} cannot be applied to a trained run: give the options of the preset "
                "one by one."
            )
        of_training = group == "task" and name in _TRAINING_OPTIONS
        of_training |= group == "trainer" and name not in _TEST_OPTIONS
        if group in _TRAINING_GROUPS or of_training:
            hint = did_you_mean(name, _TEST_OPTIONS) if group == "trainer" else ""
            if name == "test_checkpoint":
                hint = ", but --checkpoint PATH does"
            raise UserError(
                f"{override} has no effect on the test of a trained run{hint}: replace options "
                "of task, dataset, model, algorithm, or "
                f"trainer.{', trainer.'.join(_TEST_OPTIONS)}."
            )


def _check_options_of_algorithm(overrides: Sequence[str], learner: Learner) -> None:
    """Refuse options of the algorithm that affect training alone."""
    for override in overrides:
        group, name = _split_key(override)
        if group == "algorithm" and name in learner.training_options:
            of_test = f"eval_{name}"
            hint = f", or give algorithm.{of_test}" if hasattr(learner, of_test) else ""
            raise UserError(
                f"{override} is an option of the training of {type(learner).__name__}, which is "
                f"over in a trained run: leave it out{hint}."
            )


def _split_key(override: str) -> tuple[str, str]:
    """The group and the name of an override's option: "task", "ways" of "task.ways=5"."""
    group, _, name = override.lstrip("+~").partition("=")[0].partition(".")
    return group, name


def _check_run(run: Path) -> None:
    """Refuse the name of pretrained weights where a run's directory is asked for."""
    pretrained = {} if run.exists() else pretrained_weights()
    if hint := did_you_mean(run.name, pretrained):
        given = f"neither a run directory nor the name of pretrained weights{hint}"
        if run.name in pretrained:
            given = "the name of pretrained weights"
        raise UserError(
            f"{run.name} is {given}, and metadist evaluate tests a run: give the directory of a "
            "run of the same network and algorithm, and --checkpoint NAME for pretrained weights; "
            f"a run with init_from={run.name} trainer.iterations=0 tests the weights alone."
        )


def _checkpoint_files(
    run: Path, checkpoint: Path | str | Sequence[Path | str] | None
) -> list[Path]:
    """The files to test, or the run's directory for the state that it tests.

    Raises:
        UserError: there is no such checkpoint.
    """
    if checkpoint is None:
        return [run]
    given = [checkpoint] if isinstance(checkpoint, Path | str) else checkpoint
    paths = [Path(path) for path in given]
    if not paths:
        raise UserError("checkpoint is an empty list: give a checkpoint, or leave it out.")
    pretrained = pretrained_weights()
    files = [path if path.exists() else pretrained.get(str(path), path) for path in paths]
    for file in files:
        if not file.exists():
            names = ", ".join(path.name for path in Checkpoints(run).candidates())
            example = f", such as one of {names} in {run / CHECKPOINT_DIRECTORY}" if names else ""
            raise UserError(f"there is no checkpoint {file}: give the path of a file{example}.")
    return files


def _checkpoint_in_protocol(run: Path, path: Path, contents: Mapping[str, Any]) -> str:
    """The name of a checkpoint in the protocol, as in the test of its run."""
    if path.suffix == WEIGHTS_SUFFIX:  # the weights that a run tested
        return str(contents["protocol"]["checkpoint"])
    saved = Checkpoints(run)
    names = {saved.best: BEST_CHECKPOINT, saved.newest(): "last"}
    resolved = {file.resolve(): name for file, name in names.items() if file is not None}
    return resolved.get(path.resolve(), f"iteration {contents['iteration']}")


def load_for_tasks(experiment: Experiment, path: Path, contents: Mapping[str, Any]) -> None:
    """Load a checkpoint into an experiment whose tasks may have another number of classes.

    Raises:
        UserError: the images have another number of channels than in training; the learner has one
            output per class, and the tasks have another number of classes; or the checkpoint is of
            another model.
    """
    learner, saved = experiment.learner, dict(contents["learner"])
    trained_on = tuple((contents.get("task") or {}).get("input_shape") or ())
    given = tuple(experiment.tasks.input_shape)
    if len(trained_on) == len(given) == 3 and trained_on[0] != given[0]:
        raise UserError(
            f"{path} was trained on images of shape {trained_on}, and the tasks have images of "
            f"shape {given}: choose a dataset with as many channels, with dataset=folder by "
            f"dataset.channels={trained_on[0]}."
        )
    initial = learner.state_dict()
    other_head = all(name in saved and name in initial for name in _HEAD) and (
        saved[_HEAD[1]].shape != initial[_HEAD[1]].shape
    )
    if other_head and learner.outputs_are_classes:
        outputs, needed = len(saved[_HEAD[1]]), len(initial[_HEAD[1]])
        raise UserError(
            f"{path} cannot be tested with {needed} outputs: {type(learner).__name__} was trained "
            f"with {outputs} outputs, one per class; test it with task.ways={outputs}, or train an "
            "algorithm whose outputs are features, such as algorithm=prototypical."
        )
    if other_head:
        saved |= {name: initial[name] for name in _HEAD}
    contents = {**contents, "learner": saved}
    if not _same_learner(experiment, contents):
        contents.pop("frozen", None)  # another algorithm adapts other parameters
    try:
        load_learner_state(learner, contents)
        names = TrainState.__dataclass_fields__
        experiment.state = TrainState(**{key: contents[key] for key in names if key in contents})
    except CONTENTS_ERRORS as error:
        raise UserError(
            f"the checkpoint {path} is of another model or algorithm than the options ask for "
            f"({state_dict_reason(error)}): leave the options of model and algorithm as they were "
            "in training."
        ) from None


def _same_learner(experiment: Experiment, contents: Mapping[str, Any]) -> bool:
    """Whether model and algorithm are of the same classes as in the checkpoint."""
    saved = contents.get("configuration") or {}
    return all(
        (saved.get(group) or {}).get("_target_") == experiment.configuration[group]["_target_"]
        for group in ("model", "algorithm")
    )
