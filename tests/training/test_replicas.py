"""Under allreduce the ranks' parameters start equal and are compared."""

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from tiny import SMALL, compose
from worlds import RankFailed, run_world

from metadist.config import build_experiment
from metadist.distributed import get_rank
from metadist.training import Callback, Trainer
from metadist.training import trainer as trainer_module
from metadist.training.checkpoints import read_checkpoint


def allreduce(*overrides: str) -> DictConfig:
    return compose(*SMALL, "strategy=allreduce", *overrides)


def with_other_initial_weights(directory: Path, configuration: DictConfig) -> list[torch.Tensor]:
    """Training from parameters that differ between ranks, as broken seeding would give."""
    x = build_experiment(configuration, directory, "maml")
    with torch.no_grad():
        for parameter in x.learner.parameters():
            parameter += get_rank()
    Trainer(x).run()
    return [parameter.detach() for parameter in x.learner.parameters()]


def test_parameters_are_those_of_rank_zero_from_the_start(tmp_path):
    short = allreduce("trainer.iterations=1", "trainer.eval_every=0", "trainer.eval_tasks=1")
    zero, one = run_world(with_other_initial_weights, 2, tmp_path, short)
    assert all(map(torch.equal, zero, one))


def change_parameters(directory: Path, configuration: DictConfig, at: int, rank: int) -> str:
    """Change one parameter of one rank behind the trainer's back; what ends the run."""
    trainer_module.REPLICA_CHECK_EVERY = 2
    x = build_experiment(configuration, directory, "maml")
    step, count = x.scheduler.step, 0

    def step_and_change() -> None:
        nonlocal count
        step()
        count += 1
        if count == at and get_rank() == rank:
            with torch.no_grad():
                next(x.learner.parameters()).view(-1)[0] += 1e-6

    x.scheduler.step = step_and_change
    if at == 0 and get_rank() == rank:  # as if it had resumed from another checkpoint
        first = next(x.learner.parameters())
        x.optimizer.state[first] = {"step": torch.ones(()), "exp_avg": torch.ones_like(first)}
    Trainer(x).run()
    return "finished"


@pytest.mark.parametrize(
    ("at", "found"),  # a check after every second of five iterations, and after the last one
    [
        (1, 2),
        (5, 5),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 0), (2, 2), (3, 4))],
    ],
)
def test_a_rank_whose_parameters_change_is_reported_at_the_next_check(tmp_path, at, found):
    options = ("trainer.iterations=5", "trainer.eval_every=0", "trainer.checkpoint_every=0")
    outcomes = run_world(change_parameters, 3, tmp_path, allreduce(*options), at, 1, may_fail=True)
    for outcome in outcomes:
        assert isinstance(outcome, RankFailed)
        assert f"after iteration {found} the parameters or optimizer state of ranks [1] differ" in (
            str(outcome)
        )


class ChangesStatistics(Callback):
    """Changes a running mean of rank one only."""

    def on_iteration_end(self, trainer, output):
        if get_rank() == 1:
            trainer.experiment.learner.get_buffer("model.norms.0.running_mean")[0] += 1e-3


def change_statistics(directory: Path, configuration: DictConfig) -> None:
    x = build_experiment(configuration, directory, "maml")
    x.callbacks = {"mine": ChangesStatistics()}
    Trainer(x).run()


def test_a_rank_whose_running_statistics_change_is_reported(tmp_path):
    configuration = allreduce("model.running_statistics=true", "trainer.iterations=2")
    for outcome in run_world(change_statistics, 2, tmp_path, configuration, may_fail=True):
        assert "after iteration 2 the parameters or optimizer state of ranks [1]" in str(outcome)


def run_and_test_best(
    directory: Path, configuration: DictConfig
) -> tuple[int, dict[str, torch.Tensor]]:
    """Test the best checkpoint, whose files only rank zero sees."""
    x = build_experiment(configuration, directory, "maml")
    trainer = Trainer(x)
    if get_rank() != 0:
        trainer.checkpoints.directory = trainer.checkpoints.directory / "stale"
        x.directory = x.directory / "stale"
    results = trainer.run()
    return results["tested_iteration"], x.learner.state_dict()


def test_the_best_state_comes_from_rank_zero(tmp_path):
    best = allreduce("trainer.test_checkpoint=best", "model.running_statistics=true")
    (tested, zero), (other, one) = run_world(run_and_test_best, 2, tmp_path, best)
    best = read_checkpoint(tmp_path / "checkpoints" / f"best-{tested:08d}.pt")["learner"]
    assert tested == other < 4 and any(name.endswith("running_mean") for name in best)
    for found in (zero, one):
        assert found.keys() == best.keys()
        assert all(torch.equal(found[name], best[name]) for name in best)
