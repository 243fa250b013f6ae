"""Which steps are compiled."""

import pytest
import torch
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
    TrainerConfig,
    compile_options,
)


def test_what_is_compiled_by_default():
    learner, tasks = sinusoid()
    cpu = torch.device("cpu")

    def options(learner, tasks, **trainer):
        config = TrainerConfig(**trainer)
        return compile_options(config, tasks, learner, cpu, "text", local)

    local = LocalStrategy(batch_partitioner, mean_reducer)
    assert options(learner, tasks, iterations=4999) is None
    assert options(learner, tasks, iterations=5000, compile=False) is None
    found = options(learner, tasks, iterations=5000, meta_batch_size=25)
    assert found == options(learner, tasks, iterations=1, compile=True, meta_batch_size=25)
    assert found.chunk_size == 25
    assert options(learner, tasks, compile=True, task_chunk_size=7).chunk_size == 6  # of 16 tasks
    images, glyph_tasks = glyphs()
    assert options(images, glyph_tasks, iterations=60_000) is None
    assert options(images, glyph_tasks, compile=True).chunk_size == 16


def test_on_gpus_steps_are_captured_and_chunks_are_no_larger_than_shards(monkeypatch):
    strategy = LocalStrategy(batch_partitioner, mean_reducer)

    def options(workers, **trainer):
        monkeypatch.setattr("metadist.training.compilation.get_world_size", lambda: workers)
        config = TrainerConfig(meta_batch_size=7, **trainer)
        arguments = (*reversed(glyphs()), torch.device("cuda"), "text", strategy)
        return compile_options(config, *arguments)

    assert options(1)[1:] == (7, True)
    assert options(2)[1:] == options(2, compile=True)[1:] == (4, True)
    assert options(1, task_chunk_size=6)[1:] == (4, True)  # not 6 and 1
    assert options(1, compile=False) is None


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
    strategy = LocalStrategy(batch_partitioner, mean_reducer)
    arguments = (tasks, build().train(), torch.device("cpu"), "text", strategy)
    assert compile_options(TrainerConfig(compile="auto"), *arguments) is None
    assert not caplog.messages
    assert compile_options(TrainerConfig(compile=True), *arguments) is None
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
    arguments = (tasks, learner, torch.device("cpu"), "text", strategy)
    assert compile_options(TrainerConfig(iterations=5000), *arguments) is None
    with pytest.raises(UserError, match=r"trainer\.compile=true does not apply to strategy="):
        compile_options(TrainerConfig(compile=True), *arguments)
