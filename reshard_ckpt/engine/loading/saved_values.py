"""Values of a checkpoint, and the scales of FP8 weights: parts of it that one rank reads by a small plan of their own.

*Values*: small ones are in the catalog. Large ones are read when opened, per-rank ones when they are used.

*Scales*, of FP8 weights in Hugging Face folders, which are dequantized while they load. The weight ``w`` has a scale
``w_scale_inv`` beside it, one number for each block of rows and columns. A load with ``cast=`` into a float tensor reads the FP8
numbers as they are. Then this rank's part of the weight is multiplied in place.

1. `read_scales`, before any tensor changes: read those blocks of each scale that overlap this rank's part of its weight.
2. `multiply`, after the weights are read: in float32, block by block, then rounded to the dtype of the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.catalog.model import Catalog, ValueEntry
from ...core.catalog.specs import Ints, TensorSpec, ValueKind, box_piece, piece_columns
from ...core.planning.load_plan import plan_load
from ...core.planning.match import block_scales
from ...format.columns import TORCH_DTYPES
from ...format.files import Digests
from ...format.values import decode_value
from ...storage.protocol import MissingKey, Storage
from ..common.tensor_bytes import byte_blob, region
from .load import Resolved, check_whole
from .read import ReadTarget, ReadTask, execute


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value of a checkpoint; the `value` of a per-rank one is a sequence of all ranks' values."""

    kind: ValueKind
    value: Any

    @property
    def plain(self) -> Any:
        """The value as one plain value; a per-rank one is the list of all ranks' values."""
        return list(self.value) if self.kind is ValueKind.PER_RANK else self.value


def open_values(storage: Storage, catalog: Catalog, prefixes: Iterable[str], *, verify: bool) -> dict[str, SavedValue]:
    """Return the values at or below the names `prefixes`, by name.

    Raises
    ------
    CorruptError
        The bytes of a value are damaged.
    """
    at = tuple(prefixes)
    below = tuple(f"{prefix}." for prefix in at)
    chosen = [entry for entry in catalog.values_table if entry.name in at or entry.name.startswith(below)]
    found, large = {}, []
    for entry in chosen:
        if entry.data is not None:
            found[entry.name] = SavedValue(entry.kind, decode_value(entry.data, name=entry.name))
        elif entry.kind is ValueKind.PER_RANK:
            found[entry.name] = SavedValue(entry.kind, _RankValues(storage, catalog, entry, verify))
        else:
            large.append(entry)
    for entry, data in zip(large, read_blobs(storage, catalog, [entry.blobs[0] for entry in large], verify), strict=True):
        found[entry.name] = SavedValue(entry.kind, decode_value(data, name=entry.name))
    return found


class _RankValues(Sequence[Any]):
    """Sequence of the values of all ranks. A value is read when it is indexed, so a rank need read only its own."""

    def __init__(self, storage: Storage, catalog: Catalog, entry: ValueEntry, verify: bool) -> None:
        self._storage, self._catalog, self._entry, self._verify = storage, catalog, entry, verify

    def __len__(self) -> int:
        return len(self._entry.blobs)

    def __getitem__(self, rank: Any) -> Any:
        [data] = read_blobs(self._storage, self._catalog, [self._entry.blobs[rank]], self._verify)
        return decode_value(data, name=self._entry.name)


def blob_reader(storage: Storage, catalog: Catalog, *, verify: bool) -> Callable[[ValueEntry], bytes]:
    """Return a function that reads the bytes of a large value. `renamed` uses it to rename parameters in optimizers' groups."""
    return lambda value: bytes(read_blobs(storage, catalog, [value.blobs[0]], verify)[0])


def read_blobs(storage: Storage, catalog: Catalog, blobs: Sequence[int], verify: bool) -> list[memoryview]:
    """Read the bytes of blobs, all together; `blobs` are their indices among the tensors of the catalog."""
    if not blobs:
        return []
    blocks = check_whole(storage, catalog, blobs, with_digests=verify)
    names = [catalog.tensors_table.names[index] for index in blobs]
    found = [
        byte_blob(name, torch.empty(catalog.shape(index), dtype=torch.uint8, device="cpu"))
        for name, index in zip(names, blobs, strict=True)
    ]
    _read(storage, catalog, blobs, [(blob.spec, blob.tensor) for blob in found], blocks)
    return [blob.tensor.numpy().data for blob in found]


def _read(
    storage: Storage,
    catalog: Catalog,
    source: Sequence[int],
    wanted: Sequence[tuple[TensorSpec, torch.Tensor]],
    blocks: Mapping[int, Digests],
) -> None:
    """Read the parts of tensors that the specs want into their memory; `source` are the tensors' indices in the catalog."""
    plan = plan_load(catalog, np.array(source), piece_columns([spec for spec, _ in wanted]), storage.hints.read_bytes)
    targets = [ReadTarget(spec.name, memory, memory.dtype, is_buffer=True) for spec, memory in wanted]
    execute(ReadTask(storage, catalog, plan, targets, blocks))


DEFAULT_BLOCK = (128, 128)
_MAX_CONFIG_BYTES = 16 << 20
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a Hugging Face folder is quantized: the method that its ``config.json`` names, and the blocks of FP8 scales."""

    method: str = ""
    block: Ints = DEFAULT_BLOCK

    @property
    def hints(self) -> tuple[str, ...]:
        """Advice for a load that fails, if weights are packed in a way that only the library that wrote them reads."""
        if self.method in ("", "fp8"):
            return ()
        return (
            f"the folder is quantized by {self.method} (config.json), whose packed weights are not read as floats here: "
            "dequantize it before, as model.dequantize() of transformers does, or load its tensors as they are",
        )


def quantization_of(storage: Storage) -> Quantization:
    """Read how the folder is quantized; the blocks are those of DeepSeek-V3 if ``config.json`` names no others."""
    try:
        config: Any = json.loads(storage.read("config.json", _MAX_CONFIG_BYTES))["quantization_config"]
    except (MissingKey, ValueError, KeyError, TypeError):
        return Quantization()
    method = config.get("quant_method") if isinstance(config, dict) else None
    try:
        block = (int(config["weight_block_size"][0]), int(config["weight_block_size"][1]))
    except (ValueError, KeyError, TypeError, IndexError):
        block = DEFAULT_BLOCK
    return Quantization(str(method or ""), block)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A target, its part of the weight, and the blocks of the scale that overlap it; `first` is the index of the first one."""

    target: ReadTarget
    spec: TensorSpec
    scale: torch.Tensor
    first: Ints
    block: Ints


def scaled_targets(catalog: Catalog, resolved: Resolved, block: Ints | None) -> dict[int, int]:
    """Map each target to be dequantized, by its place in `resolved`, to the index of its scale in the catalog."""
    scales = block_scales(catalog, block)
    pairs = enumerate(zip(resolved.source.tolist(), resolved.targets, strict=True))
    return {k: scales[index] for k, (index, target) in pairs if index in scales and target.dtype != target.tensor.dtype}


def read_scales(storage: Storage, catalog: Catalog, resolved: Resolved, block: Ints, *, verify: bool) -> list[Scaled]:
    """Read the scales of the targets to be dequantized.

    Raises
    ------
    CorruptError
        The bytes of a scale are damaged or missing.
    """
    out = []
    for k, index in scaled_targets(catalog, resolved, block).items():
        spec = resolved.specs[k]
        corners = [(box.offsets, np.add(box.offsets, box.lengths)) for piece in spec.pieces for box in piece.boxes()]
        if not corners:
            continue
        blocks = check_whole(storage, catalog, [index], with_digests=verify)
        low = np.min([a for a, _ in corners], axis=0) // block
        high = -(-np.max([b for _, b in corners], axis=0) // np.array(block))
        shape = tuple((high - low).tolist())
        code, name = catalog.dtype(index), catalog.tensors_table.names[index]
        scale = torch.empty(shape, dtype=TORCH_DTYPES[code], device="cpu")
        wanted = TensorSpec(name, code, catalog.shape(index), (box_piece(tuple(low.tolist()), shape, 0, (shape[1], 1)),))
        _read(storage, catalog, [index], [(wanted, scale)], blocks)
        out.append(Scaled(resolved.targets[k], spec, scale.float(), tuple(low.tolist()), block))
    return out


def multiply(scaled: Sequence[Scaled]) -> None:
    """Multiply the targets by their scales, in place."""
    with torch.no_grad():
        for one in scaled:
            tensor = one.target.tensor
            scale = one.scale.to(tensor.device)
            for box in (box for piece in one.spec.pieces for box in piece.boxes()):
                part = region(tensor, box.base, box.lengths, box.strides)
                # rows, columns: the block of the scale that each row, and each column, of the part lies in
                rows, columns = (
                    torch.arange(box.offsets[d], box.offsets[d] + box.lengths[d], device=tensor.device) // one.block[d]
                    - one.first[d]
                    for d in (0, 1)
                )
                step = max(_CHUNK_ELEMENTS // box.lengths[1], 1)
                for low in range(0, box.lengths[0], step):
                    chunk = part[low : low + step]
                    chunk.copy_(chunk.float() * scale[rows[low : low + step]][:, columns])
