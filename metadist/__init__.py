"""metadist: distributed meta-learning on PyTorch, configured by Hydra.

`import metadist as todist` gives the primitives of distributed training; see
`metadist.distributed`. Models, datasets, algorithms and the training loop are in the packages
beside it, and `experiments/` holds the commands.
"""

from metadist.distributed import *  # noqa: F403
from metadist.distributed import __all__ as _distributed_names
from metadist.errors import UserError

__version__ = "0.1.0"

__all__ = [*_distributed_names, "UserError", "__version__"]
