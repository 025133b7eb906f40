"""A process group that carries the memory of simulated devices, as late and as carelessly as NCCL may.

An all-to-all is queued on a stream of the group's own, behind the caller's: from then on it may write what it receives at any
time, and it reads what it sends at the end, when the caller waits for it. Waiting holds back the caller's stream, not the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt.engine.common.tensor_bytes import Mark, on_device


class LinkGroup(dist.ProcessGroup):
    """The group, seen from one rank."""

    devices: set[int] = set()  # noqa: RUF012
    """Those that any group of this process has carried memory of."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    @property
    def group_name(self) -> str:
        return "link"

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, *sizes: Any) -> LinkWork:
        LinkGroup.devices |= {received.device.index, sent.device.index}
        stream = self._streams.setdefault(sent.device, torch.Stream(device=sent.device))
        Mark(torch.accelerator.current_stream(sent.device)).hold(stream)
        with _on_stream(stream):
            received.fill_(0xEE)
        return LinkWork(self._gloo, stream, received, sent, sizes)

    all_to_all_single = alltoall_base  # its name in newer releases of torch


class LinkWork:
    """An all-to-all that is under way."""

    def __init__(self, gloo: Any, stream: torch.Stream, received: torch.Tensor, sent: torch.Tensor, sizes: Any) -> None:
        self._gloo, self._stream, self._received, self._sent, self._sizes = gloo, stream, received, sent, sizes

    def wait(self, timeout: timedelta | None = None) -> bool:
        with _on_stream(self._stream):
            came = torch.empty(self._received.numel(), dtype=torch.uint8)
            self._gloo.alltoall_base(came, self._sent.cpu(), *self._sizes).wait()
            self._received.copy_(came)
        Mark(self._stream).hold(torch.accelerator.current_stream(self._received.device))
        return True


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    with on_device(stream.device):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        yield
        torch.accelerator.set_stream(before)


def register() -> None:
    """Make it the backend ``link`` of simulated devices."""
    dist.Backend.register_backend("link", LinkGroup, devices=["sim"])
