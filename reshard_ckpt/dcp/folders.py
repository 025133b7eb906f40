"""What of DCP's own folders does a call that speaks DCP want otherwise? The names as they were saved."""

from __future__ import annotations

from dataclasses import replace

from ..formats.dcp import DcpFormat
from ..formats.foreign import FORMATS, ForeignFormat

FORMATS_AS_SAVED: tuple[ForeignFormat, ...] = tuple(
    replace(one, as_saved=True) if isinstance(one, DcpFormat) else one for one in FORMATS
)
"""All foreign formats; the names in a folder of DCP are those of the state dict that DCP was given."""
