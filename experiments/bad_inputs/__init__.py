"""Hundreds of wrong configurations and damaged files, each to be answered by one sentence.

    python experiments/bad_inputs --configurations 200 --files 200 --seed 0

Every case is the real command `experiments/maml.py` (or `replay.py`) in a process of its own,
forked from one that has imported everything. It is answered properly if it exits with status 2,
having written to the standard error one sentence and no more, and if no code from a file was run.
Damaged files that a run recovers from by itself, as documented, are counted apart.
"""

from bad_inputs.cases import Answer, Case
from bad_inputs.report import rows, run_pile

__all__ = ["Answer", "Case", "rows", "run_pile"]
