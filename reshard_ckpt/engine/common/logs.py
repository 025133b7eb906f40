"""The logger of this package, whose lines begin with the rank and its mesh coordinates."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ...core.catalog.specs import Mesh
from ...core.timeline import rank_label

LOGGER = logging.getLogger("reshard_ckpt")

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class RankLog(_Adapter):
    """The package's logger for one rank: ``[rank 5 dp=1 tp=1] saved …``."""

    def __init__(self, rank: int, mesh: Mesh | None) -> None:
        super().__init__(LOGGER, {})
        self._rank, self._mesh = rank, mesh

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[{rank_label(self._rank, self._mesh).replace('%', '%%')}] {msg}", kwargs
