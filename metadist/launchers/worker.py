"""The program of a launched worker: python -m metadist.launchers.worker SPEC.

SPEC is the file to which the launching process has written the job's `RunSpec`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, setup_globals
from omegaconf import OmegaConf

from metadist.launchers.error_reporting import exit_process
from metadist.launchers.job import attempt_job, report_errors
from metadist.launchers.run_spec import RunSpec


def set_up_process(spec: RunSpec) -> None:
    """Give this process the module paths, `${hydra:…}` values and logging of the specification."""
    sys.path += [path for path in spec.module_paths if path not in sys.path]
    if spec.hydra is not None:
        setup_globals()
        # Both in one tree, because Hydra's node refers to the configuration too.
        merged: Any = OmegaConf.merge(spec.hydra, spec.configuration)
        HydraConfig.instance().cfg = merged
        os.environ.update(merged.hydra.job.env_set)
        configure_log(merged.hydra.job_logging, merged.hydra.verbose)


def main(path: Path) -> None:
    """Run the job of a specification file and end the process with its exit status."""
    with report_errors() as status:
        spec = RunSpec.from_yaml(path.read_text(encoding="utf-8"))
        set_up_process(spec)
        attempt_job(spec)
    exit_process(status.value, is_program=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
