"""Catalogs that refer to files of other checkpoints, written by the format's own encoder: a stand-in for incremental saves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from reshard_ckpt.core.catalog.model import Catalog, FileEntry
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.format.catalog import encode_catalog
from reshard_ckpt.format.files import CATALOG_KEY, new_save_id
from reshard_ckpt.storage import open_storage


def referring(catalog: Catalog, checkpoint: str, which: Callable[[FileEntry], bool] = lambda file: True) -> Catalog:
    """Return a catalog whose files, those that are chosen, are another checkpoint's."""

    def entry(file: FileEntry) -> FileEntry:
        keys = {name: f"{checkpoint}/{getattr(file, name)}" for name in ("key", "digests_key")}
        return replace(file, checkpoint=checkpoint, **keys)

    return replace(catalog, files=tuple(entry(file) if which(file) else file for file in catalog.files))


def refer(path: object, other: object, checkpoint: str, ranks: Collection[int]) -> None:
    """Make a checkpoint at a path that has the files of some ranks from another one, and copies of the rest as its own.

    Parameters
    ----------
    other, checkpoint
        The path of the checkpoint to refer to; the same from `path`.
    """
    with open_storage(str(other)) as source, open_storage(str(path)) as target:
        saved, save_id = open_catalog(source), new_save_id()
        files = []
        for file in referring(saved, checkpoint, lambda file: file.rank in ranks).files:
            if file.checkpoint:
                files.append(file)
                continue
            own = {name: f"{save_id}/{getattr(file, name).rpartition('/')[2]}" for name in ("key", "digests_key")}
            for name, key in own.items():
                with target.create(key) as writer:
                    writer.write(source.read(getattr(file, name), 1 << 30))
            files.append(replace(file, save_id=save_id, **own))
        target.publish(CATALOG_KEY, encode_catalog(replace(saved, files=tuple(files), save_id=save_id)))
