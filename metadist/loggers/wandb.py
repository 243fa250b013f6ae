"""The Weights & Biases logger."""

import contextlib
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from metadist.errors import UserError, one_line
from metadist.files import atomic_write, wrap_write_errors
from metadist.loggers.logger import (
    Logger,
    Metrics,
    Run,
    grouped_name,
    grouped_test_metrics,
    panel_name,
    saved_run_id,
)

if TYPE_CHECKING:
    import wandb

RUN_ID_FILE = "wandb_run_id"

_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60.0  # data that is not sent by then stays on disk, for `wandb sync`


@dataclass(eq=False)
class WandbLogger(Logger):
    """Logs the run to Weights & Biases, or to files that can be uploaded later.

    All files are under `wandb/` in the run directory. In mode `offline` nothing is sent:
    `wandb sync RUN_DIRECTORY/wandb/offline-run-*` uploads the run later. A resumed run keeps its
    run id, stored in `wandb_run_id`.

    Args:
        project: the name of the project.
        entity: the user or team; None for the default of the account.
        mode: `offline`, `online` (requires `wandb login` or WANDB_API_KEY) or `disabled`.
        tags: the tags of the run.
        name: the name of the run. Default: the experiment's name, such as `maml`.
        group: the group that the run belongs to, such as a sweep; None for none.
        job_type: the type of the run within its group; None for none.
        notes: a description of the run. Default: the run's title, such as "MAML on omniglot, 5-way
            1-shot".
    """

    project: str = "metadist"
    entity: str | None = None
    mode: Literal["offline", "online", "disabled"] = "offline"
    tags: tuple[str, ...] = ()
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None

    def __post_init__(self) -> None:
        self._wandb_run: wandb.Run | None = None
        self._exit_code = 1

    def start(self, run: Run) -> None:
        """Initializes the run, or resumes the run of the same directory."""
        if self.mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        run_id = _run_id(run)
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            if self.mode == "online" and not wandb.login(prompt=False, verify=False):
                raise UserError(
                    "no login for Weights & Biases was found: run `wandb login`, set "
                    "WANDB_API_KEY, or log to files with mode=offline."
                )
            self._wandb_run = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=self.mode,
                tags=self.tags or None,
                dir=run.directory,
                id=run_id,
                resume="allow",
                name=self.name or run.name,
                group=self.group,
                job_type=self.job_type,
                notes=self.notes or run.title,
                config=dict(run.configuration),
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_job_creation=True,
                    init_timeout=_INIT_SECONDS,
                    finish_timeout=_FINISH_SECONDS,
                ),
            )
        except (wandb.Error, OSError) as error:
            raise UserError(
                f"Weights & Biases could not initialize the run ({one_line(error).rstrip('.')}): "
                "check the login and the network, or log to files with mode=offline."
            ) from error

    def log_metrics(self, metrics: Metrics) -> None:
        """Logs the metrics at their iteration."""
        assert self._wandb_run is not None, "log_metrics() before start()"
        values = {
            grouped_name(name): value for name, value in metrics.items() if name != "iteration"
        }
        with wrap_write_errors("the files of Weights & Biases"):
            self._wandb_run.log(values, step=int(metrics["iteration"]))

    shows_panels = True

    def log_panels(
        self, iteration: int, values: Mapping[str, Sequence[float]], images: Sequence[Path]
    ) -> None:
        """Logs a histogram for each metric, and the images."""
        assert self._wandb_run is not None, "log_panels() before start()"
        import wandb

        panels: dict[str, Any] = {panel_name(path): wandb.Image(str(path)) for path in images}
        for name, task_values in values.items():
            finite = [value for value in task_values if math.isfinite(value)]
            if not finite:
                continue
            # NumPy's errors for values too large for the histogram's bins.
            with contextlib.suppress(ValueError, IndexError):
                panels[f"{grouped_name(name)}_of_tasks"] = wandb.Histogram(finite)
        with wrap_write_errors("the files of Weights & Biases"):
            self._wandb_run.log(panels, step=iteration)

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Logs test metrics and plots, and the results as the summary of the run."""
        assert self._wandb_run is not None, "finish() before start()"
        import wandb

        with wrap_write_errors("the files of Weights & Biases"):
            images = {panel_name(plot): wandb.Image(str(plot)) for plot in plots}
            values = {**grouped_test_metrics(results), **images}
            self._wandb_run.log(values, step=int(results["iterations"]))
            self._wandb_run.summary.update(dict(results))
        self._exit_code = 0

    def close(self) -> None:
        """Ends the run, as failed unless `finish` was called; waits at most a minute."""
        wandb_run, self._wandb_run = self._wandb_run, None
        if wandb_run is not None:
            with contextlib.suppress(Exception):
                wandb_run.finish(exit_code=self._exit_code)


def _run_id(run: Run) -> str:
    """The id of the resumed run, or a new one that is stored for a later resume."""
    path = run.directory / RUN_ID_FILE
    with wrap_write_errors(path):
        if saved := saved_run_id(run, RUN_ID_FILE, digits=8):
            return saved
        run_id = secrets.token_hex(4)
        atomic_write(path, f"{run_id}\n".encode())
        return run_id
