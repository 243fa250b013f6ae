"""A job: what its ranks agree on before it trains, and what it leaves in the run's directory."""

import contextlib
import io
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from commands import ROOT, CommandResult, command, run_command, specification
from omegaconf import DictConfig, OmegaConf
from tiny import SMALL, compose, records, run_results
from worlds import run_world

from metadist import kernels as native
from metadist.distributed import get_rank
from metadist.distributed.store import elastic_store
from metadist.errors import UserError
from metadist.files import locked_directory
from metadist.launchers import RunSpec, building
from metadist.launchers.building import check_same_device
from metadist.launchers.error_reporting import print_error
from metadist.launchers.job import JobFailure, attempt_job, run_job
from metadist.training import Experiment, Interrupted

OVERRIDES = (*SMALL, "strategy=allreduce", "model.pooling=max", "trainer.iterations=2")


def no_compiler_on_rank_one(file: str) -> CommandResult:
    if os.environ["RANK"] == "1":
        os.environ["CXX"] = "false"
    return command("worker", (file,))


def test_native_kernels_are_used_on_all_ranks_or_none(tmp_path):
    if native.library("norm_relu_pool") is None:
        pytest.skip("there is no C++ compiler")
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    ranks = run_world(no_compiler_on_rank_one, 2, specification(mixed, *OVERRIDES))
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert "rank 1 has no working C++ compiler" in ranks[0].out + ranks[0].err
    assert "compiler" not in ranks[1].out + ranks[1].err
    file = specification(plain, *OVERRIDES, "model.native=false")
    ranks = run_command("worker", file, size=2)
    assert "compiler" not in ranks[0].out + ranks[0].err
    losses = [
        [record["train_loss"] for record in records(each) if "train_loss" in record]
        for each in (mixed, plain)
    ]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_a_step_is_compiled_without_the_kernels_that_some_rank_lacks(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        "metadist.training.compiled_steps.compile_outer_step", lambda step, *_: step
    )
    monkeypatch.setattr(building, "native_available", lambda *_: False)
    configuration = compose(*SMALL, "strategy=local", "trainer.compile=true")
    built: list[Experiment] = []
    run_job(RunSpec("maml", tmp_path, configuration), on_built=built.append)
    assert built[0].train_mapper.compiled is not None and not built[0].learner.model.native
    assert "runs eagerly" not in caplog.text


def test_a_directory_to_which_another_run_writes_is_refused(tmp_path):
    with locked_directory(tmp_path):
        ranks = run_command("worker", specification(tmp_path, *OVERRIDES), size=2)
    assert [rank.status for rank in ranks] == [2, 2], ranks
    assert f"error: another run is writing to {tmp_path}: wait until it" in ranks[0].err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_the_step_is_compiled_on_all_ranks_or_none(tmp_path, strategy):
    options = ("dataset=sinusoid", "model=mlp", "model.hidden=[8]", "model.batch_norm=false")
    options = (*options, "trainer.iterations=2", "trainer.eval_tasks=2", "logger=jsonl")
    options = (*options, f"strategy={strategy}", "algorithm.inner_lr=0.01")
    options = (*options, "algorithm._target_=broken_parts.NotCompiledOnRankOne")
    # What is traced need not be translated to C++ here.
    environment = {"PYTHONPATH": str(ROOT / "tests"), "TORCH_COMPILE_DISABLE": "1"}
    losses = []
    for compiled in ("true", "false"):
        run = (f"trainer.compile={compiled}", f"hydra.run.dir={tmp_path / compiled}")
        ranks = run_command("maml.py", *options, *run, size=2, environment=environment)
        assert [rank.status for rank in ranks] == [0, 0], ranks
        lines = [(rank.out + rank.err).count("the outer step runs eagerly") for rank in ranks]
        assert lines == [compiled == "true", 0], ranks
        assert compiled == "false" or "on rank 1 it cannot be compiled" in ranks[0].out, ranks
        found = records(tmp_path / compiled)
        losses.append([record["train_loss"] for record in found if "train_loss" in record])
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def run_in_own_directory(directory: Path, configuration: DictConfig) -> tuple[str, bool]:
    """What a rank says whose run directory is not that of the others."""
    spec = RunSpec("maml", directory / str(get_rank()) / "run", configuration)
    try:
        attempt_job(spec)
    except JobFailure as failure:
        return str(failure.error), failure.in_job
    return "finished", False


def test_ranks_that_see_different_checkpoints_do_not_train(tmp_path, maml):
    shutil.copytree(maml, tmp_path / "0" / "run")
    configuration = compose(*SMALL, "strategy=allreduce", "resume=auto")
    for message, in_job in run_world(run_in_own_directory, 2, tmp_path, configuration):
        assert "the ranks found checkpoints of different iterations, [0, 4]" in message and in_job


def chunk_size_of_all_ranks(directory: Path, configuration: DictConfig, own: tuple) -> object:
    """The number of tasks in a chunk of a rank whose memory allows `own` ones."""
    configuration.trainer.task_chunk_size = own[get_rank()]
    built = []
    run_job(RunSpec("maml", directory, configuration), on_built=built.append)
    return built[0].train_mapper.chunk_size


def test_ranks_of_unequal_memory_have_the_chunks_of_the_smallest(tmp_path):
    configuration = compose(*SMALL, "strategy=allreduce", "trainer.iterations=1")
    assert run_world(chunk_size_of_all_ranks, 2, tmp_path, configuration, (2, 1)) == [1, 1]


def compiled_on_all_ranks(directory: Path, configuration: DictConfig) -> bool:
    """Whether a rank compiles the step, where rank one cannot compile single tasks."""

    def compile_or_fail(step, inputs, *_):
        if get_rank() == 1 and len(inputs[-1]) == 1:
            raise RuntimeError("one task is too small")
        return step

    configuration.trainer.task_chunk_size = (1, 2)[get_rank()]
    built: list[Experiment] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metadist.training.compiled_steps.compile_outer_step", compile_or_fail)
        run_job(RunSpec("maml", directory, configuration), on_built=built.append)
    return built[0].train_mapper.compiled is not None


def test_the_chunk_size_that_the_ranks_agree_on_is_compiled_on_all_ranks_or_none(tmp_path):
    options = (*SMALL, "strategy=allreduce", "trainer.iterations=1", "trainer.compile=true")
    assert run_world(compiled_on_all_ranks, 2, tmp_path, compose(*options)) == [False, False]


def results_and_files(directory: Path, configuration: DictConfig) -> tuple:
    built = []
    spec = RunSpec("maml", directory, configuration, ("a=1",))
    results = run_job(spec, on_built=built.append)
    with contextlib.redirect_stderr(io.StringIO()):
        print_error("error: of what follows the job")
    return results.get("test_tasks"), len(built)


def test_a_job_trains_tests_and_saves_its_configuration(tmp_path):
    configuration = compose(*SMALL)
    assert run_world(results_and_files, 2, tmp_path, configuration) == [(7, 1), (None, 1)]
    assert not (tmp_path / "error.txt").exists()
    saved = OmegaConf.load(tmp_path / ".hydra" / "config.yaml")
    assert saved == configuration
    assert OmegaConf.load(tmp_path / ".hydra" / "overrides.yaml") == ["a=1"]
    assert run_results(tmp_path)["world_size"] == 2


def outcome_of(spec: RunSpec) -> str:
    """Why a rank does not train, or "finished"."""
    try:
        run_job(spec)
    except UserError as error:
        return f"UserError: {error}"
    return "finished"


def run_own_job(directory: str, in_sweep: bool, *overrides: tuple[str, ...]) -> str:
    """Why a rank does not train whose overrides may be others than those of the other ranks."""
    own = overrides[get_rank()]
    configuration = compose(*SMALL, "strategy=allreduce", *own)
    return outcome_of(RunSpec("maml", Path(directory), configuration, own, in_sweep=in_sweep))


def test_ranks_whose_sweepers_sampled_different_jobs_do_not_train(tmp_path):
    overrides = ("seed=0",), ("seed=1",)
    for message in run_world(run_own_job, 2, str(tmp_path), True, *overrides):
        assert message.startswith("UserError: the 2 ranks sampled different jobs") and (
            "hydra.sweeper.sampler.seed=0" in message
        )


def test_ranks_of_different_commands_do_not_train(tmp_path):
    overrides = ("threads=1",), ("seed=1", "threads=2", "device=cpu", "trainer.iterations=9")
    messages = run_world(run_own_job, 2, str(tmp_path), False, *overrides)
    assert len({*messages}) == 1
    assert messages[0].startswith("UserError: seed is 1 on rank 1 and 0 on rank 0: start all nodes")
    assert not (tmp_path / ".hydra").exists()


def run_in_directory_of_own_name(directory: Path, configuration: DictConfig) -> str:
    return outcome_of(RunSpec("maml", directory / f"run{get_rank()}", configuration))


def test_ranks_with_directories_of_different_names_do_not_train(tmp_path):
    messages = run_world(run_in_directory_of_own_name, 2, tmp_path, compose(*SMALL))
    assert len({*messages}) == 1
    assert messages[0].startswith("UserError: hydra.run.dir is run1 on rank 1 and run0 on rank 0: ")


def run_with_own_version(directory: Path, configuration: DictConfig) -> str:
    building.__version__ = f"0.{get_rank()}"
    return outcome_of(RunSpec("maml", directory, configuration))


def test_ranks_of_different_versions_do_not_train(tmp_path):
    messages = run_world(run_with_own_version, 2, tmp_path, compose(*SMALL))
    assert len({*messages}) == 1
    assert messages[0].startswith("UserError: the version of metadist is 0.1 on rank 1 and 0.0 on ")


def test_the_user_error_of_one_rank_is_that_of_all_and_names_it(tmp_path):
    overrides = (), ("task.ways=50",)
    messages = run_world(run_own_job, 2, str(tmp_path), False, *overrides)
    assert len({*messages}) == 1 and messages[0].startswith("UserError: on rank 1: task.ways is 50")


def heartbeats_after_a_failed_job(directory: Path) -> int:
    """The number of threads that would end this process once the other one has exited."""
    with pytest.raises(UserError, match=r"task\.ways is 50"):
        run_job(RunSpec("maml", directory, compose(*SMALL, "task.ways=50")))
    threads = [each for each in threading.enumerate() if each.name == "metadist-heartbeat"]
    for thread in threads:
        thread.join(20)
    return sum(thread.is_alive() for thread in threads)


def test_a_process_may_go_on_after_a_failed_job(tmp_path):
    assert run_world(heartbeats_after_a_failed_job, 2, tmp_path) == [0, 0]


def message_of_a_stopped_job(directory: Path, **options: bool) -> str:
    def stop(_: Experiment) -> None:
        raise Interrupted(2, "stopped at iteration 3", "to resume, add resume=auto")

    try:
        run_job(RunSpec("maml", directory, compose(*SMALL, "strategy=local"), **options), stop)
    except Interrupted as stopped:
        return str(stopped)
    return ""


def messages_of_stopped_jobs(directory: Path) -> list[str]:
    options = ({}, {"in_sweep": True}, {"in_sweep": True, "launched": True}, {"launched": True})
    return [message_of_a_stopped_job(directory, **each) for each in options]


def test_only_the_sweep_says_how_a_stopped_job_of_it_resumes(tmp_path):
    alone = "stopped at iteration 3: to resume, add resume=auto"
    in_sweep = "stopped at iteration 3"
    (messages,) = run_world(messages_of_stopped_jobs, 1, tmp_path)
    assert messages == [alone, in_sweep, in_sweep, alone]


def exits(directory: str) -> object:
    try:
        run_job(
            RunSpec("maml", Path(directory), compose(*SMALL, "strategy=local")),
            on_built=lambda _: sys.exit(7),
        )
    except SystemExit as leaving:
        return leaving.code
    return "finished"


def test_sys_exit_ends_a_single_process(tmp_path):
    assert run_world(exits, 1, str(tmp_path)) == [7]  # submitit's, when SLURM preempts the job


def test_ranks_on_cpus_among_ranks_on_gpus_are_refused():
    check_same_device(["cuda", "cuda"], ["a", "b"])
    check_same_device(["cpu"], ["a"])
    with pytest.raises(UserError, match=r"ranks \[1, 3\] \(b, d\) compute on the CPU"):
        check_same_device(["cuda", "cpu", "cuda", "cpu"], ["a", "b", "c", "d"])


def run_restarted(directory: str, named: str) -> None:
    """A run that torchrun has restarted before its first checkpoint."""
    elastic_store().set(f"metadist/started/{directory}", "another process")
    run_job(RunSpec("maml", Path(directory), compose(*SMALL, "strategy=local", f"resume={named}")))


def test_a_restarted_run_resumes_from_the_named_checkpoint_until_it_has_its_own(tmp_path, maml):
    named = maml / "checkpoints" / "iteration-00000002.pt"
    run_world(run_restarted, 1, str(tmp_path / "run"), str(named))
    steps = [each["iteration"] for each in records(tmp_path / "run") if "train_loss" in each]
    assert steps == [3, 4]


def run_twice(directory: str) -> str:
    """Why a job is not run again in the same process and directory."""
    spec = RunSpec("maml", directory, compose(*SMALL, "strategy=local"))
    run_job(spec)
    with pytest.raises(UserError) as again:
        run_job(spec)
    return str(again.value)


def test_a_job_that_is_run_again_in_one_process_does_not_resume_unasked(tmp_path):
    (message,) = run_world(run_twice, 1, str(tmp_path))
    assert "holds the checkpoints of an earlier run: add resume=auto" in message
