"""Reading a checkpoint without a state to load into: verify its bytes, read whole tensors, write a manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..comm import ALONE, open_session
from ..core.catalog.model import Catalog, TensorKind
from ..core.catalog.specs import TensorSpec, box_piece, row_major_strides
from ..core.report import summarize
from ..core.timeline import Timeline
from ..engine.checking.manifest import check_listed, check_manifest, make_manifest
from ..engine.checking.verify import VerifyReport, verify_all
from ..engine.common.progress import OnProgress, reporter
from ..engine.loading.load import LoadOptions, check_whole, fetch, resolve
from ..engine.loading.saved_values import plain_values
from ..errors import CheckpointNotFound, CorruptError, MismatchError, UsageError
from ..format.dtypes import TORCH_DTYPES
from ..format.files import timeline_key
from ..format.timeline import MAX_TIMELINE_BYTES, decode_timeline
from ..formats.source import NATIVE, Path, Source, open_shared_source, open_source
from ..storage import path_text
from .selecting import match_names

MAX_WORKERS = 1024
"""The most threads that ``workers=`` may ask for; each takes 8 MiB."""


def read_values(path: Path, chosen: Callable[[str], bool]) -> tuple[Catalog, dict[str, Any]]:
    """Return a checkpoint's catalog, and a dict of the values for whose names `chosen` returns True."""
    with open_source(path) as source:
        names = [name for name in source.catalog.value_names if chosen(name)]
        values = plain_values(source.storage, source.catalog, names)
        return source.catalog, {name: values[name] for name in names}


def verify(
    path: Path,
    *,
    sha256: bool = False,
    workers: int | None = None,
    progress: bool | OnProgress = False,
    process_group: Any = ALONE,
    timeout_s: float = 600.0,
) -> VerifyReport:
    """Read a whole checkpoint and verify every byte of it, by one process or several. Nothing is loaded into a state.

    Parameters
    ----------
    path
        A checkpoint of any format that can be opened.
    sha256
        Also check every file against the manifest that a save with ``sha256=True`` or `write_manifest` made. This reads
        everything a second time.
    workers
        Threads that read and hash, with 8 MiB of memory each; by default as many as a load uses.
    progress
        As for `load`; the step is called "verify", and then "sha256".
    process_group
        The ranks that divide the reading among them, by bytes. All get the same report. None stands for all ranks. By default
        this process is on its own.
    timeout_s
        Seconds to wait for the other ranks.

    Returns
    -------
    VerifyReport
        ``.ok``, and ``.problems`` with a line for each problem: the file, the bytes, the tensors.

    Raises
    ------
    CheckpointNotFound
        The path has no catalog.
    PeerError
        Another rank failed or did not arrive.
    UsageError
        ``sha256=True`` with several ranks.
    """
    check_workers(workers)
    session = open_session("verify", str(path), process_group=process_group, timeout_s=timeout_s)
    try:
        with session as comm, open_shared_source(comm, path, timeout_s=timeout_s) as source:
            if sha256 and comm.size > 1:
                raise UsageError("sha256=True is the work of one process; verify without it on many ranks, and with it on one")
            report = reporter(progress if comm.rank == 0 else False)
            if not sha256:
                return verify_all(source.storage, source.catalog, workers=workers, report=report, comm=comm)
            return _verified_with_sha256(path, source, workers, report)
    except CorruptError as error:  # the catalog is damaged; its message gives the next step
        return VerifyReport((str(error),), 0, 0)


def _verified_with_sha256(path: Path, source: Source, workers: int | None, report: OnProgress) -> VerifyReport:
    storage, saved = source.storage, source.catalog
    if not source.sha256:  # some foreign formats list the SHA-256 of their files
        refuse_foreign(path, source, MANIFEST)
    verified = verify_all(storage, saved, workers=workers, report=report)
    unlisted = [file for file in saved.files if file.key not in source.sha256] if source.sha256 else []
    lines = [f"{storage.url}: {file.key} is not listed with a SHA-256, though tensors lie in it" for file in unlisted]
    try:
        if source.sha256:
            changed = list(check_listed(storage, source.sha256, workers=workers, report=report))
        else:
            changed = list(check_manifest(storage, saved, workers=workers, report=report))
    except CorruptError as error:  # the manifest is missing or damaged; the findings so far stay
        changed = [str(error)]
    unverified = sum(file.size for file in unlisted) if source.sha256 else verified.bytes_unverified
    return replace(verified, problems=(*verified.problems, *changed, *lines), bytes_unverified=unverified)


def write_manifest(path: Path, *, workers: int | None = None, progress: bool | OnProgress = False) -> str:
    """Write a manifest, with the SHA-256 of every file, into a checkpoint that was saved without one.

    Every byte is verified first, so that no damaged file is listed. This reads everything twice.

    Parameters
    ----------
    path
        A checkpoint of this library.
    workers, progress
        As for `verify`.

    Returns
    -------
    str
        The path of the manifest.

    Raises
    ------
    CheckpointNotFound
        The path holds no checkpoint.
    UsageError
        The checkpoint is of another format.
    CorruptError
        The checkpoint is damaged; no manifest was made.
    """
    check_workers(workers)
    with open_source(path) as source:
        refuse_foreign(path, source, MANIFEST)
        report = reporter(progress)
        verified = verify_all(source.storage, source.catalog, workers=workers, report=report)
        if not verified.ok:
            raise CorruptError(
                f"no manifest is made of a damaged checkpoint: {summarize(list(verified.problems), 'use another')}"
            )
        return f"{source.storage.url}/{make_manifest(source.storage, source.catalog, workers=workers, report=report)}"


def check_workers(workers: int | None) -> None:
    """Raise UsageError unless the option ``workers=`` is a positive number of threads, or None."""
    if workers is not None and (type(workers) is not int or not 1 <= workers <= MAX_WORKERS):
        raise UsageError(f"workers={workers!r:.80}: pass a number of threads, from 1 to {MAX_WORKERS:,}")


MANIFEST = "a manifest is made of this library's checkpoints"
"""The reason for which a manifest of a foreign checkpoint is refused."""


def refuse_foreign(path: Path, source: Source, why: str) -> None:
    """Raise UsageError, with the reason `why`, if a checkpoint is not in this library's own format."""
    if source.format != NATIVE:
        raise UsageError(f"{path_text(path)}: {why}; this is a {source.format} one")


def timeline(path: Path) -> Timeline:
    """Read how long each step of each rank took in the save that made this checkpoint.

    Parameters
    ----------
    path
        A checkpoint of this library.

    Returns
    -------
    Timeline

    Raises
    ------
    CheckpointNotFound
        The path holds no checkpoint, or it was saved with ``timeline=False``.
    CorruptError
        The timeline or the catalog is damaged.
    """
    with open_source(path) as source:
        if source.format != NATIVE:
            raise CheckpointNotFound(
                f"{path_text(path)}: has no timeline, as this is a {source.format} checkpoint; look at another"
            )
        key, url = timeline_key(source.catalog.save_id), source.storage.url
        if source.storage.size(key) is None:
            raise CheckpointNotFound(f"{url}: has no {key}; save with timeline=True, or look at another checkpoint")
        return decode_timeline(source.storage.read(key, limit=MAX_TIMELINE_BYTES), where=f"{url}: {key}")


def read(path: Path, names: Sequence[str] | None = None, *, progress: bool | OnProgress = False) -> dict[str, Any]:
    """Read whole tensors and values by name, in one process, without model code or a process group.

    Parameters
    ----------
    path
        A checkpoint of any format that can be opened.
    names
        Names, by default all. A name also stands for everything below it (``"model"`` for ``"model.…"``), and may be a
        shell-style pattern (``"*.bias"``).
    progress
        As for `load`.

    Returns
    -------
    dict
        CPU tensors and values; a per-rank value is the list of all ranks' values.

    Raises
    ------
    MismatchError
        The checkpoint has nothing of one of these names.
    UnsupportedError
        A foreign checkpoint has the name, but in a form that cannot be read, such as a value that only unpickling could make.
    """
    with open_source(path) as source:
        return read_from(source, names, progress=progress)


def read_from(source: Source, names: Sequence[str] | None = None, *, progress: bool | OnProgress = False) -> dict[str, Any]:
    """Read whole tensors and values as `read` does, from a source that is already open."""
    storage, saved = source.storage, source.catalog
    matched = match_names(saved, names)
    matched.refuse_unreadable(saved)
    tensors, values = matched.tensors, matched.values
    check_whole(storage, saved, [saved.index(name) for name in tensors])
    whole = [_whole(saved, name) for name in tensors]
    resolved = resolve(saved, whole, LoadOptions(), window_bytes=storage.hints.read_bytes)
    if any(resolved.problems.values()):
        raise MismatchError("\n".join(line for lines in resolved.problems.values() for line in lines))
    fetch(storage, saved, resolved, LoadOptions(), report=reporter(progress))
    tensors_by_name = {spec.name: tensor for spec, tensor in whole}
    return tensors_by_name | plain_values(storage, saved, values)


def _whole(saved: Catalog, name: str) -> tuple[TensorSpec, torch.Tensor]:
    """Describe a whole saved tensor as one piece, and allocate a CPU tensor to read it into."""
    index = saved.index(name)
    assert saved.tensors_table.kind[index] == TensorKind.TENSOR
    shape, dtype = saved.shape(index), saved.dtype(index)
    piece = box_piece((0,) * len(shape), shape, 0, row_major_strides(shape))
    pieces = (piece,) if np.prod(shape) else ()
    return TensorSpec(name, dtype, shape, pieces), torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cpu")
