"""Converting dtypes of a checkpoint: the tensors to convert, their new dtypes, and the scales that the conversion applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.catalog.model import Catalog
from ..core.planning.scales import PACKED, may_be_quantized
from ..engine.loading.scales import Dequantizer, advice, read_quantized
from ..errors import UnsupportedError, UsageError
from ..format.columns import TORCH_NAMES
from ..format.dtypes import TORCH_DTYPES, code_named
from ..formats.source import SAFETENSORS, Source
from .selecting import matching


def dequantizer_of(source: Source, *, verify: bool) -> Dequantizer:
    """Find the quantized tensors of a source. Return a `Dequantizer`, with which a cast multiplies them by their scales."""
    apply = source.format == SAFETENSORS and may_be_quantized(source.catalog)
    return Dequantizer(source.storage, source.catalog, read_quantized(source.storage, source.catalog, apply=apply), verify)


def applied_scales(saved: Catalog, dtypes: Mapping[str, str], dequantizer: Dequantizer | None) -> frozenset[str]:
    """Return the names of the scale tensors that a conversion multiplies into quantized weights. The result lacks them."""
    if dequantizer is None:
        return frozenset()
    cast = [index for name, code in dtypes.items() if code != saved.dtype(index := saved.index(name))]
    scales = [dequantizer.quantized.scale(saved, index) for index in cast]
    return frozenset(saved.tensors_table.names[scale.index] for scale in scales if scale is not None)


def cast_dtypes(
    saved: Catalog, tensors: Sequence[str], cast: Mapping[str, Any] | None, dequantizer: Dequantizer | None
) -> dict[str, str]:
    """Map tensors to the dtypes that they are converted to; the first pattern that matches a tensor wins.

    Raise `UsageError` if a dtype is not a floating-point one, or a pattern matches no floating-point tensor. Raise
    `UnsupportedError` if a pattern matches a quantized tensor that cannot be dequantized.
    """
    if cast and not isinstance(cast, Mapping):  # `load` takes other forms, without dtypes
        raise UsageError(f"cast={cast!r:.200}: pass a map of patterns to dtypes, as in cast={{'*': 'bfloat16'}}")
    dtypes: dict[str, str] = {}
    for pattern, wanted in (cast or {}).items():
        code = code_named(wanted)
        if code is None or not TORCH_DTYPES[code].is_floating_point:
            choices = ", ".join(sorted(TORCH_NAMES[code] for code, dtype in TORCH_DTYPES.items() if dtype.is_floating_point))
            raise UsageError(f"cast={{{pattern!r}: {wanted!r}}}: not a floating-point dtype; pass one of {choices}")
        fitting = set(tensors).intersection(matching(saved.names, pattern))
        found = [name for name in fitting if TORCH_DTYPES[saved.dtype(saved.index(name))].is_floating_point]
        packed = sorted(name for name in fitting if saved.dtype(saved.index(name)) in PACKED)
        for line in advice(dequantizer.quantized) if packed and dequantizer else ():
            raise UnsupportedError(f"cast={{{pattern!r}: …}}: {packed[0]} is {saved.dtype(saved.index(packed[0]))}: {line}")
        if not found:
            raise UsageError(f"cast={{{pattern!r}: …}}: no tensor of such a name is floating-point; correct the pattern")
        for name in found:
            index = saved.index(name)
            refusal = dequantizer.quantized.refusal(saved, index, code) if dequantizer and code != saved.dtype(index) else None
            if refusal is not None:
                raise UnsupportedError(f"cast={{{pattern!r}: …}}: {name} is {refusal}, or convert without cast=")
            dtypes.setdefault(name, code)
    return dtypes
