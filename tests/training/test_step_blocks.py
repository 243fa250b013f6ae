"""Several outer steps in a row give the bits of single ones; what lies between them is kept."""

import itertools
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from tiny import build, records, without_times
from torch import nn
from worlds import run_world

from metadist.errors import UserError
from metadist.tasks import Sinusoid
from metadist.training import Callback, Interrupted, Trainer, compile_step
from metadist.training.checkpoints import read_checkpoint
from metadist.training.resume import restore
from metadist.training.step_blocks import adam_step, block_size

WAVES = (
    *("dataset=sinusoid", "model=mlp", "model.hidden=[8]", "model.batch_norm=false"),
    *("strategy=local", "task.shots=5", "task.queries=5", "trainer.iterations=30"),
    *("trainer.eval_every=12", "trainer.checkpoint_every=20", "algorithm.inner_lr=0.01"),
)


@pytest.fixture(autouse=True)
def blocks_of_any_duration(monkeypatch):
    """Blocks of the same lengths on slow machines."""
    monkeypatch.setattr("metadist.training.trainer._MAX_BLOCK_SECONDS", 1e9)


@pytest.fixture
def uncompiled(monkeypatch):
    """Run compiled functions eagerly; compiling takes seconds."""
    monkeypatch.setattr(
        "metadist.training.compiled_steps.compile_function", lambda function, *_: function
    )


class Blocks(list):
    """The iterations of the blocks of a run, in the order in which they are computed."""

    def __init__(self, x) -> None:
        super().__init__()
        blocks = x.step_blocks

        def recorded(iterations):
            self.append([])
            for iteration, output in zip(iterations, blocks(iterations), strict=False):
                self[-1].append(iteration)
                yield output

        recorded.size, recorded.compiled = blocks.size, blocks.compiled
        x.step_blocks = recorded


def trainer(directory: Path, *overrides: str, callback: Callback | None = None) -> Trainer:
    """The trainer of sine waves, after what follows on the building of a run."""
    x = build(directory, *WAVES, *overrides, omit=("++dataset", "model.filters", "task.ways"))
    if callback is not None:
        x.callbacks = {"own": callback}
    restore(x)
    compile_step(x)
    return Trainer(x)


def in_blocks(directory: Path, *overrides: str) -> list[list[int]]:
    """Train in blocks; the iterations of each block."""
    run = trainer(directory, *overrides)
    blocks = Blocks(run.experiment)
    run.run()
    return blocks


def parts(first: int, last: int) -> list[int]:
    """The iterations from the first to the last."""
    return list(range(first, last + 1))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "trainer.compile=true",
        "trainer.compile=true trainer.clip_norm=0.5 +optimizer.weight_decay=0.1 scheduler=cosine",
        "trainer.compile=true optimizer=sgd optimizer.lr=0.001 reducer=sum",
        "+partition=batch reducer=sum trainer.clip_value=0.01",
        "algorithm=meta_sgd trainer.precision=bf16",
        "algorithm=anil trainer.compile=true optimizer._target_=torch.optim.AdamW",
    ],
)
def test_blocks_have_the_records_and_checkpoints_of_single_steps(tmp_path, uncompiled, overrides):
    blocks = in_blocks(tmp_path / "blocks", *overrides.split())
    single = trainer(tmp_path / "single", *overrides.split(), callback=Callback())
    assert single.experiment.step_blocks is None
    single.run()
    assert [*itertools.chain(*blocks)] == parts(1, 30)
    assert max(map(len, blocks)) > 1
    found, expected = (records(tmp_path / name) for name in ("blocks", "single"))
    assert without_times(found) == without_times(expected)
    states = [
        read_checkpoint(tmp_path / name / "checkpoints" / "iteration-00000030.pt")
        for name in ("blocks", "single")
    ]
    assert str(states[0]["optimizer"]) == str(states[1]["optimizer"])
    for name, value in states[0]["learner"].items():
        assert torch.equal(value, states[1]["learner"][name]), name


def test_compiled_blocks_have_the_bits_of_compiled_single_steps(tmp_path):
    in_blocks(tmp_path / "blocks", "trainer.compile=true")
    trainer(tmp_path / "single", "trainer.compile=true", callback=Callback()).run()
    found, expected = (records(tmp_path / name) for name in ("blocks", "single"))
    assert without_times(found) == without_times(expected)


def test_blocks_that_cannot_be_compiled_run_eagerly(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr("metadist.training.compiled_steps.compile_function", fail)
    blocks = in_blocks(tmp_path / "blocks", "trainer.compile=true")
    assert caplog.text.count("runs eagerly") == 1
    assert max(map(len, blocks)) > 1
    in_blocks(tmp_path / "eager", "trainer.compile=false")
    found, expected = (records(tmp_path / name) for name in ("blocks", "eager"))
    assert without_times(found) == without_times(expected)


def test_compiled_blocks_follow_a_test(tmp_path, uncompiled):
    run = trainer(tmp_path, "trainer.compile=true", "trainer.test_checkpoint=last")
    blocks = Blocks(run.experiment)
    run.test()
    run.train()
    assert [*itertools.chain(*blocks)] == parts(1, 30)


def test_blocks_end_where_something_else_follows(tmp_path):
    blocks = in_blocks(tmp_path)
    assert blocks[0] == [1]  # its time is not known before
    ends = {block[-1] for block in blocks}
    assert {12, 20, 24, 30} <= ends  # validations and checkpoints


def test_slow_steps_are_taken_and_logged_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("metadist.training.trainer._MAX_BLOCK_SECONDS", 0.0)
    assert in_blocks(tmp_path) == [[iteration] for iteration in parts(1, 30)]


def test_every_step_of_a_block_is_logged_with_an_equal_part_of_its_time(tmp_path):
    blocks = in_blocks(tmp_path)
    lines = [line for line in records(tmp_path) if "train_loss" in line]
    assert [line["iteration"] for line in lines] == parts(1, 30)
    for block in blocks:
        of_block = [lines[iteration - 1] for iteration in block]
        assert len({line["tasks_per_second"] for line in of_block}) == 1
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(set(seconds))


def stopped_in_a_block(directory: Path) -> str:
    """Train, with a signal after the gradient of iteration 16 is computed; the run's message."""
    run = trainer(directory)
    blocks = run.experiment.step_blocks

    def interrupted(iterations):
        for iteration, output in zip(iterations, blocks(iterations), strict=False):
            if iteration == 16:
                os.kill(os.getpid(), signal.SIGTERM)
            yield output

    interrupted.size, interrupted.compiled = blocks.size, None
    run.experiment.step_blocks = interrupted
    try:
        run.run()
    except Interrupted as error:
        return str(error)
    return "finished"


def test_a_signal_stops_after_the_step_and_the_run_resumes_with_the_same_bits(tmp_path):
    in_blocks(tmp_path / "whole")
    (message,) = run_world(stopped_in_a_block, 1, tmp_path / "parts")
    assert re.match(r"stopped at iteration 1[67] of 30, saved", message)
    trainer(tmp_path / "parts", "resume=auto").run()
    found, expected = (records(tmp_path / name) for name in ("parts", "whole"))
    assert without_times(found) == without_times(expected)


def test_only_the_steps_before_an_error_of_the_optimizer_are_logged(tmp_path):
    run = trainer(tmp_path, "trainer.eval_every=0", "trainer.checkpoint_every=0")
    steps = itertools.count(1)

    def fail(*_):
        if next(steps) == 15:
            raise RuntimeError("the step failed")

    run.experiment.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the step failed"):
        run.run()
    assert [line["iteration"] for line in records(tmp_path)] == parts(1, 14)


def with_infinite_waves(run: Trainer, iteration: int) -> Trainer:
    """Let one task of an iteration have an infinite target."""
    tasks = run.experiment.tasks
    sample, sample_batch = tasks.sample, tasks.sample_batch

    def at_once(keys, device):
        episodes = sample_batch(keys, device)
        episodes.query.targets[
            (keys[:, 1] == 0) & (keys[:, 2:] == torch.tensor([iteration, 2])).all(1)
        ] = torch.inf
        return episodes

    def one(key):
        episode = sample(key)
        if key[1] == 0 and key[2:].tolist() == [iteration, 2]:
            episode.query.targets[:] = torch.inf
        return episode

    tasks.sample, tasks.sample_batch = one, at_once
    return run


def test_a_step_that_is_not_finite_stops_the_run_before_it(tmp_path):
    run = with_infinite_waves(trainer(tmp_path, "trainer.eval_every=0"), 15)
    with pytest.raises(
        UserError, match=r"iteration 15: 1 of 5 tasks are not finite, .*0,train,15,2"
    ):
        run.run()
    lines = records(tmp_path)
    assert [line["iteration"] for line in lines] == parts(1, 15)
    assert lines[-1]["non_finite"] == "0,train,15,2"
    assert [*(tmp_path / "checkpoints").glob("*15.pt")] == []
    assert [path.name for path in (tmp_path / "checkpoints").glob("*14.pt")] != []


def test_a_step_that_is_not_finite_is_skipped_within_a_block(tmp_path, uncompiled):
    for name, callback in (("blocks", None), ("single", Callback())):
        options = ("trainer.on_non_finite=skip", "trainer.compile=true")
        run = trainer(tmp_path / name, *options, callback=callback)
        with_infinite_waves(run, 15).run()
        assert run.state.skipped_steps == 1
    found, expected = (records(tmp_path / name) for name in ("blocks", "single"))
    assert without_times(found) == without_times(expected)


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_no_scheduler_warns_if_the_first_step_is_skipped(tmp_path):
    run = trainer(tmp_path, "trainer.on_non_finite=skip", "trainer.eval_every=0")
    with_infinite_waves(run, 1).run()
    assert run.state.skipped_steps == 1


def test_tasks_that_cannot_be_sampled_at_once_are_computed_in_single_steps(tmp_path):
    in_blocks(tmp_path / "blocks")
    run = trainer(tmp_path / "single")
    sample_batch, refused = run.experiment.tasks.sample_batch, []

    def refuses(keys, device):
        if len(keys) == 5 or keys[0, 1]:  # of one iteration, or of a validation
            return sample_batch(keys, device)
        refused.append(len(keys))
        return None

    run.experiment.tasks.sample_batch = refuses
    run.run()
    assert refused
    found, expected = (records(tmp_path / name) for name in ("single", "blocks"))
    assert without_times(found) == without_times(expected)


def test_the_learner_is_set_to_training_mode_before_every_eager_step(tmp_path, monkeypatch):
    modes: dict[str, list[bool]] = {"blocks": [], "single": []}
    for name, callback in (("blocks", None), ("single", Callback())):
        run = trainer(tmp_path / name, callback=callback)
        kind, train = type(run.experiment.learner), type(run.experiment.learner).train

        def recorded(learner, mode=True, train=train, found=modes[name]):
            found.append(mode)
            return train(learner, mode)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "train", recorded)
            run.train()
    assert modes["blocks"] == modes["single"]


def test_a_learner_that_changes_runs_eagerly_from_then_on(tmp_path, uncompiled, caplog):
    for name, callback in (("blocks", None), ("single", Callback())):
        run = trainer(tmp_path / name, "trainer.compile=true", callback=callback)
        validate, learner = run.validate, run.experiment.learner

        def changes(validate=validate, learner=learner):
            validate()
            learner.inner_lr *= 0.5

        run.validate = changes
        caplog.clear()
        run.run()
        assert caplog.text.count("inner_lr changed during training") == 1
        if callback is None:
            assert run.experiment.step_blocks.compiled is None
    found, expected = (records(tmp_path / name) for name in ("blocks", "single"))
    assert without_times(found) == without_times(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.send_tasks=true",
        "strategy=allreduce",
        "trainer.task_chunk_size=4",
        "trainer.profile=true trainer.iterations=40",
        "task.queries=7000",
        "model.batch_norm=true model.running_statistics=true",
        "model.dropout=0.1",
    ],
)
def test_steps_are_taken_one_by_one(tmp_path, overrides):
    x = build(
        tmp_path, *WAVES, *overrides.split(), omit=("++dataset", "model.filters", "task.ways")
    )
    assert block_size(x) < 2


def test_the_number_of_steps_in_a_block(tmp_path, monkeypatch):
    x = trainer(tmp_path).experiment
    assert block_size(x) == 64
    x = trainer(tmp_path, "task.queries=500").experiment  # 5 tasks of 1,010 numbers
    assert block_size(x) == 12
    with monkeypatch.context() as patch:
        patch.setattr(Sinusoid, "looks_ahead", False)
        assert block_size(x) == 0
    x.optimizer = torch.optim.Adam([*x.learner.parameters()][1:])
    assert block_size(x) == 0


def test_a_parameter_that_no_longer_requires_grad_is_no_longer_trained(tmp_path):
    run = trainer(tmp_path)
    run.train_step(1)
    first, *others = run.experiment.learner.parameters()
    first.requires_grad_(False)
    before = first.clone(), others[0].clone()
    run.train_step(2)
    assert torch.equal(first, before[0])
    assert not torch.equal(others[0], before[1])


class Replaces(torch.optim.SGD):
    """Gives the parameters new tensors instead of changing their values in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


def test_an_optimizer_may_replace_the_values_of_parameters(tmp_path, uncompiled, monkeypatch):
    monkeypatch.setattr(torch.optim, "Replaces", Replaces, raising=False)
    options = ("trainer.compile=true", "optimizer=sgd", "optimizer._target_=torch.optim.Replaces")
    in_blocks(tmp_path / "blocks", *options)
    trainer(tmp_path / "single", *options, callback=Callback()).run()
    found, expected = (records(tmp_path / name) for name in ("blocks", "single"))
    assert without_times(found) == without_times(expected)


# --- Adam --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True, "eps": 0.01}])
def test_a_step_of_adam_has_the_bits_of_its_optimizer(kind, options):
    torch.manual_seed(0)
    modules = [nn.Linear(37, 5), nn.Linear(37, 5)]
    modules[1].load_state_dict(modules[0].state_dict())
    optimizers = [
        kind(
            [{"params": [m.weight], "betas": (0.5, 0.9)}, {"params": [m.bias], "lr": 0.2}],
            lr=0.1,
            fused=True,
            **options,
        )
        for m in modules
    ]
    for number in range(5):
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 0.3 * number - 1) * parameter.detach()
        if number == 3:
            modules[0].bias.grad = modules[1].bias.grad = None
        optimizers[0].step()
        if not adam_step(optimizers[1]):
            assert number == 0  # it has no state
            optimizers[1].step()
    assert torch.equal(modules[0].weight, modules[1].weight)
    assert torch.equal(modules[0].bias, modules[1].bias)
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())


def with_hook(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer call a function after its steps."""
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
        lambda p: type("Own", (torch.optim.Adam,), {})(p, lr=0.1, fused=True),
        lambda p: with_hook(torch.optim.Adam(p, lr=0.1, fused=True)),
    ],
)
def test_other_optimizers_take_their_own_steps(make):
    module = nn.Linear(3, 2)
    optimizer = make(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = module.weight.clone()
    assert not adam_step(optimizer)
    assert torch.equal(module.weight, before)
