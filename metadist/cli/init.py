"""Write a small project of your own: metadist init DIR.

The project has an algorithm, a model, a dataset, their configuration, tests, and a README with the
commands to run.
"""

import shutil
from pathlib import Path

from metadist.cli.command import argument_parser
from metadist.errors import UserError
from metadist.loggers.console import print_plain

_TEMPLATE = Path(__file__).with_name("project")


def write_project(directory: Path) -> None:
    """Write the project's files.

    Args:
        directory: a new or empty directory.

    Raises:
        UserError: `directory` exists and is not an empty directory, or cannot be written.
    """
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise UserError(f"{directory} exists and is not an empty directory: give another one.")
        shutil.copytree(
            _TEMPLATE,
            directory,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,
            dirs_exist_ok=True,
        )
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror or error}): give another directory."
        ) from None


def main() -> None:
    """Write a project from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty")
    directory = parser.parse_args().directory
    write_project(directory)
    print_plain(f"wrote {directory}: its README.md has the commands to run")
