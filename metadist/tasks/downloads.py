"""Files fetched from the network: by one process while others wait, verified by digest."""

import contextlib
import io
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from metadist.errors import UserError
from metadist.tasks.array_cache import locked, part_of
from metadist.tasks.data_files import one_line

_SILENCE_SECONDS = 30.0


def download(
    target: Path, source: Callable[[], tuple[str, str]], dataset: str, advice: str
) -> None:
    """Fetch a file unless it is there; other processes that ask for it wait.

    The file takes its name only when it is complete and its digest is right.

    Args:
        target: the file to make.
        source: gives the file's address and the MD5 digest that it must have; only called when
            it is needed, because these are torchvision's and importing it takes a second.
        dataset: what it belongs to, for messages.
        advice: what a user can do who cannot download it.

    Raises:
        UserError: the download fails, or the directory cannot be written to.
    """
    with locked(target, advice):
        if target.exists():
            return
        part = part_of(target)
        try:
            with _bounded_silence():
                from torchvision.datasets.utils import download_url

                url, md5 = source()
                download_url(url, str(target.parent), part.name, md5)
            part.replace(target)
        except Exception as error:  # whatever a network, its proxies and torchvision raise
            part.unlink(missing_ok=True)
            raise UserError(
                f"{target.name} of {dataset} is not in {target.parent} and could not be "
                f"downloaded ({one_line(error)}); {advice}"
            ) from error


@contextlib.contextmanager
def _bounded_silence() -> Iterator[None]:
    """No progress bar from a rank that may not be the first, and no wait for a mute server."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)
