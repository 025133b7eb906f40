"""The values of a DCP folder: read with ``torch.load``, which runs no code in them, and written with ``torch.save``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, CorruptError, UnsupportedError
from ...format.values import encode_value
from ...storage.protocol import Storage, read_range
from ...torchfile.bounds import UNCHECKED_BYTES, refuse_bombs, refuse_hash_collisions
from ...torchfile.zip_records import ZipRecords
from .chunks import FileSizes
from .metadata import Extent

MAX_VALUE_BYTES = 4 << 30
"""The largest value in bytes that is read, because a value is held in memory whole."""


@dataclass(frozen=True, slots=True)
class ReadValues:
    """The values that were read, and the errors of the values that could not be read; both are keyed by DCP's names."""

    values: Mapping[str, Any]
    unreadable: Mapping[str, CheckpointError]


def read_values(
    storage: Storage, extents: Mapping[str, Extent], otherwise: Callable[[bytes, str], Any] | None = None
) -> ReadValues:
    """Read all values. Equal bytes, such as the hyperparameters of many parameters, are decoded once.

    Parameters
    ----------
    otherwise
        Decodes values that torch refuses to load without running code; it must not run code either. It takes the value's bytes
        and its name in messages.
    """
    values: dict[str, Any] = {}
    unreadable: dict[str, CheckpointError] = {}
    known: dict[bytes, Any] = {}
    sizes = FileSizes(storage)
    for fqn, extent in extents.items():
        name, why = f"{storage.url}: {fqn}", sizes.problem(fqn, extent)
        if why is None and extent.length > MAX_VALUE_BYTES:
            why = CorruptError(f"{name} has {extent.length} bytes, more than a value has; use another checkpoint")
        if why is not None:
            unreadable[fqn] = why
            continue
        data = bytes(read_range(storage, extent.file, extent.offset, extent.length))
        try:
            if data not in known:
                known[data] = _load(data, name, otherwise)
            encode_value(known[data], name)
        except CheckpointError as error:
            unreadable[fqn] = error
        else:
            values[fqn] = known[data]
    return ReadValues(values, unreadable)


def torch_saved(value: Any) -> bytes:
    """Encode a value as the bytes that ``torch.save`` writes."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _load(data: bytes, name: str, otherwise: Callable[[bytes, str], Any] | None) -> Any:
    if len(data) > UNCHECKED_BYTES:
        refuse_hash_collisions(ZipRecords(io.BytesIO(data), name).read_pickle(sys.byteorder), name)
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # hostile bytes may make torch raise anything
        refused = "weights_only" in str(error) or "Unsupported" in str(error)
        if refused and otherwise is not None:
            return otherwise(data, name)
        if refused:
            raise UnsupportedError(
                f"{name} is a value that cannot be read without executing code that is in the file; leave it out of what you "
                "load, or load it with torch.distributed.checkpoint and save it again as plain values"
            ) from error
        raise CorruptError(f"{name}: torch cannot read its bytes ({_first_line(error)}); use another checkpoint") from error
    refuse_bombs(loaded, len(data), len(data), name)
    return loaded


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
