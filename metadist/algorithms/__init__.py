"""Meta-learning algorithms: each is what happens in one task, with no rank and no RPC."""

from metadist.algorithms.learner import Learner, TaskResult
from metadist.algorithms.maml import MAML
from metadist.algorithms.supervised import Supervised

__all__ = ["MAML", "Learner", "Supervised", "TaskResult"]
