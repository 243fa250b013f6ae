"""Starts the tests that need a GPU. Without one, they are skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GPUS = os.environ["METADIST_HIDDEN_GPUS"]


@pytest.mark.skipif(not GPUS, reason="there is no GPU")
@pytest.mark.parametrize("file", ["kernels/gpu_kernels.py", "training/gpu_training.py"])
def test_on_the_first_gpu(file):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": GPUS.split(",")[0]}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]
