from .anil import ANIL
from .batch_norm import batch_norm_protocol, batch_norms_as_in_training
from .ensemble import Ensemble
from .imaml import IMAML
from .inner_loop import InnerLoopLearner
from .learner import Learner, TaskResult
from .maml import MAML
from .maml_plus_plus import MAMLPlusPlus
from .meta_sgd import MetaSGD
from .prototypical import Prototypical
from .reptile import Reptile
from .supervised import Supervised

__all__ = [
    "ANIL",
    "IMAML",
    "MAML",
    "Ensemble",
    "InnerLoopLearner",
    "Learner",
    "MAMLPlusPlus",
    "MetaSGD",
    "Prototypical",
    "Reptile",
    "Supervised",
    "TaskResult",
    "batch_norm_protocol",
    "batch_norms_as_in_training",
]
