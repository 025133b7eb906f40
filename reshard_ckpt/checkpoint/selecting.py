"""Selection of tensors and values by name, by the name of a part of the state that contains them, or by shell-style pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..core.catalog.model import Catalog
from ..core.planning.scales import PACKED, may_be_quantized
from ..core.report import hint_of
from ..engine.loading.scales import Dequantizer, advice, read_quantized
from ..errors import MismatchError, UnsupportedError, UsageError
from ..format.columns import TORCH_DTYPES
from ..formats.source import SAFETENSORS, Source

Names = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class SelectedNames:
    """The selected names: tensors, values, and names that a foreign checkpoint has but that cannot be read."""

    tensors: list[str]
    values: list[str]
    unreadable: list[str]

    def below(self, top: str) -> SelectedNames:
        """Keep the names below `top`; ``""`` keeps everything."""

        def kept(names: list[str]) -> list[str]:
            return [name for name in names if not top or name.startswith(f"{top}.")]

        return SelectedNames(kept(self.tensors), kept(self.values), kept(self.unreadable))

    def refuse_unreadable(self, saved: Catalog) -> None:
        """Raise the error of the first tensor or value that cannot be read."""
        for name in self.unreadable:
            raise saved.unreadable[name]


def match_names(saved: Catalog, names: Sequence[str] | None) -> SelectedNames:
    """Select the tensors and values of these names; None selects all.

    Raises
    ------
    MismatchError
        The checkpoint has nothing for one of the names.
    """
    kinds = saved.names, saved.value_names, tuple(saved.unreadable)
    if names is None:
        return SelectedNames(*map(list, kinds))
    if isinstance(names, str):
        raise UsageError(f"names={names!r}: pass a list of names, as in names=[{names!r}]")
    found = {name: [_matching(known, name) for known in kinds] for name in names}
    absent = [name for name, of_kinds in found.items() if not any(of_kinds)]
    if absent:
        hint = hint_of(absent[0], (*saved.names, *saved.value_names))
        raise MismatchError(
            f"{', '.join(absent)}: not in the checkpoint, which has {top_level_keys(saved)}{hint}; inspect lists all", absent
        )
    return SelectedNames(*(list(dict.fromkeys(n for of_kinds in found.values() for n in of_kinds[i])) for i in range(len(kinds))))


def top_level_keys(saved: Catalog, limit: int = 8) -> str:
    """List the first parts of all names, as text for messages."""
    names = (*saved.names, *saved.value_names, *saved.unreadable)
    found = sorted({name.partition(".")[0] for name in names})
    if not found:
        return "nothing"
    return ", ".join(map(repr, found[:limit])) + (", …" if len(found) > limit else "")


def _matching(known: Sequence[str], name: str) -> list[str]:
    """List the names equal to this one or below it; if there are no such names, use it as a pattern."""
    below = [other for other in known if other == name or other.startswith(f"{name}.")]
    return below or [other for other in known if fnmatchcase(other, name)]


def select_names(saved: Catalog, select: Names, exclude: Names) -> SelectedNames:
    """Select names (None: all), without the excluded ones.

    Raises
    ------
    MismatchError
        The checkpoint has nothing for one of the names.
    """
    taken = match_names(saved, as_list(select))
    if exclude is None:
        return taken
    less = match_names(saved, as_list(exclude))
    gone = {*less.tensors, *less.values, *less.unreadable}
    kinds = (taken.tensors, taken.values, taken.unreadable)
    return SelectedNames(*([name for name in names if name not in gone] for names in kinds))


def as_list(names: Names) -> Sequence[str] | None:
    """Put a single name into a list."""
    return [names] if isinstance(names, str) else names


def dequantizer_of(source: Source, *, verify: bool) -> Dequantizer:
    """Find the quantized tensors of a source, for a cast of some of its tensors."""
    apply = source.format == SAFETENSORS and may_be_quantized(source.catalog)
    return Dequantizer(source.storage, source.catalog, read_quantized(source.storage, source.catalog, apply=apply), verify)


def applied_scales(saved: Catalog, dtypes: Mapping[str, str], dequantizer: Dequantizer | None) -> frozenset[str]:
    """Return the names of the scales that the conversion to these dtypes applies, which the result therefore lacks."""
    if dequantizer is None:
        return frozenset()
    cast = [index for name, code in dtypes.items() if code != saved.dtype(index := saved.index(name))]
    scales = [dequantizer.quantized.scale(saved, index) for index in cast]
    return frozenset(saved.tensors_table.names[scale.index] for scale in scales if scale is not None)


def cast_dtypes(
    saved: Catalog, tensors: Sequence[str], cast: Mapping[str, Any] | None, dequantizer: Dequantizer | None
) -> dict[str, str]:
    """Map tensors to the dtypes that they are converted to; the first pattern that matches a tensor wins.

    Raises
    ------
    UsageError
        A dtype is not a floating-point one, or a pattern matches no floating-point tensor.
    UnsupportedError
        A pattern matches a quantized tensor that cannot be dequantized.
    """
    dtypes: dict[str, str] = {}
    for pattern, wanted in (cast or {}).items():
        code = _floating_code(pattern, wanted)
        fitting = set(tensors).intersection(_matching(saved.names, pattern))
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


def _floating_code(pattern: str, wanted: Any) -> str:
    """Return the code of a floating-point dtype, given as torch's dtype, torch's name for it, or the code."""
    name = str(wanted).removeprefix("torch.")
    known = {code: str(dtype).removeprefix("torch.") for code, dtype in TORCH_DTYPES.items() if dtype.is_floating_point}
    for code, spelled in known.items():
        if name in (code, spelled):
            return code
    raise UsageError(f"cast={{{pattern!r}: {wanted!r}}}: no floating-point dtype; there are {', '.join(sorted(known.values()))}")
