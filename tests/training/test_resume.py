"""Going on after a death: nothing twice, nothing missing, the same bits; and what is in the way."""

import logging
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image
from tiny import SMALL, build, compose, records, train, train_composed, train_world, without_times
from torch import nn
from worlds import run_world

from metadist.config import build_experiment
from metadist.errors import UserError
from metadist.models import MLP
from metadist.reports import read_results
from metadist.training import Callback, Trainer
from metadist.training.checkpoints import Checkpoints, read_checkpoint, write_checkpoint


class NoisySGD(torch.optim.SGD):
    """Draws from every generator that a process has."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn_like(parameter) + np.random.randn() + random.gauss(0, 1)
                parameter.add_(noise, alpha=1e-3)


class Counting(MLP):
    """Has a buffer that its state does not hold, and whose value matters."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int):
        super().__init__(input_shape, outputs, hidden=[8], batch_norm=False, dropout=0.2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) + 0.01 * self.calls * nn.functional.one_hot(
            torch.zeros(len(inputs), dtype=torch.long), self.head.out_features
        )


HARD = (
    "optimizer._target_=test_resume.NoisySGD",
    "scheduler=cosine",
    "scheduler.eta_min=1e-5",
    "model._target_=test_resume.Counting",
    "~model.filters",
    "~model.pooling",
    "~model.flatten",
    "~model.running_statistics",
    "~model.dropout",
    "~model.native",
    "trainer.clip_norm=0.5",
    "trainer.iterations=6",
)


TESTED_ONCE = ("trainer.eval_every=0", "trainer.eval_tasks=1")
"""No validation, and a short test."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a finished run, for tests that do not change it."""
    directory = tmp_path_factory.mktemp("finished")
    train(str(directory), "strategy=local")
    return directory


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "copied")


def killed(directory: Path, after: int, configuration: DictConfig) -> None:
    """Train, and be killed as iteration `after` is recorded, its checkpoint not yet written."""
    x = build_experiment(configuration, directory, "maml")
    log_metrics = x.logger.log_metrics

    def record_and_die(line) -> None:
        log_metrics(line)
        if line["iteration"] == after:
            os.kill(os.getpid(), signal.SIGKILL)

    x.logger.log_metrics = record_and_die
    Trainer(x).run()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(Checkpoints(directory).newest())["learner"]


def test_killed_and_resumed_with_everything_that_could_differ(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(str(whole), "strategy=local", *HARD)
    resumed = compose(*SMALL, "strategy=local", "resume=auto", *HARD)
    for after in (1, 3, 4):  # before the first checkpoint too
        run_world(killed, 1, parts, after, resumed, may_fail=True)
    train(str(parts), "strategy=local", "resume=auto", *HARD)
    assert without_times(records(parts)) == without_times(records(whole))
    assert len({line["learning_rate"] for line in records(whole) if "train_loss" in line}) == 6
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name])
    # The whole of it does not depend on the world either.
    train_world(2, tmp_path / "two", "strategy=allreduce", *HARD)
    assert without_times(records(tmp_path / "two")) == without_times(records(whole))


def test_a_resumed_run_takes_as_long_as_its_parts(finished, tmp_path):
    contents = read_checkpoint(Checkpoints(finished).newest())
    assert contents["train_seconds"] < contents["wall_seconds"] < 600
    saved = tmp_path / "saved.pt"
    write_checkpoint(saved, contents | {"wall_seconds": 5000.0})
    results = train(str(tmp_path / "run"), "strategy=local", f"resume={saved}")
    assert 5000 < results["wall_seconds"] < 5600


def test_resumed_with_another_world_size(finished, tmp_path):
    train_world(2, tmp_path, "strategy=rpc", *TESTED_ONCE, "trainer.iterations=2")
    train_world(3, tmp_path, "strategy=allreduce", *TESTED_ONCE, "resume=auto")
    for name, tensor in weights(finished).items():
        torch.testing.assert_close(tensor, weights(tmp_path)[name], rtol=1e-5, atol=1e-7)


def resumed_with_warnings(directory: Path, configuration: DictConfig) -> list[str]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: logged.append(entry.getMessage())
    logging.getLogger("metadist").addHandler(handler)
    train_composed(directory, configuration)
    return logged


def test_a_corrupt_newest_checkpoint_is_renamed_and_the_one_before_is_used(finished, copied):
    folder = copied / "checkpoints"
    newest = folder / "iteration-00000004.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = compose(*SMALL, "strategy=allreduce", "resume=auto")
    logged, others = run_world(resumed_with_warnings, 2, copied, resumed)
    assert len(logged) == 1 and "\n" not in logged[0]
    assert "iteration-00000004.pt is corrupt: renamed" in logged[0]
    assert not others
    assert (folder / "iteration-00000004.pt.corrupt").exists()
    assert without_times(records(copied)) == without_times(records(finished))
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(copied)[name])


def test_the_best_is_used_when_all_others_are_corrupt_and_then_none(copied, caplog):
    folder = copied / "checkpoints"
    for path in folder.glob("iteration-*.pt"):
        path.write_bytes(b"")
    train(str(copied), "strategy=local", "resume=auto")
    assert len(caplog.messages) == 2
    assert len(records(copied)) == 6
    for path in folder.glob("*.pt"):
        path.write_bytes(b"")
    for _ in range(2):  # as after a restart
        with pytest.raises(UserError, match="every checkpoint in"):
            build(copied, "strategy=local", "resume=auto")
    assert not list(folder.glob("*.pt")) and len(list(folder.glob("*.corrupt*"))) > 3


def without_room(directory: str, *overrides: str) -> str:
    """Train with room for the first checkpoint and not for the second, as the system has it."""
    import resource

    x = build(directory, *overrides)
    log_metrics = x.logger.log_metrics

    def record_and_fill(line) -> None:
        log_metrics(line)
        if line["iteration"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))

    x.logger.log_metrics = record_and_fill
    try:
        Trainer(x).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def test_a_full_disk_ends_the_run_and_leaves_what_was_there(tmp_path):
    options = ("strategy=local", "trainer.eval_every=0")
    message = run_world(without_room, 1, str(tmp_path), *options)[0]
    assert message.startswith("UserError: the checkpoint") and "could not be written" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration-00000002.pt"]
    train(str(tmp_path), "resume=auto", *options)
    assert [line["iteration"] for line in records(tmp_path)] == [1, 2, 3, 4]


def test_other_data_are_refused(tmp_path):
    for index in range(10):
        (tmp_path / "data" / f"class{index}").mkdir(parents=True)
        for example in range(3):
            image = Image.new("L", (28, 28), 20 * index + example)
            image.save(tmp_path / "data" / f"class{index}" / f"{example}.png")
    options = (
        *("dataset=folder", f"dataset.root={tmp_path / 'data'}", "dataset.channels=1"),
        *("dataset.size=28", "task.ways=2", "task.queries=1", "trainer.iterations=2"),
        *("strategy=local", *TESTED_ONCE),
    )

    def run(*more: str) -> None:
        Trainer(build(tmp_path / "run", *options, *more, omit=("++dataset",))).run()

    run()
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    run("trainer.iterations=3", "resume=auto", f"dataset.root={tmp_path / 'moved'}")
    Image.new("L", (28, 28), 255).save(tmp_path / "moved" / "class0" / "0.png")
    with pytest.raises(UserError, match="was trained on other data: classes or images of"):
        run("trainer.iterations=4", "resume=auto", f"dataset.root={tmp_path / 'moved'}")
    (tmp_path / "data" / "class0").rename(tmp_path / "data" / "new")
    with pytest.raises(UserError, match=r"another division of the classes \(class_names is"):
        run("trainer.iterations=4", "resume=auto")


def test_a_finished_run_that_another_directory_resumes_is_saved_there(finished, tmp_path):
    again = train(str(tmp_path), "strategy=local", f"resume={Checkpoints(finished).newest()}")
    assert again["test_accuracy"] == read_results(finished)["test_accuracy"]
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(tmp_path)[name])


BEST = ("strategy=local", "trainer.test_checkpoint=best")


def test_the_best_of_the_resumed_run_is_tested_not_that_of_the_directory(finished, tmp_path):
    resume = f"resume={Checkpoints(finished).newest()}"
    best = read_checkpoint(Checkpoints(finished).best)
    expected = train(str(tmp_path / "expected"), *BEST, resume)
    other = Checkpoints(tmp_path / "other")
    other.directory.mkdir(parents=True)
    for number in (2, 4):  # another run has a best of every iteration
        learner = {name: tensor + 1 for name, tensor in best["learner"].items()}
        write_checkpoint(other.best_path(number), best | {"learner": learner})
    again = train(str(tmp_path / "other"), *BEST, resume)
    assert again["test_accuracy"] == expected["test_accuracy"]
    assert again["test_loss"] == expected["test_loss"]
    found = read_checkpoint(other.best_path(again["tested_iteration"]))
    for name, tensor in best["learner"].items():
        assert torch.equal(tensor, found["learner"][name])


def test_the_best_of_another_run_in_the_directory_is_not_lost(finished, tmp_path):
    saved = Checkpoints(finished)
    other = tmp_path / "checkpoints" / saved.best.name
    other.parent.mkdir()
    write_checkpoint(other, {"mine": 1})
    Trainer(build(tmp_path, *BEST, f"resume={saved.newest()}")).run()
    assert read_checkpoint(other)["iteration"] == read_checkpoint(saved.best)["iteration"]
    assert read_checkpoint(other.with_name(f"{other.name}.superseded"))["mine"] == 1


class KeepsMean(Callback):
    """Its state is of NumPy's types."""

    def __init__(self, file="", decay=0.5):
        self.file, self.decay = file, decay

    def state_dict(self):
        return {"mean": np.mean([1.0, 2.0]), "counts": {np.int64(3): (np.str_("a"), None)}}

    def load_state_dict(self, state):
        self.state = state


class KeepsScalar(torch.optim.SGD):
    """Its state is more than a checkpoint can hold."""

    def state_dict(self):
        return {**super().state_dict(), "mine": np.float64(1.0)}


def test_numbers_of_numpy_in_a_callback_are_resumed(tmp_path):
    options = ("strategy=local", "+callbacks.mine._target_=test_resume.KeepsMean")
    train(str(tmp_path), *options, *TESTED_ONCE, "trainer.iterations=1")
    x = build(tmp_path, *options, "resume=auto")
    assert x.callbacks["mine"].state == {"mean": 1.5, "counts": {3: ("a", None)}}


def test_paths_of_a_callback_may_change_and_its_other_options_not(tmp_path):
    options = ("strategy=local", "+callbacks.mine._target_=test_resume.KeepsMean")
    file = f"+callbacks.mine.file={tmp_path}"
    train(str(tmp_path), *options, *TESTED_ONCE, f"{file}/a", "trainer.iterations=1")
    assert build(tmp_path, *options, f"{file}/b", "resume=auto").state.iteration == 1
    with pytest.raises(UserError, match=r"callbacks\.mine\.decay was 0\.5 there and is 0\.9 now"):
        build(tmp_path, *options, f"{file}/a", "+callbacks.mine.decay=0.9", "resume=auto")


def test_a_state_that_could_not_be_read_again_is_refused_at_the_first_checkpoint(tmp_path):
    options = ("strategy=local", "optimizer._target_=test_resume.KeepsScalar")
    with pytest.raises(TypeError, match=r"the run cannot be saved: .*numpy"):
        train(str(tmp_path), *options)
    assert not Checkpoints(tmp_path).candidates()


class Scaled(MLP):
    """A model of the user's own with options that have defaults."""

    def __init__(
        self, input_shape, outputs: int, width: int = 4, scale=1.5, note: str | None = None
    ):
        super().__init__(input_shape, outputs, hidden=[width], batch_norm=False)
        self.scale = scale

    def forward(self, inputs):
        return self.scale * super().forward(inputs)


def test_defaults_of_the_users_own_classes_are_recorded_and_compared(tmp_path, monkeypatch):
    options = ("strategy=local", f"model._target_={__name__}.Scaled")
    model = ("~model.filters", "~model.pooling", "~model.flatten", "~model.running_statistics")
    options += (*model, "~model.dropout", "~model.native", *TESTED_ONCE)
    results = train(str(tmp_path), *options, "trainer.iterations=1")
    assert results["method"]["model"] == {"name": "Scaled", "width": 4, "scale": 1.5}
    assert results["protocol"]["backbone"] == "Scaled, width=4, scale=1.5"
    saved = read_checkpoint(Checkpoints(tmp_path).newest())
    assert saved["configuration"]["model"]["scale"] == 1.5
    again = (*options, "resume=auto")
    build(tmp_path, *again, "+model.scale=1.5", "+model.width=4")
    with pytest.raises(UserError, match=r"model\.scale was 1\.5 there and is 2\.0 now"):
        build(tmp_path, *again, "+model.scale=2.0")
    monkeypatch.setattr(Scaled.__init__, "__defaults__", (4, 0.5, None))
    with pytest.raises(UserError, match=r"model\.scale was 1\.5 there and is 0\.5 now"):
        build(tmp_path, *again)
    # A run of a version without the option is continued with its default.
    del saved["configuration"]["model"]["scale"]
    older = tmp_path / "older.pt"
    write_checkpoint(older, saved)
    build(tmp_path / "resumed", *options, f"resume={older}")
    with pytest.raises(UserError, match=r"model\.scale was 0\.5 there and is 3\.0 now"):
        build(tmp_path / "resumed", *options, f"resume={older}", "+model.scale=3.0")


def test_a_profile_does_not_prevent_finishing_a_resumed_run(copied, capsys):
    options = ("strategy=local", "resume=auto", "trainer.profile=true", "trainer.iterations=6")
    options = (*options, "logger=console")
    results = train(str(copied), *options)
    assert results["iterations"] == 6
    assert "no profile: it takes 6 outer steps, 2 are left" in capsys.readouterr().out


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    options = ("strategy=local", "optimizer.lr=1e400", "trainer.eval_every=0")
    with pytest.raises(UserError, match=r"is not finite before the step.*earlier checkpoint"):
        train(str(tmp_path), *options, "trainer.checkpoint_every=0")
    assert not Checkpoints(tmp_path).candidates()


def test_from_the_directory_of_another_run(finished, tmp_path):
    train(str(tmp_path / "first"), "strategy=local", "trainer.iterations=2")
    resumed = train(str(tmp_path / "second"), "strategy=local", f"resume={tmp_path / 'first'}")
    assert resumed["iterations"] == 4
    assert resumed["test_loss"] == read_results(finished)["test_loss"]
    with pytest.raises(UserError, match="holds no checkpoint: give the directory of a run"):
        build(tmp_path / "third", "strategy=local", f"resume={tmp_path}")
    with pytest.raises(UserError, match=r"20241127 does not exist.* write 'resume=\"2024_11_27\"'"):
        build(tmp_path / "third", "strategy=local", "resume=2024_11_27")
    with pytest.raises(UserError, match="none does not exist: give a checkpoint file, or a run's"):
        build(tmp_path / "third", "strategy=local", f"resume={tmp_path / 'none'}")


def test_the_validation_of_an_earlier_state_is_not_that_of_the_tested_one(copied):
    assert "validation_accuracy" in read_results(copied)
    more = ("trainer.iterations=5", "trainer.eval_every=0")
    train(str(copied), "strategy=local", "resume=auto", *more)
    results = read_results(copied)
    assert results["iterations"] == 5 and "validation_accuracy" not in results


class Raises(Callback):
    """Saves iteration 1, makes iteration 2 the best one, and fails in iteration 4."""

    def on_iteration_end(self, trainer, output):
        iteration = trainer.state.iteration
        if iteration == 1:
            trainer.save_checkpoint()
        if iteration == 2:
            trainer.state.best = {}
        if iteration == 4:
            raise RuntimeError("on purpose")


def test_a_best_checkpoint_that_is_the_newest_one_is_resumed_from(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    few = ("trainer.checkpoint_every=0", "trainer.eval_every=1", "trainer.iterations=5")
    options = ("strategy=local", *few, "resume=auto")
    train(str(whole), *options)
    x = build(parts, *options)
    x.callbacks = {"raises": Raises()}
    with pytest.raises(RuntimeError, match="on purpose"):
        Trainer(x).run()
    saved = Checkpoints(parts)
    assert [iteration for iteration, _ in saved.iterations()] == [1]
    assert build(parts, *options).state.iteration == saved.bests()[-1][0] >= 2
    train(str(parts), *options)
    assert not list(saved.directory.glob("*.superseded"))
    assert without_times(records(parts)) == without_times(records(whole))


def test_a_number_may_be_written_in_another_way(tmp_path):
    options = ("strategy=local", "scheduler=cosine", "resume=auto")
    first = (*TESTED_ONCE, "trainer.iterations=1.0", "algorithm.inner_lr=1")
    train(str(tmp_path), *options, *first)
    again = (*options, "trainer.iterations=1", "algorithm.inner_lr=1.0")
    assert build(tmp_path, *again).state.iteration == 1
    with pytest.raises(UserError, match=r"algorithm\.inner_lr was 1 there and is 1\.5 now"):
        build(tmp_path, *again, "algorithm.inner_lr=1.5")


def test_large_seeds_are_compared_exactly(tmp_path):
    options = ("strategy=local", *TESTED_ONCE, "trainer.iterations=1", "resume=auto")
    train(str(tmp_path), *options, f"seed={2**53}")
    with pytest.raises(UserError, match=r"seed was 9007199254740992 there"):
        build(tmp_path, *options, f"seed={2**53 + 1}")
