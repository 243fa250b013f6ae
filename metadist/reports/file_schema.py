"""The types of the values in a run's files, which may be damaged or another person's."""

import reprlib
from functools import cache
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from metadist.errors import printable

_MAX_SHOWN = 60
_OF_EQUAL_LENGTH = ("images", "indices", "labels", "predictions", "targets")

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Label = Annotated[int, Field(strict=True, ge=0, lt=10**6)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Node = dict[StrictStr, Any]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Values(BaseModel):
    """Values with the given types; any may be missing, and others are not checked.

    A float may be a text such as "NaN", which `json_value` writes.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class _Aligned(_Values):
    """Values with lists of one length."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "_Aligned":
        lists = (getattr(self, name, None) for name in _OF_EQUAL_LENGTH)
        lengths = [len(values) for values in lists if isinstance(values, list)]
        if len(set(lengths)) > 1:
            raise ValueError(f"it has lists of {' and '.join(map(str, lengths))} values")
        return self


class _Step(_Values):
    steps: Count
    mean: float
    ci95: float


class _Protocol(_Values):
    eval_seed: Count = 0


class Results(_Values):
    """`results.json`."""

    ci95: float | None = None
    test_accuracy: float = 0.0
    test_mse: float = 0.0
    validation_accuracy: float = 0.0
    validation_mse: float = 0.0
    test_accuracy_by_steps: list[_Step] = []
    test_mse_by_steps: list[_Step] = []
    train_loss: float | None = None
    iterations: Count = 0
    tested_iteration: Count = 0
    wall_seconds: Seconds = 0.0
    evaluation_seconds: Seconds = 0.0
    samples_per_second: float = 0.0
    tasks_per_second: float = 0.0
    world_size: Count = 1
    seed: Count = 0
    environment: Node = {}
    method: Node = {}
    protocol: _Protocol = _Protocol()
    warnings: list[str] = []


class Evaluation(Results):
    """The JSON file of `metadist evaluate`, which may have tested several checkpoints."""

    iterations: Any = 0
    tested_iteration: Any = 0


class Failure(_Values):
    """`failure.json`."""

    error: str = ""
    overrides: list[str] = []


_Row = Annotated[list[float], Field(min_length=1)]


class Prediction(_Aligned):
    """A line of `test_predictions.jsonl`."""

    task: Annotated[int, Field(strict=True)]
    classes: list[Any] | None = None
    labels: list[Label] | None = None
    predictions: list[Label] | list[_Row] | None = None
    targets: list[_Row] | None = None
    accuracy: float = 0.0
    mse: float = 0.0
    loss: float = 0.0


class _Support(_Aligned):
    images: list[str]
    labels: list[Label]


class _Query(_Aligned):
    images: list[str]
    indices: list[Count]


class _ImageTask(_Values):
    task: Count
    support: _Support
    query: _Query


class _Function(_Values):
    task: Count
    support: Annotated[list[list[_Finite]], Field(min_length=2, max_length=2)]
    inputs: list[_Finite]
    before: list[float]

    @model_validator(mode="after")
    def _check_lengths(self) -> "_Function":
        if self.before and len(self.before) != len(self.inputs):
            raise ValueError(f"it has {len(self.inputs)} inputs and {len(self.before)} predictions")
        return self


ExampleTasks = dict[str, list[_Function | _ImageTask]]
"""`test_tasks.json`."""


class _Runtime(_Values):
    choices: Node | None = None
    config_sources: list[Node] | None = None
    cwd: str | None = None


class _HydraOverrides(_Values):
    hydra: list[str] | None = None


class HydraNode(_Values):
    """The node `hydra` of `.hydra/hydra.yaml`."""

    job: Node | None = None
    runtime: _Runtime | None = None
    overrides: _HydraOverrides | None = None


class _Configuration(_Values):
    model: Node | None = None
    algorithm: Node | None = None
    dataset: Node | None = None
    trainer: Node | None = None


class Contents(_Values):
    """The contents of a checkpoint or of a weights file."""

    iteration: Count = 0
    configuration: _Configuration = _Configuration()
    task: Node = {}
    protocol: Node = {}
    learner: Node = {}
    buffers: Node = {}
    callbacks: Node = {}


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def mismatch(values: Any, schema: Any) -> str:
    """The first value that is not of the schema's type, and what is expected; "" without one."""
    try:
        _adapter(schema).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = printable(".".join(map(str, first["loc"])) or "the whole", kept="")[:_MAX_SHOWN]
        given = printable(_shown(first["input"]), kept="")
        return f"{where} is {given}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return ""


def _shown(value: Any) -> str:
    """A value in a short form; its type if it is an integer of very many digits."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return type(value).__name__
