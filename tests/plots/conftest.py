"""Matplotlib figures saved by a test."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def saved_figures(monkeypatch):
    """Figures in the order in which they were saved."""
    figures = []
    savefig = Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        return savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures
