"""Worlds that go on at the same time, started by a process that is in none."""

import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from metadist.launchers.carry_out import Failed
from metadist.launchers.error_reporting import WorkerGroupFailed
from metadist.launchers.launcher import Launcher, PlannedRun
from metadist.training import Interrupted

Ended = int | Exception
"""A world's exit status, or why its launcher could not start it or see it through."""


class Pending:
    """A run whose world has been started; its figure, once it is asked for.

    Hydra takes it for the number that a run returns: who makes a float of it waits for the run.
    """

    def __init__(
        self, worlds: "SideBySide", future: Future[int], finish: Callable[[Ended], float | None]
    ):
        self._worlds = worlds
        self._future = future
        self._finish = finish
        self._outcome: tuple[float | None] | None = None

    def done(self) -> bool:
        """Whether the world has ended."""
        return self._future.done()

    def __float__(self) -> float:
        figure = self.settle()
        if figure is None:
            raise TypeError("the run has no figure: it failed, or has no validation")
        return figure

    def settle(self) -> float | None:
        """What the run came to, once its world has ended; the same each time.

        Raises:
            Failed: a signal came, and all worlds have ended.
        """
        if self._outcome is None:
            while not self._future.done():
                self._worlds.watch([self._future])
            self._outcome = (self._finish(_how_it_ended(self._future)),)
        return self._outcome[0]


class SideBySide:
    """Runs whose worlds have been started.

    The main thread composes and starts; a thread each waits for a world's end. A signal to this
    process goes to all worlds, whose runs save and end.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="world")
        self._launchers: dict[Future[int], Launcher] = {}
        self._pending: list[Pending] = []

    def start(
        self,
        launcher: Launcher,
        planned: PlannedRun,
        at_once: int,
        finish: Callable[[Ended], float | None],
    ) -> Pending:
        """Start a world as soon as there is room for it.

        Args:
            launcher: starts it.
            planned: the run.
            at_once: how many runs may go on at a time.
            finish: what to make of the exit status, or of what the launcher raised; called in
                the main thread. What it raises for an earlier run, that run's `settle` or a
                later `start` raises.
        """
        while len(running := self._running()) >= at_once:
            self.watch(running)
            for pending in self._pending:
                if pending.done():
                    pending.settle()
        future = self._pool.submit(launcher.run, planned)
        self._launchers[future] = launcher
        self._pending.append(Pending(self, future, finish))
        return self._pending[-1]

    def settle(self) -> None:
        """Wait for every run that has been started; see `Pending.settle`."""
        for pending in self._pending:
            pending.settle()

    def watch(self, futures: list[Future[int]]) -> None:
        """Wait until one of some worlds has ended.

        Raises:
            Failed: a signal came, and all worlds have ended.
        """
        try:
            wait(futures, return_when=FIRST_COMPLETED)
        except Interrupted as interrupted:
            self.stop(interrupted.exit_status - 128)
            raise Failed(WorkerGroupFailed(interrupted.exit_status), in_job=False) from None
        except BaseException:  # submitit leaves so when SLURM wants the node back
            self.stop()
            raise

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End all runs as a signal does, and wait for their end."""
        for future in self._running():
            if not future.cancel():
                self._launchers[future].stop(number)
        wait(self._launchers)
        self._pool.shutdown()

    def _running(self) -> list[Future[int]]:
        return [future for future in self._launchers if not future.done()]


def _how_it_ended(future: Future[int]) -> Ended:
    try:
        return future.result()
    except Exception as error:
        return error
