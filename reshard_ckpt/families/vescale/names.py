"""Names in checkpoints of veScale, and the names of the same things here."""

from __future__ import annotations

NAME = "vescale"
"""The name of veScale's format."""

MODEL, OPTIMIZER = "model", "optimizer"
STATE, GROUPS, GROUP_META = "state", "param_groups", "param_group_meta"

MASTER = "shard_casted_float16_groups"
MASTERED = "vescale"
"""The key above ``model`` in the names of 16-bit weights whose fp32 masters are saved as ``model.…``."""
