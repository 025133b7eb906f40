"""The block ``nebula``: an engine saves to the memory of nodes, and from there to a storage path, as `reshard_ckpt.nebula` does.

1. A save is a checkpoint of a `Manager` at ``persistent_storage_path``, with the tag in its metadata. It is committed when it is
   whole in memory, and then ``latest`` in the folder of the save names its tag. Every ``persistent_time_interval`` seconds, one
   checkpoint is copied to the storage path; so is the last one when the engine is destroyed.
2. Its step is the number at the end of its tag, if that is greater than all steps of the run; else the next step.
3. A load takes the tag that it is given, or the tag in ``latest``. If the checkpoint in ``latest`` is gone, it takes the newest
   whole one of the run.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ...plugins import checkpoint, open_storage
from ...plugins.errors import CheckpointNotFound, CorruptError
from ...plugins.runs import TAG, close_run, load_without_going_back, open_run, run_at, tags_of
from ...plugins.states import values_of_all
from .loading import Saved, find_saved, latest_of, saved_at
from .names import ROOT


@dataclass(frozen=True, slots=True)
class NebulaBlock:
    """The options of the block ``nebula``.

    Attributes
    ----------
    path
        ``persistent_storage_path``: the folder to which checkpoints are copied from memory.
    interval_s
        ``persistent_time_interval``: the time between two such copies, in seconds.
    num_versions
        ``num_of_version_in_retention``: the number of checkpoints to keep there.
    loads
        ``enable_nebula_load``: whether a load looks into the run before the folder that it is given.
    load_path
        ``nebula_load_path``: the storage path of another run to start from.
    """

    path: str
    interval_s: float = 100
    num_versions: int = 2
    loads: bool = True
    load_path: str | None = None


_LOGGER = logging.getLogger("reshard_ckpt")
_GONE = CheckpointNotFound, CorruptError


class NebulaRun:
    """The run to which an engine with the block ``nebula`` saves. All ranks construct it, save and load together."""

    def __init__(self, block: NebulaBlock, timeout_s: float = 600.0) -> None:
        self._block, self._timeout_s = block, timeout_s
        self._manager = run_at(block.path) or open_run(block.path, block.interval_s, block.num_versions)
        self._last = max(self._tags(self._manager), default=-1)

    def save(self, tag: str, state: Mapping[str, Any], **options: Any) -> checkpoint.SaveHandle:
        """Begin a save of the run to the memory of nodes, with the options of `checkpoint.async_save`."""
        digits = re.search(r"\d+$", tag)
        number = int(digits[0]) if digits else -1
        self._last = number if number > self._last else self._last + 1
        return self._manager.async_save(self._last, state, metadata={TAG: tag}, **options)

    def close(self) -> None:
        """Copy the newest checkpoint of the run from memory to the storage path, and close the run."""
        close_run(self._manager)

    def find(self, load_dir: str, tag: Any) -> Saved | None:
        """Find the checkpoint of a tag, or of ``latest``, in the run or in the folder of the load. Collective.

        Without ``enable_nebula_load``, only the folder of the load is looked at. Return None if no tag is given and there is no
        checkpoint. Raise `CheckpointNotFound` if the tag is given, and no checkpoint has it.
        """
        if not self._block.loads:
            return find_saved(load_dir, tag, timeout_s=self._timeout_s)
        found = self._of_tag(load_dir, str(tag)) if tag is not None else self._newest(load_dir)
        if found is not None:
            return found
        # Without nebula, the checkpoint was saved in the folder of the load; or it was never saved.
        return find_saved(load_dir, tag, timeout_s=self._timeout_s)

    def _of_tag(self, load_dir: str, tag: str) -> Saved | None:
        other = self._to_begin_from()
        if tag in other:
            return saved_at(other[tag])
        tags = self._tags(self._manager)
        step = _step_of(tags, tag)
        if step is not None:
            return self._saved(step, load_dir, tag)
        if self._is_in_folder(load_dir, tag):
            return None
        raise CheckpointNotFound(
            f"nebula: no checkpoint {tag!r} in memory, at {self._block.path} or in {load_dir}; there are: "
            f"{', '.join([*tags.values(), *other]) or 'none'}"
        )

    def _newest(self, load_dir: str) -> Saved | None:
        """Find the checkpoint that ``latest`` names in this run, else its newest, else the newest of the run to start from.

        Return None if ``latest`` names a checkpoint in the folder of the load, which was saved without nebula.
        """
        latest, tags = latest_of(load_dir, timeout_s=self._timeout_s), self._tags(self._manager)
        # All ranks go the same way from here: `latest` and `tags` are equal on all of them, and each step below is collective.
        step = None if latest is None else _step_of(tags, latest)
        try:
            if step is not None and latest is not None:
                return self._saved(step, load_dir, latest)
        except _GONE as error:
            _LOGGER.warning("nebula: %s, which latest names, is not whole any more: %s", latest, error)
        if step is None and latest is not None and self._is_in_folder(load_dir, latest):
            return None
        loaded = self._manager.load_latest({ROOT: {}}, strict=False) if tags else None
        if loaded is not None:
            return self._saved(loaded.step, load_dir, tags.get(loaded.step, str(loaded.step)))
        other = list(self._to_begin_from().values())
        return saved_at(other[-1]) if other else None

    def _to_begin_from(self) -> dict[str, str]:
        """Map tags to the paths of the checkpoints in ``nebula_load_path``, in order, if that is another run; it is only read."""
        path = self._block.load_path
        if path is None or os.path.realpath(path) == os.path.realpath(self._block.path):
            return {}
        with checkpoint.Manager(path, read_only=True) as other:
            return {tag: other.path(step) for step, tag in self._tags(other).items()}

    def _saved(self, step: int, load_dir: str, tag: str) -> Saved:
        """Check that the checkpoint of a step is whole, in memory or the store, and open it. Collective."""
        load_without_going_back(self._manager, step, {ROOT: {}})  # fails unless it is whole; brings its catalog to every node
        self._last = step
        catalog = self._manager.catalog(step)
        assert catalog is not None
        path = os.path.join(load_dir, tag)
        return Saved(path, catalog, partial(self._manager.load, step), partial(self._manager.read, step))

    def _tags(self, manager: checkpoint.Manager) -> dict[int, str]:
        """Map the steps of a run to their tags, in order. Collective: new nodes do not know checkpoints in others' memory."""
        every: list[dict[int, str]] = values_of_all("list tags of", self._block.path, tags_of(manager), timeout_s=self._timeout_s)
        return dict(sorted((item for of_rank in every for item in of_rank.items()), key=lambda item: item[0]))

    def _is_in_folder(self, load_dir: str, tag: str) -> bool:
        """Tell whether a folder has files of a tag; rank 0 looks for all ranks. A save to memory leaves an empty folder."""
        path = os.path.join(load_dir, tag)
        own = False
        if dist.get_rank() == 0:
            with open_storage(path) as storage:
                own = bool(storage.list())
        return bool(values_of_all("look for", path, own, timeout_s=self._timeout_s)[0])


def _step_of(tags: Mapping[int, str], tag: str) -> int | None:
    """Return the largest step whose checkpoint has this tag; None if no checkpoint has it."""
    return max((step for step, other in tags.items() if other == tag), default=None)
