"""One device for all gloo groups of a rank.

Each group has one of its own otherwise, whose thread wakes a hundred times a second. Eight ranks with twenty groups each spend a
fifth of a core on that.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d


def share_device() -> None:
    """Make the groups of this process from now on use one device. Where torch has no such names, each has its own as before."""
    # All private: torch's own way to make a group leaves no choice of the device.
    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if not hasattr(gloo, "_Options") or not hasattr(gloo, "create_default_device"):
        return
    device = gloo.create_default_device()

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]
