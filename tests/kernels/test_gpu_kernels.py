"""The Triton kernels, on a GPU or, without one, in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="PyTorch requires Triton on Linux with CUDA only",
)
@pytest.mark.parametrize("tests", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_kernels_agree_with_pytorch(tests):
    # The interpreter has to be chosen before the first import of Triton.
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("gpu_kernels.py")
    options = ("--noconftest", "-p", "no:cacheprovider", "-m", tests)
    command = [sys.executable, "-m", "pytest", *options, file]
    done = subprocess.run(
        command, env=os.environ | interpreter, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]
