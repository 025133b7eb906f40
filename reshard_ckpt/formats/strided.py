"""A store that serves tensors in any order of elements as if they were files in row-major order.

A transposed or expanded view has no run of bytes longer than one element, so a catalog over the bytes themselves would need a row
for each element. This store instead makes a tensor's row-major bytes when they are read, one range at a time, from the mapped
file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..core.geometry.runs import decompose
from ..storage import LocalStorage
from ..storage.protocol import flat_bytes, short_file


class StridedStorage(LocalStorage):
    """A folder with additional files; each is the elements of one tensor in row-major order.

    Parameters
    ----------
    tensors
        The tensor of each additional file, by key.
    """

    def __init__(self, root: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(root)
        self._tensors = tensors

    def size(self, key: str) -> int | None:
        tensor = self._tensors.get(key)
        return super().size(key) if tensor is None else tensor.numel() * tensor.itemsize

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        tensor = self._tensors.get(key)
        if tensor is None:
            super().read_into(key, offset, buffers)
            return
        views = [flat_bytes(buffer) for buffer in buffers]
        wanted, there = sum(map(len, views)), tensor.numel() * tensor.itemsize - offset
        if wanted > there:
            raise short_file(f"{self.url}/{key}", offset, wanted, max(there, 0))
        for view in views:
            view[:] = row_major_bytes(tensor, offset, len(view))
            offset += len(view)


def row_major_bytes(tensor: torch.Tensor, offset: int, num_bytes: int) -> memoryview:
    """Return the bytes ``[offset, offset + num_bytes)`` of a tensor's row-major order, for any strides.

    >>> row_major_bytes(torch.arange(6, dtype=torch.int16).reshape(2, 3).T, 2, 3).tolist()
    [3, 0, 1]
    """
    tensor = tensor if tensor.shape else tensor.reshape(1)
    each = tensor.itemsize
    # Elements [first, last) cover the wanted bytes. `decompose` cuts this run of the tensor into boxes, and each box is copied.
    first, last = offset // each, -(-(offset + num_bytes) // each)
    cut = decompose(np.array([tensor.shape], np.int64), np.array([first]), np.array([last - first]))
    parts = []
    for low, lengths in zip(cut.offsets.tolist(), cut.lengths.tolist(), strict=True):
        part = tensor
        for dim, (begin, length) in enumerate(zip(low, lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        # Copy even if it counts as contiguous: the stride of a dim of length 1 may be anything, and torch then views no bytes.
        copied = torch.empty(part.numel(), dtype=part.dtype, device="cpu").copy_(part.reshape(-1))
        parts.append(copied.view(torch.uint8).numpy())
    data = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return data.data[offset - first * each :][:num_bytes]
