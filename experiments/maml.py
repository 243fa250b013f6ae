"""Meta-learning: torchrun --standalone --nproc_per_node=2 experiments/maml.py +partition=dim0.

`conf/maml.yaml` has the options; `python experiments/maml.py --help` lists them.
"""

from metadist.config import build_experiment
from metadist.launchers import experiment

main = experiment(__file__, build_experiment)

if __name__ == "__main__":
    main()
