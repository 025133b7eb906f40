"""The checkpoints of a run in its store: listing them, and removing the ones that the retention rule does not keep.

Only rank 0 removes. A checkpoint that is being read stays, and so does the last checkpoint that is known to be good.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ..core.catalog.model import Catalog
from ..engine.common.files import open_catalog
from ..engine.common.reader_notes import removed_within
from ..engine.common.run_lineage import RunLineage
from ..engine.common.step_folders import StepNames, alone_with, clean_up, find_steps, needed_by_folders, remove_files, remove_step
from ..errors import CorruptError, StorageError, UsageError
from ..format.catalog import HEAD_BYTES
from ..format.files import CATALOG_KEY, EXPORT, SAVE_ID
from ..storage import Lock, Storage, open_below
from ..storage.protocol import PROBE, begin, map_at_once
from .retention import Retention
from .run_folder import StepInfo, is_foreign, read_step_info


class _Listing(NamedTuple):
    """The steps of a run, as one listing of its files shows them.

    Attributes
    ----------
    committed
        The folder of each committed step.
    removed
        Folders of removed steps, mapped to the time of the removal in seconds since 1970; only steps whose time of grace for
        readers has ended.
    needed
        Keys, from the root, of files of other steps that must stay, because a removed step refers to them whose time of grace has
        not ended.
    """

    committed: dict[int, str]
    removed: dict[str, float]
    needed: frozenset[str] = frozenset()


class StoredSteps:
    """The committed steps of a run in its store: lists, measures and removes them.

    Parameters
    ----------
    storage, root
        The root of the run, and its path.
    names
        The names of the folders of its steps.
    rule
        The retention rule.
    lineage
        Knows the saves that were superseded when the run went back to an older step.
    read_only
        Whether this process only reads, so that a job may save, prune and go back beside it.
    lease
        The lease of the root, checked before anything is removed.
    grace_s
        Seconds that the files of a removed step stay in a store without locks, where nobody knows who reads them.

    Attributes
    ----------
    pruning
        Lock, held while checkpoints are removed.
    """

    def __init__(
        self,
        storage: Storage,
        root: str,
        names: StepNames,
        rule: Retention,
        lineage: RunLineage,
        *,
        read_only: bool = False,
        lease: Lock | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self._lease = lease
        self._grace_s = 0.0 if storage.hints.has_locks else grace_s
        self._storage, self._root, self._names, self._rule, self._lineage = storage, root, names, rule, lineage
        self._read_only = read_only
        self.pruning = threading.Lock()
        self._infos: dict[int, StepInfo] = {}
        self._good: list[int] = []
        self._damaged: set[int] = set()
        self._foreign: set[int] = set()
        self._since_full = 0
        self._looking: Callable[[], _Listing] = self._look
        self._committed_since: set[int] = set()

    @property
    def timeout_s(self) -> float:
        """The seconds for which requests to an object store are repeated."""
        return self._storage.hints.retry_s

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step; for a step that has none, the path of a new one."""
        return self._path(self._names.folder(self._storage, step))

    def new_path(self, step: int) -> str:
        """Return the path to save a new checkpoint of a step to."""
        return self._path(self._names.of(step))

    def _path(self, folder: str) -> str:
        return f"{self._root.rstrip('/')}/{folder}"

    def steps(self) -> list[int]:
        """List the committed steps in order, checkpoints of other libraries included."""
        return list(self.folders())

    def folders(self) -> dict[int, str]:
        """Map each committed step, in order, to the name of its folder; folders of other libraries' checkpoints included."""
        committed, begun = find_steps(self._storage, self._names)
        self._foreign = {s for s, folder in begun.items() if s in self._foreign or is_foreign(self._path(folder), self.timeout_s)}
        return dict(sorted({**committed, **{s: folder for s, folder in begun.items() if s in self._foreign}}.items()))

    def counted(self) -> list[int]:
        """List the committed steps in order. Steps that were superseded when the run went back to an older step are left out."""
        if self._read_only:  # the job may have saved a step anew, so the cached facts may be out of date
            self._lineage.refresh()
            self._forget_replaced()
        return [step for step in self.steps() if self._is_current(step)]

    def newest_except(self, passed: Iterable[int]) -> int:
        """Return the newest committed step that is neither superseded nor in `passed`, or −1. A copy of a step counts."""
        return max({*self.counted()} - {*passed}, default=-1)

    def newest(self) -> int:
        """Return the newest committed step that is neither superseded nor a copy of another step; −1 without such a step."""
        return next((step for step in reversed(self.counted()) if not self._is_copy(step)), -1)

    def has(self, step: int) -> bool:
        """Return whether the step is committed, and neither superseded nor a copy of another step."""
        return step in self.counted() and not self._is_copy(step)

    def save_id(self, step: int) -> str:
        """Return the id of the save that wrote a step."""
        return self._info(step).save_id

    def save_ids_beyond(self, step: int) -> list[str]:
        """List the save ids of all steps newer than `step`, without steps whose catalog is damaged."""
        newer = (self._info(other).save_id for other in self.steps() if other > step and not self._is_copy(other))
        return [save_id for save_id in newer if save_id]

    def metrics(self, steps: Collection[int]) -> dict[int, float]:
        """Map the steps that have a metric to that metric."""
        self._forget_replaced()
        self._read_infos(steps)
        return {step: metric for step in steps if (metric := self._info(step).metric) is not None and not self._is_copy(step)}

    def keeps(self, step: int, metric: float | None) -> bool:
        """Return whether the rule keeps a new checkpoint even when many newer ones follow.

        It does if the step is a multiple of `keep_every`, or so far one of the `keep_best` best.
        """
        if self._rule.keep_every is not None and step % self._rule.keep_every == 0:
            return True
        if metric is None or not self._rule.keep_best:
            return False
        metrics = {**self.metrics(self.counted()), step: metric}
        return step in self._rule.ranked([*metrics], metrics)[: self._rule.keep_best]

    def refuse_copy(self, step: int, path: str, catalog: Catalog) -> None:
        """Raise a `CorruptError` if the catalog at `path`, the folder of `step`, was saved to the folder of another step."""
        if self._names.is_copy(step, catalog.folder):
            raise CorruptError(
                f"{path}: saved as {catalog.folder}, and then copied or renamed, so it is not of step {step}; rename or remove "
                f"it, load it by checkpoint.load({path!r}, state), or write it anew as a step: reshard-ckpt convert "
                f"{path} DST --to reshard"
            )

    def note_good(self, step: int) -> None:
        """Record that a step was loaded or committed, and so is whole. The last such step is never removed by `prune`."""
        self._good.append(step)

    def note_committed(self, step: int) -> None:
        """Record that a step was committed, and forget the facts about an older save of this step."""
        self.note_good(step)
        self._committed_since.add(step)
        self._damaged.discard(step)
        self._foreign.discard(step)
        self._infos.pop(step, None)

    def next_base(self, full_every: int) -> str | None:
        """Return the path of the step that the next save may refer to: the one committed or loaded last. Rank 0 calls it.

        None if there is no such step, or if a full save is due: one of every `full_every` saves is full.
        """
        step = self._good[-1] if self._good else -1
        num_saves = self._info(step).num_saves if self._good else 0
        self._since_full = max(self._since_full, num_saves)
        if not 0 < num_saves <= self._since_full < full_every:
            self._since_full = 0
        self._since_full += 1
        return self.path(step) if self._since_full > 1 else None

    def note_damaged(self, step: int) -> None:
        """Record that a step could not be loaded. From then on it takes no place among the ``keep_last`` newest."""
        self._damaged.add(step)

    def note_deleted(self, step: int) -> None:
        """Record that a step was deleted."""
        self._good = [good for good in self._good if good != step]
        self._committed_since.discard(step)

    def look_ahead(self) -> None:
        """Begin to list the steps in the store in a thread, for the `prune` after the save that begins now.

        Nobody else removes a step meanwhile. In a store with fast round trips this does nothing, and `prune` lists them itself.
        """
        self._committed_since.clear()
        self._looking = begin(self._storage, self._look)

    def _look(self) -> _Listing:
        committed, begun = find_steps(self._storage, self._names)
        if not self._grace_s:
            return _Listing(committed, {})
        young, old = removed_within(self._storage, begun.values(), self._grace_s)
        self._read_infos(committed)  # while the save runs: the note of a removed step has its references
        return _Listing(committed, old, frozenset().union(*young.values()))

    def prune(self) -> None:
        """Remove the steps that the retention rule does not keep, and files of removed steps whose time of grace has ended."""
        with self.pruning:
            looking, self._looking = self._looking, self._look
            seen = looking()
            new = {step: self._names.of(step) for step in self._committed_since}
            committed = dict(sorted({**new, **seen.committed}.items()))
            steps = list(committed)
            kept = self._kept(steps)
            self._tell_of_newer(steps)
            needs: set[str] = set()
            for step in steps:
                if step not in kept:
                    needs |= self._info(step).referred if self._grace_s else frozenset()
                    if self._remove(step, steps):
                        steps = [other for other in steps if other != step]
            old = {folder: removed_s for folder, removed_s in seen.removed.items() if folder not in committed.values()}
            needed = self._needed(steps).union(needs, seen.needed) if old else frozenset()
            for folder, removed_s in old.items():  # the next save may write to one of these folders meanwhile
                self._check_lease()
                remove_files(self._storage, folder, needed, removed_s)

    def _tell_of_newer(self, steps: Sequence[int]) -> None:
        """Warn if an earlier job left a newer step, because `load_latest` would go on from it and not from this job's steps."""
        newest = max((step for step in steps if step not in self._damaged), default=-1)
        if self._good and newest > max(self._good) and self._is_current(newest) and not self._is_copy(newest):
            warnings.warn(
                f"{self._root}: step {newest} is newer than all that this job saved or loaded, so load_latest would go on from "
                "it, and steps of this job are removed first; to begin anew, use another root, or delete the earlier run's steps",
                stacklevel=6,
            )

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def delete(self, step: int) -> bool:
        """Remove the checkpoint of a step. Return whether there was one.

        Raise `StorageError` if the step is being read, and `UsageError` if the step is a folder of another library.
        """
        with self.pruning:
            steps = self.steps()
            if step not in steps:
                return False
            if step in self._foreign:
                raise UsageError(f"{self.path(step)}: this folder is of another library, so it is not removed; remove it by hand")
            if not self._remove(step, steps):
                raise StorageError(
                    f"{self.path(step)}: somebody reads it, so it is not removed; try again when that is over. If it is a "
                    "link to another folder, remove the link yourself"
                )
            return True

    def _remove(self, step: int, steps: Iterable[int]) -> bool:
        others = [other for other in steps if other != step]
        referred = self._info(step).referred

        def needed(but: str = "") -> frozenset[str]:
            found = self._needed(others, but)
            self._check_lease()  # after these requests, during which it may have ended
            return found

        # All folders of the step go, the one that counts least first: after a crash, another order would let a folder count that
        # did not count before.
        named = self._names.patterns
        folders = [self._names.of(step)] if len(named) == 1 else reversed(self._names.committed(self._storage, step))
        self._check_lease()
        removed = all(
            # With a grace, only the catalog goes now.
            remove_step(self._storage, folder, partial(needed, folder), keep_files=self._grace_s > 0, needs=referred)
            for folder in folders
        )
        if removed:
            self._infos.pop(step, None)
            # referred: files that this step alone needed, in folders of steps that were removed or saved anew before
            if referred and not self._grace_s:
                self._storage.delete(referred - needed())
        return removed

    def _kept(self, steps: Sequence[int]) -> frozenset[int]:
        """Return the steps to keep: the last step that was loaded or committed, and the steps that the rule keeps.

        The rule is applied twice: to all steps, and to the steps that are neither damaged, superseded nor copies.
        """
        metrics = self.metrics(steps) if self._rule.keep_best else {}
        good = [step for step in self._good if step in steps][-1:]
        newest = max(good, default=-1)  # of older steps, no catalog is read to see a copy
        whole = [
            step
            for step in steps
            if step not in self._damaged and self._is_current(step) and not (step > newest and self._is_copy(step))
        ]
        return self._rule.kept(steps, metrics) | self._rule.kept(whole, metrics) | frozenset(good)

    def _is_current(self, step: int) -> bool:
        superseded = self._lineage.current.superseded
        return not superseded or self._info(step).save_id not in superseded

    def _is_copy(self, step: int) -> bool:
        """Return whether the folder of a step was saved as another step, so that it has the save id of that one."""
        return self._names.is_copy(step, self._info(step).saved_as)

    def _needed(self, steps: Collection[int], but: str = "") -> frozenset[str]:
        """Return the keys of all files that these steps need, or that checkpoints in any other folders of the root need.

        The folder `but` does not count.
        """
        self._forget_replaced()
        self._read_infos(steps)
        # A step may have a second folder, of another name: it does not count, but somebody may load it by its path.
        counted = {but, *(self._info(step).folder for step in steps)}
        beside = needed_by_folders(self._storage, counted.__contains__, pass_damaged=True)
        return frozenset(key for step in steps for key in self._info(step).needed).union(beside)

    def _forget_replaced(self) -> None:
        """Forget the cached `StepInfo` of each step whose catalog has changed since: another program has saved the step again."""
        self._storage.close()  # a file that it has open may have been replaced

        def head(info: StepInfo) -> bytes:
            found = bytearray(HEAD_BYTES)
            with suppress(CorruptError, StorageError):
                self._storage.read_into(f"{info.folder}/{CATALOG_KEY}", 0, [memoryview(found)])
            return bytes(found)

        infos = list(self._infos.items())
        heads = map_at_once(self._storage, head, [info for _, info in infos])
        for (step, info), now in zip(infos, heads, strict=True):
            if now != info.head:
                self._infos.pop(step, None)

    def _read_infos(self, steps: Iterable[int]) -> None:
        """Read and cache the `StepInfo` of each of these steps that is not cached yet, several at once."""
        map_at_once(self._storage, self._info, [step for step in steps if step not in self._infos])

    def _info(self, step: int) -> StepInfo:
        if step not in self._infos:
            folder = self._names.folder(self._storage, step)
            foreign = step in self._foreign
            self._infos[step] = StepInfo(folder, save_id=folder) if foreign else read_step_info(self._storage, folder)
        return self._infos[step]

    def remove_leftovers(self) -> None:
        """Remove files that saves left behind when their process died. The root is locked, so no other job saves there."""
        # Probes are left by managers that were killed while they tested whether the store honours conditions.
        finding = begin(self._storage, lambda: find_steps(self._storage, self._names))
        self._storage.delete(f"{folder}/{PROBE}" for folder in self._storage.folders() if SAVE_ID.fullmatch(folder))
        committed, begun = finding()
        inner = map_at_once(self._storage, self._storage.folders, committed.values())
        stale = [folder for folder, folders in zip(committed.values(), inner, strict=True) if len({*folders} - {EXPORT}) > 1]
        for folder in stale:
            with alone_with(self._storage, folder) as alone, open_below(self._storage, folder) as storage, suppress(CorruptError):
                if alone:  # not alone: a reader or `compact` is there
                    clean_up(storage, open_catalog(storage), storage.folders(), self._grace_s)
        needed = self._needed(committed) if begun else frozenset()
        young, _ = removed_within(self._storage, begun.values() if self._grace_s else (), self._grace_s)
        needed = needed.union(*young.values())
        for folder in {*begun.values()} - {*young}:
            self._check_lease()
            remove_files(self._storage, folder, needed)
