"""Meta-learning: torchrun --standalone --nproc_per_node=2 experiments/maml.py +partition=dim0.

`conf/maml.yaml` lists what can be chosen; `python experiments/maml.py --help` shows it.
"""

from metadist.config import build_experiment
from metadist.launchers import experiment

main = experiment(__file__, build_experiment)

if __name__ == "__main__":
    main()
