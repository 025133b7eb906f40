"""`convert`: write a checkpoint in another format, without a job, as a stream in bounded memory."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from ..comm import ALONE, Comm, SoloComm, open_session, value_of_first
from ..core.catalog.model import Catalog, TensorKind, retyped, select_entries
from ..core.catalog.specs import ITEM_BYTES, ValueKind
from ..core.report import check_choice
from ..engine.common.progress import OnProgress, SharedTally, reporter, silent
from ..engine.common.rename import renamed
from ..engine.common.resuming import has_checksums, identity
from ..engine.loading.saved_values import plain_values
from ..engine.loading.scales import Dequantizer
from ..engine.loading.stream import Run, stream, whole_run
from ..engine.resharding.reshard import agree_on_id
from ..errors import UsageError
from ..format.columns import TORCH_NAMES
from ..format.dtypes import TORCH_DTYPES
from ..format.files import CONVERT_LOCK
from ..format.objects import names_kept
from ..format.values import decode_value
from ..formats.dcp.names import taken_apart
from ..formats.dcp.values import torch_saved
from ..formats.dcp.write import OPTIMIZER_FORMS, write_folder
from ..formats.dcp.write import lay_out as lay_out_dcp
from ..formats.destination import OutputFolder, new_file, new_folder, real_path
from ..formats.huggingface import copy_side_files
from ..formats.safetensors import lay_out, write_safetensors
from ..formats.source import Format, Path, Source, failing, known_formats, locate, open_shared_source, open_source, with_options
from ..formats.torch_writer import write_torch
from ..formats.unstacked import Unstacked
from ..formats.unstacked import unstack as take_apart
from ..state.describe import paths_of_values
from ..state.modules import is_nothing
from ..state.targets import Prefixes
from ..storage import LocalStorage, Lock, Storage, is_object_path, open_storage, path_text
from .casting import applied_scales, cast_dtypes, dequantizer_of
from .resharding import write_as_one_rank
from .selecting import Names, select_names, top_level_keys
from .topology_options import renamed_catalog

MODEL = "model"
MAX_SHARD_SIZE = "5GB"
WRITTEN_HERE = ("safetensors", "torch", "dcp", "reshard")
"""The formats that this module writes itself. The `Format` of any other has a function `write`."""


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
        `root`, or are values, which safetensors cannot hold, or are empty dicts or lists of these, for which DCP has no entry.
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
    """All that is needed to write one conversion: the source, the chosen tensors and values, and the options.

    `catalog` has the tensors with the dtypes of the result, `saved` the same tensors with the dtypes in the source's files.
    """

    source: Source
    saved: Catalog
    catalog: Catalog
    values: Mapping[str, Any]
    left_out: tuple[str, ...]
    verify: bool
    report: OnProgress
    comm: Comm
    dequantizer: Dequantizer | None = None
    is_dequantized: bool = False
    """True if the conversion dequantizes weights, so the result's config must not call the model quantized."""
    unstacked: Unstacked | None = None
    held: list[Lock] = field(default_factory=list)
    """The lease of the result's prefix in an object store, once it is taken; empty on other ranks than 0."""

    @property
    def written(self) -> Catalog:
        """The catalog of the result's tensors. With `unstacked`, it has a tensor for each layer instead of a stacked one."""
        return self.catalog if self.unstacked is None else self.unstacked.catalog

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the tensors in `catalog`. A tensor that shares the bytes of another one is not counted."""
        table = self.catalog.tensors_table
        own = [i for i in range(len(table.names)) if table.kind[i] == TensorKind.TENSOR and table.alias[i] < 0]
        return sum(prod(self.catalog.shape(i)) * ITEM_BYTES[self.catalog.dtype(i)] for i in own)

    @property
    def new_dtypes(self) -> dict[str, str]:
        """Map each saved dtype to the dtype that most of its elements have in the result, both by torch's names.

        The key ``""`` stands for all other saved dtypes. If weights are dequantized it is the only key, because a config does
        not name the dtype of quantized weights.
        """
        sizes: Counter[tuple[str, str]] = Counter()
        for name in self.catalog.names:
            pair = self.saved.dtype(self.saved.index(name)), self.catalog.dtype(self.catalog.index(name))
            if TORCH_DTYPES[pair[1]].is_floating_point:
                sizes[pair] += prod(self.catalog.shape(self.catalog.index(name)))
        found: dict[str, str] = {}
        for (old, new), _ in reversed(sizes.most_common()):  # the largest one last, which stays
            found["" if self.is_dequantized else TORCH_NAMES[old]] = found[""] = TORCH_NAMES[new]
        return found

    def run_of(self, index: int) -> Run:
        """Return the run of elements in `catalog` that tensor number `index` of `written` consists of."""
        return whole_run(self.catalog, index) if self.unstacked is None else self.unstacked.runs[index]

    def run_bytes(self, runs: Sequence[Run]) -> Iterator[memoryview]:
        """Read these runs from the source, convert them to the dtypes of the result, and yield their bytes in order."""
        tally = SharedTally(self.comm, "convert", self.num_bytes, self.report)
        asked = sum(run.count * ITEM_BYTES[self.catalog.dtype(run.tensor)] for run in runs)
        if self.comm.size == 1 and asked < self.num_bytes:
            tally.add(self.num_bytes - asked)  # the other bytes are in files that an earlier attempt had finished
        cast = [self._cast(run) for run in runs]
        for part in stream(self.source.storage, self.saved, cast, verify=self.verify, dequantizer=self.dequantizer):
            for lease in self.held:  # lost: another conversion may have written there, so write nothing more
                lease.check()
            tally.add(len(part))  # before the yield: nobody resumes this generator after the last part
            yield part

    def _cast(self, run: Run) -> Run:
        dtype = self.catalog.dtype(run.tensor)
        return run if dtype == self.saved.dtype(run.tensor) else replace(run, dtype=dtype)

    def identity(self, *options: object) -> str:
        """Return a digest of the source's catalog and the options. A killed conversion is continued only if it is the same."""
        return identity(self.saved, self.catalog, self.verify, options)


def convert(
    src: Path,
    dst: Path,
    *,
    to: str | None = None,
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
    process_group: Any = ALONE,
    timeout_s: float = 3600.0,
) -> ConvertReport:
    """Write a checkpoint in another format. Memory is bounded at any size; `dst` appears whole, or not at all.

    One process does all of it, or the ranks of a process group divide the bytes among them; the files are the same.

    Parameters
    ----------
    src
        A checkpoint of any format that can be opened.
    dst
        Where to write: a folder, or a file for ``to="torch"``. It must not exist, or be an empty folder, unless `overwrite`.
    to
        ``"safetensors"``: a folder that Hugging Face's libraries load. ``"torch"``: one file that
        ``torch.load(weights_only=True)`` reads. ``"dcp"``: a folder for ``torch.distributed.checkpoint``. ``"megatron"``: the
        folder of one iteration for Megatron-Core. ``"reshard"``: this library's own format. By default ``"torch"`` if `dst` ends
        in ``.pt`` or ``.pth``, else ``"safetensors"``; a `dst` that ends in ``.safetensors`` is refused without `to`.
    max_shard_size
        The size of a safetensors file: bytes, or text such as ``"5GB"`` or ``"4GiB"``. A larger tensor has a file of its own.
    optimizer
        For ``to="dcp"``, the form of optimizers: ``"nested"`` as ``get_optimizer_state_dict`` returns them (the default),
        ``"flat"`` as it does with ``flatten_optimizer_state_dict=True``, or ``"numbered"`` as ``optimizer.state_dict()`` does.
        For ``to="megatron"`` there is ``"fully_reshardable"``: if a Megatron source has the state in buckets
        (``dp_reshardable``), it is named by parameter, provided that the weights prove which parameter each part belongs to.
    unstack
        For ``to="safetensors"``: write layers and experts that are stacked in one tensor, as Megatron stacks them, as one tensor
        each, such as ``layers.3.mlp.weight``.
    root
        Take only names below this one, and remove it from them. By default ``"model"`` for safetensors, which have no place for
        anything else, and ``""``, which is everything, for other formats. With ``to="torch"`` and ``root="model"``, the file is
        the state dict of the model.
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
        As for `load`; rank 0 reports the bytes of all ranks.
    process_group
        The ranks that share the work. Each calls with the same arguments, and gets the same result. None stands for all ranks.
        By default this process is on its own.
    timeout_s
        Seconds to wait for the other ranks in each step.

    Returns
    -------
    ConvertReport

    Raises
    ------
    UsageError
        The options do not fit the checkpoint, or differ between ranks; or something else is at `dst`.
    UnsupportedError
        The format has no place for a selected tensor or value.
    CheckpointNotFound, CorruptError
        The source is missing or damaged; nothing appears at `dst`.
    StorageError
        The disk refused.
    """
    writers = {written.name: written for written in known_formats() if written.write is not None}
    to = _format_of(path_text(dst)) if to is None else to
    check_choice("to", to, (*WRITTEN_HERE, *writers))
    max_bytes, writer = parse_size(max_shard_size), None if to in WRITTEN_HERE else writers[to]
    forms = writer.forms if writer is not None else {form: {} for form in OPTIMIZER_FORMS if to == "dcp"}
    if optimizer is not None and (not isinstance(optimizer, str) or optimizer not in forms):
        known = {"dcp": OPTIMIZER_FORMS, **{written.name: tuple(written.forms) for written in writers.values() if written.forms}}
        choices = "; ".join(f"for to={name!r}, {' and '.join(map(repr, of_one))}" for name, of_one in known.items())
        raise UsageError(
            f"optimizer={optimizer!r}: not a form of optimizers for to={to!r}. Pass one of these, or leave it out: {choices}"
        )
    form = optimizer or OPTIMIZER_FORMS[0]
    formats = with_options(forms[optimizer]) if optimizer is not None else known_formats
    if unstack and to != "safetensors":
        raise UsageError(f"unstack=True: is for to='safetensors', and not for to={to!r}, which keeps them stacked; leave it out")
    with (
        open_session("convert", f"{src} to {dst}", process_group=process_group, timeout_s=timeout_s) as comm,
        open_shared_source(comm, src, formats, timeout_s=timeout_s) as source,
    ):
        report = reporter(progress if comm.rank == 0 else False)
        conversion = _select(comm, source, to, root, select, exclude, rename, cast, verify=verify, report=report)
        if unstack:
            conversion = replace(conversion, unstacked=take_apart(conversion.catalog, source.storage.url))
        identity = conversion.identity(to, max_bytes, unstack, form)
        agree_on_id(comm, identity)
        above, file = locate(path_text(src), source.storage.hints.retry_s)
        with above:  # the folder of a source that is a file; its storage too is of that folder
            read = [real_path(source.storage.url if file is None else f"{above.url}/{file}")]
        if file is None:
            read += [f"{read[0]}/{entry.key}" for entry in source.catalog.files]
        place = path_text(dst)
        if to == "torch":
            with _made(comm, new_file(place, read, overwrite=overwrite)) as path:
                # In an object store a file has one writer: rank 0.
                writing = SoloComm() if is_object_path(place) else comm
                if writing is comm or comm.rank == 0:
                    contents = conversion.catalog, conversion.values, conversion.run_bytes
                    write_torch(path, *contents, is_part=bool(root), comm=writing)
            files, bytes_kept = [os.path.basename(place)], 0
        else:
            changes: Any = {"dequantized": conversion.is_dequantized, "dtypes": conversion.new_dtypes if cast else None}
            beside = partial(copy_side_files, source.storage, source.catalog, **changes) if file is None else None
            # A writer that shares no files expects an empty folder, so it does not go on from the files of a killed attempt.
            resumes = has_checksums(conversion.saved) and (writer is None or writer.shares)
            folder = new_folder(place, read, conversion.held, identity=identity if resumes else None, overwrite=overwrite)
            files, bytes_kept = _write_folder(to, writer, conversion, place, folder, max_bytes, form, beside)
        if to != "reshard" and comm.size > 1:  # the ranks' last counts do not arrive before the end
            report("convert", conversion.num_bytes, conversion.num_bytes)
    return ConvertReport(
        format=to,
        files=tuple(files),
        num_tensors=len(conversion.written.names),
        num_values=len(conversion.values),
        num_bytes=conversion.num_bytes,
        bytes_kept=bytes_kept,
        left_out=conversion.left_out,
    )


def _format_of(dst: str) -> str:
    """Return the format for a result, by the ending of its path."""
    suffix = os.path.splitext(dst)[1]
    if suffix == ".safetensors":
        raise UsageError(
            f"{dst}: a conversion to safetensors writes a folder, with model.safetensors in it; pass the folder's name, such as "
            f"{dst.removesuffix(suffix)}, or to='safetensors' too for a folder of this name"
        )
    return "torch" if suffix in (".pt", ".pth") else "safetensors"


def export(src: str, dst: str, *, root: str, write_beside: Callable[[Catalog, Storage], None], timeout_s: float) -> None:
    """Write the tensors below `root` as a folder for Hugging Face's libraries, as `convert` does.

    Parameters
    ----------
    write_beside
        Writes other files into the folder, such as a tokenizer. Called with the catalog and the store of the export.
    timeout_s
        As for `open_source`.
    """
    with open_source(src, timeout_s=timeout_s) as source:
        conversion = _select(SoloComm(), source, "safetensors", root)
        folder = new_folder(dst, [real_path(src)], conversion.held, overwrite=not is_object_path(dst))
        beside = partial(write_beside, conversion.catalog)
        _write_folder("safetensors", None, conversion, dst, folder, parse_size(MAX_SHARD_SIZE), "", beside)


def _select(
    comm: Comm,
    source: Source,
    to: str,
    root: str | None,
    select: Names = None,
    exclude: Names = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    cast: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
    report: OnProgress = silent,
) -> _Conversion:
    """Choose the tensors and values to convert, with their new names and dtypes. The options are those of `convert`."""
    catalog = renamed_catalog(source, rename, verify=verify)
    # Names are changed first, then selected, then cut down to those below `top`.
    top = (MODEL if to == "safetensors" else "") if root is None else root
    selected = select_names(catalog, select, exclude)
    taken = selected.where(lambda name: not top or name.startswith(f"{top}."))
    taken.refuse_unreadable(catalog)
    tensors, values = taken.tensors, [] if to == "safetensors" else taken.values
    nothing = set() if to == "reshard" else _places_of_others(catalog)  # other formats have one thing for each name
    # An entry for an empty dict is a sign to torch that the folder is of torch 2.3: its `dcp.load` then looks for other names.
    empty = _without_entries(catalog) if to == "dcp" else set()
    values = [name for name in values if name not in nothing | empty]
    if not tensors and not values:
        found = taken if taken.values else selected
        if found.values and not found.tensors:
            why = "safetensors hold no values" if to == "safetensors" else f"to={to!r} has no place for empty values"
            raise UsageError(f"{found.values[0]}: nothing that was selected is a tensor, and {why}; pass another to=")
        raise UsageError(
            f"root={top!r}: nothing that was selected lies below it; pass another root=: the checkpoint has "
            f"{top_level_keys(catalog)}"
        )
    dequantizer = dequantizer_of(source, verify=verify) if cast else None
    dtypes = cast_dtypes(catalog, tensors, cast, dequantizer)
    applied = applied_scales(catalog, dtypes, dequantizer)
    tensors = [name for name in tensors if name not in applied]
    scale_of = dequantizer.quantized.scale if dequantizer else lambda *_: None
    left = [name for name in tensors if name not in dtypes and scale_of(catalog, catalog.index(name))]
    if applied and left and to == "safetensors":
        raise UsageError(f"cast=…: {left[0]} stays quantized, but config.json describes all weights at once; cast it too")
    result = {*tensors, *values, *nothing}
    everything = (*catalog.names, *catalog.value_names, *catalog.unreadable)
    left_out = tuple(name for name in everything if name not in result)
    # kept: the selected tensors as they are read; out: the same with the dtypes of the result.
    kept = select_entries(catalog, tensors, values)
    out = retyped(kept, {name: code for name, code in dtypes.items() if name not in applied})
    if top:
        kept, out = (renamed(each, lambda name: name.removeprefix(f"{top}.")) for each in (kept, out))
    decoded = plain_values(source.storage, kept, kept.value_names, verify=verify)
    return _Conversion(source, kept, out, decoded, left_out, verify, report, comm, dequantizer, bool(applied))


def _without_entries(catalog: Catalog) -> set[str]:
    """Return the names of values for which a folder of DCP has no entry: empty dicts, and lists of nothing but these."""
    small = ((one.name, one.data) for one in catalog.values_table if one.kind is ValueKind.PLAIN and one.data is not None)
    return {name for name, data in small if next(taken_apart((), decode_value(data, name=name)), None) is None}


def _places_of_others(catalog: Catalog) -> set[str]:
    """Return the names of empty values below which the catalog has other names.

    Such a value comes from ranks that had None or an empty dict or list where other ranks had a filled dict or list.
    """
    names = (*catalog.names, *catalog.value_names)
    above, paths = Prefixes(names), paths_of_values(catalog)
    found = [one for one in catalog.values_table if one.kind is ValueKind.PLAIN and above.include(one.name)]
    small = {one.name: decode_value(one.data, name=one.name) for one in found if one.data is not None}
    empty = {name: value for name, value in small.items() if is_nothing(value)}

    def is_in(name: str, top: str) -> bool:
        if name in paths:
            return paths[name][: len(paths[top])] == paths[top]
        # A tensor's path is not known: "a.b" is the key "b" of a dict "a", or a key "a.b". In a list it is a number.
        return not isinstance(empty[top], list | tuple) or name[len(top) + 1 :].partition(".")[0].isdecimal()

    tops = ((name, name[:at]) for name in names if empty for at, char in enumerate(name) if char == ".")
    return {top for name, top in tops if top in empty and is_in(name, top)}


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


@contextmanager
def _made(comm: Comm, place: AbstractContextManager[Any]) -> Iterator[Any]:
    """Enter the context manager `place` (`new_file` or `new_folder`) on rank 0, and yield its result on all ranks. Collective.

    Once a rank has left the block, the result is in its place.
    """
    with ExitStack() as stack:
        yield value_of_first(comm, lambda: stack.enter_context(place))
    value_of_first(comm, lambda: None)


def _write_folder(
    to: str,
    writer: Format | None,
    conversion: _Conversion,
    dst: str,
    folder: AbstractContextManager[OutputFolder],
    max_bytes: int,
    form: str,
    write_beside: Callable[[Storage], None] | None,
) -> tuple[list[str], int]:
    """Write the files of a format that is a folder; return their keys, and the bytes of files that were kept. Collective.

    Parameters
    ----------
    writer
        The format of `to`, if it is not one of `WRITTEN_HERE`.
    dst, folder
        The path of the result, and the `new_folder` to write it in.
    form
        The form of optimizers, as the option ``optimizer=`` of `convert`.
    write_beside
        For ``to="safetensors"``: writes other files into the folder; called on rank 0.
    """
    saved, out, comm, run_bytes = conversion.saved, conversion.catalog, conversion.comm, conversion.run_bytes
    with _made(comm, folder) as (result, resume_info), open_storage(result) as storage, LocalStorage(resume_info) as notes:
        shared: Any = {"comm": comm, "notes": notes if storage.hints.shares_files else None}
        kept = 0
        if to == "safetensors":
            beside = [write_beside] if write_beside is not None and comm.rank == 0 else []
            # In an object store the index of the tensors must be the last file. In a folder, `write_safetensors` first deletes
            # files that no earlier attempt has noted as finished, so the files beside the tensors must come after it.
            for write in beside if is_object_path(dst) else ():
                write(storage)
            files = lay_out(conversion.written, max_bytes, conversion.run_of)
            kept = write_safetensors(storage, files, run_bytes, **shared)
            for write in () if is_object_path(dst) else beside:
                write(storage)
        elif to == "reshard":
            dtypes = {name: out.dtype(out.index(name)) for name in out.names}
            cast = {name: code for name, code in dtypes.items() if code != saved.dtype(saved.index(name))}
            verify, report = conversion.verify, conversion.report
            done = write_as_one_rank(
                comm, conversion.source, saved, cast, result, conversion.dequantizer, verify=verify, report=report
            )
            kept = done.bytes_kept
        elif to == "dcp":
            layout = lay_out_dcp(out, conversion.values, form)
            kept = write_folder(storage, out, layout, run_bytes, torch_saved, **shared)
        else:
            assert writer is not None
            assert writer.write is not None
            # Objects of the other library's classes are written under their names, although it is not installed.
            with names_kept():
                values = plain_values(conversion.source.storage, saved, saved.value_names, verify=conversion.verify)
            if writer.shares or comm.rank == 0:
                with failing(writer, dst, writes=True):
                    kept = writer.write(storage, out, values, run_bytes, **(shared if writer.shares else {})) or 0
        return value_of_first(comm, lambda: [key for key, _ in storage.list() if key != CONVERT_LOCK]), kept
