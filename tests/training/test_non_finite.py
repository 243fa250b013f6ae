"""Numbers that go wrong: reported with iteration and task key under every strategy; the choice."""

import math
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from tiny import SMALL, build, compose, records, run_results, train, without_times
from worlds import run_world

from metadist.algorithms import TaskResult
from metadist.algorithms.learner import Learner
from metadist.config import build_experiment
from metadist.distributed import Shard
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError
from metadist.loggers import LoggerCollection
from metadist.tasks import Episode, Examples, task_keys
from metadist.training import Trainer
from metadist.training.checkpoints import Checkpoints, read_checkpoint
from metadist.training.non_finite import (
    GradientNormMapper,
    NonFiniteReport,
    find_non_finite,
    stop_message,
    warning_message,
)
from metadist.training.task_mapper import TASK_INDEX, MetaBatch

NAN_TASK = (0, 0, 3, 2)


def put_nan_into_tasks(x, keys: tuple = (NAN_TASK,)) -> None:
    """Make the first query of the tasks with some keys NaN."""
    sample = x.tasks.sample

    def sample_with_nan(key):
        episode = sample(key)
        if tuple(key.tolist()) in keys:
            episode.query.inputs[0] = math.nan
        return episode

    x.tasks.sample = sample_with_nan


def with_a_nan_task(directory: Path, configuration: DictConfig) -> str:
    """Train while one task of iteration 3 has a NaN; returns the run's messages."""
    x = build_experiment(configuration, directory, "maml")
    put_nan_into_tasks(x)
    try:
        Trainer(x).run()
    except UserError as error:
        return str(error)
    return "finished"


def run(directory: Path, choice: str, strategy: str, size: int, *overrides: str) -> str:
    """Train with a NaN in this process or in a world; the messages of the first rank."""
    common = (f"trainer.on_non_finite={choice}", *strategy.split())
    configuration = compose(*SMALL, *common, *overrides)
    if size == 1:
        return with_a_nan_task(directory, configuration)
    return run_world(with_a_nan_task, size, directory, configuration, may_fail=True)[0]


def strided(learner, batch: MetaBatch) -> list[Shard]:
    parts = [batch.select(slice(start, None, 3)) for start in range(3)]
    return [Shard(0, (learner, part), size=part.size) for part in parts]


ONLY_AT_THE_END = ("trainer.checkpoint_every=0", "trainer.eval_every=0")
"""No checkpoint is due before iteration 3."""

WORLDS = [
    ("strategy=local", 1),
    pytest.param("strategy=rpc +partition=batch", 2, marks=pytest.mark.slow),
    ("strategy=rpc strategy.gradient=dist_autograd", 2),
    ("strategy=allreduce trainer.send_tasks=true", 2),
]


OTHER_ORDER = (
    f"strategy=local +partition._target_={__name__}.strided +partition._partial_=true",
    1,
)
"""Shards whose tasks are in another order than the batch's."""


@pytest.mark.parametrize(("strategy", "size"), [*WORLDS, OTHER_ORDER])
def test_the_task_is_found_and_the_run_stops_before_the_step(tmp_path, strategy, size):
    messages = run(tmp_path, "stop", strategy, size, *ONLY_AT_THE_END, "logger=[jsonl,console]")
    assert "iteration 3: 1 of 5 tasks are not finite" in messages
    assert f"metadist replay {tmp_path} --key 0,train,3,2" in messages and "\n" not in messages
    newest = read_checkpoint(Checkpoints(tmp_path).newest())
    assert newest["iteration"] == 2
    assert newest["train_seconds"] == records(tmp_path)[-2]["seconds"]  # of two steps
    assert all(torch.isfinite(tensor).all() for tensor in newest["learner"].values())
    assert not (tmp_path / "results.json").exists()
    last = records(tmp_path)[-1]
    assert (last["iteration"], last["train_loss"]) == (3, "NaN")
    assert last["non_finite"] == "0,train,3,2"


def test_a_run_that_stops_in_its_first_iteration_saves_no_checkpoint(tmp_path):
    x = build(tmp_path, "strategy=local", *ONLY_AT_THE_END)
    put_nan_into_tasks(x, ((0, 0, 1, 0),))
    with pytest.raises(UserError, match=r"or start with trainer\.on_non_finite=skip\.$"):
        Trainer(x).run()
    assert not Checkpoints(tmp_path).candidates()  # the same command starts again


def assert_warned(messages: list[str], done: str) -> None:
    (warning,) = (text for text in messages if "iteration 3: 1 of 5 tasks" in text)
    assert done in warning


def test_finite_tasks_with_an_infinite_sum_have_no_key(tmp_path):
    x = build(tmp_path, "strategy=local")
    keys = task_keys(0, "train", 1, range(5))
    found = find_non_finite(x, keys, 1, math.inf, math.nan)
    assert found.key == "" and "though every task by itself has finite ones" in found.message


def test_skipping_is_the_same_everywhere_and_resumes(tmp_path, caplog):
    found = []
    for strategy, size in (WORLDS[0], ("strategy=rpc", 2), WORLDS[3]):
        directory = tmp_path / str(len(found))
        assert run(directory, "skip", strategy, size) == "finished"
        found.append(without_times(records(directory)))
    assert found[0] == found[1] == found[2]
    assert_warned(caplog.messages, "the step was skipped; look")
    assert not [text for text in caplog.messages if "the test task" in text]
    assert [line["non_finite"] for line in found[0] if "non_finite" in line] == ["0,train,3,2"]
    checkpoints = [
        read_checkpoint(tmp_path / "0" / "checkpoints" / f"iteration-0000000{i}.pt") for i in (2, 4)
    ]
    weights = [checkpoint["learner"]["model.head.weight"] for checkpoint in checkpoints]
    assert torch.isfinite(weights[1]).all() and not torch.equal(*weights)
    assert checkpoints[1]["optimizer"]["state"][0]["step"] == 3


def test_skipped_steps_have_one_warning_and_a_count_also_after_a_resume(tmp_path, caplog):
    for iterations in (3, 4):
        options = (f"trainer.iterations={iterations}", "strategy=local", "resume=auto")
        x = build(tmp_path, "trainer.on_non_finite=skip", *options)
        put_nan_into_tasks(x, ((0, 0, 1, 0), NAN_TASK, (0, 0, 4, 0)))
        Trainer(x).run()
    first = f"look at it with metadist replay {tmp_path} --key 0,train,1,0"
    (warning,) = (text for text in caplog.messages if "the step was skipped" in text)
    assert warning.endswith(
        f"the step was skipped; {first}, consider a lower algorithm.inner_lr; later skipped steps "
        "are only counted"
    )
    results = run_results(tmp_path)
    count = "3 of 4 steps were skipped, because loss or gradient was not finite"
    assert results["skipped_steps"] == 3 and results["warnings"] == [count]
    assert count in caplog.messages


@pytest.mark.parametrize(
    ("algorithm", "iteration", "stopped", "warned"),
    [
        (
            "maml",
            1,
            "REPLAY, start another run with a lower algorithm.inner_lr, or start with "
            "trainer.on_non_finite=skip.",
            "REPLAY, consider a lower algorithm.inner_lr",
        ),
        (
            "maml",
            2,
            "REPLAY, start another run with a lower optimizer.lr or algorithm.inner_lr or with "
            "trainer.clip_norm (init_from=RUN keeps the weights), or resume with "
            "trainer.on_non_finite=skip.",
            "REPLAY, consider trainer.clip_norm",
        ),
        (
            "prototypical",
            1,
            "REPLAY, or start with trainer.on_non_finite=skip.",
            "REPLAY",
        ),
    ],
)
def test_the_advice_is_on_what_the_step_depends_on(tmp_path, algorithm, iteration, stopped, warned):
    options = (f"algorithm={algorithm}", "trainer.on_non_finite=continue", "strategy=local")
    x, report = build(tmp_path, *options), NonFiniteReport("found", "0,train,1,0")
    replay = f"look at it with metadist replay {tmp_path} --key 0,train,1,0"
    message = stop_message(report, x, iteration)
    assert message == f"found: stopped before the step; {stopped.replace('REPLAY', replay)}"
    message = warning_message(report, x, iteration)
    done = "found: the step was taken all the same"
    assert message == f"{done}; {warned.replace('REPLAY', replay)}"


@pytest.mark.parametrize(
    ("iteration", "stopped"),
    [
        (1, "start another run with a lower algorithm.inner_lr."),
        (
            2,
            "start another run with a lower optimizer.lr or algorithm.inner_lr or with "
            "trainer.clip_norm.",
        ),
    ],
)
def test_a_run_without_a_finite_task_is_not_advised_to_resume(tmp_path, iteration, stopped):
    x = build(tmp_path, "strategy=local")
    keys = task_keys(0, "train", iteration, range(5))
    put_nan_into_tasks(x, tuple(map(tuple, keys.tolist())))
    report = find_non_finite(x, keys, iteration, math.nan, math.nan)
    assert "5 of 5 tasks are not finite" in report.message
    message = stop_message(report, x, iteration)
    assert message.endswith(f" --key 0,train,{iteration},0, or {stopped}")
    assert not find_non_finite(x, keys[:1], iteration, math.nan, math.nan).diverged


def test_going_on_takes_the_step_and_names_the_parameter_afterwards(tmp_path, caplog):
    assert run(tmp_path, "continue", "strategy=local", 1) == "finished"
    assert_warned(caplog.messages, "the step was taken all the same; look")
    (tested,) = (text for text in caplog.messages if "the test task" in text)
    assert "the test task with key 0,test,0,0" in tested
    wrong = [line["non_finite"] for line in records(tmp_path) if "non_finite" in line]
    assert wrong[0] == "0,train,3,2" and "is not finite before the step" in wrong[1]
    results = run_results(tmp_path)
    assert results["train_loss"] == results["test_loss"] == "NaN"


class RootOf(Learner):
    """Its loss is finite and its derivative is not, for tasks with an even index."""

    def forward(self, episode):
        number = episode.query.inputs.squeeze()
        derivative = self.model.weight.sum() * number
        return TaskResult(derivative + 1 if number else derivative.sqrt() + 1, {})


class Numbers:
    def sample(self, key):
        part = Examples((key[3:] % 2).float(), key[3:])
        return Episode(part, part)


def test_a_finite_loss_with_an_infinite_gradient_is_found():
    mapper = GradientNormMapper(WorkerLocal("numbers of a test", Numbers()), "cpu")
    outputs = mapper(RootOf(torch.nn.Linear(2, 1)), MetaBatch(task_keys(0, "train", 1, range(4))))
    assert outputs["loss"].isfinite().all()
    assert outputs["gradient_norm"].isfinite().tolist() == [False, True, False, True]
    assert outputs["gradient_norm"][1].item() == pytest.approx(math.sqrt(2))


def steps(directory: Path, *clippings: str) -> list[torch.Tensor]:
    """What one step of plain gradient descent takes off the parameters, over the rate."""
    options = ("strategy=local", "trainer.iterations=1", "optimizer=sgd", "optimizer.momentum=0")
    found = []
    for number, clipping in enumerate(clippings):
        x = build(directory / str(number), *options, *clipping.split())
        before = torch.cat([p.detach().flatten().clone() for p in x.learner.parameters()])
        x.logger = LoggerCollection([])
        Trainer(x).train_step(1)
        after = torch.cat([p.detach().flatten() for p in x.learner.parameters()])
        found.append((before - after) / x.optimizer.param_groups[0]["lr"])
    return found


def test_clipping_against_its_definition(tmp_path):
    (plain,) = steps(tmp_path / "a", "")
    norm, limit = plain.norm().item(), plain.abs().max().item() / 3
    messages = (
        f"trainer.clip_norm={norm / 2}",
        f"trainer.clip_value={limit}",
        f"trainer.clip_value={limit} trainer.clip_norm={norm / 10}",
        "trainer.clip_norm=99",
    )
    by_norm, by_value, by_both, by_nothing = steps(tmp_path / "b", *messages)
    torch.testing.assert_close(by_norm, plain / 2, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(by_value, plain.clamp(-limit, limit), rtol=1e-3, atol=1e-5)
    cut = plain.clamp(-limit, limit)
    assert cut.norm() > norm / 10
    torch.testing.assert_close(by_both, cut / cut.norm() * norm / 10, rtol=1e-3, atol=1e-5)
    assert torch.equal(by_nothing, plain)


def test_a_resume_with_another_clipping_is_refused(tmp_path):
    train(str(tmp_path), "strategy=local", "trainer.iterations=1", "trainer.eval_every=0")
    with pytest.raises(UserError, match=r"trainer\.clip_norm was None there and is 1 now"):
        build(tmp_path, "strategy=local", "resume=auto", "trainer.clip_norm=1")


@pytest.mark.parametrize(
    ("loss", "norm"), [(1.0, math.nan), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf)]
)
def test_a_task_is_found_by_its_loss_or_its_gradient(tmp_path, loss, norm):
    x = build(tmp_path, "strategy=local")
    losses, norms = torch.ones(5), torch.ones(5)
    losses[3], norms[3] = loss, norm
    values = {"loss": losses, "gradient_norm": norms, TASK_INDEX: torch.arange(5)}
    x.strategy.map_tasks = lambda *_: values
    report = find_non_finite(x, task_keys(0, "train", 2, range(5)), 2, 1.0, math.nan)
    assert report.key == "0,train,2,3" and "1 of 5 tasks are not finite" in report.message
