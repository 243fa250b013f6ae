"""The fuzz corpus of invalid configurations and corrupted files (`fuzzing`), as a table."""

from typing import NamedTuple

from fuzzing.corpus import rows as corpus_rows

from faults.tables import print_row


class InvalidInputs(NamedTuple):
    """A kind of invalid input, and how many cases passed, as "N of M"."""

    kind: str
    cases_passed: str

    @property
    def passed(self) -> bool:
        """Whether all cases passed."""
        number, _, total = self.cases_passed.partition(" of ")
        return number == total


def rows(seed: int) -> list[InvalidInputs]:
    """The whole corpus."""
    return [print_row(InvalidInputs(*counts)) for counts in corpus_rows(seed)]
