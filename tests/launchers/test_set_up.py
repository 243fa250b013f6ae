"""What the ranks agree on before any work starts."""

import os

import pytest
from commands import Outcome, command, run_command
from tiny import SMALL, records
from worlds import run_world

from metadist.kernels import loader

WORDS = (*SMALL, "strategy=allreduce", "model.pooling=max", "trainer.iterations=2")


def no_compiler_on_rank_one(words: tuple[str, ...]) -> Outcome:
    if os.environ["RANK"] == "1":
        os.environ["CXX"] = "false"
    return command("maml.py", words)


def test_where_one_machine_cannot_compile_all_do_without(tmp_path):
    if loader.library("norm_relu_pool") is None:
        pytest.skip("there is no C++ compiler")
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    ranks = run_world(no_compiler_on_rank_one, 2, (*WORDS, f"hydra.run.dir={mixed}"))
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert "machine of rank 1: no rank uses model.native" in ranks[0].out + ranks[0].err
    assert "compiler" not in ranks[1].out + ranks[1].err
    ranks = run_command("maml.py", *WORDS, "model.native=false", f"hydra.run.dir={plain}", size=2)
    assert "compiler" not in ranks[0].out + ranks[0].err
    losses = [
        [record["train_loss"] for record in records(each) if "train_loss" in record]
        for each in (mixed, plain)
    ]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
