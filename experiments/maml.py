"""Meta-learning: torchrun --standalone --nproc_per_node=2 experiments/maml.py +partition=dim0.

`conf/maml.yaml` lists what can be chosen; `python experiments/maml.py --help` shows it.
"""

from metadist.cli import hydra_main

main = hydra_main(__file__)

if __name__ == "__main__":
    main()
