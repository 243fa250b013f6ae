"""The commands' main functions: Hydra around a run, and the exit status."""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from metadist.cli.sweeps import (
    fail_job,
    finish_sweep,
    launch_job,
    objective_value,
    run_sweep_job,
    sweep_jobs,
)
from metadist.config.overrides import VERSION_BASE, replace_options
from metadist.config.resolvers import begin_program
from metadist.distributed import get_rank, get_world_info
from metadist.errors import UserError, did_you_mean
from metadist.launchers.error_reporting import exit_process
from metadist.launchers.job import JobFailure, attempt_job, report_errors
from metadist.launchers.launcher import create_launcher
from metadist.launchers.run_spec import RunSpec
from metadist.training.checkpoints import Checkpoints

_FLAGS_WITH_VALUE = frozenset((
    "--cfg", "-c", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp",
    "--experimental-rerun", "--info", "-i", "--package", "-p",
))  # fmt: skip
"""Hydra's flags that take a value."""

_FLAGS = _FLAGS_WITH_VALUE | {
    "--help", "-h", "--hydra-help", "--multirun", "-m", "--resolve", "--run", "-r",
    "--shell-completion", "-sc", "--version",
}  # fmt: skip
"""All flags of Hydra."""

_PATHS = ("hydra.run.dir", "hydra.sweep.dir", "resume", "init_from", "dataset.root")
"""Keys of paths that an unset variable of the shell leaves empty: the current directory."""


def hydra_main(
    config_name: str, config_path: str = "pkg://metadist.conf", *, script: str | None = None
) -> Callable[[], None]:
    """The main function of a program that runs an experiment.

    The function composes the configuration CONFIG_NAME.yaml with the command line, runs the job on
    every rank, and then exits the process. All ranks share one run directory. After a user error,
    rank zero prints one sentence and the exit status is 2.

    Args:
        config_name: "maml" or "ddp", or the name of a configuration in `config_path`.
        config_path: a package (`pkg://…`) or an absolute directory. A configuration outside of
            metadist finds metadist's groups with `hydra.searchpath: [pkg://metadist.conf]`.
        script: the program's `__file__`, if another program may call the main function.
    """
    # Hydra 1.4 warns of launchers, sweepers and callbacks that the caller did not list.
    no_list = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
    arguments = {"execution_whitelist": no_list} if no_list else VERSION_BASE
    compose_and_run = hydra.main(config_path=config_path, config_name=config_name, **arguments)(
        run_task
    )

    @functools.wraps(compose_and_run)
    def main() -> None:
        with report_errors() as status, sweep_jobs():
            get_world_info()  # raises if the variables are wrong, before Hydra uses them
            _check_arguments(sys.argv[1:])
            begin_program()
            compose_and_run()
        is_program = script is None or is_main_program(Path(script).resolve())
        exit_process(finish_sweep(status.value), is_program)

    return main


def _check_arguments(arguments: list[str]) -> None:
    """Refuse what argparse and Hydra would report without saying what to do.

    Raises:
        UserError: there is no such flag, it stands between two overrides, or a path is empty.
    """
    override, flag, left = "", "", iter(arguments)  # the last override, a flag after it
    for argument in left:
        if argument == "--":
            break
        if re.match("--?[A-Za-z]", argument):
            flag, name = argument, argument.partition("=")[0]
            # argparse takes the beginnings of long flags, too.
            if name.startswith("--") and not any(each.startswith(name) for each in _FLAGS):
                raise UserError(
                    f"there is no flag {name}{did_you_mean(name, _FLAGS)}: options are given as "
                    "KEY=VALUE, and --hydra-help lists the flags."
                )
            if argument in _FLAGS_WITH_VALUE:
                next(left, None)
        elif override and flag:
            raise UserError(
                f"the flag {flag} stands between two overrides: write flags before or after all "
                "KEY=VALUE."
            )
        else:
            override, flag = argument, ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key.lstrip("+") in _PATHS and equals and value in ("", "''", '""'):
            raise UserError(f"{argument} is empty: give a path, or leave it out.")


def run_task(configuration: DictConfig) -> float | None:
    """Hydra's task function: run a job in this process, or launch processes that run it.

    Args:
        configuration: the composed configuration.

    Returns:
        The validation metric, for a sweeper to optimize. None without validation, for a failed
        job of a sweep that continues, and for a launched job that this function does not wait for.

    Raises:
        JobFailure: the job failed.
    """
    if HydraConfig.get().job.chdir:
        message = (
            "hydra.job.chdir=true does not apply: paths and modules are relative to the directory "
            "in which the command is started; leave it out."
        )
        raise JobFailure(UserError(message), in_job=False)
    spec = spec_from_hydra(configuration)
    try:
        try:
            replace_options(spec.configuration, HydraConfig.get())
            spec.settings  # noqa: B018  (checks them before anything is started)
            launcher = create_launcher(configuration)
            concurrent = 1 if launcher is None else launcher.max_concurrent_jobs(configuration)
        except Exception as error:
            fail_job(spec, JobFailure(error, in_job=False))
            return None
        if launcher is not None:
            return launch_job(launcher, concurrent, spec)
        if spec.in_sweep:
            return run_sweep_job(spec)
        return objective_value(attempt_job(spec))
    except JobFailure as failure:
        if get_rank() == 0 and not spec.in_sweep:
            failure.directory = spec.directory  # Hydra created it
        raise


def spec_from_hydra(configuration: DictConfig) -> RunSpec:
    """The job for which Hydra called the task function. Any process, inside that function.

    A job of a sweep resumes from the checkpoints in its directory if there are any. The
    configuration is that of Hydra, before `replace_options`.
    """
    hydra_node = HydraConfig.get()
    directory = Path(hydra_node.runtime.output_dir).resolve()
    in_sweep = hydra_node.mode == RunMode.MULTIRUN
    configuration = configuration.copy()
    with open_dict(configuration):
        configuration.pop("launcher", None)
        resume = configuration.get("resume")
        if in_sweep and resume is None and Checkpoints(directory).candidates():
            configuration.resume = "auto"
    name = str(hydra_node.job.config_name)
    overrides: Any = OmegaConf.to_container(hydra_node.overrides.task, resolve=False)
    return RunSpec(
        name=name,
        directory=directory,
        configuration=configuration,
        overrides=tuple(map(str, overrides)),
        hydra=cast(DictConfig, HydraConfig.instance().cfg),
        in_sweep=in_sweep,
        number=int(hydra_node.job.num) if in_sweep else 0,
    )


def is_main_program(path: Path) -> bool:
    """Whether a script is the main program of this process, rather than called by another one."""
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    return main_file is not None and Path(main_file).resolve() == path


maml = hydra_main("maml")
"""`metadist maml`: meta-learning, with the options of `conf/maml.yaml`."""

ddp = hydra_main("ddp")
"""`metadist ddp`: supervised data-parallel training, with the options of `conf/ddp.yaml`."""
