"""Reports made from run directories: file names, comparison of runs, tables of sweeps."""

from metadist.loggers import METRICS_FILE
from metadist.reports.comparison import (
    config_fingerprint,
    flatten_config,
    format_differences,
    is_runtime_key,
    protocol_differences,
)
from metadist.reports.run_directory import (
    CHECKPOINT_DIRECTORY,
    CONTENTS,
    FAILURE_FILE,
    LEARNING_CURVES_FILE,
    PROFILE_DIRECTORY,
    REPLAY_DIRECTORY,
    RESULTS_FILE,
    TEST_TASKS_FILE,
    WORKER_ERROR_FILE,
    pop_worker_error,
    read_config,
    read_failure,
    read_overrides,
    read_results,
    write_failure,
    write_results,
)
from metadist.reports.statistics import mean_and_ci95

__all__ = [
    "CHECKPOINT_DIRECTORY",
    "CONTENTS",
    "FAILURE_FILE",
    "LEARNING_CURVES_FILE",
    "METRICS_FILE",
    "PROFILE_DIRECTORY",
    "REPLAY_DIRECTORY",
    "RESULTS_FILE",
    "TEST_TASKS_FILE",
    "WORKER_ERROR_FILE",
    "config_fingerprint",
    "flatten_config",
    "format_differences",
    "is_runtime_key",
    "mean_and_ci95",
    "pop_worker_error",
    "protocol_differences",
    "read_config",
    "read_failure",
    "read_overrides",
    "read_results",
    "write_failure",
    "write_results",
]
