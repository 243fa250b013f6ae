"""A sample of the fuzz corpus; `make fuzz` runs hundreds of cases."""

import os
import subprocess
import sys

import pytest
from commands import ROOT


@pytest.mark.slow
def test_invalid_inputs_end_with_one_sentence_each():
    arguments = ["--configurations", "4", "--files", "3", "--recoveries", "0", "--seed", "1"]
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "fuzzing", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 of 7 invalid inputs passed" in done.stdout
