"""Both states of a live reshard as they are now: the tensors of this rank, and the values that all ranks know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import msgpack
import torch

from ..comm.exchange import HOST, carries
from ..comm.group import current_accelerator
from ..core.catalog.model import Catalog
from ..core.catalog.specs import Ints
from ..core.report import check_choice, check_count
from ..engine.common.rename import renamed
from ..engine.common.rounds import NUM_BUFFERS
from ..engine.loading.load import LoadOptions
from ..engine.loading.vote import missing_values
from ..engine.resharding.live import memory_rows
from ..engine.resharding.live_source import LiveValues, Overlaps, find_overlaps
from ..engine.saving.local_shards import LocalShards, describe_local
from ..engine.saving.messages import encode_metadata
from ..errors import UsageError
from ..format.files import digest128
from ..state.capture import Captured, Target, capture, prepare_load
from ..state.layouts import group_of
from ..state.shards import PerRankValues
from .loading import wanted_names, without_ignored

MIN_MEMORY_BYTES = 1 << 20

State = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `reshard_live` and `LiveReshard`, as documented there."""

    load: LoadOptions
    rename: Mapping[str, str] | Callable[[str], str] | None
    staged: bool
    memory_bytes: int
    replicas: str
    delta: bool = False

    def __post_init__(self) -> None:
        check_choice("replicas", self.replicas, ("verify", "trust"))
        for option in ("delta", "staged"):
            if type(value := getattr(self, option)) is not bool:
                raise UsageError(f"{option}={value!r:.200}: pass True or False")
        check_count("memory_bytes", self.memory_bytes, MIN_MEMORY_BYTES)

    @property
    def compares(self) -> bool:
        return self.replicas == "verify"

    @property
    def round_bytes(self) -> int:
        """The most bytes of tensors in one round of messages: a buffer without the room for headers and for rounding up."""
        return self.memory_bytes // NUM_BUFFERS * 7 // 8


class Opened(NamedTuple):
    """The state to move from (`src`) and the state to move into (`dst`), as they are now.

    Attributes
    ----------
    held, wanted
        The pieces of `src` and of `dst` on this rank.
    saved
        A catalog of the pieces of all ranks of `src`, under the names of `dst`.
    target, values
        `dst`, and the decoded values for it.
    ignored
        The names that the option ``ignore`` may match.
    unfit
        A line for each value that `dst` cannot take.
    """

    held: LocalShards
    wanted: LocalShards
    saved: Catalog
    target: Target
    values: dict[str, Any]
    ignored: tuple[str, ...]
    unfit: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `src` and `dst` that a pattern of the options may match."""
        return *wanted_names(self.target), *self.ignored

    def addresses(self) -> list[tuple[int, int, Ints]]:
        """List the address of each piece's tensor in memory, and the piece's `base` and `strides` there.

        They may change while the layout stays the same.
        """
        pieces = (row for local in (self.held, self.wanted) for _, row in local.rows)
        return [(row.tensor.data_ptr(), row.piece.base, row.piece.strides) for row in pieces]

    def overlaps(self, sources: Mapping[int, int], catalog: Catalog) -> Overlaps:
        """Find wanted tensors that share memory with each other, or with tensors of `src`.

        `sources` has, for each tensor of `dst` that is loaded, the tensor of `catalog` with its bytes.
        """
        source = {self.wanted.specs[i].name: index for i, index in sources.items()}
        return find_overlaps(
            self.held, self.wanted, sources.keys(), lambda name, other: source[name] == catalog.source(catalog.index(other))
        )


class States:
    """Source and destination of `reshard_live` on one rank; opens them as often as they are moved."""

    def __init__(self, src: State, dst: State, options: Options, process_group: Any) -> None:
        self._src, self._dst = ({} if state is None else state for state in (src, dst))
        self._options, self._group, ranks = options, process_group, group_of(process_group)
        self.rank, self.size = ranks.rank, ranks.size

    def capture(self) -> Captured:
        """Describe the tensors and values of `src` as they are now."""
        return capture(self._src, process_group=self._group)

    def held(self, captured: Captured) -> LocalShards:
        """Return the pieces of `src` on this rank."""
        return describe_local(captured.tensors, (), None, self.rank)

    def open(self, captured: Captured, catalog: Catalog, known: LiveValues) -> Opened:
        """Describe `src` and `dst` as they are now, the values of all ranks included.

        Parameters
        ----------
        catalog
            The tensors of all ranks.
        known
            The values of all ranks.
        """
        saved = catalog = known.added_to(catalog)
        if self._options.rename is not None:
            saved = renamed(catalog, self._options.rename)
        old = {new.name: value.name for new, value in zip(saved.values_table, catalog.values_table, strict=True)}
        target = prepare_load(self._dst, saved, rank=self.rank, size=self.size)
        target, saved, ignored = without_ignored(target, saved, self._options.load.ignore)
        values = known.decoded(saved.values_table, old, target.prefixes, PerRankValues)
        unfit = (*missing_values(saved, target.values), *target.check(values))
        wanted = describe_local(target.tensors, (), None, self.rank)
        return Opened(self.held(captured), wanted, saved, target, values, ignored, unfit)

    def layout_of(self, opened: Opened) -> bytes:
        """Return a digest of the layouts of both states on this rank; it changes if either layout does."""
        parts = []
        for local in (opened.held, opened.wanted):
            *layout, _ = encode_metadata(local.local_metadata)
            parts += [*layout, bytes(self.skips_host(local))]
        return digest128(msgpack.packb(parts))

    def names_of(self, opened: Opened) -> bytes:
        """Return a digest of the options, the wanted names, and the names, paths and kinds of values.

        A kept plan fits only if this digest and that of `layout_of` have not changed.
        """
        target, values = opened.target, [(value.name, value.path, int(value.kind)) for value in opened.saved.values_table]
        return digest128(msgpack.packb([repr(self._options), target.prefixes, target.unplaced, opened.names, values]))

    def skips_host(self, local: LocalShards) -> list[bool]:
        """Return for each row (piece) whether messages can carry it from its device, without a copy in host memory."""
        if self._options.delta:  # snapshots are compared in host memory
            return [False] * len(memory_rows(local))
        known: dict[str, bool] = {"cpu": False}
        for tensor in memory_rows(local):
            kind = tensor.device.type
            if kind not in known:
                known[kind] = carries(self._group, kind)
        return [known[tensor.device.type] for tensor in memory_rows(local)]

    def device(self, opened: Opened) -> torch.device:
        """Return the device for messages that bypass host memory: the device of the first tensor that such messages carry.

        If they carry none, it is the accelerator of this process, or host memory if it has none.
        """
        both = (opened.held, opened.wanted)
        travel = (tensor.device for local in both for tensor in compress(memory_rows(local), self.skips_host(local)))
        return next(travel, current_accelerator() or HOST)
