"""Bulk data from rank to rank: an all-to-all over the job's process group.

The only collectives of this package. They are used where the caller asked for it (`load` with ``read_once=True``), in the
caller's thread, so that they meet no collective of the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import PeerError
from .group import current_group, device_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Exchange:
    """Exchanges among the ranks of a process group; a rank is its number within the group."""

    def __init__(self, group: ProcessGroup, *, timeout_s: float) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self._device = device_of(group)
        self.size = dist.get_world_size(group)

    def all_to_all(self, outgoing: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send each rank a part, and receive one from each. Collective.

        Parameters
        ----------
        outgoing
            1-D uint8, on the host: the parts for all ranks, one after the other.
        sent, received
            The size of the part to each rank, and of the one from each rank, which both sides must know.

        Returns
        -------
        Tensor
            1-D uint8, on the host: the parts from all ranks, one after the other.

        Raises
        ------
        PeerError
            The process group failed, or others did not come in time.
        """
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        try:
            work = dist.all_to_all_single(
                incoming, outgoing.to(self._device), list(received), list(sent), group=self._group, async_op=True
            )
            if work is not None:
                work.wait(self._timeout)
            return incoming.cpu()
        except RuntimeError as error:  # also torch's DistError
            raise PeerError(
                f"the exchange over the process group failed: {error}; another rank has probably failed: its log says why. "
                "Load with read_once=False if the group itself is at fault"
            ) from error


def open_exchange(process_group: ProcessGroup | None, *, timeout_s: float) -> Exchange | None:
    """Open the exchange among the ranks of a session; None where this process is on its own."""
    if current_group(process_group) is None:
        return None
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return Exchange(group, timeout_s=timeout_s)
