"""Building the catalog over the files of another library: files, tensors, pieces, aliases, values, and what cannot be read.

Tensors, boxes and files get numbers in the order in which they are added. `CatalogBuilder.finish` sorts the tensors by name,
stores equal boxes once, and checks the result. Rows can be added one by one, or as whole arrays, because a folder of a thousand
ranks has millions of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorKind, TensorTable, ValueEntry
from ..core.catalog.names import link_columns, links_from_names, optimizer_of
from ..core.catalog.param_groups import are_groups
from ..core.catalog.specs import CODES, Ints, StateLink, ValueKind, ValueSpec
from ..core.geometry.columns import group_ids
from ..core.geometry.runs import I64, pad_rows
from ..core.trees import name_of
from ..errors import CheckpointError, CorruptError, NameCollisionError
from ..format.catalog_check import problems
from ..format.columns import dtype_code
from ..format.dtypes import TORCH_DTYPES
from ..format.values import decode_value, encode_path, encode_value
from ..torchfile.archive import TorchFile
from ..torchfile.bounds import FileBudget, refuse_excess
from ..torchfile.tensors import PickledTensor
from .parts import Part, parts_of_box

Numbers = I64 | int


@dataclass(slots=True)
class ForeignTensor:
    """A tensor that was added to a `CatalogBuilder`. `parts` lacks the parts that were added by `CatalogBuilder.rows`."""

    number: int
    name: str
    dtype: str
    shape: Ints
    link: StateLink | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


class CatalogBuilder:
    """Builds the catalog over the files of another library: add the files, then say where the elements of each tensor lie.

    Parameters
    ----------
    format
        The name of the format. It takes the place of the save id, which foreign checkpoints lack.
    where
        The URL of the checkpoint, for messages.

    Attributes
    ----------
    files, tensors
        The files that were added, and the tensors by name.

    Examples
    --------
    Two files hold the two halves of one tensor:

    >>> builder = CatalogBuilder("halves", "memory://doc")
    >>> _ = builder.tensor("model.w", "F32", (4, 2))
    >>> for number, key in enumerate(["upper.bin", "lower.bin"]):
    ...     file = builder.file(key, size=16)
    ...     builder.piece("model.w", file=file, offset=0, offsets=(2 * number, 0), lengths=(2, 2))
    >>> catalog = builder.finish()
    >>> catalog.names, catalog.shape(0)
    (('model.w',), (4, 2))
    """

    def __init__(self, format: str, where: str) -> None:
        self.format, self.where = format, where
        self.files: list[FileEntry] = []
        self.tensors: dict[str, ForeignTensor] = {}
        self._file_numbers: dict[str, int] = {}
        self._aliases: dict[str, tuple[str, StateLink | None]] = {}
        self._num_tensors = 0
        self._boxes: list[tuple[Ints, Ints]] = []
        self._rows: list[tuple[I64, ...]] = []
        self._values: list[ValueEntry] = []
        self._unreadable: dict[str, CheckpointError] = {}
        self._steps: dict[str, tuple[str, int | float]] = {}
        self._budget = FileBudget()

    def file(self, key: str, size: int, rank: int = 0) -> int:
        """Add a file of `size` bytes, or find it if it was added before; return its number.

        `rank` is the rank that wrote it, if the format tells.
        """
        number = self._file_numbers.setdefault(key, len(self.files))
        if number == len(self.files):
            self.files.append(FileEntry(key, size, "", b"", self.format, rank))
        return number

    def of_step(self, key: str, count: str, step: Any) -> None:
        """Check that a count of steps in a file is the same as in the files before it.

        Parameters
        ----------
        key
            The file.
        count
            The name of the count, for messages and to compare it by.
        step
            The count in this file. Anything but a number is ignored.

        Raises
        ------
        CorruptError
            A file before it has another number: files of two saves are mixed.
        """
        if isinstance(step, int | float):
            other, other_step = self._steps.setdefault(count, (key, step))
            if step != other_step:
                raise CorruptError(
                    f"{self.where}: {count} is {other_step} in {other} and {step} in {key}, so files of two saves are mixed; use "
                    "another checkpoint"
                )

    def tensor(
        self,
        name: str,
        dtype: str | torch.dtype,
        shape: Ints,
        parts: Iterable[Part] = (),
        *,
        link: StateLink | None = None,
        again: bool = False,
    ) -> int:
        """Add a tensor and return its number.

        Parameters
        ----------
        dtype
            A dtype of torch, or its name in safetensors, such as ``"BF16"``.
        shape
            The global shape.
        parts
            The places of the tensor's elements that are known already; `piece` and `view` add more.
        link
            Names the parameter if this is a tensor of an optimizer's state. By default, the link follows from the name.
        again
            The tensor may have been added before, with the same dtype and shape, from another file.

        Raises
        ------
        NameCollisionError
            Another tensor has this name.
        CorruptError
            With `again`, it has another dtype or shape than before.
        UnsupportedError
            The catalog has no such dtype.
        """
        code = dtype if isinstance(dtype, str) else dtype_code(dtype, name)
        existing = self.tensors.get(name)
        if existing is None:
            existing = self.tensors[name] = ForeignTensor(self._num_tensors, name, code, shape, link)
            self._num_tensors += 1
        elif not again:
            raise _named_twice(name, self.where)
        elif (existing.dtype, existing.shape) != (code, shape):
            raise CorruptError(
                f"{self.where}: {name} is {existing.dtype} of shape {existing.shape} in one file and {code} of shape {shape} in "
                "another; files of several saves may be mixed, so use another checkpoint"
            )
        existing.parts += (part for part in parts if part.num_elements)
        return existing.number

    def piece(
        self,
        name: str,
        *,
        file: int,
        offset: int,
        offsets: Ints | None = None,
        lengths: Ints | None = None,
        start: int = 0,
        count: int | None = None,
    ) -> None:
        """Add a part of a tensor: elements `start` to ``start + count`` of a box, in row-major order, and their place in a file.

        Parameters
        ----------
        file, offset
            The number of the file, and the byte of the part's first element. The other elements follow without gaps.
        offsets, lengths
            The box, in global coordinates; by default the whole tensor.
        start, count
            The first element of the part, and their number; by default the whole box.
        """
        tensor = self.tensors[name]
        lengths = tensor.shape if lengths is None else lengths
        offsets = (0,) * len(lengths) if offsets is None else offsets
        part = Part(offsets, lengths, file, offset, start, count)
        if part.num_elements:
            tensor.parts.append(part)

    def view(self, name: str, file: TorchFile, view: PickledTensor, offsets: Ints | None = None) -> None:
        """Add a tensor of a torch file as the box at `offsets` of tensor `name`, which was added. It may have any strides."""
        if not prod(view.shape):
            return
        at, each = file.at(view), view.dtype.itemsize
        self._budget.spend(file.key, file.size, prod(view.shape) * each, f"{self.where}: {name}")
        corner = (0,) * len(view.shape) if offsets is None else offsets
        number = self.file(file.key, file.size)
        self.tensors[name].parts += parts_of_box(corner, view.shape, view.strides, number, at, each, f"{name} in {file.key}")

    def box(self, offsets: Ints, lengths: Ints) -> int:
        """Add a box of a tensor, in global coordinates; return its number, for the `box` column of `rows`."""
        self._boxes.append((offsets, lengths))
        return len(self._boxes) - 1

    def rows(self, tensor: Numbers, box: Numbers, start: Numbers, count: Numbers, file: Numbers, offset: Numbers) -> None:
        """Add many parts at once. Each argument is a number or a column; all are broadcast to one length.

        `tensor`, `box` and `file` are numbers that the methods of these names returned. A part is elements `start` to
        ``start + count`` of its box, and begins at byte `offset` of its file.
        """
        columns = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(c, np.int64)) for c in (tensor, box, start, count, file, offset))
        )
        self._rows.append(tuple(columns))

    def parts(self, name: str) -> list[Part]:
        """Return all parts of a tensor that were added so far, by any method."""
        tensor, found = self.tensors[name], []
        for columns in self._rows:
            # columns: tensor, box, start, count, file, offset of the rows of one call; here: the rows of this tensor
            here = np.flatnonzero(columns[0] == tensor.number)
            for box, start, count, file, offset in zip(*(column[here].tolist() for column in columns[1:]), strict=True):
                offsets, lengths = self._boxes[box]
                found.append(Part(offsets, lengths, file, offset, start, count))
        return [*tensor.parts, *found]

    def alias(self, name: str, of: str, link: StateLink | None = None) -> None:
        """Add a second name for the tensor `of`, which shares its bytes, as tied weights do.

        The tensor `of` may be added later; without it, this name is left out.
        """
        self._aliases[name] = of, link

    def value(self, path: Sequence[Any], value: Any, kind: ValueKind = ValueKind.PLAIN, link: StateLink | None = None) -> None:
        """Add a value other than a tensor by its keys in the state: ``("extra", "step")`` gets the name ``extra.step``.

        Among the keys, an index of a list is a tuple of one int. A value that cannot be encoded becomes unreadable.
        """
        name = name_of(key[0] if isinstance(key, tuple) else key for key in path)
        with self.reading(name):
            self.entry(ValueEntry(name, encode_path(list(path)), kind, encode_value(value, name), link=link))

    def entry(self, value: ValueEntry) -> None:
        """Add a value as a `ValueEntry`, whose content is encoded already."""
        self._values.append(value)

    def unreadable(self, name: str, why: CheckpointError) -> None:
        """Leave out a tensor or a value that cannot be read. A load that wants it raises `why`; other loads succeed."""
        self._unreadable[name] = why

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """If the ``with`` block raises a `CheckpointError`, suppress it and record the tensor or value `name` as unreadable.

        A `NameCollisionError` is raised on: two things of one name make the whole checkpoint ambiguous.
        """
        try:
            yield
        except NameCollisionError:
            raise
        except CheckpointError as error:
            self.unreadable(name, error)

    def is_unreadable(self, name: str) -> bool:
        """Tell whether `unreadable` was called for a name."""
        return name in self._unreadable

    def finish(self, metadata: Any = None, *, links_from_names: bool = True) -> Catalog:
        """Build and check the catalog.

        Parameters
        ----------
        links_from_names
            Whether names such as ``optimizer.state.<parameter>.exp_avg`` become links to parameters.

        Raises
        ------
        CorruptError
            Pieces lie outside of their files, or break another rule of catalogs.
        UnsupportedError
            The tensors have many times the bytes of their files.
        NameCollisionError
            A tensor and a value, or two values, have one name.
        """
        for name, (of, link) in self._aliases.items():
            if of in self.tensors:
                self.tensor(name, self.tensors[of].dtype, self.tensors[of].shape, link=link)
        tensors = [self.tensors[name] for name in sorted(self.tensors)]
        values = sorted(self._values, key=lambda value: value.name)
        names = Counter([tensor.name for tensor in tensors] + [value.name for value in values])
        for name in (name for name, count in names.items() if count > 1):
            raise _named_twice(name, self.where)
        try:
            catalog = self._catalog(tensors, values, metadata)
        except OverflowError:
            raise CorruptError(f"{self.where}: a size or an offset is over 2⁶³; use another checkpoint") from None
        for problem in problems(catalog):
            raise CorruptError(f"{self.where}: {problem}; use another checkpoint")
        refuse_excess(catalog, self.where)
        return replace(linked(catalog) if links_from_names else catalog, unreadable=self._unreadable)

    def _catalog(self, tensors: Sequence[ForeignTensor], values: Iterable[ValueEntry], metadata: Any) -> Catalog:
        names = [tensor.name for tensor in tensors]
        index = {name: i for i, name in enumerate(names)}
        width = max((len(tensor.shape) for tensor in tensors), default=1) or 1
        # place[n]: index by name of tensor number n
        place = np.zeros(self._num_tensors, np.int64)
        place[[tensor.number for tensor in tensors]] = np.arange(len(tensors))
        boxes, columns = self._columns([(tensor.number, part) for tensor in tensors for part in tensor.parts], width)
        tensor, *rows = columns
        # order: the rows in order of their tensors' names
        order = np.argsort(place[tensor], kind="stable")
        num_rows = np.bincount(place[tensor], minlength=len(tensors)) if len(tensor) else np.zeros(len(tensors), np.int64)
        return Catalog(
            save_id=self.format,
            created_s=0.0,  # so that copies of one checkpoint on the disks of several nodes have equal catalogs
            mesh=None,
            metadata=metadata,
            tensors_table=TensorTable(
                names=tuple(names),
                dtype=np.array([CODES.index(tensor.dtype) for tensor in tensors], np.uint8),
                kind=np.full(len(tensors), TensorKind.TENSOR, np.uint8),
                ndim=np.array([len(tensor.shape) for tensor in tensors], np.int64),
                shape=pad_rows([tensor.shape for tensor in tensors], width, 1),
                alias=np.array([index[self._aliases[name][0]] if name in self._aliases else -1 for name in names], np.int64),
                placement=np.full(len(tensors), -1, np.int64),
                row_start=np.append(0, np.cumsum(num_rows)),
                **link_columns(names, [tensor.link for tensor in tensors], index),
            ),
            placements=(),
            boxes=boxes,
            rows=RowTable(*(column[order] for column in rows)),
            files=tuple(self.files),
            values_table=tuple(values),
        )

    def _columns(self, listed: Sequence[tuple[int, Part]], width: int) -> tuple[BoxTable, list[I64]]:
        """Return the distinct boxes, and the columns of all parts: tensor, box, start, count, file, offset.

        `listed` are the parts that were added one by one; boxes are padded to `width` dims.
        """
        parts = [part for _, part in listed]
        # offsets[b], lengths[b]: box number b, padded to `width` dims; the boxes of listed parts come after those of `box`
        offsets = pad_rows([*(o for o, _ in self._boxes), *(part.offsets for part in parts)], width, 0)
        lengths = pad_rows([*(n for _, n in self._boxes), *(part.lengths for part in parts)], width, 1)
        # own: the columns of the listed parts; columns: these, and behind them the rows of each call of `rows`
        own = [[n for n, _ in listed], range(len(self._boxes), len(offsets)), [p.start for p in parts]]
        own += [[p.num_elements for p in parts], [p.file for p in parts], [p.offset for p in parts]]
        columns = [np.concatenate(c) for c in zip((*(np.array(c, np.int64) for c in own),), *self._rows, strict=True)]
        # ids[b]: number of box b among the distinct ones; first[i]: a box that is distinct box i
        ids, first = group_ids(np.hstack([offsets, lengths]))
        return BoxTable(offsets[first], lengths[first]), [columns[0], ids[columns[1]], *columns[2:]]


def _named_twice(name: str, where: str) -> NameCollisionError:
    return NameCollisionError(f"{where}: {name} occurs twice; open the file that has the one you want by its own path")


def linked(catalog: Catalog) -> Catalog:
    """Add to a catalog the links from optimizer state to parameters that follow from its names; links that it has stay."""
    table, values = catalog.tensors_table, catalog.values_table
    links = catalog.links()
    found = links_from_names((*catalog.names, *catalog.value_names), listed_parameters(values)) | links
    tensors = {name: i for i, name in enumerate(table.names) if table.kind[i] == TensorKind.TENSOR}
    columns = link_columns(table.names, [found.get(name) if name in tensors else None for name in table.names], tensors)
    linked_values = tuple(
        replace(value, link=found[value.name]) if value.name in found and value.link is None else value for value in values
    )
    return replace(catalog, tensors_table=replace(table, **columns), values_table=linked_values)


def listed_parameters(values: Sequence[ValueEntry | ValueSpec]) -> dict[str, list[str]]:
    """Map each optimizer's name to the parameters in its groups: FQNs, or numbers if the groups do not name their parameters."""
    listed: dict[str, list[str]] = {}
    for value in values:
        optimizer = optimizer_of(value.name)
        if optimizer is not None and value.data is not None and value.kind is not ValueKind.PER_RANK:
            try:
                groups = decode_value(value.data, name=value.name)
            except CorruptError:
                continue  # a load that wants the value gets the error
            if are_groups(groups):
                listed[optimizer] = [str(param) for group in groups for param in group["params"]]
    return listed
