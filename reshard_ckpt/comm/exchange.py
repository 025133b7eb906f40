"""Bulk data from rank to rank: all-to-alls over the job's process group, or over a gloo group beside it for host memory.

These are the only collectives of this package. They run only in calls that need them (`load` with ``read_once=True``,
`reshard_live`, a save with ``rows=``), and in the caller's thread, so they cannot meet a collective of the training loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import PeerError
from .links import gloo_group
from .sessions import current_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HOST = torch.device("cpu")

_HOST_GROUPS: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""For each process group, the gloo groups made beside it, by the tuple of their ranks: for exchanges among some ranks only, or
because the group has no backend for host memory."""

_TRIES: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""For each process group, how often a tuple of its ranks has tried to make a gloo group: each try has a name of its own."""

_LOOK_S = 1.0


class Exchange:
    """All-to-all exchanges of bytes among the ranks of a process group; ranks are numbered within the group.

    Parameters
    ----------
    group
        The process group, whose backend for `device` carries the bytes; or a `gloo_group`, for host memory.
    device
        The device of all buffers.

    Attributes
    ----------
    look
        Called about every second while this rank waits for others, if the buffers are in host memory. It may raise, for example
        if another rank has failed.
    """

    def __init__(self, group: Any, *, timeout_s: float, device: torch.device = HOST) -> None:
        self.group, self._timeout_s = group, timeout_s
        self.look: Callable[[], None] | None = None
        self.device = device
        self.rank, self.size = group.rank(), group.size()

    def start(
        self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int]
    ) -> Callable[[], None]:
        """Start to send a part to each rank, and to receive a part from each rank. Collective.

        Parameters
        ----------
        outgoing, incoming
            1-D uint8 on the device of this exchange: the parts for all ranks, and from all ranks, end to end. Do not touch them
            before the returned function has been called.
        sent, received
            Bytes of the part to each rank, and from each rank; sender and receiver must agree.

        Returns
        -------
        Callable
            Waits until all parts have arrived.

        Raises
        ------
        PeerError
            The process group failed, or another rank did not come in time. The returned function raises it too.
        """
        try:
            if isinstance(self.group, dist.ProcessGroup):
                work = dist.all_to_all_single(incoming, outgoing, list(received), list(sent), group=self.group, async_op=True)
            else:
                work = self.group.alltoall_base(incoming, outgoing, list(received), list(sent))
        except RuntimeError as error:  # also torch's DistError
            raise _failed(error) from error

        return lambda: None if work is None else self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        # A wait of NCCL that is over breaks the group.
        look = self.look if self.device == HOST else None
        ends = time.monotonic() + self._timeout_s
        while True:
            left = max(ends - time.monotonic(), 0.001)
            is_last = look is None or left <= _LOOK_S or work.is_completed()
            try:
                work.wait(timedelta(seconds=left if is_last else _LOOK_S))
                return
            except RuntimeError as error:
                if is_last:
                    raise _failed(error) from error
            if look is not None and not work.is_completed():
                look()

    def swap(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send ``messages[r]`` to rank r, and return the messages to this rank, by sender. Collective; for small messages."""
        sent = [len(message) for message in messages]
        sizes = torch.tensor(sent, dtype=torch.int64, device="cpu")
        received = torch.empty(self.size, dtype=torch.int64, device="cpu")
        each = [sizes.element_size()] * self.size
        self._swap(sizes.view(torch.uint8), each, received.view(torch.uint8), each)
        outgoing = torch.frombuffer(bytearray(b"".join(messages)) or bytearray(1), dtype=torch.uint8)[: sum(sent)]
        incoming = torch.empty(int(received.sum()), dtype=torch.uint8, device="cpu")
        self._swap(outgoing, sent, incoming, received.tolist())
        data, ends = incoming.numpy().tobytes(), received.cumsum(0).tolist()
        return [data[end - size : end] for size, end in zip(received.tolist(), ends, strict=True)]

    def _swap(self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int]) -> None:
        into = incoming if self.device == HOST else torch.empty_like(incoming, device=self.device)
        self.start(outgoing.to(self.device), sent, into, received)()
        if into is not incoming:
            incoming.copy_(into)


def _failed(error: RuntimeError) -> PeerError:
    return PeerError(
        f"the exchange over the process group failed: {error}; another rank has probably failed: its log says why. "
        "If the group itself is at fault, load with read_once=False, save without rows=, or save and load instead of reshard_live"
    )


def open_exchange(
    process_group: ProcessGroup | None, *, timeout_s: float, device: torch.device = HOST, members: Sequence[int] | None = None
) -> Exchange | None:
    """Open the exchange among all ranks of a process group, or among `members`; None if this process is on its own.

    Collective in the first call for host memory, if the group has no backend for it or only some ranks take part: then a gloo
    group of these ranks is made, and kept as long as the group. All ranks of the process group must have met in a session before.

    Parameters
    ----------
    members
        The ranks that take part, numbered within the process group, in order; by default all. Only for host memory.
    device
        The device of the buffers: host memory, or the accelerator that the group has a backend for (`carries`).
    """
    known, group = current_group(process_group, timeout_s), group_of(process_group)
    if known is None or group is None:
        return None
    ranks = tuple(range(known.size) if members is None else members)
    if device == HOST and (len(ranks) < known.size or not carries(process_group, "cpu")):
        groups = _HOST_GROUPS.setdefault(group, {})
        if ranks not in groups:
            tries = _TRIES.setdefault(group, Counter())
            tries[ranks] += 1
            name, what = f"exchange {tries[ranks]} {ranks}", "the ranks did not come together in a group for bytes in host memory"
            # Not in the job's own store: an earlier attempt of the job may have left such a name there.
            store, near = known.home.session(name, title=what, timeout_s=timeout_s)
            groups[ranks] = gloo_group(store, near.ended, ranks, ranks.index(known.rank), timeout_s=timeout_s, what=what)
        return Exchange(groups[ranks], timeout_s=timeout_s)
    return Exchange(group, timeout_s=timeout_s, device=device)


def carries(process_group: ProcessGroup | None, device_type: str) -> bool:
    """Tell whether a process group has a backend made for memory of this device type, such as ``"cpu"`` or ``"cuda"``.

    gloo also takes memory of accelerators, but copies it through the host. So it counts for host memory only.
    """
    if (group := group_of(process_group)) is None:
        return False
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":", 1) for pair in config.lower().split(",") if ":" in pair)
    backend = backends.get(device_type, "" if backends else config)
    return bool(backend) and (device_type == "cpu" or backend != "gloo")


def group_of(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a process group, the default group for None; return None if this process is on its own."""
    if current_group(process_group) is None:
        return None
    return dist.group.WORLD if process_group is None else process_group
