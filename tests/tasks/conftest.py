import mini_imagenet_tree
import pytest
from omniglot_tree import SMALL_COUNTS

from metadist.tasks import MiniImageNet, Omniglot, omniglot, omniglot_files
from metadist.tasks.decoded_images import Counts


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch, tmp_path):
    """Nothing a test prepares lands in the home directory."""
    monkeypatch.delenv("METADIST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def small_omniglot(monkeypatch):
    """Omniglot is taken to have 7 characters: 3 for training, 2 for validation, 2 for test."""
    monkeypatch.setattr(Omniglot, "expected", SMALL_COUNTS)
    monkeypatch.setattr(omniglot, "NON_TEST_CHARACTERS", 5)
    monkeypatch.setattr(omniglot, "VALIDATION_CHARACTERS", 2)


@pytest.fixture
def decodings(monkeypatch):
    """How often Omniglot's images are decoded: a size each time."""
    made = []
    decode = omniglot_files.decode
    monkeypatch.setattr(
        omniglot_files, "decode", lambda sources, size: made.append(size) or decode(sources, size)
    )
    return made


@pytest.fixture
def small_mini_imagenet(monkeypatch):
    """MiniImageNet is taken to have 3, 2 and 2 classes of 4 images."""
    counts = {
        split: Counts(classes, examples=mini_imagenet_tree.EXAMPLES)
        for split, classes in mini_imagenet_tree.CLASSES.items()
    }
    monkeypatch.setattr(MiniImageNet, "expected", counts)
