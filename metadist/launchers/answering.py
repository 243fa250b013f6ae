"""How the commands beside the experiments, which start no world, end."""

import sys
from collections.abc import Callable

from hydra.errors import HydraException

from metadist.errors import UserError
from metadist.launchers.error_reporting import USER_ERROR_STATUS


def answer(work: Callable[[], int | None]) -> int:
    """Do a command's work, and say in one sentence what the user can mend.

    Args:
        work: returns the exit status, None for success.

    Returns:
        The exit status: 2 after an error that the user can mend.
    """
    try:
        return work() or 0
    except (UserError, HydraException) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
