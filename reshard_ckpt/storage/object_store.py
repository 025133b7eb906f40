"""The store of objects: ``s3://``, ``gs://`` and ``az://``, through obstore.

An object store has no folders, no rename and no lock, and a round trip takes 30 ms. So:

1. *Write*: a file up to one part is one PUT; a larger one is an upload in parts, which exists once its last request succeeded.
2. *Publish*: one conditional PUT (If-None-Match, If-Match). A PUT whose answer was lost is sent again and then refused, though
   the store holds its bytes. So each PUT carries a random id in the object's metadata, and after any failure the object is asked
   for its id: only another id is a conflict. An upload in parts has an id too, as its last request may lose its answer.
3. *Probe*: some servers ignore conditions, and two jobs would overwrite each other silently. Before the first conditional PUT of
   a process to a bucket, a small object proves that conditions hold; a server that ignores them is refused.
4. *Leases* take the place of locks: `object_lease`.

Nothing is durable later than it is visible, so `sync` does nothing.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from ..errors import StorageError
from .object_client import client_of, explained, is_generic, is_refusal, obstore
from .object_lease import ObjectLease, take_lease
from .posix import LocksUnsupported
from .protocol import (
    ABSENT,
    ANY,
    PROBE,
    Document,
    Hints,
    Lock,
    MissingKey,
    PublishUnknown,
    Storage,
    Version,
    Writer,
    conflict,
    fill,
    flat_bytes,
    folder_parts,
    key_parts,
    map_at_once,
    missing,
    short_file,
    too_large,
)

T = TypeVar("T")

HINTS = Hints(
    requests=32,
    read_bytes=8 << 20,
    part_bytes=16 << 20,
    near_bytes=1 << 20,
    has_locks=False,
    shows_unfinished=False,
    shares_files=False,
)

PARTS_IN_FLIGHT = 8
"""Number of parts of one file that are sent at once. This times the size of a part bounds the memory of a writer."""

MAX_PARTS = 9_000
"""The most parts of one file; the stores allow 10,000."""

MAX_COPY_BYTES = {"s3": 5 << 30, "gs": 1 << 40}
"""The largest object in bytes that one request copies, by scheme. Azure copies in the background, and may return too early."""

_UNSIGNED = ("AWS_UNSIGNED_PAYLOAD", "AWS_SKIP_SIGNATURE")
DELETE_AT_ONCE = 1_000
_TRIES = 3
"""The most times that a request is sent, if its answer is cut each time."""

_ID = "reshardid"  # without "_", which some servers change
_LAST_LOOK_S = 10.0
"""Seconds for which a store is asked whether a PUT arrived, once `timeout_s` is over."""

_WAIT_S = 0.2
"""Seconds to wait before a conditional PUT is sent again because it met another PUT under way."""


class ObjectStorage(Storage):
    """A `Storage` below one prefix of a bucket in an object store.

    Parameters
    ----------
    timeout_s
        Seconds after which a request that keeps failing is a `StorageError`.
    """

    def __init__(self, scheme: str, bucket: str, prefix: str, *, timeout_s: float) -> None:
        self._scheme, self._bucket, self._prefix, self._timeout_s = scheme, bucket, f"{prefix}/" if prefix else "", timeout_s
        self._client = client_of(scheme, bucket, timeout_s)
        self._first: dict[str, Version] = {}
        # Each request to S3 is signed together with the SHA-256 of its body, unless the environment says otherwise.
        unsigned = any(os.environ.get(name, "").lower() in ("1", "true", "on", "yes", "y") for name in _UNSIGNED)
        self._hints = replace(HINTS, checks_uploads=scheme == "s3" and not unsigned, retry_s=timeout_s)

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def hints(self) -> Hints:
        return self._hints

    def _path(self, key: str) -> str:
        return self._prefix + "/".join(key_parts(key))

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _ask(self, what: str, where: str, request: Callable[[], T]) -> T:
        """Send a request that may be repeated, and return its result; `what` and `where` are for the error message.

        obstore repeats a request that got no answer, and goes on with an object that was cut. It does not repeat a request whose
        other answer was cut, such as a list or an error.
        """
        tries, until = 0, time.monotonic() + self._timeout_s
        with explained(what, where):
            while True:
                tries += 1
                try:
                    return request()
                except Exception as error:
                    if tries == _TRIES or not is_generic(error) or time.monotonic() >= until:
                        raise

    def create(self, key: str, size: int | None = None, *, replace: bool = False) -> ObjectWriter:
        self._first.pop(key, None)
        path, part_bytes = self._path(key), max(HINTS.part_bytes, -(-(size or 0) // MAX_PARTS))
        return ObjectWriter(self._client, path, self._where(key), part_bytes, partial(self._has_id, path))

    def copy(self, source: Storage, key: str, to: str) -> bool:
        if not isinstance(source, ObjectStorage) or (source._scheme, source._bucket) != (self._scheme, self._bucket):
            return False
        if self._scheme not in MAX_COPY_BYTES or ((size := source.size(key)) or 0) > MAX_COPY_BYTES[self._scheme]:
            return False
        self._first.pop(to, None)
        self._ask("copy", source._where(key), lambda: obstore().copy(self._client, source._path(key), self._path(to)))
        return self.size(to) == size  # some servers ignore the header with the source, and make an empty object

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        path, where = self._path(key), self._where(key)
        views = [flat_bytes(buffer) for buffer in buffers]
        wanted = sum(map(len, views))
        if not wanted:  # a request cannot ask for 0 bytes
            if self.size(key) is None:
                raise missing(where)
            return

        def read() -> memoryview:
            found = obstore().get(self._client, path, options={"range": (offset, offset + wanted)})
            self._first.setdefault(key, _version_of(found.meta))
            return memoryview(found.bytes())

        try:
            data = self._ask("read", where, read)
        except MissingKey:
            raise
        except StorageError:
            size = self.size(key)
            if size is not None and size <= offset:  # stores refuse a range that begins behind the end
                raise short_file(where, offset, wanted, 0) from None
            raise
        if len(data) != wanted:
            raise short_file(where, offset, wanted, len(data))
        fill(views, data)

    def document(self, key: str, limit: int) -> Document:
        def read() -> Document:
            found = obstore().get(self._client, self._path(key))
            self._first.setdefault(key, _version_of(found.meta))
            if found.meta["size"] > limit:
                raise too_large(self._where(key), limit)
            return Document(bytes(found.bytes()), _version_of(found.meta))

        return self._ask("read", self._where(key), read)

    def _head(self, key: str) -> Any:
        return self._ask("look at", self._where(key), lambda: obstore().head(self._client, self._path(key)))

    def size(self, key: str) -> int | None:
        with suppress(MissingKey):
            return int(self._head(key)["size"])
        return None

    def stamp(self, key: str) -> object:
        with suppress(MissingKey):
            return _version_of(self._head(key))
        return None

    def first_stamp(self, key: str) -> object:
        return self._first.get(key) or self.stamp(key)

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        path = self._prefix + "".join(f"{part}/" for part in folder_parts(prefix))

        def files() -> list[tuple[str, int]]:
            pages = obstore().list(self._client, path or None, chunk_size=1000)
            return sorted((file["path"][len(self._prefix) :], int(file["size"])) for page in pages for file in page)

        return self._ask("list", self._where(prefix), files)

    def folders(self, prefix: str = "", *, linked: bool = False) -> tuple[str, ...]:
        path = self._prefix + "".join(f"{part}/" for part in folder_parts(prefix))
        found = self._ask("list", self._where(prefix), lambda: obstore().list_with_delimiter(self._client, path or None))
        return tuple(sorted(folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"]))

    def lock(self, key: str, *, shared: bool = False, make: bool = False) -> Lock | None:
        key_parts(key)
        raise LocksUnsupported(f"{self.url}: an object store has no locks")

    def lease(self, key: str, note: bytes, *, ttl_s: float = 60.0, once: bool = False) -> ObjectLease | None:
        self._path(key)
        return take_lease(self, key, note, ttl_s, once=once)

    def publish(self, key: str, data: bytes, *, expected: Version = ANY) -> Version:
        path, where, sent = self._path(key), self._where(key), uuid.uuid4().hex
        self._first.pop(key, None)
        if expected == ANY:
            mode: Any = "overwrite"
        else:
            quoted = self._takes_quoted()  # also asks whether the server honours "create"
            mode = "create" if expected == ABSENT else _update(expected, quoted)
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                result = obstore().put(self._client, path, bytes(data), attributes={_ID: sent}, mode=mode, use_multipart=False)
                return _version_of(result)
            except Exception as error:
                current, ours = self._published(path, where, sent, error, until)
                if ours:
                    return current
                if is_refusal(error) and current != expected:
                    raise conflict(where, expected, current) from None
                # Another conditional PUT is under way (409), or the request did not arrive: nothing says that it never will.
                if time.monotonic() >= until or not _may_pass(error):
                    _give_up(where, error)
            time.sleep(_WAIT_S)

    def prove_conditions(self) -> None:
        self._takes_quoted()

    def _takes_quoted(self) -> bool:
        """Whether the bucket's server takes an ETag with its quotes in a condition. A process asks the server only once."""
        bucket = (self._scheme, self._bucket)
        if bucket not in _QUOTED:
            try:
                _QUOTED[bucket] = self._probed()
            except ConditionsIgnored:  # once more: a sweep of another process may have deleted the first object
                _QUOTED[bucket] = self._probed()
        return _QUOTED[bucket]

    def _probed(self) -> bool:
        """Prove by a small object that the server honours conditions of a PUT; return whether it takes an ETag with its quotes.

        The object lies in a folder that is named like the folder of a save. So a later save deletes it if this process is killed
        meanwhile. Raise `ConditionsIgnored` if the server ignores them, or takes no ETag in either form.
        """
        client, url = self._client, self.url
        path = f"{self._prefix}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}/{PROBE}"

        def put(data: bytes, mode: Any) -> Any:
            def request() -> Any:
                try:
                    return obstore().put(client, path, data, mode=mode, use_multipart=False)
                except Exception as error:
                    if is_refusal(error):
                        return None
                    raise

            return self._ask("write", f"{url}: {path}", request)

        try:
            first = _version_of(put(b"1", "overwrite"))
            # The two that wait for nothing else at once: each would be a round trip.
            created, second = map_at_once(self, partial(put, b"2"), ("create", _update(first, quoted=True)))
            quoted = second is not None
            if created is not None:
                raise _ignores(url, "If-None-Match: * (create)")
            if not quoted and put(b"3", _update(first, quoted=False)) is None:
                raise ConditionsIgnored(f"{url}: this server refuses If-Match with an object's own ETag, quoted or not; {_USE}")
            if put(b"4", _update(first, quoted)) is not None:
                raise _ignores(url, "If-Match (update)")
            return quoted
        finally:
            with suppress(Exception):
                obstore().delete(client, path)

    def _published(self, path: str, where: str, sent: str, error: Exception, until: float) -> tuple[Version, bool]:
        """After a failed PUT, look at the object: return its version, and whether it carries the id of that PUT."""
        client = self._client if time.monotonic() < until else client_of(self._scheme, self._bucket, _LAST_LOOK_S)
        try:
            with explained("look at", where):
                found = obstore().get(client, path, options={"head": True})
        except MissingKey:
            return ABSENT, False
        except StorageError:
            _give_up(where, error)
        return _version_of(found.meta), _id_of(found) == sent

    def _has_id(self, path: str, sent: str) -> bool:
        """Return whether the store has the object, and with this id. False too if it does not answer within `_LAST_LOOK_S`."""
        with suppress(Exception):
            client = client_of(self._scheme, self._bucket, _LAST_LOOK_S)
            return _id_of(obstore().get(client, path, options={"head": True})) == sent
        return False

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        paths = [self._path(key) for key in keys]
        for key in keys:
            self._first.pop(key, None)
        batches = [paths[begin : begin + DELETE_AT_ONCE] for begin in range(0, len(paths), DELETE_AT_ONCE)]
        for error in filter(None, map_at_once(self, self._delete_batch, batches)):
            raise error

    def _delete_batch(self, paths: Sequence[str]) -> StorageError | None:
        """Delete objects in one request; return the error if the store refuses some."""

        def delete() -> None:
            try:
                obstore().delete(self._client, list(paths))
            except FileNotFoundError:  # some stores refuse to delete an object that is not there, and stop at it
                map_at_once(self, self._delete_one, paths)

        try:
            self._ask("delete", self.url, delete)
        except StorageError as error:
            return error
        return None

    def _delete_one(self, path: str) -> None:
        with suppress(FileNotFoundError):
            obstore().delete(self._client, path)


class ObjectWriter(Writer):
    """Writes a new object. It exists once `finish` returns.

    `has_id` tells whether the store has the object with a given id in its metadata.
    """

    def __init__(self, client: Any, path: str, where: str, part_bytes: int, has_id: Callable[[str], bool]) -> None:
        self._client, self._path, self._where, self._part_bytes, self._has_id = client, path, where, part_bytes, has_id
        self._part, self._id = bytearray(), uuid.uuid4().hex
        self._upload: Any = None

    def _write(self, view: memoryview) -> None:
        while len(view):
            room = self._part_bytes - len(self._part)
            self._part += view[:room]
            view = view[room:]
            if len(self._part) == self._part_bytes:
                self._send()

    def _send(self) -> None:
        with explained("write", self._where):
            if self._upload is None:
                options = {"buffer_size": self._part_bytes, "max_concurrency": PARTS_IN_FLIGHT, "attributes": {_ID: self._id}}
                self._upload = obstore().open_writer(self._client, self._path, **options)
            # A part of its own, which nothing changes: the upload reads it after this call.
            part, self._part = bytes(self._part), bytearray()
            self._upload.write(part)

    def _finish(self) -> None:
        with explained("write", self._where):
            if self._upload is None:
                obstore().put(self._client, self._path, bytes(self._part), use_multipart=False)
            else:
                if self._part:
                    self._send()
                try:
                    self._upload.close()
                except Exception:
                    # The answer to the last request was lost, and many stores do not know a complete upload when asked again.
                    if not self._has_id(self._id):
                        raise

    def _abort(self) -> None:
        if self._upload is not None:
            with suppress(Exception):
                self._upload.__exit__(InterruptedError, InterruptedError(), None)


_QUOTED: dict[tuple[str, str], bool] = {}
"""For each bucket that was probed, whether its server takes an ETag with its quotes in a condition."""


class ConditionsIgnored(StorageError):
    """Raised if the server ignores the condition of a request."""


_USE = "use a store with conditional writes: S3, GCS, Azure, SeaweedFS, MinIO and Ceph have them (docs/object-stores.md)"


def _ignores(url: str, condition: str) -> ConditionsIgnored:
    return ConditionsIgnored(f"{url}: this server ignores {condition}, so two jobs would overwrite each other unseen; {_USE}")


def _give_up(where: str, error: Exception) -> NoReturn:
    """Raise a `StorageError` for a PUT that failed, or a `PublishUnknown` if the store may still do it."""
    try:
        with explained("publish", where):
            raise error
    except StorageError as known:
        if _may_pass(error):
            raise PublishUnknown(f"{known}; it may hold the new file or the old one: look before you delete anything") from None
        raise


def _may_pass(error: Exception) -> bool:
    """Whether the store may still carry out a PUT that failed, or may accept it if it is sent again."""
    return is_generic(error) or is_refusal(error)


def _id_of(found: Any) -> str | None:
    """Return the random id in the metadata of an object that was looked at."""
    return {str(name).lower(): value for name, value in found.attributes.items()}.get(_ID)


def _version_of(meta: Any) -> Version:
    return Version(f"{meta.get('e_tag') or ''}\n{meta.get('version') or ''}")


def _update(version: Version, quoted: bool) -> dict[str, str]:
    """Return obstore's condition for a PUT: replace the object only if it has this version."""
    tag, _, number = version.tag.partition("\n")
    condition = {"e_tag": tag if quoted else tag.strip('"')}
    return {**condition, "version": number} if number else condition
