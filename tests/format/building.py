"""Whole checkpoints made with the format room alone: tensors cut into runs, shard files as bytes, and their catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorKind, TensorTable, ValueEntry
from reshard_ckpt.core.catalog.names import link_columns
from reshard_ckpt.core.catalog.specs import CODES, ITEM_BYTES, AxisPlacement, Mesh, StateLink, ValueKind, blob_name
from reshard_ckpt.format.files import BlockHasher, digest128
from reshard_ckpt.format.shard_file import Member, header, make_member
from reshard_ckpt.format.values import encode_path, encode_value

SAVE_ID = "20260102-030405-abc"


@dataclass(frozen=True)
class Run:
    """Elements ``[start, start + count)`` of a box, and the file that they go to."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    count: int
    file: int


@dataclass(frozen=True)
class Tensor:
    """A tensor as its raw bytes, and how it is cut."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""
    runs: tuple[Run, ...] = ()
    alias_of: str | None = None
    kind: int = TensorKind.TENSOR
    link: StateLink | None = None

    def run_bytes(self, run: Run) -> bytes:
        """What a file holds of it, by plain indexing."""
        items = np.frombuffer(self.data, f"V{ITEM_BYTES[self.dtype]}").reshape(self.shape)
        box = items[tuple(slice(o, o + n) for o, n in zip(run.offsets, run.lengths, strict=True))]
        return box.reshape(-1)[run.start : run.start + run.count].tobytes()


@dataclass
class Built:
    """A checkpoint: its files by key, its catalog, and what it was made of."""

    catalog: Catalog
    files: dict[str, bytes]
    tensors: list[Tensor]
    values: dict[str, object] = field(default_factory=dict)


def build(
    tensors: Sequence[Tensor], *, num_files: int = 1, values: Mapping[str, object] | None = None, per_rank: Sequence[object] = ()
) -> Built:
    """Lay out files and catalog; the values' bytes are inline but for `per_rank`, whose are blobs, one on each rank."""
    blobs = [_blob(rank, value, rank % num_files) for rank, value in enumerate(per_rank)]
    tensors = sorted([*tensors, *blobs], key=lambda tensor: tensor.name)
    placed = [(t, run) for t, tensor in enumerate(tensors) for run in tensor.runs]
    offsets, files, entries = [0] * len(placed), {}, []
    for number in range(num_files):
        mine = [i for i, (_, run) in enumerate(placed) if run.file == number]
        mine.sort(key=lambda i: -ITEM_BYTES[tensors[placed[i][0]].dtype])
        data = header([_member(tensors[placed[i][0]], placed[i][1]) for i in mine], {"format": "pt"})
        for i in mine:
            offsets[i] = len(data)
            data += tensors[placed[i][0]].run_bytes(placed[i][1])
        entries.append(_add_file(files, number, data))
    names = [tensor.name for tensor in tensors]
    indices = tuple(names.index(blob.name) for blob in blobs)
    table = [ValueEntry(n, encode_path([n]), ValueKind.PLAIN, encode_value(v, n)) for n, v in (values or {}).items()]
    if blobs:
        table.append(ValueEntry("extra.own", encode_path(["extra", "own"]), ValueKind.PER_RANK, None, indices))
    catalog = _catalog(tensors, placed, offsets, entries, table)
    return Built(catalog, files, tensors, dict(values or {}))


def _blob(rank: int, value: object, file: int) -> Tensor:
    data = encode_value(value, "extra.own")
    run = Run((0,), (len(data),), 0, len(data), file)
    return Tensor(blob_name("extra.own", rank), "U8", (len(data),), data, (run,), kind=TensorKind.BLOB)


def _member(tensor: Tensor, run: Run) -> Member:
    if tensor.kind == TensorKind.BLOB:
        return Member(tensor.name, "U8", tensor.shape, run.count)
    return make_member(tensor.name, tensor.dtype, tensor.shape, run.offsets, run.lengths, run.start, run.count)


def _add_file(files: dict[str, bytes], number: int, data: bytes) -> FileEntry:
    key = f"{SAVE_ID}/rank{number:05d}-0"
    hasher = BlockHasher()
    hasher.update(data)
    files[f"{key}.safetensors"], files[f"{key}.digests"] = data, hasher.finish()
    digest = digest128(files[f"{key}.digests"])
    return FileEntry(f"{key}.safetensors", len(data), f"{key}.digests", digest, SAVE_ID, number)


def _catalog(tensors, placed, offsets, entries, values) -> Catalog:
    width = max([len(tensor.shape) for tensor in tensors], default=0)
    names = [tensor.name for tensor in tensors]
    boxes = sorted({(_pad(run.offsets, width, 0), _pad(run.lengths, width, 1)) for _, run in placed})
    box_of = {box: i for i, box in enumerate(boxes)}
    rows = [
        (box_of[_pad(run.offsets, width, 0), _pad(run.lengths, width, 1)], run.start, run.count, run.file, offset)
        for (_, run), offset in zip(placed, offsets, strict=True)
    ]
    return Catalog(
        save_id=SAVE_ID,
        created_s=1767323045.5,
        mesh=Mesh(("pp", "dp"), (2, 3)),
        metadata={"run": 7},
        tensors_table=TensorTable(
            names=tuple(names),
            dtype=np.array([CODES.index(tensor.dtype) for tensor in tensors], np.uint8),
            kind=np.array([tensor.kind for tensor in tensors], np.uint8),
            ndim=_column([len(tensor.shape) for tensor in tensors]),
            shape=_column([_pad(tensor.shape, width, 1) for tensor in tensors]).reshape(len(tensors), width),
            alias=_column([-1 if tensor.alias_of is None else names.index(tensor.alias_of) for tensor in tensors]),
            placement=_column([t % 3 - 1 for t in range(len(tensors))]),
            row_start=_column(np.searchsorted([t for t, _ in placed], np.arange(len(tensors) + 1))),
            **link_columns(names, [tensor.link for tensor in tensors], {name: i for i, name in enumerate(names)}),
        ),
        placements=(
            (AxisPlacement("pp", "resident", coords=(0, 1)), AxisPlacement("dp", "shard", dim=0, turn=0, sections=(2, 1))),
            (AxisPlacement("pp", "replicate"), AxisPlacement("dp", "flat")),
        ),
        boxes=BoxTable(*(_column([box[i] for box in boxes]).reshape(len(boxes), width) for i in range(2))),
        rows=RowTable(*(_column([row[i] for row in rows]) for i in range(5))),
        files=tuple(entries),
        values_table=tuple(values),
    )


def _column(values) -> np.ndarray:
    return np.array(values, np.int64)


def _pad(values: tuple[int, ...], width: int, filler: int) -> tuple[int, ...]:
    return (filler,) * (width - len(values)) + tuple(values)


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="→"), max_size=12) | st.sampled_from(
    ["w@[0:2]", "__metadata__", "a%40", "x@[value]", "é.weight"]
)
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def runs_of(draw, shape: tuple[int, ...], num_files: int) -> tuple[Run, ...]:
    """Runs that tile a tensor: boxes by random cuts, each of them cut again into flat ranges."""
    if prod(shape) == 0 and draw(st.booleans()):
        return ()
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, lengths[dim]))
        for begin, length in ((0, cut), (cut, lengths[dim] - cut)):
            part = _replace(offsets, dim, offsets[dim] + begin), _replace(lengths, dim, length)
            if prod(part[1]) or not prod(shape):
                boxes.append(part)
        if not prod(shape):
            boxes = boxes[:1]  # a tensor without elements has one row at most
    runs = []
    for offsets, lengths in boxes:
        cuts = {0, prod(lengths), *draw(st.lists(st.integers(0, prod(lengths)), max_size=2))}
        ordered = sorted(cuts) if prod(lengths) else [0, 0]
        for begin, end in pairwise(ordered):
            runs.append(Run(offsets, lengths, begin, end - begin, draw(st.integers(0, num_files - 1))))
    return tuple(runs)


def _replace(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def position_bytes(salt: int, num_bytes: int, *, boolean: bool = False) -> bytes:
    """Bytes that depend on where they are, so that a misplaced one is seen."""
    stream = (np.arange(num_bytes, dtype=np.uint64) * 2654435761 + salt * 40503) >> 7
    return (stream % (2 if boolean else 251)).astype(np.uint8).tobytes()


@st.composite
def checkpoints(draw) -> Built:
    """Random tensors, cut at random, some of them aliases; a few values, some of each rank's own."""
    num_files = draw(st.integers(1, 4))
    tensors: list[Tensor] = []
    for salt, name in enumerate(draw(st.lists(NAMES, max_size=5, unique=True))):
        dtype, shape = draw(st.sampled_from(CODES)), draw(SHAPES)
        data = position_bytes(salt, prod(shape) * ITEM_BYTES[dtype], boolean=dtype == "BOOL")
        tensors.append(Tensor(name, dtype, shape, data, draw(runs_of(shape, num_files))))
        if draw(st.booleans()):
            tensors.append(Tensor(f"{name}→tied", dtype, shape, data, alias_of=name))
    values = {
        f"extra.{key}": item for key, item in draw(st.dictionaries(st.sampled_from("abc"), st.integers() | st.text())).items()
    }
    per_rank = [{"rank": rank} for rank in range(draw(st.integers(0, 3)))]
    return build(tensors, num_files=num_files, values=values, per_rank=per_rank)
