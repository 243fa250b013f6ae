"""GPUs for the jobs that run at the same time, also in different processes of a user."""

import itertools
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

from metadist.errors import UserError

_jobs_without_own_gpus = itertools.count()


def acquire_slot(slots: Sequence[Sequence[str]], stack: ExitStack) -> int:
    """Lock the GPUs of the first slot that has no locked ones. Any thread may call it.

    The locks are files of the user, so they count for all of the user's processes on this machine,
    and end with the process at the latest.

    Args:
        slots: the names of the GPUs of each slot.
        stack: the stack on which the locks are put; they are released when it is closed.

    Returns:
        The slot's index; if all have locked GPUs, each in turn; 0 if there are no slots.

    Raises:
        UserError: the directory for temporary files cannot be used for locks.
    """
    directory = Path(tempfile.gettempdir()) / f"metadist-{os.getuid()}"
    try:
        if slots:
            directory.mkdir(mode=0o700, exist_ok=True)
            status = directory.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError("other users can access it")
        for index, gpus in enumerate(slots):
            with ExitStack() as locks, suppress(Timeout):
                for gpu in gpus:
                    path = directory / f"gpu-{quote(gpu, safe='')}.lock"
                    locks.enter_context(FileLock(path, timeout=0))
                stack.enter_context(locks.pop_all())
                return index
    except (OSError, NotImplementedError) as error:  # the latter if files cannot be locked
        raise UserError(
            f"GPUs cannot be locked for a job in {directory} ({error}): set TMPDIR to a directory "
            "of a local disk that you can write to."
        ) from None
    return next(_jobs_without_own_gpus) % len(slots) if slots else 0
