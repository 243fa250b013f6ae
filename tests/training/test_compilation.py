"""Which steps are compiled."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny import build
from tiny_learners import glyphs, sinusoid
from torch import nn

from metadist.algorithms import MAML, MAMLPlusPlus
from metadist.distributed import batch_partitioner, mean_reducer
from metadist.errors import UserError
from metadist.models import Conv4
from metadist.training import (
    AllReduceStrategy,
    LocalStrategy,
    RpcStrategy,
    Trainer,
    TrainerConfig,
    compile_step,
)
from metadist.training.checkpoints import Checkpoints
from metadist.training.compilation import steps_to_compile
from metadist.training.sanity_check import check_before_training

LOCAL = LocalStrategy(batch_partitioner, mean_reducer)


def steps(learner, tasks, strategy=LOCAL, **trainer):
    """What compiles the step, for the parts of an experiment that it depends on."""
    config = TrainerConfig(**trainer)
    mapper = SimpleNamespace(device="cpu", chunk_size=config.task_chunk_size)
    experiment = SimpleNamespace(trainer_config=config, train_mapper=mapper, strategy=strategy)
    experiment.learner, experiment.tasks = learner, tasks
    return steps_to_compile(experiment)


def test_what_is_compiled_by_default():
    learner, tasks = sinusoid()
    assert steps(learner, tasks, iterations=4999) is None
    assert steps(learner, tasks, iterations=5000, compile=False) is None
    for each in ({"iterations": 5000}, {"iterations": 1, "compile": True}):
        found = steps(learner, tasks, meta_batch_size=25, **each)
        assert (found.chunk_size, found.captures) == (25, False)
    assert steps(learner, tasks, compile=True, task_chunk_size=7).chunk_size == 6  # of 16 tasks
    images, glyph_tasks = glyphs()
    assert steps(images, glyph_tasks, iterations=60_000) is None
    assert steps(images, glyph_tasks, compile=True).chunk_size == 16


def test_on_gpus_steps_are_captured_and_chunks_are_no_larger_than_shards(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("metadist.training.compilation.resolve_device", lambda name: cuda)

    def chunk_size(workers, **trainer):
        monkeypatch.setattr("metadist.training.compilation.get_world_size", lambda: workers)
        found = steps(*glyphs(), meta_batch_size=7, **trainer)
        assert found is None or found.captures
        return found and found.chunk_size

    assert chunk_size(1, task_chunk_size=64) == 7
    assert chunk_size(2, task_chunk_size=64) == chunk_size(2, task_chunk_size=64, compile=True) == 4
    assert chunk_size(1, task_chunk_size=6) == 4  # not 6 and 1
    assert chunk_size(1, task_chunk_size=64, compile=False) is None
    # No size was measured: tasks have different shapes, and each would need a graph.
    assert chunk_size(1) is None
    assert chunk_size(1, compile=True) == 7


def test_the_compiled_steps_are_freed_with_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "metadist.training.compiled_steps.compile_outer_step", lambda step, *_: step
    )
    experiment = build(tmp_path, "strategy=local", "trainer.compile=true")
    compile_step(experiment)
    freed = weakref.ref(experiment.train_mapper.compiled.value)
    assert freed() is not None
    del experiment
    gc.collect()
    assert freed() is None


class Noisy(MAML):
    needs_task_seeds = True


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: MAML(nn.Sequential(nn.Flatten(), nn.Linear(784, 3))), "one task at a time"),
        (lambda: MAMLPlusPlus(Conv4((1, 28, 28), 3, filters=16)), "has buffers"),
        (lambda: Noisy(Conv4((1, 28, 28), 3, filters=16)), "Noisy draws random numbers"),
    ],
)
def test_a_learner_whose_step_is_not_compiled_is_logged(build, reason, caplog):
    _, tasks = glyphs()
    assert steps(build(), tasks, compile="auto") is None
    assert not caplog.messages
    assert steps(build(), tasks, compile=True) is None
    (message,) = caplog.messages
    assert "trainer.compile=true does not apply" in message
    assert reason in message


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduceStrategy(batch_partitioner, mean_reducer, engine="ddp"),
        RpcStrategy(batch_partitioner, mean_reducer, gradient="dist_autograd"),
        RpcStrategy(batch_partitioner, reducer=max),
    ],
)
def test_a_step_of_one_task_at_a_time_is_not_compiled(strategy):
    learner, tasks = sinusoid()
    assert steps(learner, tasks, strategy, iterations=5000) is None
    trainer = TrainerConfig(compile=True)
    with pytest.raises(UserError, match=r"trainer\.compile=true does not apply to strategy="):
        check_before_training(strategy, tasks, learner, trainer, "float32")


def test_a_resume_that_cannot_be_compiled_leaves_the_best_checkpoint(tmp_path):
    options = ("trainer.iterations=2", "trainer.eval_every=1", "trainer.test_checkpoint=best")
    Trainer(build(tmp_path, "strategy=local", *options)).run()
    best = Checkpoints(tmp_path).best
    options = (*options, "strategy=rpc", "strategy.gradient=dist_autograd", "resume=auto")
    with pytest.raises(UserError, match=r"trainer\.compile=true does not apply to strategy="):
        build(tmp_path, *options, "trainer.eval_seed=5", "trainer.compile=true")
    assert best is not None and Checkpoints(tmp_path).best == best
