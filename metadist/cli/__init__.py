"""The command line: Hydra around a run, sweeps, and exit statuses."""

from metadist.cli.main import exit_status, hydra_main

__all__ = ["exit_status", "hydra_main"]
