"""Checks of saved configurations: which classes may be built, and that no code is executed."""

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from metadist.algorithms import Learner
from metadist.config.plain import redact_secrets, to_plain
from metadist.distributed.reducers import LinearReducer
from metadist.errors import UserError
from metadist.reports import TRUSTED_PACKAGES
from metadist.tasks import Augment, Normalize
from metadist.training import Strategy, TrainerConfig

_TARGET = "_target_"

_TASKS = "metadist.tasks"
"""The package of datasets, which read files and download."""

_TASK_NODES = ("dataset", "task")
"""The nodes that may name any class of `_TASKS`; others may name `_TASK_VALUES`."""

_TASK_VALUES = (Augment, Normalize)

_BASES: Mapping[str, tuple[type, ...]] = {
    "metadist.algorithms": (Learner,),
    "metadist.distributed.reducers": (LinearReducer,),
    "metadist.models": (nn.Module,),
    _TASKS: (object,),
    "metadist.training": (Strategy, TrainerConfig),
    "torch.optim": (Optimizer,),
    "torch.optim.lr_scheduler": (LRScheduler,),
    "torchvision.transforms.v2": (nn.Module,),
}
"""The base classes of the classes that may be built, for each of `TRUSTED_PACKAGES`."""

_FUNCTIONS = {
    f"metadist.distributed.{name}"
    for name in ("batch_partitioner", "dim_partitioner", "exclusive_batch_partitioner")
}
"""What may be called besides these classes."""

_SAFE_INTERPOLATION = re.compile(r"\$\{\s*(?:[\w.\-\[\]]+\s*\}|fraction:|oc\.select:)")
"""The start of an interpolation that reads nothing but the configuration itself."""


def locate_trusted(target: str, path: str) -> Any:
    """Import the target of a saved node, which may be a class of metadist, `torch.optim` or
    `torchvision.transforms.v2`.

    Only the packages above are imported, whatever the target is.

    Args:
        target: the dotted path.
        path: the path of the node that names the target. Only `dataset` and `task` may name a
            dataset.

    Raises:
        UserError: the target is anything else.
    """
    package, _, name = target.rpartition(".")
    if target in _FUNCTIONS:
        return getattr(importlib.import_module(package), name)
    for public in TRUSTED_PACKAGES:
        if package == public or package.startswith(f"{public}."):
            located = getattr(importlib.import_module(public), name, None)
            if not inspect.isclass(located) or not issubclass(located, _BASES[public]):
                continue
            if public == _TASKS and path not in _TASK_NODES and located not in _TASK_VALUES:
                continue
            if located.__module__.startswith(public) and package in (public, located.__module__):
                return located
    raise UserError(
        f"{path}.{_TARGET}={target} is not a class that metadist knows, and code that a saved "
        f"run names is not executed: if you trust where the run and {target} come from, load it "
        "with trust_code=True in Python or --trust-code on the command line."
    )


def resolve_external(configuration: DictConfig) -> DictConfig:
    """Resolve, in a copy, interpolations that read anything but the configuration.

    `${oc.env:…}` and `${hydra:…}` would have other values in another process. The copy keeps
    references to other keys; loggers and the launcher, which no later command builds; and values
    that contain a secret, as `redact_secrets` defines it.
    """
    resolved = copy.deepcopy(configuration)

    def resolve(node: Any, keys: Iterable[Any]) -> None:
        raw: Any = OmegaConf.to_container(node, resolve=False)
        for key in keys:
            value = raw[key]
            if isinstance(value, dict | list):
                resolve(node[key], value if isinstance(value, dict) else range(len(value)))
            elif isinstance(value, str) and "${" in _SAFE_INTERPOLATION.sub("", value):
                with contextlib.suppress(OmegaConfBaseException):  # the run does not read it
                    current = to_plain(OmegaConf.create({"": node[key]}), resolve=True)[""]
                    if redact_secrets(current) == current:
                        node[key] = current

    resolve(resolved, [key for key in resolved if key not in ("logger", "launcher")])
    return resolved


def check_interpolations(values: Any, path: str = "", given: Collection[str] = ()) -> None:
    """Refuse interpolations of a saved configuration that read anything but the configuration.

    Args:
        values: plain containers, interpolations unresolved.
        path: the path of the values, for error messages.
        given: the paths of values that the user gave, which may have any interpolation.

    Raises:
        UserError: a resolver such as `oc.env` is used.
    """
    if path in given:
        return
    if isinstance(values, Mapping):
        for key, value in values.items():
            check_interpolations(key, path)
            check_interpolations(value, f"{path}.{key}".lstrip("."), given)
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            check_interpolations(value, f"{path}[{index}]", given)
    elif isinstance(values, str) and "${" in _SAFE_INTERPOLATION.sub("", values):
        raise UserError(
            f"{path}={values} of the saved run reads something outside of its configuration: give "
            f"the value itself, as in {path}=VALUE, or, if you trust where the run comes from, "
            "load it with trust_code=True in Python or --trust-code on the command line."
        )
