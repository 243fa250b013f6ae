import os

import pytest
import torch

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
