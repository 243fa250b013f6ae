"""The training loop: step, log, evaluate, save; then the test."""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from metadist.distributed import WorkerLostError, get_rank
from metadist.distributed.job import current_job
from metadist.distributed.phases import get_ready_to_record, phase
from metadist.errors import UserError
from metadist.loggers import Run
from metadist.reports import CONTENTS, write_results
from metadist.tasks import task_keys
from metadist.training.diagnosis import Culprit, find_culprit, key_text
from metadist.training.evaluation import Estimate, evaluate
from metadist.training.experiment import Experiment
from metadist.training.interrupts import Interrupted, StopRequests
from metadist.training.outer_step import advance, differentiate, meta_batch, total_weight
from metadist.training.profiling import Profile
from metadist.training.results import results_of
from metadist.training.resume import checkpoints_of, contents_of, use_best
from metadist.training.run_plots import plot_run

_log = logging.getLogger(__name__)


def run(experiment: Experiment) -> dict[str, Any]:
    """Train, then test. Every rank of the world calls it.

    Returns:
        The results, as in `results.json`, on the ranks that run the loop; elsewhere {}.

    Raises:
        UserError: a checkpoint that does not fit, a directory that cannot be written, a loss or
            gradient that is not finite (with `trainer.on_non_finite=stop`).
        Interrupted: a signal asked the run to stop; it has saved a checkpoint.
    """
    strategy = experiment.strategy
    if experiment.trainer.profile:
        get_ready_to_record()
    try:
        strategy.open()
        with StopRequests() as stop:
            try:
                results = _Run(experiment, stop).run() if strategy.runs_loop() else {}
            except Interrupted:
                strategy.close()
                raise
            strategy.close()
    except Interrupted:
        strategy.close(graceful=False)
        raise
    except BaseException as error:
        # What is every rank's to say is left to rank zero.
        if not isinstance(error, WorkerLostError) and (
            get_rank() == 0 or not isinstance(error, UserError)
        ):
            current_job().claim_first_failure()  # before the others notice that this rank leaves
        strategy.close(graceful=False)
        raise
    return results


class _Run:
    """One run on a rank that runs the loop."""

    def __init__(self, experiment: Experiment, stop: StopRequests) -> None:
        self.x = experiment
        self.stop = stop
        self.leads = get_rank() == 0
        self.progress = experiment.progress
        self.checkpoints = checkpoints_of(experiment)
        self.profile = Profile(experiment) if experiment.trainer.profile else None
        self.since = 0.0  # when the outer step under way began
        self.began = time.perf_counter() - self.progress.wall_seconds

    def run(self) -> dict[str, Any]:
        """See the module's `run`."""
        x = self.x
        try:
            if self.leads:
                x.tracker.start(
                    Run(
                        directory=x.directory,
                        name=x.name,
                        configuration=x.configuration,
                        iterations=x.trainer.iterations,
                        start_iteration=self.progress.iteration,
                        title=x.headline,
                        contents=CONTENTS,
                    )
                )
            self._train()
            results = self._test()
            if self.leads:
                write_results(x.directory, results)
                plots = plot_run(
                    x.directory, x.headline, x.tasks, x.learner, x.trainer.eval_seed, results
                )
                x.tracker.finish(results, plots)
                if self.profile is not None:
                    print(f"\n{self.profile.table}", flush=True)
        finally:
            x.tracker.close()
        return results

    # --- training ------------------------------------------------------------------------------

    def _train(self) -> None:
        x, progress = self.x, self.progress
        self._validate_if_due()  # a run may have been stopped before
        self.since = time.perf_counter()
        while progress.iteration < x.trainer.iterations:
            with contextlib.nullcontext() if self.profile is None else self.profile.step():
                self._step(progress.iteration + 1)
            last = progress.iteration == x.trainer.iterations
            with self._off_the_clock():
                if self.profile is not None:
                    self.profile.finish_if_over()
                self._validate_if_due()
            stopping = x.strategy.agree(self.stop.number != 0) and not last
            every = x.trainer.checkpoint_every
            if last or stopping or (every and progress.iteration % every == 0):
                with self._off_the_clock():
                    self._save()
            if stopping:
                self._leave()

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """What is done here is no part of the outer steps' time."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

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

    def _save_and_leave_if_asked(self) -> None:
        if self.x.strategy.agree(self.stop.number != 0):
            self._save()
            self._leave()

    def _step(self, iteration: int) -> None:
        x, progress = self.x, self.progress
        learning_rate = x.optimizer.param_groups[0]["lr"]
        outcome = differentiate(x, iteration)
        choice = "" if outcome.finite else x.trainer.on_non_finite
        culprit = find_culprit(x, iteration, outcome) if choice else None
        if choice != "stop":
            with phase("outer step"):
                advance(x, iteration, outcome, skip=choice == "skip")
        # From the end of the last step: what follows it, the record and the ranks' agreement to
        # go on, is paid for in each step.
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        if self.leads:
            weight = total_weight(x)
            with phase("log"):
                x.tracker.log_metrics(
                    {
                        "iteration": iteration,
                        "train_loss": outcome.loss,
                        **{
                            f"train_{name}": value.item() / weight
                            for name, value in outcome.result.metrics.items()
                        },
                        "gradient_norm": outcome.gradient_norm,
                        "learning_rate": float(learning_rate),
                        "tasks_per_second": x.trainer.meta_batch_size / seconds,
                        "seconds": progress.train_seconds + seconds,
                        **({} if culprit is None else {"non_finite": culprit.key or culprit.words}),
                    }
                )
        if culprit is not None:
            self._report(iteration, culprit)
        progress.iteration = iteration
        progress.train_loss = outcome.loss
        progress.train_seconds += seconds

    def _report(self, iteration: int, culprit: Culprit) -> None:
        """Say what went wrong, and end the run if that is what is to be done.

        Raises:
            UserError: with `trainer.on_non_finite=stop`, after saving the state before the step.
        """
        x, choice = self.x, self.x.trainer.on_non_finite
        look = ""
        if culprit.key:
            look = f"look at it with experiments/replay.py {x.directory} --key {culprit.key}, "
        if choice != "stop":
            done = "the step was skipped" if choice == "skip" else "the step was taken all the same"
            self._note(f"{culprit.words}: {done}; {look or 'and '}consider trainer.clip_norm")
            return
        if iteration > 1:  # the state before the first step follows from the seed
            self._save()
        raise UserError(
            f"{culprit.words}: stopped before the step; {look or 'resume before it and '}lower "
            "optimizer.lr or algorithm.inner_lr, set trainer.clip_norm, or resume with "
            "trainer.on_non_finite=skip."
        )

    def _note(self, sentence: str) -> None:
        """Tell a person, on rank zero."""
        if self.leads and not self.x.tracker.log_message(sentence):
            _log.warning(sentence)

    # --- evaluation ----------------------------------------------------------------------------

    def _evaluate(
        self, split: str, tasks: int, between: Callable[[], None] = lambda: None
    ) -> dict[str, Estimate]:
        x = self.x
        mapper = replace(x.evaluate_mapper, each_step=split == "test")
        keys = task_keys(x.trainer.eval_seed, split, 0, range(tasks))

        def warn(place: int, loss: float) -> None:
            self._note(
                f"iteration {self.progress.iteration}: the {split} task with key "
                f"{key_text(keys[place])} has loss {loss}"
            )

        return evaluate(
            x.strategy,
            mapper,
            x.learner,
            keys,
            lambda some: meta_batch(x, some),
            between,
            warn,
        )

    def _validate_if_due(self) -> None:
        x, done = self.x, self.progress.iteration
        last = done == x.trainer.iterations
        if not x.trainer.eval_every or not done or done == self.progress.validated:
            return
        if done % x.trainer.eval_every == 0 or last:
            self._validate()

    def _validate(self) -> None:
        x, progress = self.x, self.progress
        figures = self._evaluate(
            "validation", x.trainer.validation_tasks, self._save_and_leave_if_asked
        )
        figure = figures[x.metric]
        if self.leads:
            x.tracker.log_metrics(
                {
                    "iteration": progress.iteration,
                    "validation_loss": figures["loss"].mean,
                    f"validation_{x.metric}": figure.mean,
                    "validation_ci95": figure.ci95,
                }
            )
        progress.validated = progress.iteration
        progress.validation = {f"validation_{x.metric}": figure.mean}
        sign = -1 if x.tasks.regression else 1
        best = progress.best.get(x.metric)
        if math.isfinite(figure.mean) and (best is None or sign * figure.mean > sign * best):
            progress.best = {"iteration": progress.iteration, x.metric: figure.mean}
            if self.leads:
                x.tracker.flush()
                self.checkpoints.save_best(progress.iteration, self._contents())

    def _save(self) -> None:
        if self.leads:
            # First the record, then what a resumed run goes on from: none is missing then.
            self.x.tracker.flush()
            self.checkpoints.save(self.progress.iteration, self._contents())

    def _contents(self) -> dict[str, Any]:
        self._look_at_the_clock()
        return contents_of(self.x)

    def _look_at_the_clock(self) -> None:
        self.progress.wall_seconds = time.perf_counter() - self.began

    def _test(self) -> dict[str, Any]:
        x, tested = self.x, self.progress.iteration
        if x.trainer.test_checkpoint == "best":
            x.strategy.agree(False)  # rank zero has saved the best by then
            tested = use_best(x)
        figures = self._evaluate("test", x.trainer.eval_tasks, self._leave_if_asked)
        self._look_at_the_clock()
        return results_of(x, figures, tested)
