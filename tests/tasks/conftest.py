import pytest
from omniglot_tree import SMALL

from metadist.tasks import omniglot, omniglot_files


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch, tmp_path):
    """Nothing a test prepares lands in the home directory."""
    monkeypatch.delenv("METADIST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def small_omniglot(monkeypatch):
    """Omniglot is taken to have 7 characters: 3 for training, 2 for validation, 2 for test."""
    monkeypatch.setattr(omniglot_files, "CHARACTERS", SMALL)
    monkeypatch.setattr(omniglot, "TRAINING", 5)
    monkeypatch.setattr(omniglot, "HELD_OUT", 2)
