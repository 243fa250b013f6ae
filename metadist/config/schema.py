"""The schema of the configuration's top level: which keys exist and which values they take.

The groups (model, algorithm, trainer, …) are checked against the signatures of their targets, in
`metadist.config.instantiate`.
"""

import contextlib
import difflib
import re
from typing import Annotated, Any, Literal, cast

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from metadist.errors import UserError

NOT_IN_DEFAULTS = ("experiment", "partition")
"""Groups that are not in the defaults list, so that Hydra requires the plus: +partition=dim0."""

LISTS = ("logger", "callbacks")
"""Groups that take a list of options."""

_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:\s*)?([A-Za-z_]\w*)\s*[.\[},]")
"""An interpolation of an absolute key; other resolvers have a colon after the name."""


def _number(value: Any) -> Any:
    """Convert a number that an interpolation (`${oc.env:SLURM_ARRAY_TASK_ID}`) gives as text."""
    if isinstance(value, str):
        for convert in (int, float):
            with contextlib.suppress(ValueError):
                return convert(value)
    return value


def _text(value: Any) -> Any:
    """Convert a number, such as the name of a directory, to a text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Seconds = Annotated[float, Field(strict=True, gt=0, lt=1e6), BeforeValidator(_number)]


class SweepSettings(BaseModel):
    """Options of a sweep (`-m`).

    Attributes:
        on_failure: "stop" ends the sweep when a job fails, "continue" runs the other jobs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_failure: Literal["stop", "continue"]


class Settings(BaseModel):
    """The top level of `conf/maml.yaml` and `conf/ddp.yaml`; groups are not checked.

    Attributes:
        seed: the seed of the initial parameters and of the training tasks.
        threads: number of CPU threads of each worker.
        timeout_seconds: seconds within which a lost worker is detected.
        rendezvous_timeout_seconds: seconds by which the workers' starts may differ.
        device: "auto", "cpu", "cuda" or "cuda:N".
        resume: None, "auto", or the path of a checkpoint or of a run's directory.
        init_from: the source of the initial weights: the path of a run, checkpoint or weights file,
            or the name of pretrained weights; None for random ones.
        sweep: options of a sweep.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63), BeforeValidator(_number)]
    threads: Annotated[int, Field(strict=True, ge=1, le=4096), BeforeValidator(_number)]
    timeout_seconds: _Seconds
    rendezvous_timeout_seconds: _Seconds
    device: Annotated[str, BeforeValidator(_text)]
    resume: Annotated[str | None, BeforeValidator(_text)] = None
    init_from: Annotated[str | None, BeforeValidator(_text)] = None
    sweep: SweepSettings

    dataset: Any
    task: Any
    model: Any
    algorithm: Any
    optimizer: Any
    scheduler: Any
    reducer: Any
    strategy: Any
    trainer: Any
    default_partition: Any
    partition: Any = None
    logger: Any = None
    callbacks: Any = None
    launcher: Any = None

    allreduce_engine: Any = None  # in conf/ddp.yaml; conf/strategy/allreduce.yaml refers to it
    running_statistics: Any = None  # in conf/ddp.yaml; conf/model/*.yaml refer to it


def validate(configuration: DictConfig) -> Settings:
    """Check the top level of a composed configuration. Any process may call it.

    The user's own keys are allowed, see `_user_keys`.

    Raises:
        UserError: a key is unknown (the message suggests a known one) or missing, or a value does
            not fit.
    """
    known = Settings.model_fields
    user_keys = _user_keys(configuration)
    for key in map(str, configuration):
        if key not in known and key not in user_keys:
            hint = f"check its spelling, or refer to a group of your own as ${{{key}}}."
            if key == "experiment":
                hint = "let the file of the experiment begin with the line `# @package _global_`."
            elif nearest := nearest_key(key, configuration):
                hint = f"did you mean {nearest}=…?"
            raise UserError(f"{key} is not a key or group of the configuration: {hint}")
    values = {str(key): configuration[key] for key in configuration if key not in user_keys}
    if isinstance(values.get("sweep"), DictConfig):
        values["sweep"] = OmegaConf.to_container(values["sweep"], resolve=True)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def _user_keys(configuration: DictConfig) -> set[str]:
    """Top-level keys that the user adds: groups and values that other keys refer to.

    An unknown key is the user's if an interpolation (`${key}`) refers to it, or if its node has a
    `_target_` and its name is not close to the name of a known key. The object of a user's group is
    built where an interpolation refers to it: `dataset.augment=${my_augment}`.
    """
    referred = set(_REFERENCE.findall(OmegaConf.to_yaml(configuration)))
    nodes: Any = OmegaConf.to_container(configuration, resolve=False)
    user_keys = set()
    for key in nodes.keys() - Settings.model_fields.keys():
        node = nodes[key]
        is_group = isinstance(node, dict) and "_target_" in node and nearest_key(key) is None
        if key in referred or is_group:
            user_keys.add(key)
    return user_keys


def nearest_key(key: str, configuration: DictConfig | None = None) -> str | None:
    """The top-level key or group whose name is close to a misspelt one; None if there is none.

    A group that is not in the defaults list has a plus, as on the command line. If no name is
    close, the keys of this name inside the groups of `configuration`.
    """
    matches = difflib.get_close_matches(key, [*Settings.model_fields, *NOT_IN_DEFAULTS], n=1)
    if not matches:
        groups = cast(dict[str, Any], OmegaConf.to_container(configuration or OmegaConf.create()))
        inside = (g for g, keys in groups.items() if isinstance(keys, dict) and key in keys)
        return " or ".join(f"{group}.{key}" for group in inside) or None
    return f"+{matches[0]}" if matches[0] in NOT_IN_DEFAULTS else matches[0]


def _sentence(error: ValidationError) -> str:
    """Describe the first mistake in one sentence."""
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return (
            f"{path} is missing: leave out ~{path}, if you wrote it, or give a value, as in "
            f"+{path}=VALUE."
        )
    if first["type"] == "extra_forbidden":
        return f"{path} is not an option of sweep: its options are on_failure."
    reason = f"{first['msg'][0].lower()}{first['msg'][1:]}."
    return f"{path}={first['input']} does not fit: {_EXAMPLES.get(path, reason)}"


_EXAMPLES = {
    "resume": "write resume=auto or resume=PATH.",
    "init_from": "write init_from=PATH or the name of pretrained weights.",
    "sweep": "write sweep.on_failure=stop or sweep.on_failure=continue.",
}
