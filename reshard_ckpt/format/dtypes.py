"""The torch dtype of each dtype code. Catalogs are read without this module: it imports torch, which takes seconds."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from .columns import TORCH_NAMES


class _TorchDtypes(dict[str, torch.dtype]):
    def __missing__(self, code: str) -> torch.dtype:
        raise UnsupportedError(f"dtype {code} is torch.{TORCH_NAMES[code]}, which torch {torch.__version__} lacks; upgrade torch")


TORCH_DTYPES: dict[str, torch.dtype] = _TorchDtypes(
    {code: getattr(torch, name) for code, name in TORCH_NAMES.items() if hasattr(torch, name)}
)
"""The torch dtype of each dtype code of `core.catalog.specs`. A dtype that this torch lacks raises `UnsupportedError`."""


def code_named(wanted: Any) -> str | None:
    """Return the code of a dtype that is given as torch's dtype, as torch's name for it, or as the code; None for any other.

    >>> code_named(torch.bfloat16), code_named("bfloat16"), code_named("BF16"), code_named("complex128")
    ('BF16', 'BF16', 'BF16', None)
    """
    name = str(wanted).removeprefix("torch.")
    return next((code for code, of_torch in TORCH_NAMES.items() if name in (code, of_torch)), None)
