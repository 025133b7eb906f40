"""Warning once if the program uses a release of megatron-core that this package's calls have not been tested with."""

from __future__ import annotations

import re
import sys
import warnings
from functools import lru_cache

from ...plugins.states import group_of

FIRST, LAST = (0, 13), (0, 19)
"""The first and the last release that jobs have run with; docs/megatron.md lists which, and which parts of each."""


def warn_if_untested() -> None:
    """Warn if this program has imported a megatron-core that has not been tested."""
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    if isinstance(version, str):
        _judge(version)


@lru_cache(maxsize=8)
def _judge(version: str) -> None:
    """Warn about an untested version, once for each version, on rank 0."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if (release is None or not FIRST <= release <= LAST) and group_of(None).rank == 0:
        tested = " to ".join(".".join(map(str, one)) for one in (FIRST, LAST))
        warnings.warn(
            f"megatron-core {version}: the calls of reshard_ckpt.megatron have been run with {tested} only; load a checkpoint "
            "into a job of another layout once, and compare, before relying on it",
            stacklevel=4,
        )
