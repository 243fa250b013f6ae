"""One planned run in this world, whoever started its processes."""

from collections.abc import Mapping
from typing import Any

from metadist.distributed import get_rank, get_world_size
from metadist.distributed.job import Job, begin_job
from metadist.distributed.rendezvous import all_gather_object
from metadist.errors import UserError
from metadist.launchers.error_reporting import end_process
from metadist.launchers.launcher import PlannedRun
from metadist.launchers.records import finished_results, write_record
from metadist.launchers.set_up import build_on_all_ranks, timeout_of
from metadist.training import Trainer


class Failed(BaseException):
    """Carries an exception past Hydra, which would print it on every rank.

    Attributes:
        error: the exception.
        in_job: whether the ranks had met for the job already.
    """

    def __init__(self, error: Exception, in_job: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_job = in_job


def carry_out(planned: PlannedRun) -> dict[str, Any]:
    """Meet the other ranks, build the experiment, train and test it. Every rank calls it.

    It needs nothing of Hydra, but the world's environment variables (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and what `conf/` needs has to be
    registered (`resolvers.register_resolvers`). A process may carry out several, one after the
    other. A sweep's job that is finished already is not run again.

    Returns:
        The results, as in `results.json`, on the ranks that run the loop; elsewhere {}.

    Raises:
        Failed: whatever went wrong; `speaking.say` says it, on the rank whose part it is.
    """
    in_job = False
    try:
        configuration = planned.configuration
        job = begin_job(timeout_of(configuration), end_process)
        in_job = True
        results = _known_results(job, planned) if planned.in_sweep else None
        if results is None:
            experiment = build_on_all_ranks(
                job,
                planned.build,
                configuration,
                planned.directory,
                planned.name,
                planned.overrides,
            )
            if get_rank() == 0:
                write_record(planned)
            results = Trainer(experiment).run()
    except Exception as error:
        raise Failed(error, in_job) from error
    if not planned.in_sweep:  # a sweep's ranks have to agree on how the job ended
        job.end()
    return results


def _known_results(job: Job, planned: PlannedRun) -> dict[str, Any] | None:
    """What rank zero finds of a finished job, on all ranks.

    Raises:
        UserError: on all ranks: they are not at the same job, or the results cannot be read.
    """
    found, trouble = None, ""
    try:
        found = finished_results(planned) if get_rank() == 0 else None
    except UserError as error:
        trouble = str(error)
    word = {"overrides": planned.overrides, "results": found, "trouble": trouble}
    words = all_gather_object(job.store, "known", word, timeout=None)
    if words[0]["trouble"]:
        raise UserError(words[0]["trouble"])
    if any(each["overrides"] != words[0]["overrides"] for each in words):
        raise UserError(
            f"the {get_world_size()} ranks drew different jobs, for each has a sweeper of its own: "
            "give the sweeper's sampler a seed (hydra.sweeper.sampler.seed=0), or start the sweep "
            "with python and launcher=torchrun instead of torchrun."
        )
    results: dict[str, Any] | None = words[0]["results"]
    return results


def figure_of(results: Mapping[str, Any]) -> float | None:
    """What a sweeper optimises: the validation figure of the state that the test judges.

    It is the accuracy (0 to 1, more is better: `hydra.sweeper.direction=maximize`) or, for
    regression, the mean squared error (less is better: `minimize`). None on ranks that only
    serve and of a run without validation (`trainer.eval_every=0`); never a figure of the test.
    """
    for metric in ("accuracy", "mse"):
        if isinstance(results.get(f"validation_{metric}"), int | float):
            return float(results[f"validation_{metric}"])
    return None
