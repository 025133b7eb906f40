"""Opening and closing of runs (see `Manager`) that keep checkpoints in the memory of nodes; a tag names each checkpoint."""

from __future__ import annotations

from ..manager.open_runs import TAG, close_run, load_without_going_back, open_run, run_at, tags_of

__all__ = ["TAG", "close_run", "load_without_going_back", "open_run", "run_at", "tags_of"]
