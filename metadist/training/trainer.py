"""The training loop: train, validate, save checkpoints, test."""

import contextlib
import copy
import functools
import logging
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.profiler import profile

from metadist.algorithms import TaskResult
from metadist.distributed import WorkerLostError, get_rank
from metadist.distributed.job import current_job
from metadist.distributed.process_exit import close_within_seconds
from metadist.distributed.reducers import LinearReducer, MeanReducer
from metadist.errors import UserError
from metadist.files import wrap_write_errors
from metadist.loggers import Run
from metadist.metrics import score
from metadist.profile_ranges import profile_range
from metadist.reports import (
    CONTENTS,
    ERROR_FILE,
    PROFILE_DIRECTORY,
    TEST_PREDICTIONS_FILE,
    directory_override,
    write_results,
    write_test_predictions,
)
from metadist.tasks import seed_from, seed_generators
from metadist.training.batching import finite_or_zero
from metadist.training.clipping import clip_gradient, gradient_norm, optimized_parameters
from metadist.training.evaluation import Estimate, Evaluation, evaluate
from metadist.training.experiment import (
    Experiment,
    evaluation_keys,
    make_batch,
    shard_sizes,
    training_keys,
)
from metadist.training.non_finite import (
    NonFiniteReport,
    find_non_finite,
    format_key,
    stop_message,
    warning_message,
)
from metadist.training.profiling import (
    PROFILED_STEPS,
    prepare_profiler,
    start_profiler,
    write_profile,
    write_worker_profile,
)
from metadist.training.result_warnings import result_warnings, start_warnings
from metadist.training.results import prediction_records, results_of, user_metrics
from metadist.training.resume import replace_later_checkpoints
from metadist.training.run_plots import plot_run, plot_validation_tasks
from metadist.training.saved_state import (
    checkpoint_contents,
    checkpoints_of,
    learner_contents,
    load_best,
    load_learner_state,
    state_tensors,
)
from metadist.training.signals import Interrupted, StopSignals
from metadist.training.step_blocks import adam_step

_log = logging.getLogger(__name__)

REPLICA_CHECK_EVERY = 100
"""Outer steps between comparisons of the ranks' parameters (`Strategy.check_replicas`), which
also precede every validation and checkpoint."""

_MAX_BLOCK_SECONDS = 0.1
"""Seconds of outer steps in a block, whose metrics are logged at its end."""


class StepOutput(NamedTuple):
    """Loss and gradient of a meta-batch. The gradient itself is in the parameters' `.grad`.

    Attributes:
        result: the reduced result, detached.
        loss: the reduced loss.
        gradient_norm: the Euclidean norm of the gradient with respect to all parameters that the
            optimizer changes, before clipping.
        stopping: whether any driver was asked to stop.
    """

    result: TaskResult
    loss: float
    gradient_norm: float
    stopping: bool = False

    @property
    def finite(self) -> bool:
        """Whether neither loss nor gradient holds a NaN or an infinity."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class _Step(NamedTuple):
    """An outer step to log.

    Attributes:
        iteration: its number, from 1.
        output: its loss and gradient.
        learning_rate: the learning rate of the optimizer's first group.
        report: what is not finite; None if everything is.
        refused: whether the run stops instead of taking the step.
        skipped: whether the step leaves parameters and buffers as they are.
    """

    iteration: int
    output: StepOutput
    learning_rate: float
    report: NonFiniteReport | None
    refused: bool
    skipped: bool


class Trainer:
    """Trains, validates and tests the learner of an experiment. Every rank makes one.

    `run` opens the strategy and logs. With `strategy=local` the other methods can also be called
    alone; built-in loggers then write no metrics.

    Args:
        experiment: the experiment, built and restored; training continues from its `state`.
    """

    def __init__(self, experiment: Experiment) -> None:
        replace_later_checkpoints(experiment)
        self.experiment = experiment
        self.config = experiment.trainer_config
        self.state = experiment.state
        self.callbacks = list(experiment.callbacks.values())
        self.checkpoints = checkpoints_of(experiment)
        self._is_main = get_rank() == 0
        self._is_training = self._holds_best = False
        self._stop = StopSignals(experiment.directory / ERROR_FILE)
        self._step_started, self._step_seconds = 0.0, math.inf
        self._total_weight = total_weight(experiment)
        self._device = next(experiment.learner.parameters()).device
        self._optimizer_seed = seed_from(experiment.seed)
        self._started = time.perf_counter() - self.state.wall_seconds

    def run(self) -> dict[str, Any]:
        """Train, then test. Every rank calls it; ranks that are not drivers serve requests.

        Returns:
            The results, as in `results.json`, on the drivers; {} on other ranks.

        Raises:
            UserError: a checkpoint does not fit, a directory cannot be written, or a loss or
                gradient is not finite (with `trainer.on_non_finite=stop`).
            Interrupted: a signal asked the run to stop; it has saved a checkpoint.
        """
        experiment = self.experiment
        results: dict[str, Any] = {}
        if self.config.profile:
            prepare_profiler()
        with self._joined():
            if experiment.strategy.is_driver:
                with self._logging():
                    self.train()
                    results = self.test(experiment.directory / TEST_PREDICTIONS_FILE)
                    if self._is_main:
                        self._finish(results)
        return results

    def _finish(self, results: dict[str, Any]) -> None:
        """Write the results, plots and report; errors in plots and report are only warnings."""
        write_results(self.experiment.directory, results)
        self._stop.error_file = None  # the run has finished
        plots = []
        if self.config.report:
            plots = self._write_plots(results)
            self._write_report()
        self.experiment.logger.finish(results, plots)
        for warning in results["warnings"]:
            self._warn(warning)

    def _write_plots(self, results: dict[str, Any]) -> list[Path]:
        try:
            return plot_run(self.experiment, results)
        except Exception as error:
            self._warn(f"the run's plots could not be made: {error}")
            return []

    def _write_report(self) -> None:
        directory = self.experiment.directory
        try:
            # Imported here because it takes time.
            from metadist.reports.run_report import write_run_report
            from metadist.training.example_tasks import write_test_tasks

            write_test_tasks(self.experiment)
            write_run_report(directory)
        except Exception as error:
            later = f"metadist report {shlex.quote(str(directory))}"
            self._warn(f"the report could not be made: {error} ({later} writes it later)")

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        """Open the strategy around the block, and handle signals and errors of the block."""
        strategy = self.experiment.strategy
        try:
            strategy.open()
            with self._stop.recorded():
                try:
                    yield
                except Interrupted:
                    strategy.close()
                    raise
                strategy.close()
            write_worker_profile(self.experiment.directory / PROFILE_DIRECTORY)
        except BaseException as error:
            with contextlib.suppress(Interrupted):  # torchrun's SIGTERM: the error is reported
                # An error that all ranks raise is left to rank zero.
                if not isinstance(error, Interrupted | WorkerLostError) and (
                    self._is_main or not isinstance(error, UserError)
                ):
                    current_job().claim_first_failure()  # before the others miss this rank
                close_within_seconds(functools.partial(strategy.close, graceful=False))
            raise

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        experiment = self.experiment
        try:
            if self._is_main:
                experiment.logger.start(
                    Run(
                        directory=experiment.directory,
                        name=experiment.name,
                        configuration=experiment.configuration,
                        iterations=self.config.iterations,
                        start_iteration=self.state.iteration,
                        title=experiment.title,
                        contents=CONTENTS,
                        split_descriptions=experiment.split_descriptions,
                    )
                )
            yield
        except BaseException:
            close_within_seconds(experiment.logger.close)  # a service may take minutes to answer
            raise
        experiment.logger.close()

    # --- training ------------------------------------------------------------------------------

    def train(self) -> None:
        """Take the outer steps that are left, with validations and checkpoints between them. The
        drivers call it.

        Raises:
            UserError: the learner holds the best weights, which `test` has loaded; a loss or
                gradient is not finite; or a checkpoint cannot keep a callback's state.
            Interrupted: the run was asked to stop. A checkpoint is saved.
        """
        self._require_last_weights("train")
        experiment, state = self.experiment, self.state
        self._is_training = True
        if self._is_main:
            with wrap_write_errors(experiment.directory):
                experiment.directory.mkdir(parents=True, exist_ok=True)
        experiment.strategy.broadcast_module(experiment.learner)
        experiment.strategy.check_replicas(state_tensors(experiment), state.iteration)
        profiler = self._start_profiler()
        for warning in start_warnings(experiment):
            self._warn(warning)
        for callback in self.callbacks:
            callback.on_train_start(self)
        checkpoint_contents(experiment)  # an error in a callback's state is found before training
        self._catch_up()
        self._step_started = time.perf_counter()
        while not self._is_finished():
            with profile_range("train_step"):
                output = self._train_steps(self._next_iterations())
            if profiler is not None:
                profiler.step()
            for callback in self.callbacks:
                callback.on_iteration_end(self, output)
            self._share_should_stop()
            step_ended = time.perf_counter()
            self._check_validate_save(output.stopping)
            self._step_started += time.perf_counter() - step_ended  # not part of the next step
            if output.stopping:
                self._raise_interrupted()
        self._is_training = False
        if profiler is not None:
            table = write_profile(profiler, experiment.directory / PROFILE_DIRECTORY)
            if self._is_main:
                print(f"\n{table}", flush=True)

    def _start_profiler(self) -> profile | None:
        if not self.config.profile:
            return None
        left = self.config.iterations - self.state.iteration
        if left < PROFILED_STEPS:  # of a resumed run
            self._warn(f"no profile: it takes {PROFILED_STEPS} outer steps, {left} are left")
            return None
        return start_profiler()

    def _catch_up(self) -> None:
        """Write the checkpoint and run the validation that the resumed iteration still lacks."""
        missing = self._is_main and not self.checkpoints.path(self.state.iteration).exists()
        if self._is_finished() and self.experiment.strategy.any_rank(missing):
            self.save_checkpoint()  # the run was resumed from a file of another directory
        if self._validation_is_due():  # the run may have been stopped before it
            self.validate()
            self.save_checkpoint()

    def _check_validate_save(self, stopping: bool) -> None:
        """After an outer step, check the replicas, validate and save a checkpoint, if due."""
        iteration, interval = self.state.iteration, self.config.checkpoint_every
        saving = stopping or (interval and iteration % interval == 0)
        validating = self._validation_is_due()
        if saving or validating or self._is_finished() or iteration % REPLICA_CHECK_EVERY == 0:
            self.experiment.strategy.check_replicas(state_tensors(self.experiment), iteration)
        if validating:
            self.validate()
        if saving or self._is_finished():
            self.save_checkpoint()

    def train_step(self, iteration: int) -> StepOutput:
        """Take one outer step: gradient of a meta-batch, clipping, optimizer, learning rate.

        The drivers call it and end with the same parameters.

        Args:
            iteration: the number of the step, from 1. It keys the tasks.

        Raises:
            UserError: loss or gradient is not finite, with `trainer.on_non_finite=stop`. The
                parameters are unchanged, and a checkpoint is saved, unless it is the first
                iteration or the parameters were not finite before it.
        """
        return self._train_steps(range(iteration, iteration + 1))

    def _next_iterations(self) -> range:
        """The outer steps that nothing separates: those of a block, or the next one."""
        first, blocks = self.state.iteration + 1, self.experiment.step_blocks
        if blocks is None or self.callbacks:
            return range(first, first + 1)
        steps = int(_MAX_BLOCK_SECONDS / max(self._step_seconds, 1e-6))
        last = first - 1 + max(1, min(steps, blocks.size, self.config.iterations - first + 1))
        for interval in (self.config.eval_every, self.config.checkpoint_every):
            if interval:
                last = min(last, -(-first // interval) * interval)
        return range(first, last + 1)

    @torch.enable_grad()
    def _train_steps(self, iterations: range) -> StepOutput:
        """Take outer steps and log them, and return the output of the last.

        The others are left out once the run is asked to stop, or if a step is refused.
        """
        optimizer, blocks = self.experiment.optimizer, self.experiment.step_blocks
        steps: list[_Step] = []
        try:
            for iteration, output in zip(iterations, self._outputs(iterations), strict=False):
                step = self._checked(iteration, output)
                if not step.refused:
                    with profile_range("optimizer_step"):
                        self._apply_output(step)
                        compiled = blocks is not None and blocks.compiled is not None
                        taken = blocks is not None and adam_step(optimizer)
                        if not (taken and compiled):  # Adam and compiled steps draw no numbers
                            # An optimizer's random numbers depend on seed and iteration only.
                            seed = (self._optimizer_seed + iteration) % 2**64
                            seed_generators(seed, self._device)
                        if not taken:
                            optimizer.step()
                        self.experiment.scheduler.step()
                    self._count(step)
                steps.append(step)
                if step.refused or output.stopping:
                    break
        finally:
            self._log_steps(steps)
        if step.report is not None and step.refused:
            # The first state follows from the seed.
            if step.iteration > 1 and not step.report.parameters:
                self.save_checkpoint()
            raise UserError(stop_message(step.report, self.experiment, step.iteration))
        return output

    def _outputs(self, iterations: range) -> Iterator[StepOutput]:
        """The loss and gradient of each iteration's meta-batch."""
        experiment, taken = self.experiment, 0
        if experiment.step_blocks is not None:
            for result, norm in experiment.step_blocks(iterations):
                yield StepOutput(result, result.loss.item(), norm, self._stop.number != 0)
                taken += 1
        for iteration in iterations[taken:]:
            result, stopping = experiment.strategy.forward_backward(
                experiment.train_mapper,
                experiment.learner,
                make_batch(experiment, training_keys(experiment, iteration)),
                lambda: self._stop.number != 0,
            )
            norm = gradient_norm(optimized_parameters(experiment.optimizer))
            yield StepOutput(result, result.loss.item(), norm, stopping)

    def _checked(self, iteration: int, output: StepOutput) -> _Step:
        """The step that an output is for, with a report if the output is not finite."""
        experiment, report = self.experiment, None
        if not output.finite:
            keys = training_keys(experiment, iteration)
            report = find_non_finite(experiment, keys, iteration, output.loss, output.gradient_norm)
        learning_rate = float(experiment.optimizer.param_groups[0]["lr"])
        choice = None if report is None else self.config.on_non_finite
        return _Step(iteration, output, learning_rate, report, choice == "stop", choice == "skip")

    def _apply_output(self, step: _Step) -> None:
        """Clip the gradient and change the buffers, or drop both if the step is skipped."""
        optimizer, output = self.experiment.optimizer, step.output
        if step.skipped:
            # Without gradients the step changes no parameter.
            optimizer.zero_grad(set_to_none=True)
        else:
            clip_gradient(optimized_parameters(optimizer), self.config, output.gradient_norm)
            self._update_buffers(output.result.buffers)

    def _count(self, step: _Step) -> None:
        """Add a step to the state, and warn of values that are not finite."""
        self.state.iteration = step.iteration
        self.state.train_loss = step.output.loss
        self.state.skipped_steps += step.skipped
        if step.report is not None and (not step.skipped or self.state.skipped_steps == 1):
            self._warn(warning_message(step.report, self.experiment, step.iteration))

    def _update_buffers(self, changes: dict[str, Tensor]) -> None:
        """Add the mean of the tasks' changes to the learner's buffers (running statistics)."""
        if not changes:
            return
        for name, buffer in self.experiment.learner.named_buffers():
            if name not in changes:  # of a type that is constant, such as bool
                continue
            change = changes[name].to(buffer.device) / self._total_weight
            if buffer.is_floating_point():
                buffer.copy_(finite_or_zero(buffer).double() + change)
            else:  # a mean of equal integers may differ from them in the last bit
                buffer.add_(change.round().to(buffer))

    def _log_steps(self, steps: list[_Step]) -> None:
        """Add the steps' time, in equal parts, to the state, and log their metrics on rank zero."""
        # From the end of the last step: logging and the exchange of stop requests are part of it.
        now = time.perf_counter()
        seconds = (now - self._step_started) / max(1, len(steps))
        self._step_started, self._step_seconds = now, seconds
        weight, total = self._total_weight, self.state.train_seconds
        # A refused step is not part of the checkpoint.
        self.state.train_seconds += seconds * sum(not step.refused for step in steps)
        if not self._is_main:
            return
        throughput = self.experiment.throughput(self.config.meta_batch_size, seconds)
        for number, step in enumerate(steps, start=1):
            output = step.output
            metrics: dict[str, Any] = {
                "iteration": step.iteration,
                "train_loss": output.loss,
                **{f"train_{n}": v.item() / weight for n, v in output.result.metrics.items()},
                "gradient_norm": output.gradient_norm,
                "learning_rate": step.learning_rate,
                **throughput,
                "seconds": total + number * seconds,
            }
            if step.report is not None:
                metrics["non_finite"] = step.report.key or step.report.message
            with profile_range("log"):
                self.experiment.logger.log_metrics(metrics)

    def _warn(self, message: str) -> None:
        if self._is_main and not self.experiment.logger.log_message(message):
            _log.warning(message)

    # --- evaluation ----------------------------------------------------------------------------

    def _validation_is_due(self) -> bool:
        done, interval = self.state.iteration, self.config.eval_every
        if not interval or not done or done == self.state.validated:
            return False
        return done % interval == 0 or self._is_finished()

    def validate(self) -> dict[str, Estimate]:
        """Evaluate the validation tasks, and save the state if it is the best so far. The drivers
        call it.

        Raises:
            UserError: the learner holds the best weights, which `test` has loaded.
            Interrupted: the run was asked to stop. A checkpoint is saved.
        """
        self._require_last_weights("validate")
        experiment, state, metric = self.experiment, self.state, self.experiment.metric
        evaluation = self._evaluate(
            "validation",
            self.config.validation_tasks,
            functools.partial(self._raise_if_stopped, save=True),
        )
        estimates = evaluation.estimates
        value = estimates[metric].mean
        metrics = {
            "validation_loss": estimates["loss"].mean,
            f"validation_{metric}": value,
            "validation_ci95": estimates[metric].ci95,
            **{f"validation_{name}": mean for name, mean in user_metrics(estimates).items()},
        }
        if self._is_main:
            experiment.logger.log_metrics({"iteration": state.iteration, **metrics})
            if experiment.logger.shows_panels:
                self._log_panels(evaluation)
        state.validated = state.iteration
        state.validation = {f"validation_{metric}": value}
        best = state.best.get(metric)
        improved = math.isfinite(value) and (
            best is None or score(value, metric) > score(best, metric)
        )
        if improved:
            state.best = {"iteration": state.iteration, metric: value}
        for callback in self.callbacks:
            callback.on_validation_end(self, metrics)
        self._share_should_stop()
        if improved:
            self._save(self.checkpoints.best_path(state.iteration), self.checkpoints.save_best)
        return estimates

    def _log_panels(self, evaluation: Evaluation) -> None:
        experiment = self.experiment
        values = {
            f"validation_{n}": evaluation.metrics[n].tolist() for n in ("loss", experiment.metric)
        }
        try:
            images = plot_validation_tasks(experiment)
        except Exception as error:  # such as a learner that returns other predictions
            images = []
            self._warn(f"the validation tasks could not be plotted ({error})")
        experiment.logger.log_panels(self.state.iteration, values, images)

    def test(self, predictions: Path | None = None) -> dict[str, Any]:
        """Evaluate the test tasks and return the results, as in `results.json`.

        The drivers call it.

        If a callback calls it, training then continues with its own weights, and a signal is
        handled after the iteration. Otherwise the learner keeps the tested weights.

        Args:
            predictions: the file into which rank zero writes the predictions. Default: none.

        Raises:
            UserError: the best checkpoint is missing or damaged.
            Interrupted: the run was asked to stop; not if a callback calls it in training.
        """
        experiment, started = self.experiment, time.perf_counter()
        with self._tested_weights() as tested:
            between_calls = (lambda: None) if self._is_training else self._raise_if_stopped
            evaluation = self._evaluate("test", self.config.eval_tasks, between_calls)
            if self._is_main and predictions is not None:
                write_test_predictions(predictions, prediction_records(experiment, evaluation))
            self.state.wall_seconds = time.perf_counter() - self._started
            results = results_of(experiment, evaluation.estimates, tested)
            results["evaluation_seconds"] = time.perf_counter() - started
            results["warnings"] = result_warnings(experiment, results)
            for callback in self.callbacks:
                callback.on_test_end(self, results)
        return results

    @contextlib.contextmanager
    def _tested_weights(self) -> Iterator[int]:
        """Load the state to test and yield its iteration; in training, restore the weights."""
        experiment, current = self.experiment, self.state.iteration
        best, learner = self.state.best.get("iteration"), experiment.evaluated_learner
        if self.config.test_checkpoint == "last" or (self._is_training and best == current):
            yield current  # in `on_validation_end`, the best checkpoint is not written yet
            return
        before = copy.deepcopy(learner_contents(learner)) if self._is_training else None
        if self._is_main:  # other ranks may not see the newest files yet
            load_best(experiment)
        experiment.strategy.broadcast_module(learner)
        self._holds_best = best != current
        try:
            yield int(self.state.best["iteration"])
        finally:
            if before is not None:
                load_learner_state(learner, before)
                self._holds_best = False

    def _evaluate(self, split: str, tasks: int, between_calls: Callable[[], None]) -> Evaluation:
        experiment, testing = self.experiment, split == "test"
        mapper = replace(
            experiment.evaluate_mapper, evaluate_each_step=testing, return_predictions=testing
        )
        keys = evaluation_keys(experiment, split, range(tasks))
        evaluation = evaluate(
            experiment.strategy,
            mapper,
            experiment.evaluated_learner,
            keys,
            functools.partial(make_batch, experiment),
            between_calls,
        )
        losses = evaluation.metrics["loss"]
        non_finite = (~losses.isfinite()).nonzero()
        if len(non_finite):
            first = int(non_finite[0])
            self._warn(
                f"iteration {self.state.iteration}: the {split} task with key "
                f"{format_key(keys[first])} has loss {losses[first].item()}"
            )
        return evaluation

    # --- checkpoints and stopping --------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Save the state from which a run resumes. The drivers call it, rank zero writes.

        Raises:
            UserError: the learner holds the best weights, which `test` has loaded.
        """
        self._require_last_weights("save_checkpoint")
        self._save(self.checkpoints.path(self.state.iteration), self.checkpoints.save)

    def _require_last_weights(self, method: str) -> None:
        if self._holds_best:
            raise UserError(
                f"trainer.{method}() was called in or after the test, for which the weights of the "
                "best checkpoint are loaded: call it before, or set trainer.test_checkpoint=last."
            )

    def _save(self, path: Path, save: Callable[[int, dict[str, Any]], Path]) -> None:
        if self._is_main:
            # Metrics first, so that a resumed run finds the metrics of all earlier iterations.
            self.experiment.logger.flush()
            self.state.wall_seconds = time.perf_counter() - self._started
            save(self.state.iteration, checkpoint_contents(self.experiment))
        if self.callbacks:
            self.experiment.strategy.barrier()  # rank zero has written the file
        for callback in self.callbacks:
            callback.on_checkpoint(self, path)

    def _is_finished(self) -> bool:
        """Whether all outer steps are taken, or a callback asked to stop."""
        return self.state.should_stop or self.state.iteration >= self.config.iterations

    def _share_should_stop(self) -> None:
        """Stop on all drivers if a callback on any driver asked for it."""
        if self.callbacks:
            self.state.should_stop = self.experiment.strategy.any_rank(self.state.should_stop)

    def _raise_interrupted(self) -> NoReturn:
        experiment = self.experiment
        raise Interrupted(
            self._stop.number or signal.SIGTERM,
            f"stopped at iteration {self.state.iteration} of {self.config.iterations}, saved",
            "to resume, give the same command with "
            f"{directory_override('hydra.run.dir', experiment.directory)} resume=auto",
        )

    def _raise_if_stopped(self, save: bool = False) -> None:
        if self.experiment.strategy.any_rank(self._stop.number != 0):
            if save:
                self.save_checkpoint()
            self._raise_interrupted()


def total_weight(experiment: Experiment) -> float:
    """The sum of the weights of a meta-batch's shards: 1 for a mean.

    Only the loss may be a sum; logged metrics and running statistics are means.
    """
    reducer = experiment.strategy.reducer
    if not isinstance(reducer, LinearReducer) or type(reducer) is MeanReducer:
        return 1.0
    sizes = shard_sizes(experiment)
    return sum(reducer.weights(sizes)) / (reducer.divisor(sizes) or 1.0)
