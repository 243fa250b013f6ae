from .command import exit_status
from .main import hydra_main

__all__ = ["exit_status", "hydra_main"]
