"""Pictures of a checkpoint: functions from plain data to matplotlib figures, and from figures to PNG, SVG or HTML.

This package imports matplotlib, the extra ``plot``; `checkpoint.plot` imports it only when it draws.
"""

from __future__ import annotations

from .cuts import draw_cuts
from .feeds import WantedPart, wanted_on
from .page import rendered, report_page
from .times import draw_goodput, draw_timeline, timeline_title

__all__ = ["WantedPart", "draw_cuts", "draw_goodput", "draw_timeline", "rendered", "report_page", "timeline_title", "wanted_on"]
