"""Dequantizing FP8 weights of Hugging Face folders while they load: each block of a weight is multiplied by its scale.

The weight ``w`` has a scale ``w_scale_inv`` beside it, one number for each block of rows and columns. A load with ``cast=`` into
a float tensor reads the FP8 numbers as they are. Then this rank's part of the weight is multiplied in place.

1. `read_scales`, before any tensor changes: read those blocks of each scale that overlap this rank's part of its weight.
2. `multiply`, after the weights are read: in float32, block by block, then rounded to the dtype of the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints, Piece, TensorSpec, box_piece
from ...core.geometry.runs import decompose
from ...core.planning.load_plan import plan_load
from ...core.planning.local_metadata import piece_columns
from ...core.planning.match import block_scales
from ...format.columns import TORCH_DTYPES
from ...storage.protocol import MissingKey, Storage
from ..common.files import open_files
from ..common.tensor_bytes import region
from .load import Resolved, check_whole
from .read import WINDOW_BYTES, ReadTarget, ReadTask, execute

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
        corners = [(low, np.add(low, lengths)) for low, lengths, _, _ in _boxes(spec.pieces)]
        if not corners:
            continue
        check_whole(storage, catalog, [index])
        low = np.min([a for a, _ in corners], axis=0) // block
        high = -(-np.max([b for _, b in corners], axis=0) // np.array(block))
        shape = tuple((high - low).tolist())
        code, name = catalog.dtype(index), catalog.tensors_table.names[index]
        scale = torch.empty(shape, dtype=TORCH_DTYPES[code], device="cpu")
        wanted = TensorSpec(name, code, catalog.shape(index), (box_piece(tuple(low.tolist()), shape, 0, (shape[1], 1)),))
        plan = plan_load(catalog, np.array([index]), piece_columns([wanted], 2), WINDOW_BYTES)
        files = np.unique(plan.file).tolist()
        blocks = open_files(storage, catalog, files, files if verify else ())
        execute(ReadTask(storage, catalog, plan, [ReadTarget(name, scale, scale.dtype, is_buffer=True)], blocks))
        out.append(Scaled(resolved.targets[k], spec, scale.float(), tuple(low.tolist()), block))
    return out


def multiply(scaled: Sequence[Scaled]) -> None:
    """Multiply the targets by their scales, in place."""
    with torch.no_grad():
        for one in scaled:
            tensor = one.target.tensor
            scale = one.scale.to(tensor.device)
            for offsets, lengths, first, strides in _boxes(one.spec.pieces):
                part = region(tensor, first, lengths, strides)
                # rows, columns: the block of the scale that each row, and each column, of the part lies in
                rows, columns = (
                    torch.arange(offsets[d], offsets[d] + lengths[d], device=tensor.device) // one.block[d] - one.first[d]
                    for d in (0, 1)
                )
                step = max(_CHUNK_ELEMENTS // lengths[1], 1)
                for low in range(0, lengths[0], step):
                    chunk = part[low : low + step]
                    chunk.copy_(chunk.float() * scale[rows[low : low + step]][:, columns])


def _boxes(pieces: Sequence[Piece]) -> Iterator[tuple[Ints, Ints, int, Ints]]:
    """Yield offsets, lengths, first local element and strides of the boxes that make up the pieces of a 2-D tensor."""
    for piece in pieces:
        if piece.count:
            cut = decompose(np.array([piece.lengths]), np.array([piece.start]), np.array([piece.count]))
            for inner, lengths in zip(cut.offsets.tolist(), cut.lengths.tolist(), strict=True):
                first = piece.base + int(np.dot(inner, piece.strides))
                yield tuple(np.add(piece.offsets, inner).tolist()), tuple(lengths), first, piece.strides
