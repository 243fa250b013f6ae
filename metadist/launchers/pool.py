"""Jobs that run at the same time, each in its own processes, which a launcher starts."""

import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from metadist.launchers.error_reporting import WorkerGroupFailed
from metadist.launchers.job import JobFailure
from metadist.training import Interrupted
from metadist.training.signals import STOPPING, write_line

JobExit = int | Exception
"""A job's exit status, or the exception that its launcher raised."""

Finish = Callable[[JobExit], float | None]
"""A function from a job's exit to its result. It is called once, in the main thread."""


class JobPool:
    """Runs jobs in threads, each of which waits for a launcher.

    Its methods are called in the main thread. A signal to this process is passed on to all jobs,
    which save a checkpoint and end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="job")
        self._jobs: dict[Future[int], tuple[Callable[[int], None], Finish]] = {}

    def submit(
        self,
        run: Callable[[], int],
        stop: Callable[[int], None],
        max_concurrent: int,
        finish: Finish,
    ) -> None:
        """Start a job as soon as fewer than `max_concurrent` jobs run.

        Args:
            run: the function that runs the job, `Launcher.run`; called in a thread.
            stop: the function that stops the job, `Launcher.stop`.
            max_concurrent: the largest number of jobs that run at the same time.
            finish: the function that makes the job's result.

        Raises:
            JobFailure: a signal arrived, or `finish` raised it for an earlier job.
        """
        while len(self._jobs) >= max_concurrent:
            self._finish_ended()
        self._jobs[self._threads.submit(run)] = stop, finish

    def join(self) -> list[float | None]:
        """Wait for every job that has not been finished, and return their results as they end.

        Raises:
            JobFailure: a signal arrived, or `finish` raised it for a job. Others may still run.
        """
        results = []
        while self._jobs:
            results += self._finish_ended()
        return results

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Pass a signal to all jobs and wait until they have ended."""
        for future, (stop, _) in self._jobs.items():
            if not (future.cancel() or future.done()):
                stop(number)
        wait(self._jobs)
        self._threads.shutdown()

    def _finish_ended(self) -> list[float | None]:
        """Wait until a job has ended, and return the results of those that have."""
        try:
            wait(self._jobs, return_when=FIRST_COMPLETED)
        except Interrupted as interrupted:
            write_line(STOPPING)  # torchrun's workers do not know that it was a user's signal
            with suppress(Interrupted):  # a second signal ends the wait for the jobs
                self.stop(interrupted.exit_status - 128)
            raise JobFailure(WorkerGroupFailed(interrupted.exit_status), in_job=False) from None
        except BaseException:  # submitit exits so when SLURM preempts the job
            self.stop()
            raise
        results = []
        for future in [future for future in self._jobs if future.done()]:
            _, finish = self._jobs.pop(future)
            try:
                job_exit: JobExit = future.result()
            except Exception as error:
                job_exit = error
            results.append(finish(job_exit))
        return results
