"""Meta-learning algorithms. Each processes one task, without ranks or RPC."""

from metadist.algorithms.anil import ANIL
from metadist.algorithms.imaml import IMAML
from metadist.algorithms.inner_loop import InnerLoopLearner
from metadist.algorithms.learner import Learner, TaskResult, batch_norm_protocol
from metadist.algorithms.maml import MAML
from metadist.algorithms.maml_plus_plus import MAMLPlusPlus
from metadist.algorithms.meta_sgd import MetaSGD
from metadist.algorithms.prototypical import Prototypical
from metadist.algorithms.reptile import Reptile
from metadist.algorithms.supervised import Supervised

__all__ = [
    "ANIL",
    "IMAML",
    "MAML",
    "InnerLoopLearner",
    "Learner",
    "MAMLPlusPlus",
    "MetaSGD",
    "Prototypical",
    "Reptile",
    "Supervised",
    "TaskResult",
    "batch_norm_protocol",
]
