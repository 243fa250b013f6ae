"""The Triton kernels in Triton's interpreter. See `test_on_gpu.py` for a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="PyTorch requires Triton on Linux with CUDA only",
)
@pytest.mark.parametrize("tests", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_kernels_agree_with_pytorch(tests):
    interpreter = {"TRITON_INTERPRET": "1"}  # chosen before the first import of Triton
    file = Path(__file__).with_name("gpu_kernels.py")
    options = ("--noconftest", "-p", "no:cacheprovider", "-m", tests)
    command = [sys.executable, "-m", "pytest", *options, file]
    done = subprocess.run(
        command, env=os.environ | interpreter, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]
