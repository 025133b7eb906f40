"""A store that caches its listing and the heads (first bytes) of its files: many formats look at a folder before one fits.

Every format looks for its own files, and reads the heads of all files, one after the other. In an object store each look is a
round trip. So this store lists its files once, answers questions about names and sizes from the list, keeps small files, and
reads the heads of all files with one suffix at once as soon as the first of them is wanted. It asks for nothing twice, so it does
not see later changes: make one for each public call.
"""

from __future__ import annotations

from collections.abc import Sequence

from .followed import FollowedStorage
from .protocol import MissingKey, Storage, fill, flat_bytes, folder_parts, key_parts, missing, too_large

HEAD_BYTES = 64 << 10
"""Size in bytes of the head of a file, which is read before anyone asks for it."""

MAX_HEADS = 1_024
"""The most heads of files that are kept."""

_SMALL_BYTES = 1 << 20


class ListedStorage(FollowedStorage):
    """A store that caches its listing, its small files, and the first bytes (head) of each file.

    Parameters
    ----------
    only
        If given, show only the files with these keys; by default all files are listed.
    """

    def __init__(self, own: Storage, only: Sequence[str] | None = None) -> None:
        super().__init__(own, {})
        self._only = only
        self._sizes: dict[str, int] | None = None
        self._documents: dict[str, bytes | None] = {}
        self._heads: dict[str, bytes] = {}

    def below(self, folder: str, own: Storage) -> ListedStorage:
        """Wrap `own`, the store of a folder below this one, with the names and sizes of its files from this store's listing."""
        found = ListedStorage(own)
        found._sizes = {key[len(folder) + 1 :]: size for key, size in self.list(folder)}
        return found

    def _files(self) -> dict[str, int]:
        if self._sizes is None:
            if self._only is None:
                self._sizes = dict(self._own.list())
            else:
                found = zip(self._only, self._own.stat(self._only), strict=True)
                self._sizes = {key: size for key, size in found if size is not None}
        return self._sizes

    def folders(self, prefix: str = "", *, linked: bool = False) -> tuple[str, ...]:
        return Storage.folders(self, prefix)  # from the listing, not asked for again

    def size(self, key: str) -> int | None:
        key_parts(key)
        return self._files().get(key)

    def stat(self, keys: Sequence[str]) -> list[int | None]:
        return [self.size(key) for key in keys]  # not at once: the listing is made by the first

    def read_ranges(self, ranges: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
        self._own.read_ranges(ranges)

    def read(self, key: str, limit: int) -> bytes:
        # Once a file was missing, others will be: then the files are listed.
        is_known = self._sizes is not None or None in self._documents.values()
        if key not in self._documents and not (is_known and key not in self._files()):
            try:
                data = self._own.read(key, limit)
            except MissingKey:
                self._documents[key] = None
                raise
            if len(data) > _SMALL_BYTES:
                return data
            self._documents[key] = data
        found = self._documents.get(key)
        if found is None:
            raise missing(f"{self.url}/{key}")
        if len(found) > limit:
            raise too_large(f"{self.url}/{key}", limit)
        return found

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        views = [flat_bytes(buffer) for buffer in buffers]
        end = offset + sum(map(len, views))
        size = self._files().get(key, -1)
        is_full = key not in self._heads and len(self._heads) >= MAX_HEADS
        if is_full or end > min(size, HEAD_BYTES):
            self._own.read_into(key, offset, views)
            return
        if key not in self._heads:
            self._read_heads(key)
        fill(views, self._heads[key][offset:end])

    def _read_heads(self, wanted: str) -> None:
        """Read the head of a file, and at once the heads of other files with its suffix in its folder."""
        folder, _, name = wanted.rpartition("/")
        kind = name.rpartition(".")[2]
        alike = [
            key
            for key in self._files()
            if key not in self._heads and key.rpartition("/")[0] == folder and key.endswith(f".{kind}")
        ]
        chosen = dict.fromkeys([wanted, *alike[: MAX_HEADS - len(self._heads) - 1]])
        buffers = {key: bytearray(min(self._files()[key], HEAD_BYTES)) for key in chosen}
        self._own.read_ranges([(key, 0, [memoryview(buffer)]) for key, buffer in buffers.items() if buffer])
        self._heads.update((key, bytes(buffer)) for key, buffer in buffers.items())

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        start = "".join(f"{part}/" for part in folder_parts(prefix))
        return [(key, size) for key, size in self._files().items() if key.startswith(start)]
