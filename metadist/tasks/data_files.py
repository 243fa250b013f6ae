"""Find, fingerprint, download and decode the files of datasets."""

import contextlib
import functools
import hashlib
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, UnidentifiedImageError

from metadist.errors import UserError, one_line
from metadist.files import open_regular, partial_path, wrap_write_errors
from metadist.tasks.array_cache import file_lock

_PHOTOMETRIC = 262  # TIFF's tag PhotometricInterpretation
_TIMEOUT_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16
_SAMPLED_FILES, _SAMPLED_BYTES = 32, 1 << 16


@contextlib.contextmanager
def root_errors(root: Path, dataset: str) -> Iterator[None]:
    """Report errors while looking for a dataset's files in `root` as user errors.

    Raises:
        UserError: `root` is a file or cannot be read.
    """
    try:
        if root.is_file():
            raise UserError(
                f"dataset.root is {root}, which is a file; give the directory of {dataset}."
            )
        yield
    except OSError as error:
        raise UserError(
            f"dataset.root {root} cannot be read ({error.strerror}); allow it, or give another "
            "directory."
        ) from error


def fingerprint(files: Sequence[tuple[str, Path]], *options: object) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times, and `options`.

    Two datasets may have files of equal names, sizes and times: the digits also depend on the first
    bytes of some of the files.

    Args:
        files: pairs of a file's name, which must not depend on its directory, and its path.
        options: other values that the decoded images depend on, such as their size.

    Raises:
        UserError: a file does not exist.
    """
    digest = hashlib.blake2b(repr(options).encode(), digest_size=8)
    for name, file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(unreadable(file, error)) from error
        digest.update(repr((name, status.st_size, status.st_mtime_ns)).encode())
    for _, file in files[:: max(1, math.ceil(len(files) / _SAMPLED_FILES))]:
        # A file that cannot be read is reported when it is decoded.
        with contextlib.suppress(OSError), open_regular(file) as opened:
            digest.update(opened.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def download(
    target: Path, url: str, checksum: str, advice: str, show_progress: bool = False
) -> None:
    """Download a file, unless it exists with this checksum. Other processes that need it wait.

    If the download is interrupted, its part stays at `partial_path(target)`, and the next call
    continues it. The file gets its name after it is verified.

    Args:
        target: the file to create.
        url: the URL of the file.
        checksum: the checksum, "md5:…" or "sha256:…".
        advice: what a user who cannot download the file can do.
        show_progress: whether to show a progress bar.

    Raises:
        UserError: the download fails, the file has another checksum, or the directory cannot be
            written to.
    """
    import pooch  # these take time to import
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    part = partial_path(target)
    downloader = functools.partial(_download, part, show_progress)
    with file_lock(target, advice), wrap_write_errors(target, advice):
        try:
            pooch.retrieve(url, checksum, target.name, target.parent, downloader=downloader)
        except RequestException as error:
            kept = f"; {part} is kept, and the next start continues it" if part.exists() else ""
            raise UserError(
                f"{url} could not be downloaded ({_failure(error)}){kept}: check the network, or "
                f"{advice}."
            ) from error
        except ValueError as error:  # raised by pooch if the checksum does not match
            raise UserError(
                f"{url} does not have the expected checksum; nothing was kept: start again, or "
                f"{advice}."
            ) from error


def _failure(error: Exception) -> str:
    """Why a download failed, in one line; requests describes a lost connection in several."""
    from requests import exceptions  # takes time to import

    if isinstance(error, exceptions.ProxyError):
        return "the connection to the proxy failed"
    if isinstance(error, exceptions.ConnectionError | exceptions.Timeout) and not isinstance(
        error, exceptions.SSLError
    ):
        host = urlsplit(str(error.request.url)).hostname if error.request else "the server"
        return f"the connection to {host} failed"
    return one_line(error)


def _download(part: Path, show_progress: bool, url: str, output_file: Any, _: Any) -> None:
    """A downloader for pooch: continues `part` and renames it to `output_file` at the end."""
    import requests
    from rich.progress import Progress

    if part.is_symlink():
        part.unlink()
    start = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_SECONDS) as response:
        if response.status_code != requests.codes.requested_range_not_satisfiable:
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:
                start = 0
            length = int(response.headers.get("Content-Length", 0))
            with (
                Progress(disable=not show_progress) as progress,
                part.open("ab" if start else "wb") as file,
            ):
                bar = progress.add_task(part.name[1:-5], total=start + length, completed=start)
                for data in response.iter_content(_CHUNK_BYTES):
                    file.write(data)
                    progress.advance(bar, len(data))
    part.replace(output_file)


def decode_image(
    data: bytes, mode: str, size: int, formats: tuple[str, ...], max_pixels: int
) -> np.ndarray:
    """Decode an image and resize it to a square with the Lanczos filter.

    MAML's code asks for this filter too, but Pillow ignores it for images of one bit, such as
    Omniglot's: there they stay black and white.

    Args:
        data: the file's contents.
        mode: "L" for greyscale or "RGB".
        size: height and width of the result, in pixels.
        formats: Pillow's names of the accepted formats.
        max_pixels: the most pixels that the image may have, so that a small file cannot fill the
            memory.

    Returns:
        uint8 of shape (size, size) or (size, size, 3).

    Raises:
        ValueError: the image cannot be decoded; the message is one line.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if image.width * image.height > max_pixels:
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            return resize_image(image, mode, size)
    except UnidentifiedImageError:
        raise ValueError("it is of no known image format") from None
    # Pillow raises these on damaged files, SyntaxError included.
    except (OSError, ValueError, SyntaxError, zlib.error, Image.DecompressionBombError) as error:
        raise ValueError(one_line(error)) from error


def resize_image(image: Image.Image, mode: str, size: int) -> np.ndarray:
    """Convert an image to a mode and resize it to a square with the Lanczos filter.

    Images of 16 bits are scaled to 8, and transparent ones are composited onto a white background.

    Args:
        image: an image of any size and of any mode but "I" and "F", whose range of values is
            unknown.
        mode: "L" for greyscale or "RGB".
        size: height and width of the result, in pixels.

    Returns:
        uint8 of shape (size, size) or (size, size, 3).

    Raises:
        ValueError: the image has another mode.
    """
    if image.mode == "I" and image.format == "PPM":  # 16 bits
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its mode is {image.mode}, expected 8 or 16 bits per channel")
    transparent = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        pixels = np.asarray(image)
        if image.format == "TIFF" and cast(Any, image).tag_v2.get(_PHOTOMETRIC) == 0:
            pixels = 65535 - pixels  # zero is white; Pillow inverts images of 8 bits only
        white = pixels == transparent if isinstance(transparent, int) else False
        image = Image.fromarray(np.where(white, 255, pixels >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        if isinstance(transparent, tuple) and max(transparent) > 255:
            image = image.copy()  # of a file of 16 bits per channel, read as 8 bits
            image.info["transparency"] = tuple(value >> 8 for value in transparent)
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image.convert("RGBA"))
    return np.asarray(image.convert(mode).resize((size, size), Image.Resampling.LANCZOS))


def unreadable(path: Path | str, error: OSError) -> str:
    """The error message for a file that the operating system refuses to read."""
    if isinstance(error, FileNotFoundError):
        return f"there is no file or folder {path}: correct the path."
    return f"{path} cannot be read ({error.strerror}); allow it, or put another copy there."


def error_with_type(error: BaseException) -> str:
    """An error's type and text in one line, for texts that are unclear without the type."""
    return f"{type(error).__name__}: {one_line(error)}"
