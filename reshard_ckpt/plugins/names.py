"""Names of tensors and values: their paths, the parameters that state belongs to, and the parts that torch's wrappers add."""

from __future__ import annotations

from ..core.catalog.names import unwrapped, unwrapped_keys
from ..core.catalog.specs import StateLink
from ..core.trees import name_of
from ..state.describe import Index, paths_of_values

__all__ = ["Index", "StateLink", "name_of", "paths_of_values", "unwrapped", "unwrapped_keys"]
