"""Scales of quantized tensors: when a load casts such a tensor, it applies the scale, or refuses the cast.

1. `find_scales` looks for the scale beside each tensor of 8 bits an element: a tensor whose name is made of the quantized one's.
2. A load can apply the scale of an FP8 tensor if its numbers are floats, and its shape tells which elements each number is for:
   all (one number), one row (a number for each), or one block of a size that ``config.json`` names. The name ``_scale`` counts if
   ``config.json`` names one of `METHODS`; others might divide by it.
3. Every other quantized tensor gets a reason why it cannot be cast.

Tensors are known by the place of their first byte. So their scales are found in a catalog with other names and in a part of the
catalog too, and a cast of a weight that was renamed without its scale applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ..catalog.model import Catalog, TensorKind
from ..catalog.specs import CODES, Ints

SCALE_INV, SCALE = "_scale_inv", "_scale"
"""Suffixes that make the name of a scale from the name of its weight, for scales that a load applies: in DeepSeek-V3 and
transformers; in compressed-tensors, modelopt and fbgemm."""

METHODS = ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")
"""Quantization methods, as named in ``config.json``, in which the tensor ``…_scale`` is multiplied with the FP8 weight."""

SCALES = (SCALE_INV, SCALE, "_scales", ".SCB", ".absmax")
"""Suffixes that make the name of a scale from the name of the quantized tensor."""

BESIDE = ("SCB", "scale", "scales", "scale_weight", "qscale_weight")
"""Names of scales beside a quantized ``weight`` in the same module: of bitsandbytes, of DeepSeek's and Mistral's own files, and
others."""

OTHER_PARTS = ("_scale_2", "_zero_point", "_g_idx")
"""Suffixes of names of further tensors that change how a weight is dequantized. A weight that has one cannot be cast."""

PRE_QUANT = "pre_quant_scale"
"""The name, beside a ``weight``, of a scale of the layer's inputs, which divides the weight. Such a weight cannot be cast."""

WITHOUT_SCALE = "which a cast would leave out: dequantize it before"
"""Advice in the message about a quantized tensor whose scale cannot be applied."""

FLOATS = ("F16", "BF16", "F32", "F64")
"""Dtypes that a quantized tensor may be loaded into, by applying its scale."""

POWERS_OF_TWO = "F8_E8M0"
"""The dtype of the scales of the microscaling (MX) formats."""

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Dtypes of quantized tensors whose scale a load can apply."""

QUANTIZED = (*FP8, "I8", "U8")
"""Dtypes of tensors that have a scale if they are quantized."""

PACKED = ("I8", "U8", "I32")
"""Dtypes of tensors into which some quantization methods pack several numbers an element."""

Place = tuple[int, int]
"""Where the first byte of a tensor lies: the index of the file, and the offset in it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a quantized tensor.

    `index` is the index of the scale's tensor in the catalog of the source. Each number of the scale belongs to a block of
    elements; `block` has the lengths of a block by dim.
    """

    index: int
    block: Ints


class Quantized(NamedTuple):
    """The quantized tensors of a checkpoint, each known by the place of its first byte.

    Attributes
    ----------
    scales
        The tensors that a cast can dequantize.
    refused
        The tensors that cannot be cast, each with the reason for messages.
    method
        The quantization method that ``config.json`` names, or "".
    packed
        Whether there are tensors that only the library of this method can read.
    """

    scales: Mapping[Place, Scale]
    refused: Mapping[Place, str]
    method: str = ""
    packed: bool = False

    def scale(self, catalog: Catalog, index: int) -> Scale | None:
        """Return the scale of a tensor, or None.

        `catalog` is that of the source, or made from it by renaming and selecting tensors.
        """
        return self.scales.get(_place(catalog, index))

    def refusal(self, catalog: Catalog, index: int, wanted: str) -> str | None:
        """Return the reason why a tensor cannot be cast to the dtype `wanted`; None if it can be cast."""
        place = _place(catalog, index)
        if place in self.scales and wanted not in FLOATS:
            return f"saved as {catalog.dtype(index)} with a scale, {WITHOUT_SCALE}"
        return self.refused.get(place)


def may_be_quantized(catalog: Catalog) -> bool:
    """Tell whether any tensor of the catalog has a dtype that quantized tensors have."""
    return len(_small(catalog)) > 0


def _small(catalog: Catalog) -> list[int]:
    """List the indices of non-empty tensors whose dtype is one that quantized tensors have."""
    table, codes = catalog.tensors_table, [CODES.index(code) for code in {*QUANTIZED, *PACKED}]
    found: list[int] = np.flatnonzero(np.isin(table.dtype, codes) & (table.kind == TensorKind.TENSOR)).tolist()
    return [index for index in found if prod(catalog.shape(index))]


def find_scales(catalog: Catalog, blocks: Iterable[Ints] | None, method: str = "") -> Quantized:
    """Find the quantized tensors of a catalog, and their scales if a load can apply them.

    Parameters
    ----------
    blocks
        Sizes (rows, columns) of the blocks of a weight that one number of a scale may stand for. With None, no scale is applied,
        because the format does not say how.
    method
        The method by which weights are quantized, if the checkpoint says so. Then every tensor of 8 bits an element counts as
        quantized, whether or not it has a scale.
    """
    table = catalog.tensors_table
    names = frozenset(table.names)
    scales: dict[Place, Scale] = {}
    refused: dict[Place, str] = {}
    packed = False
    sizes = None if blocks is None else tuple(blocks)
    for i in _small(catalog):
        name, code, place = table.names[i], catalog.dtype(i), _place(catalog, i)
        beside = None
        if code in QUANTIZED:  # the scale beside the tensor: named after it, or in the module of a weight
            module = name.removesuffix("weight")
            listed = [f"{name}{end}" for end in SCALES] + [f"{module}{own}" for own in BESIDE if name.endswith(".weight")]
            beside = next((scale for scale in listed if scale in names), None)
        # Only the name "…_scale_inv" says that weights are multiplied by the scale; for other names, the method must say it.
        applies = beside is not None and sizes is not None and (method in METHODS or beside == f"{name}{SCALE_INV}")
        scale = _applicable(catalog, i, str(beside), sizes or (), names) if applies else None
        if scale is not None:
            scales[place] = scale
        elif beside is not None:
            refused[place] = f"saved as {code} with the scale {beside}, {WITHOUT_SCALE}"
        elif method and code in QUANTIZED and not name.endswith(SCALES):
            refused[place] = f"saved as {code} in a folder quantized by {method}, without a known scale: dequantize it before"
        packed = packed or (bool(method) and scale is None and code in PACKED)
    return Quantized(scales, refused, method, packed)


def _place(catalog: Catalog, index: int) -> Place:
    rows = catalog.rows_of(catalog.source(index))
    if rows.start == rows.stop:  # it has no elements
        return (-1, -1)
    return int(catalog.rows.file[rows.start]), int(catalog.rows.offset[rows.start])


def _applicable(catalog: Catalog, index: int, beside: str, blocks: Sequence[Ints], names: frozenset[str]) -> Scale | None:
    """Return the scale of a tensor if a load can apply it, else None; `beside` is the name of the scale."""
    name, code = catalog.tensors_table.names[index], catalog.dtype(index)
    others = [f"{name}{end}" for end in OTHER_PARTS] + [f"{name.removesuffix('weight')}{PRE_QUANT}"]
    if code not in FP8 or beside not in (f"{name}{SCALE_INV}", f"{name}{SCALE}") or names.intersection(others):
        return None
    scale = catalog.index(beside)
    if catalog.dtype(scale) not in (*FLOATS, POWERS_OF_TWO):
        return None
    block = block_of(catalog.shape(index), catalog.shape(scale), blocks)
    return None if block is None else Scale(scale, block)


def block_of(shape: Ints, scale: Ints, blocks: Iterable[Ints]) -> Ints | None:
    """Return the lengths of the blocks of a weight that share one number of its scale; None if the shapes leave it open.

    >>> block_of((256, 384), (), []), block_of((256, 384), (256, 1), []), block_of((256, 384), (256,), [])
    ((256, 384), (1, 384), (1, 384))
    >>> block_of((300, 260), (3, 3), [(128, 128)]), block_of((300, 260), (3, 3), [])
    ((128, 128), None)
    """
    if prod(scale) == 1:
        return shape
    if len(scale) == 1 and len(shape) == 2 and scale[0] == shape[0]:
        scale = (scale[0], 1)
    if len(scale) != len(shape):
        return None
    # A scale may fit blocks of several sizes. Then nothing tells which of them was used.
    fits = set()
    if all(number in (1, length) for number, length in zip(scale, shape, strict=True)):
        fits.add(tuple(length if number == 1 else 1 for number, length in zip(scale, shape, strict=True)))
    for last in blocks if len(shape) > 1 else ():
        block = (*(1 for _ in shape[2:]), *last)
        if scale == tuple(-(-length // each) for length, each in zip(shape, block, strict=True)):
            fits.add(tuple(min(each, length) for length, each in zip(shape, block, strict=True)))
    return fits.pop() if len(fits) == 1 else None
