"""What a run tells of itself, and who listens: the interface of every tracker."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Record = Mapping[str, float | int | str | bool]
"""One line of what happened: a training iteration or a validation, always with `iteration`."""


@dataclass(frozen=True)
class Run:
    """What a tracker is told of the run before the first record.

    Attributes:
        directory: where the run's files lie; it exists.
        name: the experiment's short name, such as `maml`.
        configuration: the resolved configuration, in plain containers.
        iterations: training iterations in all.
        start_iteration: finished iterations that the run goes on from; 0 for a new run. The
            first record then has `iteration` `start_iteration + 1`.
        headline: one line for a person, such as `MAML on glyphs, 5-way 1-shot, rpc on 2 workers`.
    """

    directory: Path
    name: str
    configuration: dict
    iterations: int
    start_iteration: int
    headline: str

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.start_iteration > 0


class Tracker:
    """Listens to a run. Every method does nothing here: a tracker overrides what it needs.

    The order of calls is `start`, `record`, `note` and `flush` any number of times, `finish` if
    all went well, and `close` in every case. Only rank zero has trackers.
    """

    def start(self, run: Run) -> None:
        """Opens what records go to.

        Args:
            run: the run that begins or goes on.

        Raises:
            UserError: where nothing can be written, or a service cannot be reached.
        """

    def record(self, record: Record) -> None:
        """Takes one record.

        Args:
            record: plain figures by name, with the number of finished iterations as
                `iteration`. Those of training begin with `train_`, those of a validation with
                `validation_`.

        Raises:
            UserError: if it cannot be written.
        """

    def note(self, sentence: str) -> bool:
        """Tells a person of something out of the ordinary.

        Args:
            sentence: one line.

        Returns:
            Whether a person will see it.
        """
        return False

    def flush(self) -> None:
        """Brings every record so far to the disk; a checkpoint is written next.

        Raises:
            UserError: if it cannot be written.
        """

    def finish(self, results: Mapping[str, object], pictures: Sequence[Path]) -> None:
        """Takes what came of a run that ended well.

        Args:
            results: what `results.json` holds.
            pictures: PNG files in the run's directory.

        Raises:
            UserError: if it cannot be written.
        """

    def close(self) -> None:
        """Lets go of files and terminals, after an error too. Never raises; may come twice."""


class Trackers(Tracker):
    """Several trackers as one, told in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def start(self, run: Run) -> None:
        """Starts each; the first that fails ends it, and `close` closes them all."""
        for tracker in self._trackers:
            tracker.start(run)

    def record(self, record: Record) -> None:
        """Hands the record to each."""
        for tracker in self._trackers:
            tracker.record(record)

    def note(self, sentence: str) -> bool:
        """Hands the sentence to each; whether any of them shows it to a person."""
        seen = [tracker.note(sentence) for tracker in self._trackers]
        return any(seen)

    def flush(self) -> None:
        """Flushes each."""
        for tracker in self._trackers:
            tracker.flush()

    def finish(self, results: Mapping[str, object], pictures: Sequence[Path]) -> None:
        """Hands the results to each."""
        for tracker in self._trackers:
            tracker.finish(results, pictures)

    def close(self) -> None:
        """Closes each, whatever another one does."""
        for tracker in self._trackers:
            with contextlib.suppress(Exception):
                tracker.close()
