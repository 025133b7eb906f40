"""Folders like those of ``torch.distributed.checkpoint``: metadata that other libraries write in DCP's way, and their content."""

from __future__ import annotations

from ..formats.dcp.chunks import FileSizes
from ..formats.dcp.metadata import METADATA_KEY, Chunk, ChunkRun, Extent, Metadata, SavedTensor
from ..formats.dcp.names import KeyPath
from ..formats.dcp.read import add_parts, add_tensors, advice_on_numbers, open_dcp
from ..formats.dcp.rooted import is_written_by, read_nested, read_part, renamed
from ..formats.dcp.write import FolderLayout, write_folder

__all__ = [
    "METADATA_KEY",
    "Chunk",
    "ChunkRun",
    "Extent",
    "FileSizes",
    "FolderLayout",
    "KeyPath",
    "Metadata",
    "SavedTensor",
    "add_parts",
    "add_tensors",
    "advice_on_numbers",
    "is_written_by",
    "open_dcp",
    "read_nested",
    "read_part",
    "renamed",
    "write_folder",
]
