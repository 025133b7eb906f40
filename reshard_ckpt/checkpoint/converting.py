"""`convert`: write a checkpoint in another format, without a job, as a stream in bounded memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from ..core.catalog.model import Catalog, TensorKind, retyped, select_entries
from ..core.catalog.specs import ITEM_BYTES
from ..engine.common.progress import OnProgress, Tally, reporter
from ..engine.common.rename import renamed
from ..engine.common.resuming import has_checksums, identity
from ..engine.loading.saved_values import blob_reader, open_values
from ..engine.loading.scales import ENTRIES, Dequantizer
from ..engine.loading.stream import Run, stream, whole_run
from ..errors import UsageError
from ..format.objects import names_kept
from ..formats.dcp import OPTIMIZER_FORMS, write_dcp
from ..formats.destination import PREFIX_LOCK, OutputFolder, new_file, new_folder
from ..formats.huggingface import copy_side_files
from ..formats.safetensors import finished_files, lay_out, write_safetensors
from ..formats.source import Format, Path, Source, known_formats, locate, open_source, with_options
from ..formats.torch_writer import write_torch
from ..formats.unstacked import Unstacked
from ..formats.unstacked import unstack as take_apart
from ..storage import LocalStorage, Storage, is_object_path, open_storage, path_text
from .resharding import write_as_one_rank
from .selecting import Names, SelectedNames, applied_scales, cast_dtypes, dequantizer_of, select_names, top_level_keys
from .topology_options import check_rename

MODEL = "model"
MAX_SHARD_SIZE = "5GB"
WRITTEN_HERE = ("safetensors", "torch", "dcp", "reshard")
"""The formats that this module writes. Others have a `Format.write`."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of `convert`.

    Attributes
    ----------
    format
        The format of the result.
    files
        The files of the result, relative to `dst`; if the result is a single file, its name.
    num_tensors, num_values
        The number of tensors and values in the result. A tensor that is tied to another one counts too.
    num_bytes
        The bytes of the tensors of the result.
    bytes_kept
        Bytes of files that an earlier attempt had finished before it was killed, and that were kept.
    left_out
        Names of tensors and values that the checkpoint has and the result lacks. They were not selected, or lie outside of
        `root`, or are values, which safetensors cannot hold.
    """

    format: str
    files: tuple[str, ...]
    num_tensors: int
    num_values: int
    num_bytes: int
    bytes_kept: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A conversion to be written: `catalog` has the tensors as the result will have them, `saved` the same as they are read."""

    source: Source
    saved: Catalog
    catalog: Catalog
    values: Mapping[str, Any]
    left_out: tuple[str, ...]
    verify: bool
    report: OnProgress
    dequantizer: Dequantizer | None = None
    is_dequantized: bool = False
    """Whether quantized tensors become floats, so that the result is not quantized any more."""
    unstacked: Unstacked | None = None

    @property
    def written(self) -> Catalog:
        """The tensors of the result; with `unstacked`, some are parts of tensors of `catalog`."""
        return self.catalog if self.unstacked is None else self.unstacked.catalog

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that are not aliases."""
        table = self.catalog.tensors_table
        own = [i for i in range(len(table.names)) if table.kind[i] == TensorKind.TENSOR and table.alias[i] < 0]
        return sum(prod(self.catalog.shape(i)) * ITEM_BYTES[self.catalog.dtype(i)] for i in own)

    def tensor_bytes(self, tensors: Sequence[int]) -> Iterator[memoryview]:
        """Yield the bytes of whole tensors, converted, one after another."""
        if self.unstacked is not None:
            return self.run_bytes([self.unstacked.runs[index] for index in tensors])
        return self.run_bytes([whole_run(self.catalog, index) for index in tensors])

    def run_bytes(self, runs: Sequence[Run]) -> Iterator[memoryview]:
        """Yield the bytes of parts of tensors, converted, one after another."""
        tally = Tally("convert", self.num_bytes, self.report)
        asked = sum(run.count * ITEM_BYTES[self.catalog.dtype(run.tensor)] for run in runs)
        if asked < self.num_bytes:
            tally.add(self.num_bytes - asked)  # the other bytes are in files that an earlier attempt had finished
        cast = [self._cast(run) for run in runs]
        for part in stream(self.source.storage, self.saved, cast, verify=self.verify, dequantizer=self.dequantizer):
            tally.add(len(part))  # before the yield: nobody resumes this generator after the last part
            yield part

    def _cast(self, run: Run) -> Run:
        dtype = self.catalog.dtype(run.tensor)
        return run if dtype == self.saved.dtype(run.tensor) else replace(run, dtype=dtype)

    def identity(self, *options: object) -> str | None:
        """Return a digest of the source's bytes and the options; None if the source has no checksums that identify its bytes."""
        return identity(self.saved, self.catalog, self.verify, options) if has_checksums(self.saved) else None


def convert(
    src: Path,
    dst: Path,
    *,
    to: str = "safetensors",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    optimizer: str | None = None,
    unstack: bool = False,
    root: str | None = None,
    select: Names = None,
    exclude: Names = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    cast: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: bool | OnProgress = False,
) -> ConvertReport:
    """Write a checkpoint in another format. Memory is bounded at any size; `dst` appears whole, or not at all.

    Parameters
    ----------
    src
        A checkpoint of any format that can be opened.
    dst
        Where to write: a folder, or a file for ``to="torch"``. It must not exist, or be an empty folder, unless `overwrite`.
    to
        ``"safetensors"``: a folder that Hugging Face's libraries load. ``"torch"``: one file that
        ``torch.load(weights_only=True)`` reads. ``"dcp"``: a folder for ``torch.distributed.checkpoint``. ``"megatron"``: the
        folder of one iteration for Megatron-Core. ``"reshard"``: this library's own format.
    max_shard_size
        The size of a safetensors file: bytes, or text such as ``"5GB"`` or ``"4GiB"``. A larger tensor has a file of its own.
    optimizer
        For ``to="dcp"``, the form of optimizers: ``"nested"`` as ``get_optimizer_state_dict`` returns them (the default), or
        ``"flat"`` as it does with ``flatten_optimizer_state_dict=True``. For ``to="megatron"`` there is ``"fully_reshardable"``:
        if a Megatron source has the state in buckets (``dp_reshardable``), it is named by parameter, provided that the weights
        prove which parameter each part belongs to.
    unstack
        For ``to="safetensors"``: write layers and experts that are stacked in one tensor, as Megatron stacks them, as one tensor
        each, such as ``layers.3.mlp.weight``.
    root
        Take only names below this one, and remove it from them. By default ``"model"`` for safetensors, which have no place for
        anything else, and ``""``, which is everything, for other formats.
    select, exclude
        Names, which also stand for everything below them, or patterns: what to take (by default all), and what to leave out.
    rename
        As for `load`: old names, or dotted prefixes, mapped to new ones. All other options use the new names.
    cast
        Patterns of names, with the dtype that matching floating-point tensors get: ``{"model.*": "bfloat16"}``.
        FP8 weights of a Hugging Face folder are multiplied by their scales, which the result then lacks.
    overwrite
        Replace a checkpoint at `dst`, once the new one is complete. Other files and folders are never replaced, nor is the root
        of a run, nor a step whose files another step refers to.
    verify
        Verify the checksum of every block that is read, if the source has checksums.
    progress
        As for `load`.

    Returns
    -------
    ConvertReport

    Raises
    ------
    UsageError
        The options do not fit the checkpoint; or something else is at `dst`.
    UnsupportedError
        The format has no place for a selected tensor or value.
    CheckpointNotFound, CorruptError
        The source is missing or damaged; nothing appears at `dst`.
    StorageError
        The disk refused.
    """
    writers = {one.name: one for one in known_formats() if one.write is not None}
    if to not in (*WRITTEN_HERE, *writers):
        raise UsageError(f"to={to!r}: there are {', '.join(map(repr, (*WRITTEN_HERE, *writers)))}")
    max_bytes, writer = parse_size(max_shard_size), None if to in WRITTEN_HERE else writers[to]
    forms = writer.forms if writer is not None else {form: {} for form in OPTIMIZER_FORMS if to == "dcp"}
    if optimizer is not None and optimizer not in forms:
        raise UsageError(_unknown_form(optimizer, to, writers.values()))
    form = optimizer or OPTIMIZER_FORMS[0]
    formats = with_options(forms[optimizer]) if optimizer is not None else known_formats
    if unstack and to != "safetensors":
        raise UsageError(f"unstack=True: is for to='safetensors', and not for to={to!r}, which keeps them stacked; leave it out")
    with open_source(src, formats) as source:
        conversion = _select(source, to, root, select, exclude, rename, cast, verify, reporter(progress))
        if unstack:
            conversion = replace(conversion, unstacked=take_apart(conversion.catalog, source.storage.url))
        result = path_text(dst)
        above, file = locate(path_text(src))
        with above:  # the folder of a source that is a file; its storage too is of that folder
            read = source.storage.url if file is None else f"{above.url}/{file}"
        files: tuple[str, ...] = (os.path.basename(result),)
        bytes_kept = 0
        if to == "torch":
            with new_file(result, read, overwrite=overwrite) as path:
                write_torch(path, conversion.catalog, conversion.values, conversion.tensor_bytes)
        else:
            identity = conversion.identity(to, max_bytes, unstack) if to in ("safetensors", "reshard") else None
            with (
                new_folder(result, read, identity=identity, overwrite=overwrite) as output,
                open_storage(output.result) as storage,
            ):
                less = ENTRIES if conversion.is_dequantized else ()
                beside = partial(copy_side_files, source.storage, source.catalog, less=less) if file is None else None
                bytes_kept = _write_folder(to, writer, conversion, output, storage, max_bytes, form, beside)
                files = tuple(key for key, _ in storage.list() if key != PREFIX_LOCK)
    return ConvertReport(
        format=to,
        files=files,
        num_tensors=len(conversion.written.names),
        num_values=len(conversion.values),
        num_bytes=conversion.num_bytes,
        bytes_kept=bytes_kept,
        left_out=conversion.left_out,
    )


def export(src: str, dst: str, *, root: str, write_beside: Callable[[Catalog, Storage], None]) -> None:
    """Write the tensors below `root` as a folder for Hugging Face's libraries, as `convert` does.

    Parameters
    ----------
    write_beside
        Writes the files beside the tensors, before these; it gets the catalog of the export.
    """
    with open_source(src) as source, new_folder(dst, src, overwrite=not is_object_path(dst)) as output:
        conversion = _select(source, "safetensors", root, None, None, None, None, True, reporter(False))
        with open_storage(output.result) as storage:
            max_bytes = parse_size(MAX_SHARD_SIZE)
            _write_folder(
                "safetensors", None, conversion, output, storage, max_bytes, "", partial(write_beside, conversion.catalog)
            )


def _unknown_form(optimizer: str, to: str, writers: Iterable[Format]) -> str:
    known = {"dcp": OPTIMIZER_FORMS, **{one.name: tuple(one.forms) for one in writers if one.forms}}
    choices = "; ".join(f"for to={name!r}, {' and '.join(map(repr, forms))}" for name, forms in known.items())
    return f"optimizer={optimizer!r}: nothing of this name for to={to!r}. There are {choices}; pass one of them, or leave it out"


def _select(
    source: Source,
    to: str,
    root: str | None,
    select: Names,
    exclude: Names,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    cast: Mapping[str, Any] | None,
    verify: bool,
    report: OnProgress,
) -> _Conversion:
    check_rename(source.catalog, rename)
    catalog = source.catalog
    if rename is not None:
        catalog = renamed(catalog, rename, read=blob_reader(source.storage, catalog, verify=verify))
    # Names are changed first, then selected, then cut down to those below `top`.
    top = (MODEL if to == "safetensors" else "") if root is None else root
    selected = select_names(catalog, select, exclude)
    taken = selected.below(top)
    taken.refuse_unreadable(catalog)
    tensors, values = taken.tensors, [] if to == "safetensors" else taken.values
    if not tensors and not values:
        raise UsageError(_nothing_selected(catalog, top, taken if taken.values else selected))
    dequantizer = dequantizer_of(source, verify=verify) if cast else None
    dtypes = cast_dtypes(catalog, tensors, cast, dequantizer)
    applied = applied_scales(catalog, dtypes, dequantizer)
    tensors = [name for name in tensors if name not in applied]
    scale_of = dequantizer.quantized.scale if dequantizer else lambda *_: None
    left = [name for name in tensors if name not in dtypes and scale_of(catalog, catalog.index(name))]
    if applied and left and to == "safetensors":
        raise UsageError(f"cast=…: {left[0]} stays quantized, but config.json describes all weights at once; cast it too")
    result = {*tensors, *values}
    everything = (*catalog.names, *catalog.value_names, *catalog.unreadable)
    left_out = tuple(name for name in everything if name not in result)
    # kept: the selected tensors as they are read; out: the same with the dtypes of the result.
    kept = select_entries(catalog, tensors, values)
    out = retyped(kept, {name: code for name, code in dtypes.items() if name not in applied})
    if top:
        kept, out = (renamed(each, lambda name: name.removeprefix(f"{top}.")) for each in (kept, out))
    opened = open_values(source.storage, kept, kept.value_names, verify=verify)
    decoded = {name: value.plain for name, value in opened.items()}
    return _Conversion(source, kept, out, decoded, left_out, verify, report, dequantizer, bool(applied))


def _nothing_selected(catalog: Catalog, top: str, found: SelectedNames) -> str:
    if found.values and not found.tensors:
        return f"{found.values[0]}: nothing that was selected is a tensor, and safetensors hold no values; pass another to="
    return (
        f"root={top!r}: nothing that was selected lies below it; pass another root=: the checkpoint has {top_level_keys(catalog)}"
    )


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base**power for infix, base in (("", 1000), ("i", 1024)) for power, letter in enumerate("KMGTP", start=1)
}


def parse_size(size: int | str) -> int:
    """Parse a size: a number of bytes, or text with a unit.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(7)
    (5000000000, 1572864, 7)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", str(size).strip())
    units = {unit.upper(): factor for unit, factor in _UNITS.items()}
    if isinstance(size, bool) or match is None or match[2].upper() not in units or float(match[1]) <= 0:
        raise UsageError(f"max_shard_size={size!r}: pass a number of bytes, or one with a unit, as '5GB' or '4GiB'")
    unit_bytes: int = units[match[2].upper()]
    if "." in match[1]:
        return max(int(float(match[1]) * unit_bytes), 1)
    return int(match[1]) * unit_bytes  # not through a float, which is inexact above 2⁵³


def _write_folder(
    to: str,
    writer: Format | None,
    conversion: _Conversion,
    output: OutputFolder,
    storage: Storage,
    max_bytes: int,
    form: str,
    write_beside: Callable[[Storage], None] | None,
) -> int:
    """Write the files of a format that is a folder; return the bytes of kept files, finished by an attempt that was killed.

    Parameters
    ----------
    write_beside
        Writes the files beside the tensors of ``to="safetensors"``.
    """
    saved, out = conversion.saved, conversion.catalog
    if to == "safetensors":
        files = lay_out(conversion.written, max_bytes)
        with LocalStorage(output.resume_info) as resume_info:
            kept = finished_files(storage, resume_info, files)
            storage.delete({key for key, _ in storage.list()} - {file.key for file in kept})
            if write_beside is not None:
                write_beside(storage)
            write_safetensors(storage, conversion.written, conversion.tensor_bytes, files, resume_info=resume_info, kept=kept)
        return sum(file.num_bytes for file in kept)
    if to == "reshard":
        dtypes = {name: out.dtype(out.index(name)) for name in out.names}
        cast = {name: code for name, code in dtypes.items() if code != saved.dtype(saved.index(name))}
        verify, report = conversion.verify, conversion.report
        written = write_as_one_rank(
            conversion.source, saved, cast, output.result, conversion.dequantizer, verify=verify, report=report
        )
        return written.bytes_kept
    if to == "dcp":
        write_dcp(storage, out, conversion.values, conversion.run_bytes, optimizer=form)
        return 0
    assert writer is not None
    assert writer.write is not None
    # Objects of the other library's classes are written under their names, although it is not installed.
    with names_kept():  # so that objects of the other library's classes are written as such, though it is not installed
        opened = open_values(conversion.source.storage, saved, saved.value_names, verify=conversion.verify)
        values = {name: value.plain for name, value in opened.items()}
    writer.write(storage, out, values, conversion.run_bytes)
    return 0
