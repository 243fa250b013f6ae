"""Supervised data-parallel training: torchrun --standalone --nproc_per_node=2 experiments/ddp.py.

Trains a classifier of all training classes, the supervised few-shot baseline; `conf/ddp.yaml` has
the options.
"""

from metadist.cli import hydra_main

main = hydra_main("ddp", script=__file__)

if __name__ == "__main__":
    main()
