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

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.catalog.packed import BITS
from ..core.report import check_choice, type_in_words
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import UsageError
from .row_policies import POLICIES
from .tracked_table import Table, group_of, memory_key, moves_other_rows

_INDICES = (torch.int8, torch.int16, torch.int32, torch.int64)
"""The dtypes of indices of rows. Other packages take bytes (uint8) for a mask."""


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
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if fraction is not None and (policy == "touched" or not is_number or not 0 < fraction <= 1):
            raise UsageError(f"fraction={fraction!r}: pass a share above 0 and up to 1, and none with policy='touched'")
        if bits is not None and (type(bits) is not int or bits not in BITS):
            raise UsageError(f"bits={bits!r}: pass one of {', '.join(map(str, BITS))}, or leave it out for exact rows")
        self.bits = bits
        self.policy, self.fraction = policy, 0.125 if fraction is None and policy != "touched" else fraction
        self.since: str | None = None
        """The id of the save from which the rows count; None if nothing is known."""
        self._pending = self._was_changed = False
        self._held: Mapping[str, tuple[Any, ...]] = {}
        """The memory of each tensor of the last save on this rank, by name."""
        self._tables: dict[int, Table] = {}
        self._handles: list[Any] = []
        if isinstance(table, torch.Tensor) and not table.requires_grad:
            raise UsageError("TouchedRows: a tensor without requires_grad has no gradients, which tell its rows; pass its module")
        if not isinstance(table, torch.Tensor | nn.Module):
            raise UsageError(f"TouchedRows: got {type_in_words(table)}; pass a module, or a parameter")
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
        self._handles.append(register_optimizer_step_pre_hook(_WeakHook(self._before_step)))
        self._handles.append(register_optimizer_step_post_hook(_WeakHook(self._after_step)))

    def mark(self, parameter: torch.Tensor, rows: torch.Tensor) -> None:
        """Record that rows of a table, given by their indices, were changed outside of optimizer steps, such as by your own code.

        Raises
        ------
        UsageError
            The parameter is not a table of this tracker, or it lacks one of the rows; or `rows` are not indices.
        """
        table = self._tables.get(id(parameter))
        if table is None:
            raise UsageError("mark: this parameter is no table of this TouchedRows; pass one of the module that it was made of")
        # A mask of bools would count as the rows 0 and 1, and the rows that it means would keep their old values in a save.
        kind = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
        if not isinstance(rows, torch.Tensor) or rows.dtype not in _INDICES or rows.is_meta:
            raise UsageError(f"mark: rows are of {kind}; pass a tensor of indices, such as mask.nonzero() for a mask of rows")
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
        by_key = {memory_key(table.memory): table for table in self._tables.values()}
        found: dict[Table, list[str]] = {}
        for tensor in tensors:
            of_memory = by_key.get(memory_key(tensor.memory))
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
        before, held = self._held, {spec.name: memory_key(memory) for spec, memory in tensors}
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
        if moves_other_rows(optimizer, group_of(optimizer, table)):
            raise UsageError(
                f"rows=: {names[0]}: {type(optimizer).__name__} also moves rows that a step did not touch, by momentum or weight "
                f"decay, so the touched rows are not all that changed: {advice}"
            )
