"""Hyperparameter search over whole experiments with Ray Tune: each trial is a distributed run."""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, open_dict

from metadist.errors import UserError
from metadist.launchers.job import RunSpec
from metadist.launchers.ray.cluster import (
    load_ray,
    open_ray,
    require_workers,
    trial_resources,
    trials_at_once,
)
from metadist.launchers.ray.run import RayRun

_TURN_SECONDS = 0.5
_PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)\Z)[a-z_][a-z0-9_./-]*", re.IGNORECASE)


def tune_experiment(
    script: str | Path,
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

    A trial is what `python SCRIPT launcher=ray OVERRIDES KEY=VALUE …` would be, with a run
    directory of its own below `directory`. Rank zero's figures of each validation are reported
    through Ray Train to the trial, with `iteration` (finished outer steps), `train_loss` and
    `validation_…`, so that a scheduler such as `ASHAScheduler(time_attr="iteration")` can stop it
    early. As many trials go on at a time as the cluster has workers for.

    Args:
        script: the experiment's, such as `experiments/maml.py`; `conf/` lies beside its folder.
        space: option, as on the command line -> what Tune draws values from
            (`tune.grid_search([0.01, 0.4])`, `tune.loguniform(1e-3, 1)`), or a value: None,
            a number, a string, or lists and dictionaries of them.
        overrides: options of all trials, as on the command line.
        directory: where the trials' run directories and Tune's records are put.
        num_workers: of each trial.
        use_gpu: whether each worker has a GPU.
        metric: what trials are judged by: "validation_accuracy" or "validation_mse".
        mode: whether more of it is better, or less. Default: less of an error or a loss.
        num_samples: how often the space is drawn from; a grid is gone through as often.
        scheduler: Tune's, such as ASHA; metric and mode are given to it. Default: all trials run
            to their end.
        search: one of Tune's search algorithms. Default: grid and random search.
        max_failures: how often each trial may lose workers.
        address: of a running cluster. Default: as `open_ray` has it.

    Returns:
        Tune's `ResultGrid`: `get_best_result().config` has the best options, and
        `.metrics["run_directory"]` says where its run lies.

    Raises:
        UserError: Ray is not there, too few CPUs or GPUs, or options that do not fit, found
            before any trial starts.
    """
    right = "min" if metric.endswith(("_mse", "_loss")) else "max"
    if metric.startswith("validation_") and mode not in (None, right):
        raise UserError(f"the better {metric} is its {right}imum: leave mode={mode!r} out.")
    tune = load_ray("ray.tune")
    open_ray(address)
    require_workers(num_workers, use_gpu, f"num_workers={num_workers}")
    script, directory = Path(script).resolve(), Path(directory).resolve()
    overrides = tuple(overrides)
    _compose(script, overrides)
    trial = tune.with_parameters(
        _trial_class(),
        script=script,
        overrides=overrides,
        directory=directory / "runs",
        workers={"num_workers": num_workers, "use_gpu": use_gpu, "max_failures": max_failures},
    )
    tuner = tune.Tuner(
        trial,
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            metric=metric,
            mode=mode or right,
            num_samples=num_samples,
            scheduler=scheduler,
            search_alg=search,
            max_concurrent_trials=trials_at_once(num_workers, use_gpu),
        ),
        run_config=tune.RunConfig(name="tune", storage_path=str(directory), verbose=0),
    )
    return tuner.fit()


def in_grammar(value: Any) -> str:
    """A value as an override of Hydra's has it, which Hydra reads as the same value.

    A string is quoted where it might be read as something else: '1e-3' stays a string, `maml` can
    be the choice of a group.

    Raises:
        UserError: it, or something in it, is of a kind that Hydra's grammar does not have.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Real):  # NumPy's as well
        return str(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, str | Path):
        text = str(value)
        return text if _PLAIN.fullmatch(text) else QuotedString(text, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_key(each)}:{in_grammar(value[each])}' for each in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_grammar, value))}]"
    raise UserError(
        f"an option cannot be set to {value!r}, which is of type {type(value).__name__}: let the "
        "space have None, numbers, strings, lists and dictionaries."
    )


def _key(key: Any) -> str:
    """A dictionary's key, which cannot be quoted."""
    if isinstance(key, str) and not _PLAIN.fullmatch(key):
        raise UserError(
            f"the key {key!r} of a dictionary cannot stand in an option: choose a name of letters, "
            "digits and underscores."
        )
    return in_grammar(key)


def _trial_class() -> type:
    """The class of a trial, made when Ray is there."""
    tune = load_ray("ray.tune")

    class ExperimentTrial(tune.Trainable):
        """A run in Ray workers; an iteration of Tune's lasts until the run's next report."""

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return trial_resources()

        def setup(
            self,
            config: dict[str, Any],
            script: Path,
            overrides: tuple[str, ...],
            directory: Path,
            workers: dict[str, Any],
        ) -> None:
            words = (*overrides, *(f"{key}={in_grammar(value)}" for key, value in config.items()))
            self.directory = directory / self.trial_id
            self.directory.mkdir(parents=True, exist_ok=True)
            configuration = _compose(script, words)
            configuration.resume = "auto"  # a trial that Tune starts again goes on
            self.iterations = int(configuration.trainer.iterations)
            self.figures: dict[str, Any] = {"iteration": 0}
            self.newest: dict[str, Any] = {}
            self.reports: list[dict[str, Any]] = []
            self.output = (self.directory / "console.log").open("a", encoding="utf-8")
            planned = RunSpec(
                name=script.stem,
                directory=self.directory,
                configuration=configuration,
                overrides=words,
            )
            self.run = RayRun(planned, output=self.output, **workers)

        def step(self) -> dict[str, Any]:
            going_on = True
            while going_on and not self.reports:
                going_on = self.run.attend(_TURN_SECONDS)
                # Two reports of one validation differ in the checkpoint alone.
                for each in self.run.new_reports():
                    if "validation_loss" in each and each != self.newest:
                        self.newest = each
                        self.reports.append(each)
            done = {"run_directory": str(self.directory)}
            if self.reports:
                self.figures = self.reports.pop(0)
                return self.figures | done
            if status := self.run.status():
                raise RuntimeError(
                    f"the trial's run ended with status {status}: {self.directory}/console.log "
                    "and what was printed say why"
                )
            return self.figures | done | {"done": True}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            # The state itself lies in the run's directory.
            path = Path(checkpoint_dir) / "figures.json"
            path.write_text(json.dumps(self.figures), encoding="utf-8")

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            path = Path(checkpoint_dir) / "figures.json"
            self.figures = json.loads(path.read_text(encoding="utf-8"))

        def cleanup(self) -> None:
            # A run at its end is let to its test; one that is stopped early saves and ends.
            if self.figures["iteration"] < self.iterations:
                self.run.signal(signal.SIGTERM)
            while self.run.attend(_TURN_SECONDS):
                pass
            self.run.close()
            self.output.close()

    return ExperimentTrial


def _compose(script: Path, words: Sequence[str]) -> DictConfig:
    """The configuration of an experiment, as Hydra has it for its command line.

    Raises:
        UserError: options that Hydra does not take.
    """
    try:
        with hydra.initialize_config_dir(str(script.parent.parent / "conf"), version_base="1.3"):
            configuration = hydra.compose(script.stem, list(words))
    except hydra.errors.HydraException as error:
        raise UserError(f"the options do not fit: {' '.join(str(error).split())}") from None
    with open_dict(configuration):
        configuration.pop("hydra", None)
        configuration.pop("launcher", None)
    return configuration
