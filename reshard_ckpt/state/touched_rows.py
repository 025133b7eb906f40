"""Tracking of the rows of embedding tables that training used, for saves that write only some rows (`TouchedRows`).

1. Hooks on modules see the indices of each forward pass. A row changes in the optimizer step after it, so the policy
   ``"touched"`` keeps the indices until that step, and then marks the rows. It also marks each row that has a gradient in the
   step, which may come from an earlier forward pass.
2. `TouchedRows.begin` finds the tables in the state of a save by their memory. `engine.saving.touched` merges the scores of all
   ranks, and chooses the rows. `Table.take` then resets the scores of the chosen rows.
3. `TouchedRows.committed` notes the id of the checkpoint. Only a save with that checkpoint as its base trusts the scores. The id
   is cleared, so that the next save compares blocks, by a failed save; by a change of a table or of its optimizer's state outside
   optimizer steps (its version counter shows it); and by a save that gives a table another name.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.catalog.packed import BITS
from ..core.catalog.param_groups import comparable, hyperparameters
from ..core.report import check_choice
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
        now = {_memory_key(memory): _version(memory) for memory in (self.parameter, self.memory, *state)}
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
        group = {**_group_of(optimizer, self), "lr": 1.0}
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
        """Record the name, the number of rows and the first row (`first`) of the global table.

        `tensor` is the tensor of the state that has this table's memory.

        Raises
        ------
        UsageError
            The rows on this rank are not one range of consecutive rows of the global table.
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


class TouchedRows:
    """Tracks the rows of embedding tables that training used, for ``rows=`` of `save`, `async_save` and `Manager.save`.

    With ``base=`` such a save writes only the chosen rows of each table, and of the optimizer state that has a row for each of
    them. It refers to the base for the other rows. Every other tensor is compared with the base block by block. The rows count
    from the last save with this tracker: if the base is another checkpoint, or if tables were loaded since, the tables are
    compared block by block too. So the first save may have any base, or none.

    Make it after the model is sharded and loaded, before its first forward pass. Ranks share their rows when they save.

    Parameters
    ----------
    table
        A module with ``nn.Embedding`` or ``nn.EmbeddingBag`` somewhere in it, or with tables of FBGEMM as TorchRec has them; or a
        parameter, whose rows are taken from its gradients.
    policy
        ``"touched"``: all rows that a step updated, so that the checkpoint is bit for bit that of a whole save. It needs an
        optimizer that leaves all other rows alone: SparseAdam, Adagrad without weight decay, or SGD without momentum and weight
        decay. It keeps 1 bit a row, and the indices of the forward passes since the last step. The other policies save fewer
        rows, as in CPR (Maeng et al., 2020). In the checkpoint, the rows that are not saved have older values; its catalog names
        the tables. ``"most_used"`` (MFU): the rows with the most uses since they were saved; 4 bytes a row. ``"sampled"`` (SSU):
        rows drawn at random from those in use; 8 × `fraction` bytes a row. ``"largest_change"`` (SCAR): the rows whose values are
        farthest from those saved; a copy of this rank's part of the tables.
    fraction
        For all but ``"touched"``: the share of the rows of each table that a save writes, by default 1/8.
    bits
        8 or 4: the number of bits that an element of a chosen row has in its file. Elements are rounded to steps between the
        row's least and greatest element (asymmetric, per row, as in Check-N-Run, Eisenman et al., 2022); each row takes 8 bytes
        more. A load returns the rounded values; the catalog names the tables. Optimizer state stays exact, and so does a save
        that chooses no rows. By default all rows are exact.

    Raises
    ------
    UsageError
        There is no table, or an option has another value.

    Examples
    --------
    >>> table = nn.Embedding(1000, 16, sparse=True)
    >>> rows = TouchedRows(table)
    >>> rows.policy, rows.since
    ('touched', None)
    """

    def __init__(
        self, table: nn.Module | torch.Tensor, *, policy: str = "touched", fraction: float | None = None, bits: int | None = None
    ) -> None:
        check_choice("policy", policy, POLICIES)
        if fraction is not None and (policy == "touched" or not 0 < fraction <= 1):
            raise UsageError(f"fraction={fraction}: pass a share above 0 and up to 1, and none with policy='touched'")
        if bits not in (None, *BITS):
            raise UsageError(f"bits={bits}: pass one of {', '.join(map(str, BITS))}, or leave it out for exact rows")
        self.bits = bits
        self.policy, self.fraction = policy, 0.125 if fraction is None and policy != "touched" else fraction
        self.since: str | None = None
        """The id of the save from which the rows count; None if nothing is known."""
        self._pending = self._was_changed = False
        self._held: Mapping[str, tuple[Any, ...]] = {}
        """The memory of each tensor of the last save on this rank, by name."""
        self._tables: dict[int, Table] = {}
        self._handles: list[Any] = []
        if isinstance(table, torch.Tensor):
            added = self._table(table)
            hook = _WeakHook(self._of_gradient, added)
            self._handles.append(table.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        else:
            for module in table.modules():
                self._hook(module)
        if not self._tables:
            raise UsageError(
                f"TouchedRows: {type(table).__name__} has no nn.Embedding, nn.EmbeddingBag or table of FBGEMM; pass a module "
                "that has one, or the parameter itself"
            )
        for register, call in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            self._handles.append(register(_WeakHook(call)))

    def mark(self, parameter: torch.Tensor, rows: torch.Tensor) -> None:
        """Record that rows of a table were changed outside of optimizer steps, such as by your own code.

        Raises
        ------
        UsageError
            The parameter is not a table of this tracker, or it lacks one of the rows.
        """
        table = self._tables.get(id(parameter))
        if table is None:
            raise UsageError("mark: this parameter is no table of this TouchedRows; pass one of the module that it was made of")
        num_rows = parameter.shape[0]
        least, most = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
        if least < -num_rows or most >= num_rows:
            raise UsageError(f"mark: rows {least} to {most} of a table of {num_rows} rows; pass rows that it has")
        table.use(rows % num_rows)
        table.updated()

    def close(self) -> None:
        """Remove all hooks from modules and optimizers; nothing is tracked any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, tensors: Iterable[LocalTensor]) -> Sequence[Table]:
        """Begin a save of a state that has these tensors, and return the tracked tables among them.

        Raises
        ------
        UsageError
            The state has none of the tables, or something else than lookups changes a table's rows.
        """
        tensors = list(tensors)
        by_key = {_memory_key(table.memory): table for table in self._tables.values()}
        found: dict[Table, list[str]] = {}
        for tensor in tensors:
            of_memory = by_key.get(_memory_key(tensor.memory))
            if of_memory is not None:
                if of_memory not in found:
                    of_memory.locate(tensor)
                found.setdefault(of_memory, []).append(tensor.spec.name)
        for tracked in self._tables.values():
            self._look(tracked)
        self._look_at_state(tensors, found)
        if self._pending:  # the last save failed, and its rows are forgotten
            self.since = None
        self._pending, self._was_changed = True, False
        if not found:
            raise UsageError(
                "rows=: the state has none of its tables: pass the module that it was made of, and make it after the model is "
                "sharded"
            )
        if self.policy == "touched":
            for table, names in found.items():
                _check_exact(table, names)
        return list(found)

    def _look_at_state(self, tensors: Sequence[LocalTensor], found: Mapping[Table, Sequence[str]]) -> None:
        """Forget `since`, the save from which rows count, if optimizer state changed in an unknown way or tensors traded names.

        If a table or its state now has a name that another tensor had in the last save, its unchanged rows would refer to the
        rows of that tensor.
        """
        # before, held: the memory of each tensor of the last save and of this one, by name
        before, held = self._held, {spec.name: _memory_key(memory) for spec, memory in tensors}
        self._held = held
        table_of = {name: table for table, names in found.items() for name in names}
        if any(before.get(name, held[name]) != held[name] for name in table_of):
            self.since = None
        memory_before = set(before.values())
        for spec, memory in tensors:
            table = None if spec.link is None else table_of.get(spec.link.parameter or "")
            if table is None or spec.shape[:1] != (table.num_rows,) or spec.name in table_of:
                continue
            # A step may have put new memory in the place of a tensor: then that memory was not in the last save.
            if held[spec.name] in memory_before and before.get(spec.name, held[spec.name]) != held[spec.name]:
                self.since = None
            if not table.is_fused:
                self._look(table, [memory])

    def committed(self, save_id: str) -> None:
        """Record that the running save was committed with this id. Rows count from it, unless something unknown has changed."""
        self._pending = False
        self.since = None if self._was_changed else save_id

    def _table(self, parameter: torch.Tensor, *, is_fused: bool = False) -> Table:
        table = self._tables.get(id(parameter))
        if table is None:
            table = self._tables[id(parameter)] = Table(parameter, self.policy, self.fraction or 1, is_fused=is_fused)
        table.num_uses += 1
        return table

    def _hook(self, module: nn.Module) -> None:
        """Register forward hooks on a module that looks rows up in tables; do nothing for any other module."""
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            table = self._table(module.weight)
            self._handles.append(module.register_forward_pre_hook(_WeakHook(self._of_lookup, table), with_kwargs=True))
            if module.max_norm is not None:
                table.renorms = True
                self._handles.append(module.register_forward_hook(_WeakHook(self._after_lookup, table)))
        elif hasattr(module, "split_embedding_weights") and hasattr(module, "feature_table_map"):
            weights: Sequence[torch.Tensor] = module.split_embedding_weights()  # type: ignore[operator]
            tables = [self._table(weight, is_fused=True) for weight in weights]
            self._handles.append(module.register_forward_pre_hook(_WeakHook(self._of_batched, tables), with_kwargs=True))

    def _of_lookup(self, table: Table, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if table.renorms:
            self._look(table)
        if table.renorms or (torch.is_grad_enabled() and table.parameter.requires_grad):
            table.use(args[0] if args else kwargs["input"])

    def _after_lookup(self, table: Table, *_: Any) -> None:
        table.note()

    def _of_batched(self, tables: Sequence[Table], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the rows that a forward pass of an FBGEMM module looks up in its tables; its backward pass will update them.

        The indices are ordered by feature, each feature with the same number of bags.
        """
        if not torch.is_grad_enabled():
            return
        named = dict(zip(("indices", "offsets"), args, strict=False)) | dict(kwargs)
        indices, offsets = named["indices"], named["offsets"]
        bags = (len(offsets) - 1) // len(module.feature_table_map)
        for table in tables:
            table.updated()  # by the backward pass of the forward pass before this one
        for feature, number in enumerate(module.feature_table_map):
            low, high = offsets[feature * bags], offsets[(feature + 1) * bags]
            tables[number].use(indices[low:high])

    def _of_gradient(self, table: Table, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            table.use(gradient._indices()[0])
        else:
            table.use((gradient != 0).flatten(1).any(1).nonzero())

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for table in self._tables_of(optimizer):
            self._look(table, table.state_in(optimizer))

    def _look(self, table: Table, state: Iterable[torch.Tensor] = ()) -> None:
        """Forget `since`, the save from which rows count, if the table or its optimizer's state changed in an unknown way."""
        if table.note(state):
            self.since, self._was_changed = None, True

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for table in self._tables_of(optimizer):
            table.optimizers.add(optimizer)
            table.stepped()
            table.note(table.state_in(optimizer))
            # Looked at now: at the save, the optimizer may be gone, or have other hyperparameters.
            if self.policy == "touched" and (self.since is not None or self._pending) and table.is_moved_by(optimizer):
                self.since, self._was_changed = None, True

    def _tables_of(self, optimizer: torch.optim.Optimizer) -> list[Table]:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [table for key, table in self._tables.items() if key in ids]


def _memory_key(memory: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensor objects of the same shape over the same memory.

    It does not keep the memory alive. While the key lives, no other memory has an equal one.
    """
    return StorageWeakRef(memory.untyped_storage()), memory.storage_offset(), tuple(memory.shape)  # type: ignore[no-untyped-call]


def _version(memory: torch.Tensor) -> float:
    """Return torch's version counter of a tensor, which rises with each change that torch sees.

    An inference tensor has no counter. It gets NaN, which differs from every earlier version, so any change counts as unknown.
    """
    return math.nan if memory.is_inference() else memory._version


class _WeakHook:
    """A hook that calls a method with leading arguments, as long as the method's object is alive; it does not keep it alive."""

    def __init__(self, method: Callable[..., None], *first: Any) -> None:
        self._method, self._first = weakref.WeakMethod(method), first

    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*self._first, *args)


def _check_exact(table: Table, names: Sequence[str]) -> None:
    """Refuse a table if rows may change that no tracked module looked up."""
    advice = "base= alone compares blocks and is exact; or pass another policy= to TouchedRows"
    if len(names) > table.num_uses:
        raise UsageError(
            f"rows=: {' and '.join(names)} are one tensor, and TouchedRows was given {table.num_uses} of the modules that use "
            f"it, so rows may change that it has not seen; pass it the whole model, or leave rows= out: {advice}"
        )
    for optimizer in table.optimizers:
        if moves_other_rows(optimizer, _group_of(optimizer, table)):
            raise UsageError(
                f"rows=: {names[0]}: {type(optimizer).__name__} also moves rows that a step did not touch, by momentum or weight "
                f"decay, so the touched rows are not all that changed: {advice}"
            )


def _group_of(optimizer: torch.optim.Optimizer, table: Table) -> Mapping[str, Any]:
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
