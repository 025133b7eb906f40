"""One embedding table that a `TouchedRows` tracks: its scores, and whether an optimizer moves rows that a step did not touch."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.catalog.param_groups import comparable, hyperparameters
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import UsageError
from .dtensor import dtensor_layout, is_dtensor, local_of
from .row_policies import POLICIES, Scores, Touched

MAX_WAITING = 64
"""The most forward passes since the last step whose indices are kept one by one; with more, they are joined into one list."""


class Table:
    """One embedding table that a `TouchedRows` tracks, on this rank.

    Attributes
    ----------
    parameter
        The parameter, or the local memory of a table whose module keeps several tables in one tensor.
    name, num_rows, first
        In the save in progress: the name and the number of rows of the global table, and the global row of the first score.
    num_uses
        The number of modules that use the parameter.
    renorms
        Whether forward passes change rows, as ``max_norm=`` does.
    is_fused
        Whether backward passes update the table, as those of FBGEMM do.
    """

    def __init__(self, parameter: torch.Tensor, policy: str, fraction: float, *, is_fused: bool = False) -> None:
        self.parameter, self.is_fused, self.renorms = parameter, is_fused, False
        self.name, self.num_rows, self.first, self.num_uses = "", 0, 0, 0
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._policy, self._fraction = POLICIES[policy], fraction
        self._begin_anew()
        self._is_exact, self._counts_memory = policy == "touched", policy == "largest_change"
        self._tried: tuple[Any, bool] | None = None
        """The last optimizer and hyperparameters of `is_moved_by`, and the answer."""
        self._versions: dict[tuple[Any, ...], float] = {}
        """The version of the table, and of each tensor of its optimizer's state, after the last known change, by the memory."""
        self.note()

    @property
    def memory(self) -> torch.Tensor:
        memory: torch.Tensor = local_of(self.parameter)
        return memory

    def _begin_anew(self) -> None:
        """Reset all scores and forget the rows of forward passes: the table is new, or has another shape or dtype than before."""
        self._looks = self.parameter.shape, self.parameter.dtype
        self._store = self._policy(self.parameter.shape[0], self._fraction, self.memory)
        self._waiting: list[torch.Tensor] = []

    def note(self, state: Iterable[torch.Tensor] = ()) -> bool:
        """Accept the present contents of the table, and of these tensors of its optimizer's state, as known.

        Return whether there was an unknown change: a tensor has changed since the last call with it, or is new here.
        """
        if self._looks != (self.parameter.shape, self.parameter.dtype):
            self._begin_anew()
        now = {memory_key(memory): _version(memory) for memory in (self.parameter, self.memory, *state)}
        is_unknown = any(self._versions.get(key) != version for key, version in now.items())
        self._versions = {key: version for key, version in self._versions.items() if not key[0].expired()} | now
        return is_unknown

    def state_in(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the local tensors of this table's optimizer state that have a row for each row of the table."""
        values = optimizer.state.get(self.parameter, {}).values()
        state = [local_of(value) for value in values if isinstance(value, torch.Tensor)]
        return [memory for memory in state if memory.shape[:1] == self.memory.shape[:1]]

    def is_moved_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether a step of this optimizer may change rows without a gradient; True also if that cannot be tried out.

        It is tried with a learning rate of 1, because the real one changes from step to step.
        """
        group = {**group_of(optimizer, self), "lr": 1.0}
        key = type(optimizer), comparable(hyperparameters(group))
        if self._tried is None or self._tried[0] != key:
            self._tried = key, moves_other_rows(optimizer, group) is not False
        return self._tried[1]

    @torch.no_grad()
    def use(self, rows: torch.Tensor) -> None:
        """Record the rows that a forward pass looks up: a tensor of indices, of any shape."""
        rows = local_of(rows).detach().flatten().long()
        if self._looks != (self.parameter.shape, self.parameter.dtype):
            self._begin_anew()
        if not self._is_exact or self.renorms:
            self._store.add(rows)
        if self._is_exact:
            self._waiting.append(rows.clone())  # the caller may reuse its memory
            if len(self._waiting) > MAX_WAITING:
                self._waiting = [torch.cat(self._waiting).unique()]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def stepped(self) -> None:
        """Record that an optimizer step has updated the rows looked up since the last step, and all rows with a gradient.

        Rows have a gradient of an earlier forward pass if a loop does not clear it, steps twice, or keeps the graph.
        """
        gradient = self.parameter.grad
        if isinstance(self._store, Touched) and gradient is not None:
            if gradient.is_sparse:
                self._store.add(gradient._indices()[0])
            else:
                self._store.add_where(self._rows_with(gradient))
        self.updated()

    def _rows_with(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a mask of the parameter's rows, (rows,) bool, that have a gradient on this rank; all rows if that is unknown."""
        local: torch.Tensor = local_of(gradient)
        has = local.flatten(1).any(1) if local.ndim > 1 else local.bool()
        if not is_dtensor(self.parameter):
            return has
        layout = dtensor_layout(self.parameter, tuple(self.memory.shape), "")
        if layout.flat_start is not None or local.shape != self.memory.shape:
            return torch.ones(self.parameter.shape[0], dtype=torch.bool, device=local.device)
        rows = torch.zeros(self.parameter.shape[0], dtype=torch.bool, device=local.device)
        for box in layout.boxes:
            local_row, row, count = box.local_offsets[0], box.offsets[0], box.lengths[0]
            rows[row : row + count] |= has[local_row : local_row + count]
        return rows

    @torch.no_grad()
    def updated(self) -> None:
        """Mark the rows of the forward passes so far as updated."""
        for rows in self._waiting:
            self._store.add(rows)
        self._waiting.clear()
        self.note()

    def locate(self, tensor: LocalTensor) -> None:
        """Record the name of the global table, its number of rows, and which of its rows has this rank's first score (`first`).

        `tensor` is the tensor of the state whose memory is that of this table. Raise `UsageError` if the rows on this rank are
        not one range of consecutive rows of the global table.
        """
        spec = tensor.spec
        self.name, self.num_rows, self.first = spec.name, spec.shape[0], 0
        if self._counts_memory or not is_dtensor(self.parameter):  # the indices of a DTensor's module count global rows
            offsets = {piece.offsets[0] for piece in spec.pieces}
            if len(offsets) > 1 or any(piece.lengths[0] != self.memory.shape[0] for piece in spec.pieces):
                raise UsageError(
                    f"{spec.name}: rows= needs tables of which each rank holds consecutive rows, and this rank holds "
                    f"{len(spec.pieces)} pieces: leave rows= out, and base= compares blocks"
                )
            self.first = next(iter(offsets), 0)

    @torch.no_grad()
    def scores(self) -> Scores:
        """Return the score of each row, from global row `first` on; a row with score 0 need not be saved."""
        if self.is_fused:  # the last backward pass may have updated these, or may do so yet
            for rows in self._waiting:
                self._store.add(rows)
        return self._store.scores(self.memory)

    @torch.no_grad()
    def take(self, chosen: NDArray[np.bool_]) -> None:
        """Reset the scores of rows that are saved now; `chosen` is a mask of all rows of the global table."""
        num = self.memory.shape[0] if self._counts_memory else self.parameter.shape[0]
        self._store.take(chosen[self.first : self.first + num], self.memory)


def group_of(optimizer: torch.optim.Optimizer, table: Table) -> Mapping[str, Any]:
    """Return the parameter group of an optimizer that lists a table."""
    group: Mapping[str, Any] = next(g for g in optimizer.param_groups if any(p is table.parameter for p in g["params"]))
    return group


def moves_other_rows(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Try out whether an optimizer changes a row without a gradient, or that row's state, in two steps on a small table.

    A new optimizer of the same class steps on a table of two rows. Return None if its step fails, or if it cannot be made from
    the hyperparameters of the group, such as one that wraps another optimizer.

    >>> table = nn.Parameter(torch.ones(3, 2))
    >>> tried = [torch.optim.Adagrad([table]), torch.optim.AdamW([table]), torch.optim.SGD([table], momentum=0.9)]
    >>> [moves_other_rows(optimizer, optimizer.param_groups[0]) for optimizer in tried]
    [False, True, True]
    """
    tried = nn.Parameter(torch.ones(2, 2))
    taken = inspect.signature(type(optimizer)).parameters  # AdamW has defaults that its constructor does not take
    options = {key: value for key, value in group.items() if key in taken and key != "params"}
    if not options.get("lr", 1):  # a schedule has ended at 0, and steps before had another rate
        options["lr"] = 1.0
    try:
        new = type(optimizer)([tried], **options)
    except Exception:
        return None
    for lookup in ([0, 1], [0]):
        before = [tried.detach().clone(), *(v.clone() for v in new.state[tried].values() if _has_rows(v))]
        for is_sparse in (False, True):
            gradient = torch.zeros(2, 2)
            gradient[lookup] = 1
            tried.grad = gradient.to_sparse(1) if is_sparse else gradient
            try:
                new.step(lambda: 0.0)  # without a closure, LBFGS takes no step
                break
            except Exception:  # SparseAdam takes sparse gradients only
                if is_sparse:
                    return None
    held = [tried.detach(), *(v for v in new.state[tried].values() if _has_rows(v))]
    return any(not torch.equal(old[1], now[1]) for old, now in zip(before, held, strict=True))


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:1] == (2,)


def memory_key(memory: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensor objects of the same shape over the same memory.

    It does not keep the memory alive. While the key lives, no other memory has an equal one.
    """
    return StorageWeakRef(memory.untyped_storage()), memory.storage_offset(), tuple(memory.shape)  # type: ignore[no-untyped-call]


def _version(memory: torch.Tensor) -> float:
    """Return torch's version counter of a tensor, which rises with each change that torch sees.

    An inference tensor has no counter. It gets NaN, which differs from every earlier version, so any change counts as unknown.
    """
    return math.nan if memory.is_inference() else memory._version
