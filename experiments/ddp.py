"""Supervised data-parallel training: torchrun --standalone --nproc_per_node=2 experiments/ddp.py.

Trains a classifier of all training classes, the supervised few-shot baseline; `conf/ddp.yaml` has
the options.
"""

from metadist.config import build_experiment
from metadist.launchers import experiment

main = experiment(__file__, build_experiment)

if __name__ == "__main__":
    main()
