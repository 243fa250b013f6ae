"""Jobs that run at the same time, each in its own processes, which a launcher starts."""

import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from metadist.launchers.error_reporting import WorkerGroupFailed
from metadist.launchers.job import JobFailure
from metadist.training import Interrupted
from metadist.training.signals import STOPPING, write_line

JobExit = int | Exception
"""A job's exit status, or the exception that its launcher raised."""


class JobFuture:
    """The result of a submitted job. Used in the main thread."""

    def __init__(
        self, pool: "JobPool", future: Future[int], finish: Callable[[JobExit], float | None]
    ) -> None:
        self._pool = pool
        self._future = future
        self._finish = finish
        self._result: Future[float | None] = Future()

    def done(self) -> bool:
        """Whether the job's processes have ended."""
        return self._future.done()

    def result(self) -> float | None:
        """Wait for the job and return the result of `finish`, which is called once.

        Raises:
            JobFailure: a signal arrived, and all jobs have ended. Errors of `finish` are raised
                unchanged.
        """
        if not self._result.done():
            self._pool.wait([self._future])
            try:
                job_exit: JobExit = self._future.result()
            except Exception as error:
                job_exit = error
            try:
                self._result.set_result(self._finish(job_exit))
            except BaseException as error:  # JobFailure is one
                self._result.set_exception(error)
        return self._result.result()


class JobPool:
    """Runs jobs in threads, each of which waits for a launcher.

    Its methods are called in the main thread. A signal to this process is passed on to all jobs,
    which save a checkpoint and end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="job")
        self._stops: dict[Future[int], Callable[[int], None]] = {}
        self._jobs: list[JobFuture] = []

    def submit(
        self,
        run: Callable[[], int],
        stop: Callable[[int], None],
        max_concurrent: int,
        finish: Callable[[JobExit], float | None],
    ) -> JobFuture:
        """Start a job as soon as fewer than `max_concurrent` jobs run.

        Args:
            run: the function that runs the job, `Launcher.run`; called in a thread.
            stop: the function that stops the job, `Launcher.stop`.
            max_concurrent: the largest number of jobs that run at the same time.
            finish: a function from the exit status, or the launcher's exception, to the job's
                result.

        Raises:
            JobFailure: a signal arrived, or `finish` raised it for an earlier job.
        """
        while len(running := self._running()) >= max_concurrent:
            self.wait(running)
            self._finish_ended()
        future = self._threads.submit(run)
        self._stops[future] = stop
        job = JobFuture(self, future, finish)
        self._jobs.append(job)
        return job

    def join(self) -> None:
        """Wait for every job; see `JobFuture.result`.

        Raises:
            JobFailure: a signal arrived, or `finish` raised it for a job. Others may still run.
        """
        while running := self._running():
            self.wait(running)
            self._finish_ended()
        self._finish_ended()

    def wait(self, futures: list[Future[int]]) -> None:
        """Wait until one of the jobs has ended.

        Raises:
            JobFailure: a signal arrived, and all jobs have ended.
        """
        try:
            wait(futures, return_when=FIRST_COMPLETED)
        except Interrupted as interrupted:
            write_line(STOPPING)  # torchrun's workers do not know that it was a user's signal
            self.stop(interrupted.exit_status - 128)
            raise JobFailure(WorkerGroupFailed(interrupted.exit_status), in_job=False) from None
        except BaseException:  # submitit exits so when SLURM preempts the job
            self.stop()
            raise

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Pass a signal to all jobs and wait until they have ended."""
        for future in self._running():
            if not future.cancel():
                self._stops[future](number)
        wait(self._stops)
        self._threads.shutdown()

    def _finish_ended(self) -> None:
        for job in self._jobs:
            if job.done():
                job.result()

    def _running(self) -> list[Future[int]]:
        return [future for future in self._stops if not future.done()]
