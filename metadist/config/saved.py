"""Loads runs and checkpoints, without executing anything that they contain."""

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metadist.algorithms import Learner
from metadist.config.build import assemble_experiment, build_learner
from metadist.config.hydra_errors import describe_error
from metadist.config.instantiate import instantiate, locate_target
from metadist.config.overrides import VERSION_BASE, is_node, with_overrides
from metadist.config.schema import NOT_IN_DEFAULTS, Settings
from metadist.config.trusted import check_interpolations, locate_trusted
from metadist.distributed.reducers import LinearReducer
from metadist.errors import UserError, first_line, one_line
from metadist.files import read_regular
from metadist.loggers import Logger
from metadist.models.backbones import options_of_weights
from metadist.reports import CONFIG_FILE, read_hydra, refuse_aliases
from metadist.tasks import SPLITS, ImagePreprocessing, Normalize
from metadist.training import Experiment
from metadist.training.saved_state import CONTENTS_ERRORS, load_learner_state, tested_checkpoint

_SINGLE_PROCESS = {
    "logger": None,
    "callbacks": None,
    "resume": None,
    "strategy": {"_target_": "metadist.training.LocalStrategy"},
    "default_partition": {"_target_": "metadist.distributed.dim_partitioner"},
}
_MEAN = {"_target_": "metadist.distributed.reducers.MeanReducer"}


@dataclass(frozen=True)
class SavedLearner:
    """A trained learner, without its dataset.

    Attributes:
        learner: model and algorithm with the checkpoint's parameters, on the CPU.
        configuration: the run's configuration, resolved, as plain containers.
        input_shape: shape of one input, without a batch dimension.
        outputs: width of the model's last layer.
        regression: whether targets are real numbers.
        iteration: finished outer steps.
        checkpoint: the checkpoint's file.
    """

    learner: Learner
    configuration: Mapping[str, Any]
    input_shape: tuple[int, ...]
    outputs: int
    regression: bool
    iteration: int
    checkpoint: Path


@torch.inference_mode(False)
def load_learner(path: str | Path, *, trust_code: bool = False) -> SavedLearner:
    """Load the trained learner of a run directory, checkpoint or weights file, without a dataset.

    Args:
        path: the path of a run directory, checkpoint or weights file; see `tested_checkpoint`.
        trust_code: whether to build any class that the checkpoint names. By default only classes
            of metadist, torch.optim and torchvision.transforms.v2 are built.

    Raises:
        UserError: there is no checkpoint, it is corrupt, or it names a class that is not trusted.
    """
    path, contents = tested_checkpoint(Path(path))
    configuration, task = contents.get("configuration"), contents.get("task")
    if not isinstance(configuration, Mapping) or not isinstance(task, Mapping):
        raise UserError(
            f"the checkpoint {path} does not hold the configuration of its run, because an earlier "
            "version of metadist wrote it: use load_experiment with the run's directory."
        )
    try:
        shape = SimpleNamespace(
            input_shape=tuple(map(int, task["input_shape"])),
            outputs=int(task["outputs"]),
            regression=bool(task["regression"]),
        )
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay the same
            learner = build_learner(
                _without_pretrained(configuration.get("model")),
                configuration.get("algorithm"),
                shape,
                functools.partial(instantiate, locate=_locate(trust_code)),
            )
        load_learner_state(learner, contents)
        iteration = int(contents["iteration"])
    except UserError:
        raise
    except CONTENTS_ERRORS as error:
        raise UserError(
            f"the checkpoint {path} does not fit the configuration that it holds "
            f"({one_line(error)}): load another checkpoint of the run."
        ) from None
    return SavedLearner(
        learner, configuration, shape.input_shape, shape.outputs, shape.regression, iteration, path
    )


def _without_pretrained(model: Any) -> Any:
    """A model's node without the download of weights, which the checkpoint's would replace."""
    if not isinstance(model, Mapping) or not str(model.get("_target_")).startswith("metadist."):
        return model
    untrained = {"weights": None, "pretrained": False}
    node = {**model, **{key: value for key, value in untrained.items() if key in model}}
    if model.get("weights"):
        implied = options_of_weights(str(model.get("name", "resnet18")), str(model["weights"]))
        node["options"] = implied | dict(model.get("options") or {})
    return node


def image_preprocessing(
    saved: SavedLearner, *, trust_code: bool = False
) -> ImagePreprocessing | None:
    """The preprocessing of images for a saved learner, as in the evaluation of its run.

    Size and channels come from the learner's input shape, inversion and normalization from the
    run's dataset, which is not built.

    Args:
        saved: a learner from `load_learner`.
        trust_code: whether to import any class that the checkpoint names. By default only classes
            of metadist, torch.optim and torchvision.transforms.v2 are imported.

    Returns:
        The preprocessing; None if the inputs are not square images with one or three channels.

    Raises:
        UserError: the checkpoint names a class that is not trusted.
    """
    dataset = saved.configuration.get("dataset")
    if not isinstance(dataset, Mapping) or not ImagePreprocessing.supports(saved.input_shape):
        return None
    locate, normalize = _locate(trust_code), dataset.get("normalize")
    return ImagePreprocessing(
        saved.input_shape,
        bool(getattr(locate(str(dataset.get("_target_")), "dataset"), "inverted", False)),
        instantiate(normalize, "dataset.normalize", locate=locate) if normalize else Normalize(),
    )


def load_experiment(
    path: str | Path, *overrides: str, trust_code: bool = False, splits: Sequence[str] = SPLITS
) -> Experiment:
    """The experiment that a run's `.hydra/config.yaml` describes, at iteration 0, in one process.

    The strategy is `local`, with the default partitioner. A reducer that one process cannot use, or
    that is the user's own code, is replaced by the mean. Nothing is logged, and no checkpoint is
    read or written. The dataset is opened: a relative `dataset.root` that does not exist here is
    looked up in the directory where the run was started.

    Args:
        path: the run's directory.
        overrides: values and options to replace, as on the command line: "dataset.root=DIR",
            "dataset=omniglot". Options are looked up in metadist and in the run's directories of
            options (`--config-dir`).
        trust_code: whether to build any class that the configuration names, and to resolve
            interpolations such as `${oc.env:…}`. By default only classes of metadist,
            torch.optim and torchvision.transforms.v2 are built.
        splits: the splits of which tasks will be sampled. The sizes of others are not checked.

    Raises:
        UserError: `path` is not a run directory, or its configuration cannot be used.
    """
    directory = Path(path)
    configuration = _read_configuration(directory)
    with open_dict(configuration):
        configuration.update(_SINGLE_PROCESS)
        configuration.pop("partition", None)  # it may name workers of another job
        given = _apply_overrides(configuration, overrides, _searchpath(directory, trust_code))
    if not trust_code:
        check_interpolations(OmegaConf.to_container(configuration, resolve=False), given=given)
    _make_paths_absolute(configuration, directory)
    locate = _locate(trust_code)
    replaced = any(re.match(r"[+~]*reducer\b", override) for override in overrides)
    if not replaced and not _is_linear_reducer(configuration.get("reducer"), locate):
        configuration.reducer = _MEAN
    name = str((read_hydra(directory).get("job") or {}).get("config_name") or "maml")
    experiment = assemble_experiment(configuration, directory, name, locate=locate, splits=splits)
    experiment.logger = Logger()
    return experiment


def _locate(trust_code: bool) -> Callable[[str, str], Any]:
    return locate_target if trust_code else locate_trusted


def _is_linear_reducer(reducer: Any, locate: Callable[[str, str], Any]) -> bool:
    """Whether a reducer's node may be built here and gives a `LinearReducer`."""
    try:
        return isinstance(instantiate(reducer, "reducer", locate=locate), LinearReducer)
    except Exception:  # evaluation does not need the reducer
        return False


def _read_configuration(directory: Path) -> DictConfig:
    path = directory / CONFIG_FILE
    if directory.is_file():
        raise UserError(
            f"{directory} is a file, not a run directory: give the directory that holds .hydra and "
            "metrics.jsonl; the command line takes a checkpoint of it by --checkpoint FILE."
        )
    try:
        text = read_regular(path)
        refuse_aliases(text)
        configuration = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        raise UserError(
            f"{directory} is not a run directory ({path} cannot be read: {error.strerror}): give "
            "the directory that holds .hydra and metrics.jsonl."
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, RecursionError) as error:
        reason = first_line(error)
        raise UserError(f"{path} is corrupt ({reason}): restore it from a copy.") from None
    if not isinstance(configuration, DictConfig) or "trainer" not in configuration:
        raise UserError(f"{path} is corrupt (it has no trainer): restore it from a copy.")
    return configuration


def _searchpath(directory: Path, trust_code: bool) -> list[str]:
    """The override that adds the run's own directories of options, as given by `--config-dir`.

    Packages of options need `trust_code`: they are imported, which executes their code.
    """
    sources = []
    runtime = read_hydra(directory).get("runtime") or {}
    for source in runtime.get("config_sources") or ():
        schema, path = str(source.get("schema")), str(source.get("path"))
        if (schema == "file" and Path(path).is_dir()) or (schema == "pkg" and trust_code):
            sources.append(f"{schema}://{path}")
    return [f"hydra.searchpath=[{','.join(map(repr, sources))}]"] if sources else []


def _apply_overrides(
    configuration: DictConfig, overrides: tuple[str, ...], searchpath: list[str]
) -> set[str]:
    """Replace values in place; an option (`dataset=omniglot`) stands for the values of its file.

    Returns:
        The keys whose values the overrides give.
    """
    given = set()
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for override in parsed:
            if override.is_sweep_override():
                raise UserError(f"{override.input_line} has several values: give one.")
            key, value = override.key_or_group, override.value()
            if override.is_delete():
                _delete(configuration, key)
            elif is_node(configuration, key) and isinstance(value, str):
                with hydra.initialize_config_module("metadist.conf", **VERSION_BASE):
                    plus = "+" if key in NOT_IN_DEFAULTS or key not in Settings.model_fields else ""
                    composed = hydra.compose("maml", [*searchpath, f"{plus}{key}={value}"])
                    configuration[key] = with_overrides(composed[key], key, parsed)
            else:
                OmegaConf.update(configuration, key, value, force_add=True)
                given.add(key)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(describe_error(error)) from None
    return given


def _delete(configuration: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(configuration, parent) if parent else configuration
    if not isinstance(node, DictConfig) or name not in node:
        raise UserError(f"~{key} deletes no key of the run's configuration: leave it out.")
    del node[name]


def _make_paths_absolute(configuration: DictConfig, directory: Path) -> None:
    """Make relative paths absolute if they exist only in the directory where the run started."""
    started = (read_hydra(directory).get("runtime") or {}).get("cwd") or ""
    for key in ("dataset.root", "init_from"):
        path = OmegaConf.select(configuration, key)
        if isinstance(path, str) and not Path(path).exists() and Path(started, path).exists():
            OmegaConf.update(configuration, key, str(Path(started, path)))
