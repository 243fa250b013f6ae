"""Wrong configurations and damaged files, from `experiments/bad_inputs`, as a table."""

import sys
from pathlib import Path
from typing import NamedTuple

from tables import tell


class BadInputs(NamedTuple):
    """One kind of bad input: how many of how many were answered properly."""

    kind: str
    answered_properly: str

    @property
    def good(self) -> bool:
        """Whether all were."""
        number, _, whole = self.answered_properly.partition(" of ")
        return number == whole


def rows(seed: int) -> list[BadInputs]:
    """The whole pile."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bad_inputs.report import rows as counted

    return [tell(BadInputs(*each)) for each in counted(seed)]
