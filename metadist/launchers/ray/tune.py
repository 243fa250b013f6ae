"""Hyperparameter search over whole experiments with Ray Tune: each trial is a run."""

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, open_dict

from metadist.config.overrides import VERSION_BASE, compose
from metadist.errors import UserError
from metadist.launchers.ray.cluster import (
    check_resources,
    init_ray,
    load_ray,
    max_concurrent_trials,
    trial_resources,
)
from metadist.launchers.ray.ray_launcher import TrainRun
from metadist.launchers.run_spec import RunSpec
from metadist.metrics import METRIC_MODES

_POLL_SECONDS = 0.5
_runs: list[TrainRun] = []
_PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)\Z)[a-z_][a-z0-9_./-]*", re.IGNORECASE)


def tune_experiment(
    config_name: str,
    space: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    directory: str | Path,
    num_workers: int = 1,
    use_gpu: bool = False,
    metric: str = "validation_accuracy",
    mode: Literal["max", "min"] | None = None,
    num_samples: int = 1,
    scheduler: Any = None,
    search: Any = None,
    max_failures: int = 0,
    address: str | None = None,
) -> Any:
    """Search over an experiment's options with Ray Tune.

    A trial is a run of `metadist CONFIG_NAME launcher=ray OVERRIDES KEY=VALUE …`, with its own run
    directory in `directory`. Ray's `TuneReportCallback` passes the reports of the run's validations
    to Tune: `iteration` (finished outer steps), `train_loss`, `validation_…` and `run_directory`;
    the last report is made after the test. A scheduler such as
    `ASHAScheduler(time_attr="iteration")` can stop a trial early. As many trials run concurrently
    as the cluster has resources for.

    Args:
        config_name: "maml", "ddp", or a configuration in a directory that the overrides add, as in
            "hydra.searchpath=[file:///home/me/conf]".
        space: the options to search. A key is an option, as on the command line; a value is a
            search space of Tune (`tune.grid_search([0.01, 0.4])`, `tune.loguniform(1e-3, 1)`) or a
            fixed value: None, a number, a string, or lists and dictionaries of them.
        overrides: the options of all trials, as on the command line.
        directory: the directory for the trials' run directories and Tune's files.
        num_workers: the number of workers of each trial.
        use_gpu: whether each worker has a GPU.
        metric: the metric by which trials are compared: "validation_accuracy" or "validation_mse".
        mode: "max" or "min". Default: "max" for an accuracy, "min" for an MSE or a loss; required
            for a metric of the user's.
        num_samples: the number of samples of the space; a grid is repeated as often.
        scheduler: a scheduler of Tune, such as ASHA; it gets `metric` and `mode`. Default: no early
            stopping.
        search: a search algorithm of Tune. Default: grid and random search.
        max_failures: the number of times that each trial may lose workers.
        address: the address of a running cluster. Default: see `init_ray`.

    Returns:
        Tune's `ResultGrid`: `get_best_result().config` has the best options, and
        `.metrics["run_directory"]` the directory of its run.

    Raises:
        UserError: Ray is not installed or unreachable, there are too few CPUs or GPUs, or options
            are invalid. Raised before any trial starts.
    """
    expected_mode = METRIC_MODES.get(metric.removeprefix("validation_"), mode)
    if expected_mode is None:
        raise UserError(f"metric={metric!r} needs a mode: set mode to 'min' or 'max'.")
    if mode not in (None, expected_mode):
        raise UserError(f"{metric} needs mode={expected_mode!r}: leave mode={mode!r} out.")
    tune = load_ray("ray.tune")
    init_ray(address)
    check_resources(num_workers, use_gpu, f"num_workers={num_workers}")
    directory = Path(directory).resolve()
    _compose(config_name, overrides)
    trial = tune.with_parameters(
        _run_trial,
        config_name=config_name,
        overrides=tuple(overrides),
        directory=directory / "runs",
        workers={"num_workers": num_workers, "use_gpu": use_gpu, "max_failures": max_failures},
    )
    tuner = tune.Tuner(
        tune.with_resources(_graceful_trial(trial), trial_resources()),
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            metric=metric,
            mode=expected_mode,
            num_samples=num_samples,
            scheduler=scheduler,
            search_alg=search,
            max_concurrent_trials=max_concurrent_trials(num_workers, use_gpu),
        ),
        run_config=tune.RunConfig(name="tune", storage_path=str(directory), verbose=0),
    )
    return tuner.fit()


def _run_trial(
    config: dict[str, Any],
    config_name: str,
    overrides: tuple[str, ...],
    directory: Path,
    workers: dict[str, Any],
) -> None:
    """The trainable: run an experiment in Ray Train workers that report to this trial."""
    callback = load_ray("ray.tune.integration.ray_train").TuneReportCallback()
    directory = directory / load_ray("ray.tune").get_context().get_trial_id()
    directory.mkdir(parents=True, exist_ok=True)
    overrides = (*overrides, *(f"{key}={format_value(config[key])}" for key in config))
    configuration = _compose(config_name, overrides)
    configuration.resume = "auto"  # a trial that Tune restarts resumes
    spec = RunSpec(
        name=config_name,
        directory=directory,
        configuration=configuration,
        overrides=overrides,
        concurrent=True,
    )
    run = TrainRun(spec, callbacks=[callback], **workers)
    _runs.append(run)
    with contextlib.closing(run):
        while not run.wait(_POLL_SECONDS):
            pass
        status = run.finish()
    if status:
        raise RuntimeError(
            f"the trial's run ended with status {status}: see {directory}/console.log and what "
            "was printed"
        )


def _graceful_trial(function: Any) -> Any:
    """A trial class for the function that stops the trial's run before Tune ends its process. Ray
    Train's workers would otherwise outlive the process for a while and keep their resources.
    """
    base: Any = load_ray("ray.tune.trainable.function_trainable").wrap_function(function)

    class ExperimentTrial(base):  # type: ignore[misc]  # Ray is optional
        def cleanup(self) -> None:
            _stop_runs()
            super().cleanup()

    return ExperimentTrial


def _stop_runs() -> None:
    """Make the runs of this trial's process save a checkpoint and end, and wait for them."""
    for run in _runs:
        if not run.wait(0.0):
            run.signal(signal.SIGTERM)
        while not run.wait(_POLL_SECONDS):
            pass


def format_value(value: Any) -> str:
    """Format a value in Hydra's override grammar, so that Hydra parses it to the same value.

    A string is quoted if it would be parsed as another type: '1e-3' stays a string, and `maml` can
    select an option of a group.

    Raises:
        UserError: Hydra's grammar does not have the value's type.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Real):  # includes NumPy's numbers
        return str(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, str | Path):
        text = str(value)
        return text if _PLAIN.fullmatch(text) else QuotedString(text, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_key(key)}:{format_value(value[key])}' for key in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    raise UserError(
        f"an option cannot be set to {value!r}, which is of type {type(value).__name__}: let the "
        "space have None, numbers, strings, lists and dictionaries."
    )


def _key(key: Any) -> str:
    """Format a key of a dictionary; Hydra's grammar has no quoted keys."""
    if isinstance(key, str) and not _PLAIN.fullmatch(key):
        raise UserError(
            f"the key {key!r} of a dictionary is not valid in an override: choose a name of "
            "letters, digits and underscores."
        )
    return format_value(key)


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration of an experiment, composed as for its command line.

    Raises:
        UserError: the overrides do not fit.
    """
    with hydra.initialize_config_module("metadist.conf", **VERSION_BASE):
        configuration = compose(config_name, overrides)
    with open_dict(configuration):
        configuration.pop("launcher", None)
    return configuration
