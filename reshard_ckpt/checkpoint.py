"""Save and load checkpoints: the public functions, each a straight line through the rooms."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from .adapters.shards import PerRank, PerRankValues
from .adapters.state import capture, prepare_load
from .adapters.stepped import can_be_held, optimizers_in, owned_storages
from .comm import open_session
from .core.catalog import Catalog, TensorKind
from .core.report import LoadReport
from .core.state import TensorSpec, ValueKind, box_piece, row_major_strides
from .engine.agreement import agree
from .engine.async_save import LINE, SaveHandle, launch, take_ring
from .engine.host_memory import POOL
from .engine.load import LoadOptions, drop_refused, fetch, fetch_catalog, missing_values, open_catalog, resolve, vote
from .engine.rename import renamed
from .engine.save import commit, hold
from .engine.saved_values import SavedValue, open_values
from .engine.verify import VerifyReport, verify_all
from .engine.write import lay_out, write_assignment
from .errors import MismatchError, UsageError
from .format.torch_dtypes import TORCH_DTYPES
from .format.values import encode_value
from .storage import open_storage

__all__ = [
    "LoadReport",
    "PerRank",
    "SaveHandle",
    "VerifyReport",
    "async_save",
    "catalog",
    "load",
    "prepare",
    "read",
    "save",
    "verify",
]

Path = str | os.PathLike[str]
Patterns = Sequence[str] | bool


def save(
    path: Path,
    state: Mapping[str, Any],
    *,
    mesh: Any = None,
    process_group: Any = None,
    metadata: Any = None,
    timeout_s: float = 600.0,
) -> None:
    """Save a state as one checkpoint, from all ranks of a job together.

    Until the last step the path holds what it held before, and after it the new checkpoint, whole.

    Parameters
    ----------
    path
        A folder that all ranks share, or ``memory://name``.
    state
        Modules, optimizers, objects with ``state_dict``, tensors, shards and plain values, by name; see the guide.
    mesh
        A ``DeviceMesh``, or axis names and sizes, outermost first, where the state alone does not show the job's mesh.
    process_group
        The ranks that save together; all, by default.
    metadata
        Plain values to keep in the catalog.
    timeout_s
        How long to wait for another rank before giving up, in seconds.

    Raises
    ------
    UsageError
        The state cannot be saved as it is; the message says what to change.
    StorageError
        The store refused; what the path held before is still there.
    PeerError
        Another rank failed or did not arrive.
    """
    with open_session("save", str(path), process_group=process_group, timeout_s=timeout_s) as comm:
        LINE.wait_turn(when_busy="wait")
        said = encode_value(metadata, "metadata")
        captured = capture(state, mesh=mesh, process_group=process_group)
        with open_storage(path) as storage:
            holdings = hold([(e.spec, e.memory) for e in captured.entries], captured.values, captured.mesh, comm.rank)
            agreed = agree(comm, holdings)
            receipt = write_assignment(storage, holdings, agreed.assignment, comm.rank)
            commit(comm, storage, agreed, receipt, said)


def async_save(
    path: Path,
    state: Mapping[str, Any],
    *,
    staging: str = "eager",
    host_buffer_bytes: int | None = None,
    when_busy: str = "wait",
    mesh: Any = None,
    process_group: Any = None,
    metadata: Any = None,
    timeout_s: float = 600.0,
) -> SaveHandle:
    """Save a state while training goes on.

    Parameters
    ----------
    path, state, mesh, process_group, metadata, timeout_s
        As for `save`.
    staging
        ``"eager"``: the state may change as soon as this returns. ``"lazy"``: this returns sooner, and the state may change once
        ``staged()`` of the handle returns; the steps of the optimizers in the state wait for that by themselves, so a training
        loop needs no change. What else may change meanwhile (buffers, other objects) is copied before this returns.
        Where an optimizer's steps cannot be held back (compiled, ``capturable=True``), lazy is eager.
    host_buffer_bytes
        Upper bound of the host memory for staging, at least 16 MiB. Below what this rank writes, staging is eager, and waits
        for the disk.
    when_busy
        If a save of this process is still under way: ``"wait"`` for it, or ``"error"``.

    Returns
    -------
    SaveHandle
        Its ``result()`` returns once the checkpoint is committed, or raises what went wrong. An error that nobody asked for is
        raised by the next save.

    Raises
    ------
    CheckpointError
        As for `save`, as far as known before this returns; or the previous save failed in the background.
    """
    _check_option("staging", staging, ("eager", "lazy"))
    _check_option("when_busy", when_busy, ("wait", "error"))
    handle = SaveHandle(str(path))
    with ExitStack() as stack:
        comm = stack.enter_context(open_session("save", str(path), process_group=process_group, timeout_s=timeout_s))
        LINE.wait_turn(when_busy=when_busy)
        said = encode_value(metadata, "metadata")
        captured = capture(state, mesh=mesh, process_group=process_group)
        storage = stack.enter_context(open_storage(path))
        holdings = hold([(e.spec, e.memory) for e in captured.entries], captured.values, captured.mesh, comm.rank)
        agreed = agree(comm, holdings)
        guarded = [o for o in optimizers_in(state) if can_be_held(o)] if staging == "lazy" else []
        launch(
            handle,
            stack,
            comm,
            storage,
            holdings,
            agreed,
            said,
            host_buffer_bytes=host_buffer_bytes,
            guarded=guarded,
            owned=owned_storages(guarded),
        )
        LINE.join(handle)
    return handle


def prepare(
    state: Mapping[str, Any],
    *,
    mesh: Any = None,
    process_group: Any = None,
    host_buffer_bytes: int | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Allocate the staging memory for a state, and agree on its layout, before the first `async_save` of it needs both.

    Call it on all ranks, with the state and the options that `async_save` will be given. What an optimizer does not have yet,
    before its first step, is not counted.
    """
    with open_session("prepare", "", process_group=process_group, timeout_s=timeout_s) as comm:
        captured = capture(state, mesh=mesh, process_group=process_group)
        holdings = hold([(e.spec, e.memory) for e in captured.entries], captured.values, captured.mesh, comm.rank)
        agreed = agree(comm, holdings)
        ring = take_ring(holdings, lay_out(holdings, agreed.assignment, comm.rank), host_buffer_bytes)
        POOL.give_back(ring.fill_(0))


def _check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r}: pass one of {', '.join(map(repr, known))}")


def load(
    path: Path,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    verify: bool = True,
    verify_first: bool = False,
    cast: Patterns = False,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    allow_resize: Patterns = False,
    process_group: Any = None,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Load a checkpoint into a state, in place, whatever layout it was saved from.

    Each rank reads just the bytes that its own shards need. Nothing changes before all ranks know that everything fits.

    Parameters
    ----------
    path
        A checkpoint that `save` committed.
    state
        As for `save`: the tensors in it are overwritten, values in dicts replaced, objects given their state back.
    strict
        False loads what fits and reports the rest.
    verify
        Prove the checksum of every block that is read.
    verify_first
        Prove all of them before any tensor changes, at the price of reading twice.
    cast
        Shell-style patterns of names whose dtype may change, or True for all.
    rename
        Saved names, or dotted prefixes of them, mapped to the names of this state; or a function of a saved name.
    allow_resize
        Patterns of names whose global shape may differ: what overlaps loads, the rest keeps its value.
    process_group, timeout_s
        As for `save`.

    Returns
    -------
    LoadReport
        What loaded and, with ``strict=False``, what did not.

    Raises
    ------
    CheckpointNotFound
        The path holds no committed checkpoint.
    MismatchError
        Checkpoint and state disagree; nothing was changed.
    CorruptError
        Bytes are damaged; the message says what had been overwritten.
    PeerError
        Another rank failed or did not arrive.
    """
    options = LoadOptions(strict, verify, verify_first, cast, allow_resize)
    with open_session("load", str(path), process_group=process_group, timeout_s=timeout_s) as comm, open_storage(path) as storage:
        LINE.wait_staged()  # what a save still copies must not change under it
        saved = fetch_catalog(comm, storage)
        saved = saved if rename is None else renamed(saved, rename)
        target = prepare_load(state, saved, rank=comm.rank, size=comm.size)
        values = _for_adapters(open_values(storage, saved, target.prefixes, verify=verify))
        resolved = resolve(saved, [(e.spec, e.memory) for e in target.entries], options)
        unfit = missing_values(saved, target.values) + target.check(values)
        verdict = vote(comm, saved, resolved, target.prefixes, values=unfit, unplaced=target.unplaced, strict=strict)
        resolved = drop_refused(saved, resolved, verdict.refused)
        bytes_read = fetch(storage, saved, resolved, options)
        # Every rank has proved its bytes before any object is given its values.
        comm.gather(b"")
        # What is tied is loaded under one of its names, and there for all.
        loaded = {spec.alias_of or spec.name for spec in resolved.specs}
        target.finish(values, [e.spec.name for e in target.entries if (e.spec.alias_of or e.spec.name) not in loaded])
    return verdict.report.loaded(len(resolved.dests), resolved.plan.num_bytes, bytes_read)


def _for_adapters(values: Mapping[str, SavedValue]) -> dict[str, Any]:
    return {name: PerRankValues(v.value) if v.kind is ValueKind.PER_RANK else v.value for name, v in values.items()}


def catalog(path: Path) -> Catalog:
    """The catalog of a checkpoint: names, shapes, shards, files. No tensor data are read, and no process group is needed."""
    with open_storage(path) as storage:
        return open_catalog(storage)


def verify(path: Path) -> VerifyReport:
    """Read a whole checkpoint and prove every byte of it, in one process; nothing is loaded.

    Returns
    -------
    VerifyReport
        ``.ok``, and ``.problems`` with a line for each thing that is wrong: which file, which bytes, which tensors.

    Raises
    ------
    CheckpointNotFound, CorruptError
        There is no catalog, or it is damaged itself.
    """
    with open_storage(path) as storage:
        return verify_all(storage, open_catalog(storage))


def read(path: Path, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Read whole tensors and values by name, in one process, without model code or a process group.

    Parameters
    ----------
    names
        Which; all by default. A name also stands for everything below it (``"model"`` for ``"model.…"``).

    Returns
    -------
    dict
        CPU tensors and values; a per-rank value is the list of all ranks' values.

    Raises
    ------
    MismatchError
        The checkpoint has none of a name that was asked for.
    """
    with open_storage(path) as storage:
        saved = open_catalog(storage)
        tensors, values = _chosen(saved, names)
        whole = [_whole(saved, name) for name in tensors]
        resolved = resolve(saved, whole, LoadOptions())
        if any(resolved.problems.values()):
            raise MismatchError("\n".join(line for lines in resolved.problems.values() for line in lines))
        fetch(storage, saved, resolved, LoadOptions())
        out: dict[str, Any] = {spec.name: tensor for spec, tensor in whole}
        for name, value in open_values(storage, saved, values, verify=True).items():
            out[name] = list(value.value) if value.kind is ValueKind.PER_RANK else value.value
        return out


def _chosen(saved: Catalog, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Names of the tensors and of the values that the caller asks for."""
    if names is None:
        return list(saved.names), list(saved.value_names)
    if isinstance(names, str):
        raise UsageError(f"names={names!r}: pass a list of names, as in names=[{names!r}]")

    def below(known: Sequence[str], name: str) -> list[str]:
        return [n for n in known if n == name or n.startswith(f"{name}.")]

    found = {name: (below(saved.names, name), below(saved.value_names, name)) for name in names}
    absent = [name for name, (tensors, values) in found.items() if not tensors and not values]
    if absent:
        raise MismatchError(f"{', '.join(absent)}: not in the checkpoint; checkpoint.catalog(path).names lists what is", absent)
    return (
        list(dict.fromkeys(n for tensors, _ in found.values() for n in tensors)),
        list(dict.fromkeys(n for _, values in found.values() for n in values)),
    )


def _whole(saved: Catalog, name: str) -> tuple[TensorSpec, torch.Tensor]:
    """A tensor of its own memory, wanted whole."""
    index = saved.index(name)
    assert saved.tensors_table.kind[index] == TensorKind.TENSOR
    shape, dtype = saved.shape(index), saved.dtype(index)
    piece = box_piece((0,) * len(shape), shape, 0, row_major_strides(shape))
    pieces = (piece,) if np.prod(shape) else ()
    return TensorSpec(name, dtype, shape, pieces), torch.empty(shape, dtype=TORCH_DTYPES[dtype])
