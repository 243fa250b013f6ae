"""Supervised data-parallel training: torchrun --standalone --nproc_per_node=2 experiments/ddp.py.

It learns all training classes at once and serves as the few-shot baseline; `conf/ddp.yaml` lists
what can be chosen.
"""

from metadist.cli import hydra_main

main = hydra_main(__file__)

if __name__ == "__main__":
    main()
