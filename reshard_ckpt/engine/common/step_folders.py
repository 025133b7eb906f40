"""The step folders below the root of a run: finding them, naming them, and removing one.

The catalog of a checkpoint is removed first: before that the checkpoint is whole, after it the checkpoint is gone. Its other
files follow, except files that another committed catalog refers to. A reader holds a shared lock on the catalog, so a checkpoint
that is being read is not removed.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from ...core.catalog.model import Catalog
from ...errors import CheckpointError, CorruptError, StorageError, UsageError
from ...format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ...format.files import CATALOG_KEY, EXPORT, RESHARD_LOCK, SAVE_ID, SAVE_TIME, exported_saves
from ...storage import LocksUnsupported, MissingKey, Storage, open_beside, open_storage, unlinked_path
from ...storage.protocol import at_once
from .lineage import LINEAGE, Note
from .reader_notes import GRACE_S, REMOVED_KEY, is_read, note_removed, old_enough

STEP_NAME = "step_{}"
"""The default pattern of the names of step folders; a manager may have another."""

_PATTERN = re.compile(r"(?!\.)([\w.-]*)\{(:0[1-9]\d?d)?\}([\w.-]*)")
_TEMPORARY = re.compile(r"\.catalog\.msgpack\.[0-9a-f]{32}\.tmp")
_BEGUN_EXPORT = re.compile(rf"\.{EXPORT}\.[0-9a-f]{{32}}\.(partial|replaced)")


@dataclass(frozen=True, slots=True)
class StepNames:
    """The patterns of the names of a run's step folders.

    The first names new folders. The others are patterns that the run had before, and `STEP_NAME`, the last of all: folders of
    these names are found too. If a step has several folders, the one whose pattern comes first counts.

    >>> names = StepNames(("iter-{:04d}",)).with_patterns(())
    >>> names.of(7), names.step_of("iter-0007"), names.step_of("iter-7"), names.step_of("step_7")
    ('iter-0007', 7, None, 7)
    """

    patterns: tuple[str, ...] = (STEP_NAME,)

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            found = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
            if found is None or found[1][-1:].isdigit() or found[3][:1].isdigit():
                raise UsageError(
                    f"name={pattern!r}: pass the name of a step's folder with {{}} for the step, as in 'step-{{}}' or "
                    "'iter_{:07d}': letters, digits, '.', '_' and '-', no digit beside the braces, and no '.' in front"
                )

    def with_patterns(self, others: Iterable[str]) -> StepNames:
        """Return a copy that also recognizes folders with other patterns. New folders are named as before."""
        return StepNames(tuple(dict.fromkeys([*self.patterns, *others, STEP_NAME])))

    def of(self, step: int) -> str:
        """Return the folder name for a new checkpoint of this step."""
        return self.patterns[0].format(step)

    def step_of(self, folder: str) -> int | None:
        """Return the step that a folder's name stands for; None if no pattern fits."""
        for pattern in self.patterns:
            before, after = pattern[: pattern.index("{")], pattern[pattern.index("}") + 1 :]
            digits = folder[len(before) : len(folder) - len(after)]
            # A hostile catalog may name a folder with more digits than Python converts. A pattern pads to 99 at most.
            is_number = digits.isascii() and digits.isdecimal() and len(digits) < 100
            if is_number and pattern.format(int(digits)) == folder:
                return int(digits)
        return None

    def is_copy(self, step: int, saved_as: str) -> bool:
        """Return whether a step's folder is a copy of another step's; `saved_as` is the folder name that its catalog has."""
        return self.step_of(saved_as) not in (None, step)

    def folder(self, root: Storage, step: int) -> str:
        """Return a step's folder name: of a committed checkpoint, else of any folder that exists, else for a new checkpoint."""
        if len(self.patterns) == 1:
            return self.of(step)
        if committed := self.committed(root, step):
            return committed[0]
        return next((name for name in root.folders(linked=True) if self.step_of(name) == step), self.of(step))

    def committed(self, root: Storage, step: int) -> list[str]:
        """List the folders that hold a committed checkpoint of a step, in order of the patterns. The first one counts."""
        names = list(dict.fromkeys(pattern.format(step) for pattern in self.patterns))
        sizes = root.stat([f"{name}/{CATALOG_KEY}" for name in names])
        return [name for name, size in zip(names, sizes, strict=True) if size is not None]


STEP_NAMES = Note(
    ".reshard_ckpt.names",
    1,
    1 << 16,
    lambda patterns: StepNames(tuple(patterns)).with_patterns(()),
    "restore the file, or delete it and make a Manager with the name= of the run",
)
"""The note (small file) in the root of a run that lists the patterns of its step folders. Only a manager with ``name=`` writes
it."""


def names_at(root: Storage) -> StepNames:
    """Read the patterns of a run's step folders from its note. A run without a note has the default pattern alone."""
    return STEP_NAMES.read(root) or StepNames()


def find_steps(root: Storage, names: StepNames | None = None) -> tuple[dict[int, str], dict[int, str]]:
    """Return two dicts from step to folder, in order of steps: the committed steps, and steps without a committed checkpoint.

    `names` has the patterns of folder names; by default those in the root's note. A step of the second dict has only folders
    without a catalog.
    """
    names = names or names_at(root)
    found = [(step, folder) for folder in root.folders(linked=True) if (step := names.step_of(folder)) is not None]
    if len(names.patterns) > 1:  # of two folders of a step, the one whose pattern comes first comes last here, and wins
        found.sort(key=lambda pair: -next(i for i, pattern in enumerate(names.patterns) if pattern.format(pair[0]) == pair[1]))
    sizes = root.stat([f"{folder}/{CATALOG_KEY}" for _, folder in found])
    committed = {step: folder for (step, folder), size in zip(found, sizes, strict=True) if size is not None}
    begun = {step: folder for step, folder in found if step not in committed}
    return dict(sorted(committed.items())), dict(sorted(begun.items()))


def describe_run(root: Storage) -> str | None:
    """Describe, for a message, a folder that holds the checkpoints of a run. Return None if it holds no step folder."""
    committed, begun = find_steps(root)
    if not committed and not begun:
        return None
    if not committed:
        return f"saves began in {name_steps(begun)} there, but none was committed; check the path"
    newest = f"{root.url}/{committed[_newest_current(root, committed)]}"
    return (
        f"it holds those of a run: {name_steps(committed)}; load the newest as {newest!r}, or with "
        f"checkpoint.Manager({root.url!r}).load_latest(state); reshard-ckpt inspect {root.url} lists them"
    )


def _newest_current(root: Storage, committed: Mapping[int, str]) -> int:
    """Return the newest committed step that is neither superseded in the run's lineage nor a copy of another step.

    Return the newest of all steps if there is no such step, or if the lineage or a catalog cannot be read.
    """
    newest = max(committed)
    with suppress(CheckpointError):
        lineage, names = LINEAGE.read(root), names_at(root)
        superseded = lineage.superseded if lineage else ()
        for step, folder in reversed(list(committed.items())):
            catalog = _catalog(root, folder)
            if catalog.lineage_id not in superseded and not names.is_copy(step, catalog.folder):
                return step
    return newest


def _catalog(root: Storage, folder: str) -> Catalog:
    return decode_catalog(root.read(f"{folder}/{CATALOG_KEY}", MAX_CATALOG_BYTES))


def name_steps(folders: Mapping[int, str], limit: int = 6) -> str:
    """List the folders of some steps for a message; if there are many, only the first and the last ones.

    >>> name_steps({1: "step_1", 2: "step_2"}), name_steps({i: f"step_{i}" for i in range(10)})
    ('step_1, step_2', 'step_0, step_1, step_2, …, step_7, step_8, step_9 (10 in all)')
    """
    names = list(folders.values())
    shown = names if len(names) <= limit else [*names[: limit // 2], "…", *names[-limit // 2 :]]
    return ", ".join(shown) + ("" if len(names) <= limit else f" ({len(names)} in all)")


def remove_step(
    root: Storage, folder: str, referred: Callable[[], frozenset[str]], *, keep_files: bool = False, needs: Iterable[str] = ()
) -> bool:
    """Remove the checkpoint in one folder of a run. If it is being read, remove nothing and return False.

    Parameters
    ----------
    referred
        Returns the keys of files, from the root, that other committed catalogs refer to: these stay. It is called once the
        checkpoint is locked: a save that refers to it holds the lock until it has committed.
    keep_files
        Remove only the catalog, and note the time: in a store without locks somebody may be reading the files.
    needs
        Keys, from the root, of files of other checkpoints that this one refers to: the note of the removal keeps those files too.
    """
    key = f"{folder}/{CATALOG_KEY}"
    try:
        lock = root.lock(key)
    except MissingKey:
        return root.size(key) is None  # a catalog behind a link is there, but nothing is deleted through links
    except LocksUnsupported:
        lock = nullcontext()  # type: ignore[assignment]
    if lock is None:
        return False
    if keep_files:  # before the catalog goes, so that no moment has files without a catalog and without the note
        note_removed(root, folder, needs)
    with lock:
        kept = frozenset() if keep_files else referred()
        root.delete([key])
        # Were the other files to go first, a power cut could bring the catalog back without them.
        root.sync([key])
    if not keep_files:
        remove_files(root, folder, kept)
    return True


def remove_files(root: Storage, folder: str, referred: frozenset[str], before_s: float | None = None) -> None:
    """Remove the files of saves and of their export from a step's folder that has no catalog; other files stay.

    A network file system may have answered from its cache that the catalog is missing, after another machine wrote it. If a new
    list of the folder has it, raise `StorageError`: the checkpoint is whole.

    Files whose keys are in `referred` stay, because other checkpoints need them. If somebody reads these files, all stay. With
    `before_s`, in seconds since 1970, files of saves that began later stay: such a save may be under way. Files of an offline
    reshard under way stay too.
    """
    # A save's id begins with its time, which sorts as text. That of an offline reshard is the time of its source.
    last = "9" if before_s is None else time.strftime(SAVE_TIME, time.gmtime(before_s)) + "~"
    listed = [key for key, _ in root.list(folder)]
    if is_read(root, listed):
        return
    if root.hints.has_locks and f"{folder}/{CATALOG_KEY}" in listed:
        raise StorageError(
            f"{root.url}/{folder}/{CATALOG_KEY}: there in the list of the folder, but not found by its name, or just written: "
            "wait until the file system's cache on this machine is up to date, and begin again; nothing was deleted"
        )
    keys = [key.removeprefix(f"{folder}/") for key in listed]
    is_exported = min(exported_saves(keys), default="9") < last
    with ExitStack() as leases:
        under_way = {
            key.partition("/")[0] for key in keys if key.endswith(f"/{RESHARD_LOCK}") and not _take(root, folder, key, leases)
        }

        def goes(key: str) -> bool:
            first, _, rest = key.partition("/")
            if not rest:
                return first == REMOVED_KEY or _TEMPORARY.fullmatch(first) is not None
            if first == EXPORT:
                return is_exported
            if SAVE_ID.fullmatch(first):
                return first not in under_way and first < last
            return _BEGUN_EXPORT.fullmatch(first) is not None

        going = {f"{folder}/{key}" for key in keys if goes(key)}
        # The note stays with files that stay: a later sweep looks at its folder again.
        going -= referred | ({f"{folder}/{REMOVED_KEY}"} if going & referred else set())
        root.delete(going)
        if root.hints.has_locks:
            return
        # A job whose lease had ended may have published its catalog while its files were deleted as leftovers.
        [found] = root.read_many([f"{folder}/{CATALOG_KEY}"], MAX_CATALOG_BYTES)
        if found and going & {f"{folder}/{file.key}" for file in decode_catalog(found.data).files}:
            root.delete([f"{folder}/{CATALOG_KEY}"])


def _take(root: Storage, folder: str, lock: str, leases: ExitStack) -> bool:
    """Take the lease of an offline reshard on its file `lock`. Return False if the reshard is under way, and so has the lease.

    Return True without the lease if the store has no leases, or if the file is gone.
    """
    with suppress(LocksUnsupported, MissingKey):
        lease = root.lease(f"{folder}/{lock}", b"sweep", once=True)
        if lease is None:
            return False
        leases.enter_context(lease)
    return True


def needed_keys(folder: str, catalog: Catalog) -> Iterable[str]:
    """Yield the keys of all files that a folder's catalog needs, also of those in other folders, relative to the run's root."""
    for file in catalog.files:
        yield from (posixpath.normpath(f"{folder}/{key}") for key in file.keys)


def needed_by_folders(root: Storage, left_out: Callable[[str], bool], *, pass_damaged: bool = False) -> dict[str, str]:
    """Map the key of each file that the catalogs below a root need to the name of a folder whose catalog needs it.

    Keys are relative to the root. Folders that this user may not read are passed over. Raise `CorruptError` if a catalog is
    damaged, so the files that it needs are unknown.

    Parameters
    ----------
    left_out
        Tells whether to skip the folder of a name.
    pass_damaged
        Whether a folder whose catalog is damaged is passed over too.
    """

    def needed_by(folder: str) -> dict[str, str]:
        try:
            return dict.fromkeys(needed_keys(folder, _catalog(root, folder)), folder)
        except CorruptError:
            if not pass_damaged:
                raise
        except StorageError as error:
            if not isinstance(error, MissingKey) and not isinstance(error.__cause__, PermissionError):
                raise
        return {}

    found = at_once(root, *(partial(needed_by, folder) for folder in root.folders(linked=True) if not left_out(folder)))
    return {key: folder for by_folder in found for key, folder in by_folder.items()}


def referred_by_others(storage: Storage) -> dict[str, str]:
    """Map the key of each file of this checkpoint that another one needs to the folder name of that other checkpoint.

    Checkpoints beside this one (incremental saves) may refer to its files, so these must stay when it is replaced or deleted. All
    catalogs beside it are read. Raise `CorruptError` if the catalog of another checkpoint is damaged, so the files that it refers
    to are unknown.
    """
    path, found = unlinked_path(storage.url), dict[str, str]()
    # If it is a link to another folder, the checkpoints there may refer to it as well as those beside the link.
    true = [os.path.realpath(path)] if os.path.islink(path) else []
    for place in (path, *true):
        above, _, name = place.rpartition("/")
        if not name or above.endswith(":/"):  # memory://step_1 has nothing above it
            continue
        beside = open_storage(place, timeout_s=storage.hints.retry_s)
        with open_beside(beside, "..", f"{name}/{CATALOG_KEY}") as root:
            keys = needed_by_folders(root, {name}.__contains__)
        found |= {key.removeprefix(f"{name}/"): folder for key, folder in keys.items() if key.startswith(f"{name}/")}
    return found


def clean_up(storage: Storage, catalog: Catalog, folders: Iterable[str], grace_s: float = GRACE_S) -> None:
    """Delete the files of earlier and of unfinished saves in some folders of a checkpoint.

    Files that `catalog` or a catalog of the same run refers to stay. Folders whose names are not ids of saves stay too, except
    the export of an earlier save. In a store without locks, the files stay for `grace_s` seconds first, and as long as somebody
    reads them: a later save deletes them.
    """
    kept = {key for file in catalog.files for key in (file.key, file.digests_key)}
    names = sorted(name for name in folders if SAVE_ID.fullmatch(name) and name != catalog.save_id)
    listed = at_once(storage, *(partial(storage.list, folder) for folder in names))
    stale = {folder: [key for key, _ in found if key not in kept] for folder, found in zip(names, listed, strict=True)}
    if stale and not storage.hints.has_locks:
        stale = old_enough(storage, stale, grace_s)
    for folder, keys in stale.items():
        keys.append(f"{folder}/none")  # not a real file: `delete` also removes empty folders, as of a save killed early
    if EXPORT in folders:
        exported = [key for key, _ in storage.list(EXPORT)]
        stale |= {EXPORT: exported} if exported_saves(exported) - {catalog.lineage_id} else {}
    if stale:
        try:
            others = referred_by_others(storage)
        except CorruptError as error:
            warnings.warn(f"{storage.url}: what was replaced there stays: {error}", stacklevel=2)
            return
        going = []
        for folder, keys in stale.items():  # the note stays with files that stay, or the next save would write it again
            stay = {*others, f"{folder}/{REMOVED_KEY}"} if any(key in others for key in keys) else others
            going += [key for key in keys if key not in stay]
        storage.delete(going)


@contextmanager
def alone_with(root: Storage, folder: str) -> Iterator[bool]:
    """Lock a step against readers inside a ``with`` block; yield whether that succeeded, False if somebody reads the step now.

    A step without a catalog has no readers. In a store without locks nothing is locked, and the block gets True.
    """
    try:
        lock = root.lock(f"{folder}/{CATALOG_KEY}")
    except (MissingKey, LocksUnsupported):
        yield True
        return
    with lock or nullcontext():
        yield lock is not None
