"""The runs behind the cells: started as torchrun worlds, gone on with, or skipped if finished."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from reproduction.cells import ROOT, compose
from yaml import YAMLError

from metadist.errors import UserError
from metadist.reports import FAILURE_FILE, config_fingerprint, write_failure

LOG = "log.txt"
PLAN = "reproduction.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A run to make.

    Attributes:
        preset: of conf/experiment.
        dataset: its dataset's name.
        seed: the run's.
        iterations: to train.
        options: further overrides, which the numbers may follow from.
        directory: the run's.
    """

    preset: str
    dataset: str
    seed: int
    iterations: int
    options: tuple[str, ...]
    directory: Path

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.preset}, seed {self.seed}, {self.iterations} iterations"

    def plan(self) -> dict[str, Any]:
        """What is noted in its folder before it starts."""
        noted = ("preset", "seed", "iterations", "options")
        return {name: getattr(self, name) for name in noted}

    def finished(self) -> bool:
        """Whether the run has ended well, with results.

        Raises:
            UserError: it was begun with other options, or when the preset was another.
        """
        begun = plan_of(self.directory)
        if begun is not None and begun["options"] != list(self.options):
            raise UserError(
                f"{self.directory} was begun with the options "
                f"{' '.join(begun['options']) or '(none)'}, not "
                f"{' '.join(self.options) or '(none)'}: choose another --directory."
            )
        results = (self.directory / "results.json").exists()
        if not results or has_failed(self.directory, results):
            return False
        then = identity_of(self.directory)
        now = _but_seed(compose([*self.words(), *self.options])) if then else {}
        # An option that has been added since is not another run.
        for key in sorted(then.keys() & now.keys()):
            if then[key] != now[key]:
                raise UserError(
                    f"{self.directory} holds a run of another {self.preset}, with {key}={then[key]}"
                    f" where it now has {now[key]}: choose another --directory."
                )
        return True

    def words(self) -> list[str]:
        """The overrides that make it the run it is, but for the options."""
        return [
            f"+experiment={self.preset}",
            f"seed={self.seed}",
            f"trainer.iterations={self.iterations}",
        ]

    def command(self, workers: int, root: str | None) -> list[str]:
        """What starts it, or goes on with it.

        Args:
            workers: processes.
            root: where its dataset lies; None for the preset's place, or for a dataset without.
        """
        # It ends its world when its standard input ends, so however this program ends.
        start = [sys.executable, "-m", "metadist.distributed.torchrun", "--standalone"]
        words = [
            *self.words(),
            f"hydra.run.dir={_quote(self.directory)}",
            "resume=auto",
            *([] if workers > 1 else ["strategy=local"]),
            *([] if root is None else [f"dataset.root={_quote(root)}"]),
            *self.options,
        ]
        return [*start, f"--nproc-per-node={workers}", "experiments/maml.py", *words]


class Runner:
    """Makes runs, a few at a time; a signal stops them all, each with a checkpoint.

    Args:
        workers: processes of each run.
        jobs: runs at a time.
        roots: where datasets lie, by name; those that are missing lie where the presets say.
        say: tells a person.

    Attributes:
        stopped: the number of the signal that stopped it, 0 if none has.
        refused: runs whose folder could not be used.
    """

    def __init__(self, workers: int, jobs: int, roots: Mapping[str, str], say: Say) -> None:
        self.workers = workers
        self.jobs = jobs
        self.roots = roots
        self.say = say
        self.stopped = 0
        self.refused: list[Planned] = []
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.RLock()  # a signal's handler may be interrupted by another signal

    def carry_out(self, planned: Sequence[Planned]) -> None:
        """Make what is not finished yet. Failures are left to the folders to tell.

        Raises:
            UserError: a folder holds a run with other options.
        """
        waiting = [run for run in planned if not run.finished()]
        for run in planned:
            if run not in waiting:
                self.say(f"{run.name}: finished before")
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with ThreadPoolExecutor(self.jobs) as pool:
                list(pool.map(self._one, waiting))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _one(self, run: Planned) -> None:
        if self.stopped:
            return
        try:
            self._start_and_wait(run)
        except OSError as error:
            self.refused.append(run)
            self.say(f"{run.name}: FAILED: {run.directory} could not be used ({error.strerror})")

    def _start_and_wait(self, run: Planned) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        (run.directory / PLAN).write_text(json.dumps(run.plan()), encoding="utf-8")
        (run.directory / FAILURE_FILE).unlink(missing_ok=True)
        command = run.command(self.workers, self.roots.get(run.dataset))
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with (run.directory / LOG).open("w", encoding="utf-8") as log:
            with self._lock:
                if self.stopped:
                    return
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C reaches it through this program alone
                )
                self._running.add(process)
            self.say(f"{run.name}: started, writes to {run.directory}")
            status = process.wait()
            with self._lock:
                self._running.discard(process)
            assert process.stdin is not None
            process.stdin.close()
        if status == 0:
            self.say(f"{run.name}: finished")
        elif self.stopped or status in (130, 143):
            self.say(f"{run.name}: stopped; the same command goes on with it")
        else:
            sentence = failure(run.directory)
            write_failure(run.directory, [*run.words(), *run.options], sentence, status)
            self.say(f"{run.name}: FAILED with status {status}: {sentence}")

    def _stop(self, number: int, frame: object) -> None:
        with self._lock:
            first, self.stopped = not self.stopped, number
            for process in self._running if first else ():  # twice would cut the saving short
                process.send_signal(signal.SIGTERM)


def has_failed(directory: Path, results: bool = False) -> bool:
    """Whether an error ended the run of a folder; else it goes on, was stopped or was killed.

    Args:
        directory: the run's.
        results: whether it left results. An error may come after them all the same.
    """
    if (directory / FAILURE_FILE).exists():
        return True
    if results:
        return False
    try:
        text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(line.lstrip().startswith("error:") for line in text.splitlines())


def failure(directory: Path) -> str:
    """What a run that ended without results said last, in one line."""
    try:
        return str(json.loads((directory / FAILURE_FILE).read_text(encoding="utf-8"))["error"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # it is said below
    try:
        text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "it left no log"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("error:", "stopped at iteration"))]
    return (causes or lines or ["it said nothing"])[-1].removeprefix("error: ")[:300]


def identity_of(directory: Path) -> dict[str, str]:
    """What the numbers of a folder's run follow from but for the seed, {} if it does not say."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(directory / ".hydra" / "config.yaml"))
    except (OSError, ValueError, OmegaConfBaseException, YAMLError):
        return {}
    return _but_seed(saved) if isinstance(saved, dict) else {}


def _but_seed(configuration: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in config_fingerprint(configuration).items() if key != "seed"}


def plan_of(directory: Path) -> dict[str, Any] | None:
    """Preset, seed, iterations and options of a run's folder, however it was started, or None."""
    plan, words = directory / PLAN, directory / ".hydra" / "overrides.yaml"
    try:
        if plan.exists():
            return json.loads(plan.read_text(encoding="utf-8"))
        overrides = [str(word) for word in OmegaConf.load(words)]
        configuration = OmegaConf.load(words.with_name("config.yaml"))
        presets = [word.partition("=")[2] for word in overrides if word.startswith("+experiment=")]
        return {
            "preset": presets[-1],
            "seed": int(configuration.seed),
            "iterations": int(configuration.trainer.iterations),
            "options": overrides,
        }
    except (OSError, ValueError, TypeError, IndexError, OmegaConfBaseException, YAMLError):
        return None


def _quote(path: Path | str) -> str:
    """A path as the value of a Hydra override."""
    return QuotedString(str(path), Quote.single).with_quotes()
