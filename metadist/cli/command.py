"""The `metadist` command: a table of subcommands, each imported when it is used."""

import argparse
import pkgutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from metadist import __version__
from metadist.distributed import get_rank
from metadist.errors import (
    FAILURE_STATUS,
    USER_ERROR_STATUS,
    UserError,
    did_you_mean,
    printable,
    user_traceback,
)
from metadist.files import discard_output, replace_closed_streams
from metadist.loggers.console import print_plain


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        target: the function, as "module:function". It takes no arguments and reads `sys.argv[1:]`.
        summary: the summary for `metadist --help`, in one line.
    """

    target: str
    summary: str


COMMANDS = {
    "maml": Command("metadist.cli.main:maml", "meta-learning; KEY=VALUE sets an option"),
    "ddp": Command("metadist.cli.main:ddp", "supervised data-parallel training"),
    "report": Command("metadist.cli.report:main", "report of a run, or table of a folder of runs"),
    "evaluate": Command("metadist.cli.evaluate:main", "test a run under another protocol"),
    "compare": Command("metadist.cli.compare:main", "paired difference of two runs' tests"),
    "predict": Command("metadist.cli.predict:main", "classify images with a trained model"),
    "export": Command("metadist.cli.export:main", "weights of a run as a safetensors file"),
    "replay": Command("metadist.cli.replay:main", "replay a single task of a run"),
    "fetch": Command("metadist.cli.fetch:main", "download a dataset"),
    "init": Command("metadist.cli.init:main", "write a small project of your own"),
}
"""The subcommands, in the order of `metadist --help`."""


def main() -> int:
    """Run a subcommand. The entry point of `metadist` and of `python -m metadist`.

    Returns:
        The exit status: 2 if there is no such subcommand; else see `exit_status`.
    """
    replace_closed_streams()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        return exit_status(lambda: print_plain(f"metadist {__version__}"))
    if name in ("-h", "--help", "help"):
        return exit_status(lambda: print_plain(usage()))
    if name in COMMANDS:
        sys.argv = [f"metadist {name}", *sys.argv[2:]]
        return exit_status(lambda: pkgutil.resolve_name(COMMANDS[name].target)())
    if get_rank() == 0:
        hint = did_you_mean(name, [*COMMANDS, "--help", "--version"])
        print(
            f"error: metadist has no command {name!r}{hint}: choose one of {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
    return USER_ERROR_STATUS


def argument_parser(documentation: str | None) -> argparse.ArgumentParser:
    """The parser of a subcommand's arguments.

    Args:
        documentation: the docstring of the subcommand's module; the description is the text after
            the first paragraph.
    """
    _, description = (documentation or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=description)
    parser.register("type", Path, _path)
    return parser


def _path(text: str) -> Path:
    if not text:  # such as "$DIR" without the variable
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-code`, for subcommands that load a run."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="build any class that the run names, such as an algorithm of your own",
    )


def exit_status(run: Callable[[], int | None]) -> int:
    """Run a subcommand, and report user errors in one sentence.

    Args:
        run: the subcommand. It returns the exit status, None for success, or exits the process.

    Returns:
        The exit status: 2 after a user error, 1 after another one, whose traceback is printed.
        After a keyboard interrupt, or if the reader of a pipe has ended, it is the signal's exit
        status, and no message is printed.
    """
    try:
        return run() or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Imported here because Hydra takes time.
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from metadist.config.hydra_errors import describe_error

        if not isinstance(error, UserError | HydraException | OmegaConfBaseException):
            print(printable(user_traceback(error)), end="", file=sys.stderr)
            return FAILURE_STATUS
        try:
            sys.stdout.flush()
        except OSError:  # Python flushes again at exit, and would report the failure
            discard_output()
        if isinstance(error.__cause__, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"error: {printable(describe_error(error))}", file=sys.stderr)
        return USER_ERROR_STATUS


def usage() -> str:
    """The text of `metadist --help`."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: metadist COMMAND ...",
            "",
            *rows,
            "",
            "metadist COMMAND --help describes a command, metadist --version prints the version.",
            "On several workers: torchrun --standalone --nproc_per_node=2 -m metadist maml ...",
        ]
    )
