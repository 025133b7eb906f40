"""Runs in the memory of nodes that are open in this process, by their storage path; a checkpoint of one has a tag."""

from __future__ import annotations

from ..manager.open_runs import TAG, close_run, load_without_going_back, open_run, run_at, tags_of

__all__ = ["TAG", "close_run", "load_without_going_back", "open_run", "run_at", "tags_of"]
