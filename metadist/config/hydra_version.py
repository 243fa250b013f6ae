"""Differences between Hydra 1.3 and 1.4."""

from collections.abc import Mapping
from typing import Any

import hydra

IS_HYDRA_1_3 = hydra.__version__.startswith("1.3.")
"""Whether this is Hydra 1.3 with OmegaConf 2.3."""

VERSION_BASE: Mapping[str, Any] = {"version_base": "1.3"} if IS_HYDRA_1_3 else {}
"""The argument `version_base` of Hydra's functions, which Hydra 1.4 deprecates."""
