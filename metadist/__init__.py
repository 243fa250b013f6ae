"""metadist: distributed meta-learning on PyTorch, configured by Hydra.

`import metadist as todist` gives the primitives of distributed training; see
`metadist.distributed`. `FewShotClassifier` classifies images with a trained model. Models,
datasets, algorithms and the trainer are in the other packages; the `metadist` command runs
experiments.
"""

import importlib
from typing import TYPE_CHECKING, Any

from metadist import distributed
from metadist.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

    from metadist.distributed import *  # noqa: F403
    from metadist.inference import FewShotClassifier

    rpc: ModuleType  # torch.distributed.rpc

__version__ = "0.1.0"

__all__ = [*distributed.__all__, "FewShotClassifier", "UserError", "__version__", "rpc"]


def __getattr__(name: str) -> Any:
    if name == "rpc":
        return importlib.import_module("torch.distributed.rpc")
    if name == "FewShotClassifier":
        return importlib.import_module("metadist.inference").FewShotClassifier
    if name in distributed.__all__:
        return getattr(distributed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
