"""Pinning host memory: the device then copies from and into it at full speed, and while the host goes on.

torch's own pinned memory is rounded up to a power of two, and is never given back to the system. So a mapping of ours is
registered with the device instead, where that is known how; elsewhere torch's own serves.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Registrar:
    """How memory is registered with devices of one type: by address and size, and by address; both raise if it cannot be."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


def _cuda_register(address: int, num_bytes: int) -> None:
    portable = 1  # for every device of the process
    _check_cuda(torch.cuda.cudart().cudaHostRegister(address, num_bytes, portable))  # type: ignore[no-untyped-call]


def _cuda_unregister(address: int) -> None:
    _check_cuda(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def _check_cuda(code: Any) -> None:
    if int(code):
        raise RuntimeError(f"CUDA error {int(code)}")


REGISTRARS = {"cuda": Registrar(_cuda_register, _cuda_unregister)}
"""By the type of the device."""


class _Registered(mmap.mmap):
    """A mapping that is registered; it is unregistered before it is unmapped, when nobody views it any more."""

    registrar: Registrar | None = None
    address = 0

    def __del__(self) -> None:
        if self.registrar is not None:
            with suppress(Exception):  # the interpreter may be ending, and the driver's context be gone
                self.registrar.unregister(self.address)


def empty_pinned(num_bytes: int) -> torch.Tensor:
    """Allocate pinned host memory for the accelerator, as a 1-D uint8 tensor; `num_bytes` is a multiple of the page size."""
    registrar = _registrar()
    if registrar is not None and (memory := _registered(registrar, num_bytes)) is not None:
        return memory
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _registrar() -> Registrar | None:
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else REGISTRARS.get(accelerator.type)


def _registered(registrar: Registrar, num_bytes: int) -> torch.Tensor | None:
    """Map memory and register it; None where the system or the driver refuses."""
    mapping = map_private(num_bytes, _Registered)
    if mapping is None:
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        registrar.register(memory.data_ptr(), num_bytes)
    except Exception:  # a limit of locked memory, or a driver that cannot
        return None
    mapping.registrar, mapping.address = registrar, memory.data_ptr()
    return memory


def map_private(num_bytes: int, kind: Any = mmap.mmap) -> Any:
    """Map private memory in large pages where there are such; None on a system without mappings of this kind."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return None
    mapping = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
