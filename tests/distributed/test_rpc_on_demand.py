"""Without torch.distributed.rpc and torch.distributed.autograd everything but RPC works."""

import importlib
import os
import subprocess
import sys

import pytest
from commands import ROOT
from tiny import SMALL, records
from worlds import open_store, run_world

BLOCKED = """
import sys, torch, torch.nn.parallel  # torch itself imports both modules

NAMES = ("torch.distributed.rpc", "torch.distributed.autograd")


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(NAMES):
            raise ModuleNotFoundError(f"{name} is blocked")


for name in [name for name in sys.modules if name.startswith(NAMES)]:
    del sys.modules[name]
del torch.distributed.rpc, torch.distributed.autograd
sys.meta_path.insert(0, Blocker())
"""

RUN = f"""{BLOCKED}
import runpy

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def import_metadist_again() -> None:
    exec(BLOCKED, {})
    for name in [name for name in sys.modules if name.split(".")[0] == "metadist"]:
        del sys.modules[name]
    todist = importlib.import_module("metadist")
    assert todist.get_world_info().worker_name == "worker0" and not todist.rpc_is_initialized()
    for name in ("rpc", "init_rpc", "auto_init_rpc", "autograd"):
        with pytest.raises(ModuleNotFoundError, match="is blocked"):
            getattr(todist, name)


def test_import_metadist_does_not_import_them():
    run_world(import_metadist_again, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "size"),
    [
        (["strategy=local"], 1),
        (["strategy=allreduce"], 1),
        (["strategy=allreduce"], 2),
    ],
    ids=["local", "one rank", "two ranks"],
)
def test_other_strategies_do_not_import_them(tmp_path, options, size):
    store = open_store()
    processes = []
    for rank in range(size):
        world = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
        }
        arguments = [*SMALL, *options, "trainer.iterations=2", f"hydra.run.dir={tmp_path}"]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", RUN, str(ROOT / "experiments" / "maml.py"), *arguments],
                env={**os.environ, **{name: str(value) for name, value in world.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, outputs
    assert len([each for each in records(tmp_path) if "train_loss" in each]) == 2
