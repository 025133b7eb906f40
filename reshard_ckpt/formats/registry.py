"""Formats of other libraries: of this package, and of other packages that register them as entry points.

1. Load every entry point of the group ``reshard_ckpt.formats``; each names a `Format`. If one fails to import, warn, and go on
   with the others.
2. Sort by `Format.order`. A path belongs to the first format whose `open` recognizes it.

Opening a path converts nothing and reads no tensor data. A format builds a catalog over its own files; the planner and the reader
of this library's own checkpoints do the rest, resharding included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

from ..engine.common.entry_points import load_all
from ..errors import CheckpointError, CorruptError
from ..storage import Storage
from .protocol import Format, Source

GROUP = "reshard_ckpt.formats"

OWN = {
    "bytecheckpoint": "reshard_ckpt.families.bytecheckpoint.open:FORMAT",
    "vescale": "reshard_ckpt.families.vescale.open:FORMAT",
    "megatron": "reshard_ckpt.families.megatron.open:FORMAT",
    "dcp": "reshard_ckpt.formats.dcp.read:FORMAT",
    "deepspeed": "reshard_ckpt.families.deepspeed.open:FORMAT",
    "safetensors": "reshard_ckpt.formats.safetensors:FORMAT",
    "torch_checkpointing": "reshard_ckpt.formats.torch_checkpointing:FORMAT",
    "rank-files": "reshard_ckpt.formats.rank_files:FORMAT",
    "torch": "reshard_ckpt.formats.torch_file:FORMAT",
}
"""The entry points of this package, as in pyproject.toml."""

Formats = Callable[[], tuple[Format, ...]]
"""Returns the formats to try, in order. It is called only if a path holds no checkpoint of this library."""


@cache
def known_formats() -> tuple[Format, ...]:
    """Load all formats, in the order in which they are tried."""
    return tuple(sorted(load_all(GROUP, OWN, Format), key=lambda format: format.order))


def with_options(options: Mapping[str, bool], only: Collection[str] | None = None) -> Formats:
    """Return a function like `known_formats`, with these options set for all formats that take them, or only those in `only`.

    >>> [one.name for one in with_options({"as_saved": True}, only=["dcp"])() if one.options]
    ['dcp']
    """
    return partial(_with_options, options, only)


def _with_options(options: Mapping[str, bool], only: Collection[str] | None) -> tuple[Format, ...]:
    return tuple(
        replace(one, options={name: value for name, value in options.items() if name in one.takes})
        if only is None or one.name in only
        else one
        for one in known_formats()
    )


def open_foreign(storage: Storage, key: str | None, formats: Formats) -> Source | None:
    """Open a folder, or the file `key` in it, in the first format that recognizes it; return None if none does.

    Raises
    ------
    CorruptError
        A format recognizes it, but the checkpoint is damaged.
    """
    with _garbage_collection_paused():
        return next((found for one in formats() if (found := _opened(one, storage, key)) is not None), None)


def _opened(one: Format, storage: Storage, key: str | None) -> Source | None:
    try:
        return one.open(storage, key, **one.options)
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may have anything where the format expects what its library writes
        why = f"{type(error).__name__}: {error}"
        place = storage.url if key is None else f"{storage.url}: {key}"
        raise CorruptError(f"{place}: is not as {one.name} writes it ({why:.200}); use another copy") from error


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause Python's cycle collector: over a million new objects it takes longer than making them, and finds no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def latest_below(storage: Storage, formats: Formats) -> str | None:
    """Return the folder of the latest checkpoint below the root of a run; None if no format knows the root."""
    return next((tag for one in formats() if one.latest is not None and (tag := one.latest(storage)) is not None), None)
