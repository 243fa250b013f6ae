"""The training loop: step, log, evaluate, save; then the test."""

import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from metadist.distributed import get_rank, get_world_size
from metadist.distributed.reducers import LinearReducer
from metadist.errors import UserError
from metadist.tasks import stack_episodes, task_keys
from metadist.tracking import Run
from metadist.training.evaluation import Estimate, evaluate
from metadist.training.experiment import Experiment
from metadist.training.interrupts import Interrupted, StopRequests
from metadist.training.mappers import MetaBatch
from metadist.training.pictures import draw_pictures
from metadist.training.resume import checkpoints_of, identity


def run(experiment: Experiment) -> dict[str, Any]:
    """Train, then test. Every rank of the world calls it.

    Returns:
        The results, as in `results.json`, on the ranks that run the loop; elsewhere {}.

    Raises:
        UserError: a checkpoint that does not fit, a directory that cannot be written.
        Interrupted: a signal asked the run to stop; it has saved a checkpoint.
    """
    strategy = experiment.strategy
    with StopRequests() as stop:
        strategy.open()
        try:
            results = _Run(experiment, stop).run() if strategy.runs_loop() else {}
        except Interrupted:
            strategy.close()
            raise
        except BaseException:
            strategy.close(graceful=False)
            raise
        strategy.close()
    return results


class _Run:
    """One run on a rank that runs the loop."""

    def __init__(self, experiment: Experiment, stop: StopRequests) -> None:
        self.x = experiment
        self.stop = stop
        self.leads = get_rank() == 0
        self.progress = experiment.progress
        self.checkpoints = checkpoints_of(experiment)
        self.metric = "mse" if experiment.tasks.regression else "accuracy"

    def run(self) -> dict[str, Any]:
        """See the module's `run`."""
        x, started = self.x, time.perf_counter()
        try:
            if self.leads:
                x.tracker.start(
                    Run(
                        directory=x.directory,
                        name=x.name,
                        configuration=x.configuration,
                        iterations=x.trainer.iterations,
                        start_iteration=self.progress.iteration,
                        headline=x.headline,
                    )
                )
            self._train()
            results = self._test(time.perf_counter() - started)
            if self.leads:
                _write_json(x.directory / "results.json", results)
                pictures = draw_pictures(
                    x.directory, x.headline, x.tasks, x.learner, x.seed, results
                )
                x.tracker.finish(results, pictures)
        finally:
            x.tracker.close()
        return results

    # --- training ------------------------------------------------------------------------------

    def _train(self) -> None:
        x, progress = self.x, self.progress
        while progress.iteration < x.trainer.iterations:
            self._step(progress.iteration + 1)
            last = progress.iteration == x.trainer.iterations
            if x.trainer.eval_every and (progress.iteration % x.trainer.eval_every == 0 or last):
                self._validate()
            stopping = x.strategy.agree(self.stop.number != 0) and not last
            every = x.trainer.checkpoint_every
            if last or stopping or (every and progress.iteration % every == 0):
                self._save()
            if stopping:
                self._leave()

    def _leave(self) -> NoReturn:
        x, done = self.x, self.progress.iteration
        raise Interrupted(
            self.stop.number or signal.SIGTERM,
            f"stopped at iteration {done} of {x.trainer.iterations}, saved: "
            f"to go on, give the same command hydra.run.dir={x.directory} resume=auto",
        )

    def _leave_if_asked(self) -> None:
        if self.x.strategy.agree(self.stop.number != 0):
            self._leave()

    def _step(self, iteration: int) -> None:
        x, progress = self.x, self.progress
        started = time.perf_counter()
        keys = task_keys(x.seed, "train", iteration, range(x.trainer.meta_batch_size))
        result = x.strategy.backward(x.train_mapper, x.learner, self._batch(keys))
        x.optimizer.step()
        # Only the loss may be a sum; what is reported and running statistics are means.
        weight = _total_weight(x.strategy.reducer, x.trainer.meta_batch_size)
        for name, buffer in x.learner.named_buffers():
            buffer += (result.buffers[name] / weight).to(buffer)
        seconds = time.perf_counter() - started
        progress.iteration = iteration
        progress.train_loss = result.loss.item()
        progress.train_seconds += seconds
        if self.leads:
            x.tracker.record(
                {
                    "iteration": iteration,
                    "train_loss": progress.train_loss,
                    **{
                        f"train_{name}": value.item() / weight
                        for name, value in result.metrics.items()
                    },
                    "tasks_per_second": x.trainer.meta_batch_size / seconds,
                    "seconds": progress.train_seconds,
                }
            )

    def _batch(self, keys: Tensor) -> MetaBatch:
        if not self.x.trainer.send_tasks:
            return MetaBatch(keys)
        return MetaBatch(keys, stack_episodes([self.x.tasks.draw(key) for key in keys]))

    def _evaluate(
        self, split: str, tasks: int, between: Callable[[], None] = lambda: None
    ) -> dict[str, Estimate]:
        x = self.x
        return evaluate(
            x.strategy,
            x.evaluate_mapper,
            x.learner,
            task_keys(x.seed, split, 0, range(tasks)),
            self._batch,
            between,
        )

    def _validate(self) -> None:
        x, progress = self.x, self.progress
        figures = self._evaluate("validation", x.trainer.validation_tasks)
        figure = figures[self.metric]
        if self.leads:
            x.tracker.record(
                {
                    "iteration": progress.iteration,
                    "validation_loss": figures["loss"].mean,
                    f"validation_{self.metric}": figure.mean,
                    "validation_ci95": figure.ci95,
                }
            )
        progress.validation = {f"validation_{self.metric}": figure.mean}
        sign = -1 if x.tasks.regression else 1
        best = progress.best.get(self.metric)
        if math.isfinite(figure.mean) and (best is None or sign * figure.mean > sign * best):
            progress.best = {"iteration": progress.iteration, self.metric: figure.mean}
            if self.leads:
                self.checkpoints.save_best(self._contents())

    # --- saving --------------------------------------------------------------------------------

    def _contents(self) -> dict[str, Any]:
        return {
            "version": version("metadist"),
            **asdict(self.progress),
            "identity": identity(self.x.configuration),
            "learner": self.x.learner.state_dict(),
            "optimizer": self.x.optimizer.state_dict(),
        }

    def _save(self) -> None:
        if self.leads:
            self.checkpoints.save(self.progress.iteration, self._contents())

    # --- the test ------------------------------------------------------------------------------

    def _test(self, seconds: float) -> dict[str, Any]:
        x, progress = self.x, self.progress
        started = time.perf_counter()
        figures = self._evaluate("test", x.trainer.eval_tasks, self._leave_if_asked)
        result = figures[self.metric]
        before = figures.get(f"{self.metric}_before")
        tasks = progress.iteration * x.trainer.meta_batch_size
        return {
            f"test_{self.metric}": result.mean,
            "ci95": result.ci95,
            "test_tasks": result.tasks,
            **({} if before is None else {f"test_{self.metric}_before": before.mean}),
            "test_loss": figures["loss"].mean,
            "train_loss": progress.train_loss,
            **progress.validation,
            "best_validation": progress.best,
            "iterations": progress.iteration,
            "tasks_per_second": tasks / progress.train_seconds,
            "wall_seconds": seconds + time.perf_counter() - started,
            "world_size": get_world_size(),
            "strategy": x.strategy.name,
            "seed": x.seed,
            "protocol": {
                **x.tasks.protocol(),
                **x.learner.protocol(),
                "split": "test",
                "batch_norm": _batch_norm(x.learner),
                "interval": "95%, 1.96 standard errors over tasks",
                "checkpoint": "last",
            },
        }


def _batch_norm(learner: nn.Module) -> str:
    norms = [m for m in learner.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return "none"
    if any(norm.track_running_stats for norm in norms):
        return "running statistics of training"
    return "statistics of the batch at hand (transductive)"


def _total_weight(reducer: Any, items: int) -> float:
    """What the weights of a batch's items add up to: 1 for a mean."""
    if not isinstance(reducer, LinearReducer):
        return 1.0
    return sum(reducer.coefficients([1.0] * items))


def _without_nan(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_json(path: Path, contents: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".part")
    try:
        temporary.write_text(
            json.dumps(_without_nan(contents), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror}): free some space."
        ) from None
