"""The run as Weights & Biases shows it, without an account unless one is asked for."""

import contextlib
import netrc
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from metadist.errors import UserError
from metadist.loggers.tracker import Record, Run, Tracker
from metadist.loggers.writing import replace_file, writing

if TYPE_CHECKING:
    import wandb

RUN_ID_FILE = "wandb_run_id"

_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60.0  # what was not sent by then stays on the disk, for `wandb sync`


class WeightsAndBiases(Tracker):
    """Sends the run to Weights & Biases, or keeps it to be sent.

    Everything it writes lies under `wandb/` in the run's directory. Offline, the default, nothing
    leaves the machine: `wandb sync RUN_DIRECTORY/wandb/offline-run-*` sends it later. A resumed
    run has the same id as before, kept in `wandb_run_id`, so both parts make one run there.

    Args:
        project: the project's name.
        entity: the user or team; None for the account's own.
        mode: `offline`, `online` (needs `wandb login` or WANDB_API_KEY) or `disabled`.
        tags: labels of the run.
    """

    def __init__(
        self,
        project: str = "metadist",
        entity: str | None = None,
        mode: Literal["offline", "online", "disabled"] = "offline",
        tags: tuple[str, ...] = (),
    ) -> None:
        self._project = project
        self._entity = entity
        self._mode = mode
        self._tags = tags
        self._iterations = 0
        self._wandb_run: wandb.Run | None = None
        self._exit_code = 1

    def start(self, run: Run) -> None:
        """Begins the run, or goes on with the one of the same directory."""
        if self._mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means offline
        import wandb

        self._iterations = run.iterations
        run_id = _run_id(run)
        session = wandb.setup(settings=wandb.Settings(silent=True))
        if self._mode == "online" and not _has_credentials(session.settings.base_url):
            raise UserError(
                "no login for Weights & Biases was found: run `wandb login`, set WANDB_API_KEY, "
                "or keep the run on this machine with mode=offline"
            )
        try:
            self._wandb_run = wandb.init(
                project=self._project,
                entity=self._entity,
                mode=self._mode,
                tags=self._tags or None,
                dir=run.directory,
                id=run_id,
                resume="allow",
                name=run.name,
                notes=run.headline,
                config=_without_key(run.configuration),
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_job_creation=True,
                    init_timeout=_INIT_SECONDS,
                    finish_timeout=_FINISH_SECONDS,
                ),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"Weights & Biases could not begin the run ({reason}): check the login and the "
                "network, or keep the run on this machine with mode=offline"
            ) from error

    def record(self, record: Record) -> None:
        """Logs the figures at their iteration."""
        assert self._wandb_run is not None, "record() before start()"
        step = int(record["iteration"])
        figures = {name: value for name, value in record.items() if name != "iteration"}
        with writing("the files of Weights & Biases"):
            self._wandb_run.log(figures, step=step)

    def finish(self, results: Mapping[str, object], pictures: Sequence[Path]) -> None:
        """Logs the pictures, and the results as the run's summary."""
        assert self._wandb_run is not None, "finish() before start()"
        import wandb

        with writing("the files of Weights & Biases"):
            if pictures:
                images = {picture.stem: wandb.Image(str(picture)) for picture in pictures}
                self._wandb_run.log(images, step=self._iterations)
            self._wandb_run.summary.update(_without_key(dict(results)))
        self._exit_code = 0

    def close(self) -> None:
        """Ends the run, as failed unless `finish` was called; waits a minute at most."""
        wandb_run, self._wandb_run = self._wandb_run, None
        if wandb_run is not None:
            with contextlib.suppress(Exception):
                wandb_run.finish(exit_code=self._exit_code)


def _run_id(run: Run) -> str:
    """The id of the run that is resumed, or a new one that a resumed run will find."""
    path = run.directory / RUN_ID_FILE
    with writing(path):
        if run.resumed and path.exists():
            saved = path.read_bytes().strip()
            if re.fullmatch(rb"[0-9a-f]{8}", saved):  # a damaged one makes a new run
                return saved.decode()
        run_id = secrets.token_hex(4)
        replace_file(path, f"{run_id}\n".encode())
        return run_id


def _has_credentials(base_url: str) -> bool:
    """Whether wandb can log in without asking: it would ask on a terminal, and wait."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    candidates = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for path in (Path(name).expanduser() for name in candidates if name):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(path)).authenticators(urlsplit(base_url).hostname or ""):
                return True
    return False


def _without_key(value: Any) -> Any:
    """The same containers, with the account's key blotted out wherever a text holds it."""
    key = os.environ.get("WANDB_API_KEY")
    if not key:
        return value
    if isinstance(value, str):
        return value.replace(key, "***")
    if isinstance(value, Mapping):
        return {_without_key(name): _without_key(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_key(inner) for inner in value]
    return value
