"""Folders of ``torch.distributed.checkpoint``: read in place, and written."""

from __future__ import annotations

from .write import OPTIMIZER_FORMS, write_dcp

__all__ = ["OPTIMIZER_FORMS", "write_dcp"]
