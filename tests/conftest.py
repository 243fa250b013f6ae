import os
from pathlib import Path

import pytest
import torch
from tiny import finished_run

# Several processes run tests: threads of all of them would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Unbuffered, print() writes a line and its end separately: lines of two workers would mix.
os.environ.pop("PYTHONUNBUFFERED", None)
# The expected results are those of CPUs. `test_on_gpu.py` starts the tests of GPUs.
if "METADIST_HIDDEN_GPUS" not in os.environ:
    count = torch.cuda.device_count()
    every = ",".join(str(index) for index in range(count))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every) if count else ""
    os.environ |= {"METADIST_HIDDEN_GPUS": gpus, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def single_thread():
    """A test may set another number of threads; the next one starts with one thread."""
    torch.set_num_threads(1)


@pytest.fixture
def saved_figures(monkeypatch):
    """Figures in the order in which they were saved."""
    from matplotlib.figure import Figure  # takes time to import

    figures = []
    savefig = Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        return savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.fixture(scope="module")
def maml(tmp_path_factory) -> Path:
    """The directory of a finished run of MAML."""
    return finished_run(tmp_path_factory.mktemp("runs") / "maml")


@pytest.fixture(scope="module")
def prototypical(tmp_path_factory) -> Path:
    """The directory of a finished run of prototypical networks."""
    return finished_run(tmp_path_factory.mktemp("runs") / "prototypical", "algorithm=prototypical")
