"""The step folders below the root of a run: finding them, naming them, and removing one.

The catalog of a checkpoint is removed first: before that the checkpoint is whole, after it the checkpoint is gone. Its other
files follow, except files that another committed catalog refers to. A reader holds a shared lock on the catalog, so a checkpoint
that is being read is not removed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from ...core.catalog.model import Catalog
from ...errors import CheckpointError
from ...format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ...format.files import CATALOG_KEY, SAVE_ID, step_name
from ...storage import LocksUnsupported, MissingKey, Storage, open_beside
from .lineage import LINEAGE

_STEP = re.compile(r"step_(0|[1-9]\d*)")
_TEMPORARY = re.compile(r"\.catalog\.msgpack\.[0-9a-f]{32}\.tmp")


def find_steps(root: Storage) -> tuple[list[int], list[int]]:
    """Return the committed steps, and the steps whose folder has no catalog; both sorted."""
    steps = sorted(int(match[1]) for name in root.folders() if (match := _STEP.fullmatch(name)))
    committed = [step for step in steps if root.size(f"{step_name(step)}/{CATALOG_KEY}") is not None]
    return committed, sorted(set(steps) - set(committed))


def describe_run(root: Storage) -> str | None:
    """Describe, for a message, a folder that holds the checkpoints of a run. Return None if it holds no step folder."""
    committed, begun = find_steps(root)
    if not committed and not begun:
        return None
    if not committed:
        return f"saves began in {name_steps(begun)} there, but none was committed; check the path"
    newest = f"{root.url}/{step_name(_newest_that_counts(root, committed))}"
    return (
        f"it holds those of a run: {name_steps(committed)}; load the newest as {newest!r}, or with "
        f"checkpoint.Manager({root.url!r}).load_latest(state); reshard-ckpt inspect {root.url} lists them"
    )


def _newest_that_counts(root: Storage, committed: Sequence[int]) -> int:
    """Return the newest committed step that the run did not go back from; the newest of all if that cannot be read."""
    with suppress(CheckpointError):
        lineage = LINEAGE.read(root)
        superseded = lineage.superseded if lineage else ()
        counted = (step for step in reversed(committed) if not superseded or _catalog(root, step).save_id not in superseded)
        return next(counted, committed[-1])
    return committed[-1]


def _catalog(root: Storage, step: int) -> Catalog:
    return decode_catalog(root.read(f"{step_name(step)}/{CATALOG_KEY}", MAX_CATALOG_BYTES))


def name_steps(steps: Sequence[int], limit: int = 6) -> str:
    """Name steps in a message: the first and the last ones, if there are many.

    >>> name_steps([1, 2]), name_steps(range(10))
    ('step_1, step_2', 'step_0, step_1, step_2, …, step_7, step_8, step_9 (10 in all)')
    """
    names = [step_name(step) for step in steps]
    shown = names if len(names) <= limit else [*names[: limit // 2], "…", *names[-limit // 2 :]]
    return ", ".join(shown) + ("" if len(names) <= limit else f" ({len(names)} in all)")


@contextmanager
def reading(storage: Storage) -> Iterator[None]:
    """Keep a checkpoint from being removed while the ``with`` block reads it, if the store has locks."""
    try:
        lock = storage.lock(CATALOG_KEY, shared=True)
    except (MissingKey, LocksUnsupported):
        lock = None  # the reader raises that it is missing
    with lock or nullcontext():
        yield


def remove_step(root: Storage, step: int, referred: frozenset[str]) -> bool:
    """Remove one checkpoint. If it is being read, remove nothing and return False.

    Parameters
    ----------
    referred
        Keys of files, from the root, that other committed catalogs refer to: these stay.
    """
    key = f"{step_name(step)}/{CATALOG_KEY}"
    try:
        lock = root.lock(key)
    except MissingKey:
        return True
    except LocksUnsupported:
        lock = nullcontext()  # type: ignore[assignment]
    if lock is None:
        return False
    with lock:
        root.delete([key])
        # Were the other files to go first, a power cut could bring the catalog back without them.
        root.sync([key])
    remove_files(root, step, referred)
    return True


def remove_files(root: Storage, step: int, referred: frozenset[str]) -> None:
    """Remove the files of saves from the folder of a step that has no catalog; other files stay."""
    keys = [key for key, _ in root.list(step_name(step)) if _is_ours(key) and key not in referred]
    root.delete(keys)


def _is_ours(key: str) -> bool:
    _, *parts = key.split("/")
    return bool(SAVE_ID.fullmatch(parts[0])) if len(parts) > 1 else bool(_TEMPORARY.fullmatch(parts[0]))


def referred_keys(step: int, catalog: Catalog) -> Iterable[str]:
    """Yield the keys, from the root, of the files of other checkpoints that the catalog of a step refers to."""
    for file in catalog.files:
        if file.checkpoint:
            yield from (posixpath.normpath(f"{step_name(step)}/{key}") for key in (file.key, file.digests_key))


def referred_by_others(storage: Storage) -> dict[str, str]:
    """Map the keys of this checkpoint's files that another step of its run refers to, to the name of that step.

    Whoever replaces or deletes a checkpoint asks this beforehand: these files must stay. It reads the catalogs of all steps.

    Raises
    ------
    CorruptError
        The catalog of another step is damaged, so the files that it refers to are unknown.
    """
    above, _, name = storage.url.rpartition("/")
    if not _STEP.fullmatch(name) or above.endswith(":/"):  # memory://step_1 has nothing above it
        return {}
    with open_beside(storage, "..", f"{name}/{CATALOG_KEY}") as root:
        others = [step for step in find_steps(root)[0] if step_name(step) != name]
        keys = [(key, step_name(step)) for step in others for key in referred_keys(step, _catalog(root, step))]
    return {key.removeprefix(f"{name}/"): step for key, step in keys if key.startswith(f"{name}/")}


@contextmanager
def alone_with(root: Storage, step: int) -> Iterator[bool]:
    """Keep readers away from a step; False where one is there now. A step without a catalog has none."""
    try:
        lock = root.lock(f"{step_name(step)}/{CATALOG_KEY}")
    except (MissingKey, LocksUnsupported):
        yield True
        return
    with lock or nullcontext():
        yield lock is not None
