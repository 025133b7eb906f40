"""Scales of quantized tensors: a cast of such a tensor either applies its scale, or is refused.

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
"""Ends of the names of scales that a load applies, after the name of the weight: those of DeepSeek-V3 and of transformers, and
those of compressed-tensors, modelopt and fbgemm."""

METHODS = ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")
"""The methods, as ``config.json`` names them, that multiply FP8 numbers by the tensor named ``_scale``."""

SCALES = (SCALE_INV, SCALE, "_scales", ".SCB", ".absmax")
"""Ends of the names of scales, after the name of the quantized tensor."""

BESIDE = ("SCB", "scale", "scales", "scale_weight", "qscale_weight")
"""Names of scales in the module of a quantized ``weight``: of bitsandbytes, of DeepSeek's and Mistral's own files, and others."""

OTHER_PARTS = ("_scale_2", "_zero_point", "_g_idx")
"""Ends of the names of tensors that change how a weight is dequantized, beside its scale."""

PRE_QUANT = "pre_quant_scale"
"""The name, in the module of a ``weight``, of a scale of its inputs that was divided out of the weight."""

DEQUANTIZE = "dequantize it before"
WITHOUT_SCALE = f"which a cast would leave out: {DEQUANTIZE}"
"""The advice for a tensor whose scale cannot be applied."""

FLOATS = ("F16", "BF16", "F32", "F64")
"""Dtypes that scaled numbers may be loaded into."""

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Dtypes of the tensors whose scales can be applied."""

QUANTIZED = (*FP8, "I8", "U8")
"""Dtypes of tensors that may have a scale."""

PACKED = ("I8", "U8", "I32")
"""Dtypes of tensors that a folder with quantized weights may pack several numbers into."""

Place = tuple[int, int]
"""The file and the offset of a tensor's first byte."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a quantized tensor: the scale's index in the catalog of the source, and how many elements of the tensor, along
    each dim, share one of its numbers."""

    index: int
    block: Ints


class Quantized(NamedTuple):
    """The quantized tensors of a source.

    Attributes
    ----------
    scales
        The tensors that a cast can dequantize.
    refused
        A text for each tensor that cannot be cast.
    method
        The method by which ``config.json`` says that weights are quantized, or "".
    packed
        Whether there are tensors that only the library of this method reads.
    """

    scales: Mapping[Place, Scale]
    refused: Mapping[Place, str]
    method: str = ""
    packed: bool = False

    def scale(self, catalog: Catalog, index: int) -> Scale | None:
        """Return the scale of a tensor of the source, or of a catalog made from it by renaming and selecting."""
        return self.scales.get(_place(catalog, index))

    def refusal(self, catalog: Catalog, index: int, wanted: str) -> str | None:
        """Return the reason why a tensor cannot be cast to the dtype `wanted`; None if it can."""
        place = _place(catalog, index)
        if place in self.scales and wanted not in FLOATS:
            return f"saved as {catalog.dtype(index)} with a scale, {WITHOUT_SCALE}"
        return self.refused.get(place)


def may_be_quantized(catalog: Catalog) -> bool:
    """Tell whether a tensor has a dtype that quantized tensors have."""
    return len(_small(catalog)) > 0


def _small(catalog: Catalog) -> list[int]:
    """List the tensors of dtypes that quantized tensors have."""
    table, codes = catalog.tensors_table, [CODES.index(code) for code in {*QUANTIZED, *PACKED}]
    found: list[int] = np.flatnonzero(np.isin(table.dtype, codes) & (table.kind == TensorKind.TENSOR)).tolist()
    return [index for index in found if prod(catalog.shape(index))]


def find_scales(catalog: Catalog, blocks: Iterable[Ints] | None, method: str = "") -> Quantized:
    """Find the quantized tensors of a catalog, and the scales that can be applied.

    Parameters
    ----------
    blocks
        Sizes of blocks, in rows and columns, that the numbers of a scale may stand for. With None, no scale is applied, because
        the format does not say how.
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
            refused[place] = f"saved as {code} in a folder quantized by {method}, without a known scale: {DEQUANTIZE}"
        packed = packed or (bool(method) and scale is None and code in PACKED)
    return Quantized(scales, refused, method, packed)


def _place(catalog: Catalog, index: int) -> Place:
    rows = catalog.rows_of(catalog.source(index))
    if rows.start == rows.stop:  # it has no elements
        return (-1, -1)
    return int(catalog.rows.file[rows.start]), int(catalog.rows.offset[rows.start])


def _applicable(catalog: Catalog, index: int, beside: str, blocks: Sequence[Ints], names: frozenset[str]) -> Scale | None:
    """Return the scale of a tensor if a load can apply it."""
    name, code = catalog.tensors_table.names[index], catalog.dtype(index)
    others = [f"{name}{end}" for end in OTHER_PARTS] + [f"{name.removesuffix('weight')}{PRE_QUANT}"]
    if code not in FP8 or beside not in (f"{name}{SCALE_INV}", f"{name}{SCALE}") or names.intersection(others):
        return None
    scale = catalog.index(beside)
    if catalog.dtype(scale) not in FLOATS:
        return None
    block = block_of(catalog.shape(index), catalog.shape(scale), blocks)
    return None if block is None else Scale(scale, block)


def block_of(shape: Ints, scale: Ints, blocks: Iterable[Ints]) -> Ints | None:
    """Return how many elements along each dim share one number of a scale; None if the shapes do not tell.

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
