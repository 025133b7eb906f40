"""Folders of ``torch.distributed.checkpoint``: read as they are, and written."""

from __future__ import annotations

from .format import DcpFormat
from .read import open_folder
from .write import Span, write_dcp

__all__ = ["DcpFormat", "Span", "open_folder", "write_dcp"]
