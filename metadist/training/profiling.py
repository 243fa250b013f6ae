"""`trainer.profile=true`: where each step's time goes, as a table, and a trace of a few steps.

The first steps are left out, in the next a clock alone runs, and the last few are recorded
operation by operation, which slows them down: the table does not count those.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.distributed import get_rank
from metadist.distributed.phases import Phase, Recording, finish_recording, recorded
from metadist.errors import UserError
from metadist.reports import PROFILE_DIRECTORY
from metadist.training.experiment import Experiment
from metadist.training.mappers import MetaBatch
from metadist.training.outer_step import training_keys

WARM_UP, CLOCKED, TRACED = 3, 10, 2
"""Outer steps of each part of a profile, one after the other."""

PHASES: tuple[Phase, ...] = get_args(Phase)


class Profile:
    """The profile of a run, on a rank that runs the loop. Every such rank makes one.

    Args:
        experiment: the run, with its progress restored.

    Raises:
        UserError: fewer iterations are left than a profile takes.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.x = experiment
        self.table = ""
        self._step = -WARM_UP
        left = experiment.trainer.iterations - experiment.progress.iteration
        needed = WARM_UP + CLOCKED + TRACED
        if left < needed:
            raise UserError(
                f"trainer.profile=true takes {needed} iterations and {left} are left: set "
                f"trainer.iterations={experiment.progress.iteration + needed} or more."
            )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each outer step."""
        what: Recording = "no"
        if 0 <= self._step < CLOCKED + TRACED:
            what = "clock" if self._step < CLOCKED else "trace"
        self._step += 1
        if self.x.train_mapper.recording != what:
            self.x.train_mapper = replace(self.x.train_mapper, recording=what)
        with recorded(what):
            yield

    def finish_if_over(self) -> None:
        """After each outer step; after the profile's last one, gather what the workers recorded
        and write it: the table is there then.
        """
        if self._step != CLOCKED + TRACED:
            return
        x = self.x
        batch = MetaBatch(training_keys(x, 0))
        finish = _Finish(str(x.directory / PROFILE_DIRECTORY))
        rows = x.strategy.collect(finish, x.learner, batch)["seconds"]
        if get_rank() != 0:
            return
        ranks = {int(rank): seconds for rank, *seconds in rows.tolist()}
        found = in_a_step(ranks, CLOCKED)
        self.table = table_of(found, CLOCKED)
        directory = x.directory / PROFILE_DIRECTORY
        report = {"seconds_a_step_by_rank": found, "steps": CLOCKED, "headline": x.headline}
        try:
            directory.mkdir(exist_ok=True)
            (directory / "table.txt").write_text(self.table + "\n", encoding="utf-8")
            (directory / "phases.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{directory} could not be written ({error.strerror}): free some space, or set "
                "trainer.profile=false."
            ) from None


@dataclass(frozen=True)
class _Finish:
    """Mapper that ends the recording on its worker and answers with the phases' seconds, once
    for each task that it is given.
    """

    directory: str

    def __call__(self, learner: Learner, batch: MetaBatch) -> dict[str, Tensor]:
        """Returns rows of the rank and the seconds of each of `PHASES`."""
        seconds = finish_recording(Path(self.directory) / f"rank{get_rank()}.trace.json.gz")
        row = [get_rank(), *(seconds.get(name, 0.0) for name in PHASES)]
        return {"seconds": torch.tensor(row, dtype=torch.float64).repeat(batch.count(), 1)}


def in_a_step(seconds: dict[int, list[float]], steps: int) -> dict[int, dict[str, float]]:
    """Each rank's seconds a step by phase. A rank that is idle between two calls waits then.

    Args:
        seconds: of each rank, those of each of `PHASES` over all steps.
        steps: how many.
    """
    found = {
        rank: {name: s / steps for name, s in zip(PHASES, each, strict=True)}
        for rank, each in sorted(seconds.items())
    }
    step = sum(found[0].values())
    for phases in found.values():
        phases["wait"] += max(0.0, step - sum(phases.values()))
    return found


def table_of(found: dict[int, dict[str, float]], steps: int) -> str:
    """The phases of rank zero and, in the mean, of the others: milliseconds a step and shares."""
    others = [phases for rank, phases in found.items() if rank]
    step = sum(found[0].values())
    lines = [f"Where a step's time goes (mean of {steps} steps of {1000 * step:.1f} ms)", ""]
    head = f"{'phase':<12}{'rank 0, ms':>12}{'share':>8}"
    lines += [head + (f"{f'others ({len(others)}), ms':>18}{'share':>8}" if others else "")]
    for name in PHASES:
        columns = [found[0][name]]
        if others:
            columns.append(sum(phases[name] for phases in others) / len(others))
        if any(columns):
            cells = zip(columns, (12, 18), strict=False)
            text = (f"{1000 * s:>{width}.2f}{s / step:>8.1%}" for s, width in cells)
            lines.append(f"{name:<12}{''.join(text)}")
    return "\n".join(lines)
