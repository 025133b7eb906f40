"""The foreign formats that can be read, in the order in which they are tried. Each gives a catalog over its own files.

Nothing is converted and no tensor data are read: the catalog has the places of the bytes, and the planner and the reader of the
library's own checkpoints do the rest, resharding included.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bytecheckpoint import ByteCheckpointFormat
from .catalog_builder import FilePart, ForeignTensor
from .dcp.format import DcpFormat
from .deepspeed.format import DeepSpeedFormat
from .megatron.format import MegatronFormat
from .protocol import Foreign, ForeignFormat, RawValue
from .safetensors import SafetensorsFormat
from .torch_file import TorchFormat
from .vescale import VeScaleFormat

__all__ = ["FORMATS", "FilePart", "Foreign", "ForeignFormat", "ForeignTensor", "RawValue", "open_foreign"]

FORMATS: tuple[ForeignFormat, ...] = (
    ByteCheckpointFormat(),
    VeScaleFormat(),
    MegatronFormat(),
    DcpFormat(),
    DeepSpeedFormat(),
    SafetensorsFormat(),
    TorchFormat(),
)
"""In the order in which they are tried."""


def open_foreign(path: str, formats: Sequence[ForeignFormat] = FORMATS) -> Foreign | None:
    """Open what a path holds in the first format that recognizes it; return None if none does.

    Raises
    ------
    CorruptError
        A format knows it, but it is damaged.
    """
    return next((found for one in formats if (found := one.open(path)) is not None), None)
