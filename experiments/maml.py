"""Meta-learning: torchrun --standalone --nproc_per_node=2 experiments/maml.py +partition=dim0.

`conf/maml.yaml` has the options; `python experiments/maml.py --help` lists them.
"""

from metadist.cli import hydra_main

main = hydra_main("maml", script=__file__)

if __name__ == "__main__":
    main()
