import os
from pathlib import Path

import pytest
import torch
from tiny import finished_run

# Unbuffered, print() writes a line and its end separately: lines of two workers would mix.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture
def single_thread():
    """The C++ wants one thread; small layers lose by more where others keep the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
