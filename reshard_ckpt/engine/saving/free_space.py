"""The check that there is room for a save, before a byte of it is written: rank 0 compares the plan with what the store has free.

The path is one that all ranks share, so one look is enough; a path that is not is found at the commit. Headers, the catalog and
what other jobs write meanwhile are not counted: a disk that fills up later is an error all the same, only a later one.
"""

from __future__ import annotations

from ...core.planning.save_plan import SavePlan
from ...core.words import plural
from ...errors import StorageError
from ...format.checksums import digests_file_bytes
from ...storage.protocol import Storage


def check_free_space(storage: Storage, plan: SavePlan) -> None:
    """Refuse a plan that cannot fit.

    Raises
    ------
    StorageError
        What the ranks would write is more than the store has free.
    """
    free = storage.free_bytes()
    by_rank = [size + digests_file_bytes(size) for size in plan.bytes_by_rank().tolist() if size]
    if free is None or sum(by_rank) <= free:
        return
    raise StorageError(
        f"{storage.url}: this save writes {sum(by_rank):,} bytes ({plural(len(by_rank), 'rank')}, {max(by_rank):,} the one with "
        f"most), but {free:,} are free there; nothing was written. What the path holds now stays until the new checkpoint is "
        "complete, so overwriting needs the room as well: free space there, or save to another path"
    )
