"""A storage whose operations can be made to fail, for tests of what happens then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from reshard_ckpt.storage import Buffer, Hints, Storage, Writer

Before = Callable[[str, str], None]


def _passed_on(method: str, operation: str) -> Any:
    """A method of `FaultyStorage` whose first argument is a key, and which does what the inner storage does."""

    def call(self: FaultyStorage, key: str = "", *args: Any, **options: Any) -> Any:
        self.before(operation, key)
        return getattr(self.inner, method)(key, *args, **options)

    return call


@dataclass
class FaultyStorage(Storage):
    """`inner`, where `before(operation, key)` runs before each operation and may raise in its place.

    >>> from reshard_ckpt.storage import open_storage
    >>> seen = []
    >>> storage = FaultyStorage(open_storage("memory://faulty"), lambda operation, key: seen.append((operation, key)))
    >>> with storage.create("f") as writer:
    ...     writer.write(b"x")
    >>> seen
    [('create', 'f'), ('write', 'f'), ('finish', 'f')]
    """

    inner: Storage
    before: Before

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def hints(self) -> Hints:
        return self.inner.hints

    def create(self, key: str, size: int | None = None, *, replace: bool = False) -> FaultyWriter:
        self.before("create", key)
        return FaultyWriter(self.inner.create(key, size, replace=replace), key, self.before)

    def sync(self, keys: Iterable[str]) -> None:
        keys = keys if isinstance(keys, str) else tuple(keys)
        self.before("sync", " ".join(keys))
        self.inner.sync(keys)

    read_into = _passed_on("read_into", "read_into")
    document = _passed_on("document", "read")
    size = _passed_on("size", "size")
    list = _passed_on("list", "list")
    folders = _passed_on("folders", "list")
    lock = _passed_on("lock", "lock")
    lease = _passed_on("lease", "lock")
    publish = _passed_on("publish", "publish")

    def free_bytes(self) -> int | None:
        self.before("free_bytes", "")
        return self.inner.free_bytes()

    def delete(self, keys: Iterable[str]) -> None:
        keys = tuple(keys)
        self.before("delete", " ".join(keys))
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> FaultyStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class FaultyWriter:
    """The writer of a `FaultyStorage`."""

    inner: Writer
    key: str
    before: Before

    def write(self, data: Buffer) -> None:
        self.before("write", self.key)
        self.inner.write(data)

    def finish(self) -> None:
        self.before("finish", self.key)
        self.inner.finish()

    def abort(self) -> None:
        self.before("abort", self.key)
        self.inner.abort()

    def __enter__(self) -> FaultyWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise


CHANGES = ("create", "write", "finish", "sync", "publish", "delete")
"""The operations that change something, or make it last."""


class Stopped(BaseException):
    """The process is dead: not an error that any code may handle."""


@dataclass
class StopAt:
    """A `before` that kills the process before the n-th change (from 0): nothing that it does afterwards happens."""

    n: int
    seen: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        return len(self.seen) > self.n

    def __call__(self, operation: str, key: str) -> None:
        if operation in CHANGES and not self.is_dead:
            self.seen.append((operation, key))
        if self.is_dead:
            raise Stopped


@dataclass
class FailAt:
    """A `before` that raises `error` at the n-th operation (from 0) of those named."""

    n: int
    error: BaseException
    operations: Sequence[str] = CHANGES
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, operation: str, key: str) -> None:
        if operation not in self.operations:
            return
        self.seen.append((operation, key))
        if len(self.seen) == self.n + 1:
            raise self.error
