"""A sample of the pile of bad inputs; `python experiments/bad_inputs` runs hundreds."""

import subprocess
import sys
from pathlib import Path

PILE = Path(__file__).resolve().parents[2] / "experiments" / "bad_inputs"


def test_bad_inputs_are_answered_by_one_sentence_each():
    words = ["--configurations", "10", "--files", "8", "--recoveries", "0", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, str(PILE), *words], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "18 of 18 bad inputs answered" in done.stdout
