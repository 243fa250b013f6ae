from .main import exit_status, hydra_main

__all__ = ["exit_status", "hydra_main"]
