"""The parameters of modules that FSDP1 (``FullyShardedDataParallel``) wraps, as runs under their own names.

FSDP1 flattens the parameters of a unit (a wrapped module), lays them end to end, and cuts the result evenly over ranks. So a rank
holds some parameters whole, a run of one or two others, and nothing of the rest:

1. The state dict of the module is read without FSDP1's hooks, which would gather all parameters.
2. Each parameter becomes a `FlatPart`, a `FlatShard` over this rank's memory. With ``use_orig_params=True`` its tensor is the
   module's parameter. Otherwise it is a view into the flat parameter, and an optimizer knows only that.
3. A buffer that mixed precision has cast is copied to its first dtype, as FSDP1's own state dict does, and copied back after a
   load.
4. An optimizer of flat parameters has state of them alone. `FlatState` divides it by parts.
5. After a load, parameters that a forward left gathered are freed, so that the next forward gathers the loaded ones.

torch has no public functions for this. All private names of FSDP1 that this library needs are in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..core.catalog.names import unwrapped
from ..core.catalog.specs import Ints
from ..errors import MismatchError, UnsupportedError
from .dtensor import dtensor_layout
from .shards import FlatShard


class FlatPart(FlatShard):
    """This rank's run of one parameter that FSDP1 has flattened.

    Attributes
    ----------
    held_in
        The parameter that an optimizer knows: the parameter itself, or the flat parameter that it is a part of.
    shard
        This rank's part of the flat parameter, if `held_in` is the flat parameter; else None.
    at
        The index in `shard` at which the run begins.
    """

    __slots__ = ("at", "held_in", "shard")

    def __init__(self, tensor: torch.Tensor, held_in: Any, shard: torch.Tensor | None, at: int, **where: Any) -> None:
        super().__init__(tensor, **where)
        self.held_in, self.shard, self.at = held_in, shard, at


class FlatModule:
    """The units of FSDP1 (wrapped modules) in one module: this rank's part of each parameter, and the buffers that were cast.

    Raises
    ------
    UnsupportedError
        This release of torch keeps flat parameters in another way, or the memory order of a parameter is not row-major.
    """

    def __init__(self, units: Sequence[Any], name: str) -> None:
        self._name = name
        self._parts: dict[tuple[int, str], FlatPart] = {}
        """The part of each parameter, by the id of the module that holds the parameter, and its name there."""
        self._inside: dict[int, list[tuple[str, FlatPart]]] = {}
        """The parameters in each flat parameter, by its id."""
        self._cast: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Buffers, and their copies in their own dtypes."""
        try:
            self._handles = [unit._handle for unit in units if unit._handle is not None]
            for handle in self._handles:
                self._open(handle.flat_param)
            self._hooks = [hooks for unit in units for hooks in (unit._state_dict_pre_hooks, unit._state_dict_hooks)]
            self._dtypes = {key: dtype for unit in units for key, dtype in _dtypes_before_cast(unit)}
        except AttributeError as error:
            raise UnsupportedError(
                f"{name}: torch {torch.__version__} keeps the flat parameters of FSDP1 in a way that is unknown here ({error}); "
                "save the result of torch.distributed.checkpoint.state_dict.get_state_dict, or use fully_shard"
            ) from None

    def _open(self, flat: Any) -> None:
        """Record this rank's part of each parameter inside one flat parameter."""
        # A forward may have put the gathered parameters into `flat`. Before the first forward, it is the shard itself.
        shard = getattr(flat, "_local_shard", flat).detach()
        inside = self._inside[id(flat)] = []
        columns = flat._fqns, flat._shapes, flat._contiguities, flat._param_extensions, flat._shard_param_infos, flat._param_infos
        for i, (fqn, shape, is_contiguous, extension, run, (own_name, owner, _)) in enumerate(zip(*columns, strict=True)):
            if not is_contiguous:
                raise UnsupportedError(
                    f"{self._name}: FSDP1 flattened {fqn} of shape {tuple(shape)} in the order of its memory, which is not "
                    "row-major (channels_last?); make parameters contiguous before FSDP1 wraps them, or use fully_shard"
                )
            at, count, start = (run.offset_in_shard, run.numel_in_shard, run.intra_param_start_idx) if run.in_shard else (0, 0, 0)
            where = {"start": start, **_place_of(tuple(shape), extension, f"{self._name}.{fqn}")}
            memory = shard[at : at + count]
            if flat._params is None:
                part = FlatPart(memory, flat, shard, at, **where)
            else:  # use_orig_params=True
                own = flat._params[i]
                # If a summon has put the whole parameter there, this rank's part is in the shard alone.
                part = FlatPart(own if own.numel() == count else memory, own, None, 0, **where)
            self._parts[id(owner), own_name] = part
            inside.append((fqn, part))
        for own_name, owner, below, first_name, first_owner, _ in flat._shared_param_infos:
            part = self._parts[id(owner), own_name] = self._parts[id(first_owner), first_name]
            inside.append((f"{below}.{own_name}" if below else own_name, part))

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Remove FSDP1's own hooks from ``state_dict`` during the ``with`` block; hooks of others stay."""
        with ExitStack() as undo:
            for hooks in self._hooks:
                before = dict(hooks)
                undo.callback(hooks.update, before)
                undo.callback(hooks.clear)
                for key, hook in before.items():
                    if hook.__module__.startswith("torch.distributed.fsdp."):
                        del hooks[key]
            yield

    def entries(self, raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the entries of a state dict. In place of each flat parameter, yield the parameters inside it."""
        for key, value in raw.items():
            above = key.rpartition(".")[0]
            inside = self._inside.get(id(value), [("", value)])
            yield from ((".".join(filter(None, (above, fqn))) if fqn else key, part) for fqn, part in inside)

    def saved_form(self, owner: nn.Module, name: str, value: Any) -> Any:
        """Return the object to save and load in place of `value`, which module `owner` holds as parameter or buffer `name`.

        It is this rank's part if FSDP1 flattened the parameter, a copy in the original dtype if mixed precision cast the buffer,
        or `value` itself.
        """
        part = self._parts.get((id(owner), name))
        if part is not None:
            return part
        dtype = self._dtypes.get(id(value))
        if dtype is None or value.dtype == dtype:
            return value
        copied = value.to(dtype)
        self._cast.append((value, copied))
        return copied

    def is_own(self, value: Any) -> bool:
        """Tell whether `saved_form` gave this object in place of one of the module's own.

        A load into it changes the module, at once or in `finish`.
        """
        return isinstance(value, FlatPart) or any(copied is value for _, copied in self._cast)

    @torch.no_grad()
    def finish(self) -> None:
        """Finish a load: copy loaded buffers back into the module, and free parameters that a forward pass left gathered."""
        for buffer, copied in self._cast:
            buffer.copy_(copied)
        for handle in self._handles:
            is_gathered = hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard()
            if is_gathered:
                handle.reshard(True)
                handle.post_reshard()
                handle._prefetched = False


def _place_of(shape: Ints, extension: Any, name: str) -> dict[str, Any]:
    """Return keyword arguments for `FlatShard` that say which tensor FSDP1 flattened.

    Without tensor parallelism it flattened the whole tensor; with it (`extension`), the local tensor of a DTensor.
    """
    if extension is None:
        return {"global_shape": shape}
    # With tensor parallelism, the extension is the spec of the DTensor.
    spec = SimpleNamespace(device_mesh=extension.mesh, placements=extension.placements, shape=extension.shape)
    boxes = dtensor_layout(spec, shape, name).boxes
    pieces = [(box.local_offsets, box.offsets, box.lengths) for box in boxes]
    return {"global_shape": extension.shape, "pieces": pieces, "local_shape": shape}


def _dtypes_before_cast(unit: Any) -> Iterator[tuple[int, torch.dtype]]:
    """Yield the id of each buffer that a unit of FSDP1 casts (mixed precision), and its dtype before that."""
    if unit.mixed_precision.buffer_dtype is None:
        return
    first = {unwrapped(name): dtype for name, dtype in unit._buffer_name_to_orig_dtype.items()}
    for name, buffer in unit.module.named_buffers():
        if unwrapped(name) in first:
            yield id(buffer), first[unwrapped(name)]


class FlatState:
    """An optimizer's state of flat parameters of FSDP1, divided among the parameters inside; `own` is the optimizer's state.

    Attributes
    ----------
    entries
        The state of each part that has state, by the part's id: its run of each tensor as large as this rank's part of the flat
        parameter, and all other values as they are.
    """

    def __init__(self, own: MutableMapping[Any, dict[str, Any]]) -> None:
        self._own = own
        self._parts: dict[Any, list[FlatPart]] = {}
        """The parts of each flat parameter, by its key in the optimizer's state."""
        self.entries: dict[int, dict[str, Any]] = {}

    def add(self, key: Any, part: FlatPart) -> int:
        """Add one part of the flat parameter that has `key` in the optimizer's state; return the part's key in `entries`."""
        self._parts.setdefault(key, []).append(part)
        if key in self._own:  # it may be a defaultdict, where looking makes an entry
            assert part.shard is not None
            size, first, last = part.shard.shape, part.at, part.at + part.tensor.numel()
            entry = self._own[key].items()
            flat = {name for name, value in entry if isinstance(value, torch.Tensor) and value.shape == size}
            self.entries[id(part)] = {name: value[first:last] if name in flat else value for name, value in entry}
        return id(part)

    def give_back(self) -> None:
        """Put the loaded state of all parts back into the optimizer's state of flat parameters. A part without state has zeros.

        Raise `MismatchError` if the parts of a flat parameter have different values where it can have only one.
        """
        for flat_key, listed in self._parts.items():
            parts = {id(part): part for part in listed}  # tied parameters are one part
            of_parts = {number: self.entries.pop(number) for number in parts if number in self.entries}
            if not of_parts:
                self._own.pop(flat_key, None)
                continue
            entry = self._own.setdefault(flat_key, {})
            for key in list(entry):
                if not any(key in found for found in of_parts.values()):
                    del entry[key]
            for key in dict.fromkeys(key for found in of_parts.values() for key in found):
                having = [(parts[number], found[key]) for number, found in of_parts.items() if key in found]
                lacking = [part for number, part in parts.items() if key not in of_parts.get(number, ())]
                entry[key] = _flat_state(having, lacking, entry.get(key), key)


def _flat_state(values: list[tuple[FlatPart, Any]], lacking: list[FlatPart], before: Any, key: str) -> Any:
    """Return one entry of a flat parameter's state, joined from its parts; `before` is the entry before the load.

    A tensor is zero where the `lacking` parts, which have no state, lie in it.
    """
    part, value = values[0]
    assert part.shard is not None
    if isinstance(value, torch.Tensor) and value.shape == part.tensor.shape:
        if isinstance(before, torch.Tensor) and before.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            for absent in lacking:  # the other parts are views of it, so they are loaded already
                before[absent.at : absent.at + absent.tensor.numel()].zero_()
            return before
        whole = torch.zeros(part.shard.shape, dtype=value.dtype, device=value.device)
        for part, value in values:
            whole[part.at : part.at + value.numel()] = value
        return whole
    for _, other in values[1:]:
        if not (torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other):
            raise MismatchError(
                f"state {key}: the parameters of one flat parameter of FSDP1 were saved with {value} and {other}, and it can "
                "have only one; wrap the module with use_orig_params=True"
            )
    return value
