"""Dequantizing FP8 weights of Hugging Face folders while their bytes are read.

The weight ``w`` has a scale ``w_scale_inv`` or ``w_scale`` beside it (`core.planning.scales`). A cast into a float dtype reads
the FP8 numbers as they are, which is exact in every such dtype. Then they are multiplied in place.

1. `read_quantized` finds the scales; it reads ``config.json``.
2. `Dequantizer.read` reads the numbers of each scale that stand for the parts of its weight that were asked for. A load does so
   before any tensor changes.
3. `multiply`, after the weights are read: in float32, then rounded once to the dtype of the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints, Piece, TensorSpec, box_piece, row_major_strides
from ...core.planning.scales import Quantized, Scale, find_scales
from ...format.dtypes import TORCH_DTYPES
from ...storage.protocol import MissingKey, Storage
from ..common.tensor_bytes import region
from .load import Resolved
from .read import ReadTarget
from .saved_values import read_whole

DEFAULT_BLOCK = (128, 128)
"""Block size (rows, columns) that shares one scale, if ``config.json`` names no other: the blocks of DeepSeek-V3."""

ENTRIES = ("quantization_config", "compression_config")
"""The entries of ``config.json`` that say how weights are quantized."""

_MAX_CONFIG_BYTES = 16 << 20
_CHUNK_ELEMENTS = 1 << 20


def read_quantized(storage: Storage, catalog: Catalog, *, apply: bool) -> Quantized:
    """Find the quantized tensors of a checkpoint. With `apply` (folders of safetensors), also find the scales to apply."""
    if not apply:
        return find_scales(catalog, None)
    try:
        config: Any = json.loads(storage.read("config.json", _MAX_CONFIG_BYTES))
    except (MissingKey, ValueError, RecursionError):
        config = {}
    known = [config.get(key) for key in ENTRIES] if isinstance(config, dict) else []
    found = next((each for each in known if isinstance(each, dict)), {})
    return find_scales(catalog, _blocks(found) or [DEFAULT_BLOCK], str(found.get("quant_method") or ""))


def _blocks(config: Mapping[str, Any]) -> list[Ints]:
    """List the block sizes (rows, columns) that the quantization entry of ``config.json`` names, for all or for some weights."""
    groups = config.get("config_groups")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    named = [config.get("weight_block_size")]
    for each in weights:
        if isinstance(each, dict):
            named += [each.get("block_structure"), each.get("group_size") and (1, each["group_size"])]
    blocks = [block for block in named if isinstance(block, list | tuple) and len(block) == 2]
    return [(rows, columns) for rows, columns in blocks if type(rows) is type(columns) is int and min(rows, columns) > 0]


def advice(quantized: Quantized) -> tuple[str, ...]:
    """Return advice for a failed load if weights are packed in a form that only their own library reads, else no advice."""
    if not quantized.packed:
        return ()
    return (
        f"the folder is quantized by {quantized.method} (config.json), whose packed weights are not read as floats here: "
        "dequantize it before, as model.dequantize() of transformers does, or load its tensors as they are",
    )


class Part(NamedTuple):
    """A target tensor with parts of a quantized tensor: the boxes that it holds, and the tensor's scale."""

    target: ReadTarget
    boxes: tuple[Piece, ...]
    scale: Scale


class Scaled(NamedTuple):
    """A part of a quantized tensor, with the scale numbers for it; `first` is the index of the first number along each dim."""

    part: Part
    numbers: torch.Tensor
    first: Ints


def parts_of_load(catalog: Catalog, resolved: Resolved, quantized: Quantized) -> list[Part]:
    """Return the parts of a load whose target tensors must be multiplied by scales after the read."""
    found = []
    for spec, target, index in zip(resolved.specs, resolved.targets, resolved.source.tolist(), strict=True):
        scale = quantized.scale(catalog, index) if target.dtype != target.tensor.dtype else None
        if scale is not None:
            boxes = [box for piece in spec.pieces for box in piece.boxes()]
            found.append(Part(target, tuple(_saved_boxes(boxes, catalog.shape(index))), scale))
    return found


def _saved_boxes(boxes: Iterable[Piece], shape: Ints) -> Iterator[Piece]:
    """Yield the parts of some boxes that lie in a tensor of this shape. With ``allow_resize``, boxes may reach beyond it."""
    for box in boxes:
        lengths = tuple(min(length, end - low) for low, length, end in zip(box.offsets, box.lengths, shape, strict=True))
        if min(lengths, default=1) > 0:
            yield box.inner((0,) * len(lengths), lengths)


class Dequantizer(NamedTuple):
    """Reads the scales of quantized tensors from the store in which they lie; `catalog` is the catalog of that store."""

    storage: Storage
    catalog: Catalog
    quantized: Quantized
    verify: bool

    def part_of_run(
        self, saved: Catalog, tensor: int, target: ReadTarget, offsets: Ints, lengths: Ints, start: int
    ) -> Part | None:
        """Return the `Part` for a 1-D target that holds the elements of a box of a saved tensor, from element `start` on.

        Return None if the tensor, with index `tensor` in the catalog `saved`, has no scale or is not converted to another dtype.
        """
        scale = self.quantized.scale(saved, tensor) if target.dtype != target.tensor.dtype else None
        if scale is None:
            return None
        piece = Piece(offsets, lengths, start, target.tensor.numel(), -start, row_major_strides(lengths))
        return Part(target, tuple(piece.boxes()), scale)

    def read(self, parts: Iterable[Part]) -> list[Scaled]:
        """Read the scale numbers that some parts need.

        Of each scale, all numbers from the first to the last needed are read at once.

        Raises
        ------
        CorruptError
            The bytes of a scale are damaged or missing.
        """
        by_scale: dict[int, list[Part]] = {}
        for part in parts:
            if part.boxes:
                by_scale.setdefault(part.scale.index, []).append(part)
        return [
            scaled
            for index, of_scale in by_scale.items()
            for scaled in _read_scale(self.storage, self.catalog, index, of_scale, self.verify)
        ]


def _read_scale(storage: Storage, catalog: Catalog, index: int, parts: Sequence[Part], verify: bool) -> Iterator[Scaled]:
    block = parts[0].scale.block
    boxes = [box for part in parts for box in part.boxes]
    low = [min(box.offsets[d] for box in boxes) // each for d, each in enumerate(block)]
    high = [-(-max(box.offsets[d] + box.lengths[d] for box in boxes) // each) for d, each in enumerate(block)]
    count = tuple(b - a for a, b in zip(low, high, strict=True))
    # The scale may have fewer or more dims than its tensor: then one number stands along each of the others.
    shape, code = catalog.shape(index), catalog.dtype(index)
    offsets = tuple((*low, *(0 for _ in shape))[: len(shape)])
    lengths = tuple((*count, *(1 for _ in shape))[: len(shape)])
    memory = torch.empty(lengths, dtype=TORCH_DTYPES[code], device="cpu")
    piece = box_piece(offsets, lengths, 0, row_major_strides(lengths))
    name = catalog.tensors_table.names[index]
    read_whole(storage, catalog, [index], [(TensorSpec(name, code, shape, (piece,)), memory)], verify=verify)
    numbers = memory.float().reshape(count)
    return (Scaled(part, numbers, tuple(low)) for part in parts)


def multiply(scaled: Iterable[Scaled]) -> None:
    """Multiply the dequantized targets by their scales, in place, after the bytes are read."""
    with torch.no_grad():
        for piece in scaled:
            tensor = piece.part.target.tensor
            numbers = piece.numbers.to(tensor.device)
            for box in piece.part.boxes:
                _multiply_box(region(tensor, box.base, box.lengths, box.strides), box.offsets, numbers, piece)


def _multiply_box(values: torch.Tensor, offsets: Ints, numbers: torch.Tensor, scaled: Scaled) -> None:
    """Multiply one box of a tensor by its scale numbers, in place, in slices, which bounds the memory needed."""
    # numbers: now one for each element along the dims where it had several, so that it can be broadcast to the box.
    for d, each in enumerate(scaled.part.scale.block):
        if numbers.shape[d] > 1:
            at = torch.arange(offsets[d], offsets[d] + values.shape[d], device=values.device) // each - scaled.first[d]
            numbers = numbers.index_select(d, at)
    cut = next((d for d, length in enumerate(values.shape) if length > 1), None)
    if cut is None:
        values.copy_(values.float() * numbers)
        return
    step = max(_CHUNK_ELEMENTS * values.shape[cut] // max(prod(values.shape), 1), 1)
    for low in range(0, values.shape[cut], step):
        count = min(step, values.shape[cut] - low)
        chunk = values.narrow(cut, low, count)
        chunk.copy_(chunk.float() * (numbers.narrow(cut, low, count) if numbers.shape[cut] > 1 else numbers))
