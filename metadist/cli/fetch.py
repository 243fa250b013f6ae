"""Download a dataset: metadist fetch DATASET [--root DIR] [--yes].

Shows the dataset's terms first and asks for agreement. Files are verified by their checksums; an
interrupted download continues where it stopped. DATASET is mini_imagenet, tiered_imagenet or cub.
"""

import contextlib
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from metadist.cli.command import argument_parser
from metadist.errors import UserError, did_you_mean, one_line
from metadist.loggers.console import print_plain
from metadist.tasks.array_cache import file_lock
from metadist.tasks.data_files import download

_TIMEOUT_SECONDS = 30.0

_IMAGENET_TERMS = (
    "The images are ImageNet's: for non-commercial research and education only, under the terms of "
    "https://image-net.org/download."
)
_ZENODO = "https://zenodo.org/records/7978538/files"


class RemoteFile(NamedTuple):
    """A file to download.

    Attributes:
        url: the URL of the file.
        path: the path of the downloaded file, relative to the dataset's directory.
        checksum: the checksum, "md5:…" or "sha256:…"; None if it is in the dataset's `listing`.
        unpack: whether the file is a tar archive to unpack into the dataset's directory.
    """

    url: str
    path: str
    checksum: str | None
    unpack: bool = False


class RemoteDataset(NamedTuple):
    """The files of a dataset and the terms of its use.

    Attributes:
        terms: the terms of use.
        source: the origin of the files, and other software that downloads them from there.
        gigabytes: the size of all files.
        files: the files to download.
        listing: the URL of the JSON document of a Zenodo record, with the files' checksums.
    """

    terms: str
    source: str
    gigabytes: float
    files: tuple[RemoteFile, ...]
    listing: str | None = None


DATASETS = {
    "mini_imagenet": RemoteDataset(
        terms=_IMAGENET_TERMS,
        source="learn2learn's copy at Zenodo (record 7978538)",
        gigabytes=1.8,
        files=tuple(
            RemoteFile(f"{_ZENODO}/{name}?download=1", name, f"md5:{checksum}")
            for name, checksum in (
                ("mini-imagenet-cache-train.pkl", "ee4e80dc7b716f3ceec891d199b5277a"),
                ("mini-imagenet-cache-validation.pkl", "c1145a80890b88d54a67d6e0022d53a5"),
                ("mini-imagenet-cache-test.pkl", "389b6c59d348b2e1ae9610f00a5e6724"),
            )
        ),
    ),
    "tiered_imagenet": RemoteDataset(
        terms=_IMAGENET_TERMS,
        source="learn2learn's copy at Zenodo (record 7978538) of the files of Ren et al. 2018",
        gigabytes=12.9,
        files=tuple(
            RemoteFile(
                f"{_ZENODO}/tiered-imagenet-{name}?download=1", f"tiered-imagenet/{name}", None
            )
            for split in ("train", "val", "test")
            for name in (f"{split}_labels.pkl", f"{split}_images_png.pkl")
        ),
        listing="https://zenodo.org/api/records/7978538",
    ),
    "cub": RemoteDataset(
        terms="The images of CUB-200-2011 are for non-commercial research and education only; "
        "Caltech does not hold their copyright.",
        source="https://data.caltech.edu/records/65de6-vp158 (checksum as in torchmeta)",
        gigabytes=1.2,
        files=(
            RemoteFile(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
                "CUB_200_2011.tgz",
                "md5:97eceeb196236b17998738112f37df78",
                unpack=True,
            ),
        ),
    ),
}
"""The datasets by the names of their configuration options."""

_DOWNLOADED_BY_RUNS = ("omniglot", "cifar_fs", "fc100")


def main() -> None:
    """Download from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("dataset", metavar="DATASET", help=f"one of {', '.join(DATASETS)}")
    parser.add_argument("--root", type=Path, help="directory of the dataset; as dataset.root")
    parser.add_argument("--yes", action="store_true", help="agree to the terms without a question")
    options = parser.parse_args()
    if options.dataset in _DOWNLOADED_BY_RUNS:
        raise UserError(
            f"{options.dataset} needs no metadist fetch: a run with dataset={options.dataset} "
            "downloads it."
        )
    if options.dataset not in DATASETS:
        raise UserError(
            f"metadist fetch does not know {options.dataset}"
            f"{did_you_mean(options.dataset, DATASETS)}: choose one of {', '.join(DATASETS)}."
        )
    root = options.root or Path("data", options.dataset)
    remote = DATASETS[options.dataset]
    print_plain(f"{remote.terms}\nSource: {remote.source}, {remote.gigabytes} GB, to {root}.")
    if not options.yes:
        ask_for_agreement()
    fetch(remote, root.expanduser())
    print_plain(f"{root} is complete: dataset={options.dataset} dataset.root={root}")


def ask_for_agreement() -> None:
    """Ask the user to agree to the terms that were printed.

    Raises:
        UserError: the user does not agree, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UserError("the terms need your agreement: read them and add --yes.")
    answer = ""
    with contextlib.suppress(EOFError):  # Ctrl-D
        answer = input("Do you agree to these terms? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("nothing was downloaded, because you did not agree to the terms.")


def fetch(remote: RemoteDataset, root: Path) -> None:
    """Download the missing files. A file gets its name after it is verified.

    If a download is interrupted, its part stays as `.NAME.part`, and the next call continues it.

    Args:
        remote: the dataset.
        root: the dataset's directory, which is created if it does not exist.

    Raises:
        UserError: a download fails, or a checksum does not match.
    """
    checksums = _listed_checksums(remote)
    for file in remote.files:
        target = root / file.path
        checksum = file.checksum or checksums.get(file.url.partition("?")[0].rpartition("/")[2])
        if checksum is None:
            raise UserError(f"{remote.listing} has no checksum of {file.path}; try again later.")
        advice = (
            f"put {target.name} into {target.parent} yourself, or choose another directory with "
            "--root"
        )
        download(target, file.url, checksum, advice, show_progress=True)
        if file.unpack:
            print_plain(f"unpacking {target}")
            with file_lock(target, advice):
                _unpack(target, root)


def _unpack(archive: Path, directory: Path) -> None:
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(directory, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{archive} cannot be unpacked into {directory} ({error}).") from error


def _listed_checksums(remote: RemoteDataset) -> dict[str, str]:
    """The checksums of the files of a Zenodo record, by file name."""
    import requests

    if remote.listing is None:
        return {}
    try:
        response = requests.get(remote.listing, timeout=_TIMEOUT_SECONDS)
        response.raise_for_status()
        return {str(file["key"]): str(file["checksum"]) for file in response.json()["files"]}
    except (requests.RequestException, KeyError, TypeError) as error:
        raise UserError(
            f"{remote.listing} with the files' checksums cannot be read ({one_line(error)}): "
            "check the network."
        ) from error
