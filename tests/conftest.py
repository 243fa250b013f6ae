import pytest
import torch


@pytest.fixture
def single_thread():
    """The C++ wants one thread; small layers lose by more where others keep the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
