"""The torch dtype of each code of a dtype. A catalog is read without this module: it imports torch, which takes seconds."""

from __future__ import annotations

import torch

from .columns import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in TORCH_NAMES.items()}
"""By the code of `core.catalog.specs`."""
