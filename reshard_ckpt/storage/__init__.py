"""Stores of checkpoints, as bytes under keys: a folder, an object store, or the memory of this process."""

from __future__ import annotations

import os
import posixpath
import re
from urllib.parse import unquote

from ..errors import CorruptError, UsageError
from .listed import ListedStorage
from .local import LocalStorage
from .memory import MemoryStorage
from .object_lease import holder_text
from .posix import MOMENTS_S, LocksUnsupported
from .protocol import ABSENT, ANY, Buffer, Document, Hints, Lock, MissingKey, PublishConflict, Storage, Version, Writer

__all__ = [
    "ABSENT",
    "ANY",
    "Buffer",
    "Document",
    "Hints",
    "LocalStorage",
    "Lock",
    "LocksUnsupported",
    "MemoryStorage",
    "MissingKey",
    "PublishConflict",
    "Storage",
    "Version",
    "Writer",
    "holder_text",
    "is_object_path",
    "open_below",
    "open_beside",
    "open_storage",
    "path_text",
    "resolved_path",
    "unlinked_path",
]

# Two letters at least, as C:/ is a drive. One slash is enough: `Path("s3://bucket")` becomes "s3:/bucket".
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)")
_OBJECTS = ("s3", "gs", "az")
_MAX_LINKS = 40
"""The most symbolic links that are followed one after the other, as many as Linux follows."""
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{1,254}")


def path_text(path: str | os.PathLike[str]) -> str:
    """Convert a path of a public call to text, and expand a leading ``~`` as a shell does.

    Raise `UsageError` if it is neither a str nor an `os.PathLike`, if the text cannot be a path, or if it is relative to a folder
    that was removed.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(
            f"{path!r} is not a path: pass a folder, file:///folder, s3://bucket/… or memory://name, as a str or a Path"
        )
    try:
        os.fsencode(text)
        text = os.path.expanduser(text)
        if _SCHEME.match(text) is None:
            os.path.abspath(text)
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!r} is not a path: {error}; pass a folder of another name") from None
    except FileNotFoundError:
        raise UsageError(f"{text}: the working folder of this process was removed; pass an absolute path") from None
    return text


def resolved_path(path: str | os.PathLike[str]) -> str:
    """Make a path absolute, so that it names the same folder after the process changes its working folder.

    >>> resolved_path("/ckpt/./run/"), resolved_path("memory://run"), resolved_path("S3://bucket/run/")
    ('/ckpt/run', 'memory://run', 's3://bucket/run')
    """
    text = path_text(path)
    if _SCHEME.match(text) is None:
        return os.path.abspath(text)
    return "/".join(_place(text)).replace("/", "://", 1) if is_object_path(text) else text


def unlinked_path(path: str | os.PathLike[str]) -> str:
    """Make a path absolute, and follow its last part if that is a link to a folder beside it, as from ``latest`` to ``step_100``.

    Checkpoints in one folder refer to each other by name, so only one name of each may count. A link to another folder stays:
    a user may have moved a checkpoint to another disk.
    """
    text = resolved_path(path)
    if _SCHEME.match(text):
        return text
    for _ in range(_MAX_LINKS):
        above = os.path.dirname(text)
        try:
            target = os.path.join(above, os.readlink(text))
        except OSError:  # no link, as nearly always
            break
        # The target is relative to the true folder of the link, which `above` may reach by other links.
        if os.path.realpath(os.path.dirname(target.rstrip("/"))) != os.path.realpath(above):
            break
        text = os.path.join(above, os.path.basename(target.rstrip("/")))
    return text


def is_object_path(path: str | os.PathLike[str]) -> bool:
    """Whether a path lies in an object store."""
    match = _SCHEME.match(path_text(path))
    return match is not None and match[1].lower() in _OBJECTS


def _place(url: str) -> list[str]:
    """Split the URL of an object store into its scheme, its bucket, and the parts of the prefix.

    Raise `UsageError` if the URL has no bucket, or a part such as ``..`` that could mean another place.
    """
    match = _SCHEME.match(url)
    assert match is not None
    scheme, (bucket, *parts) = match[1].lower(), url[match.end() :].rstrip("/").split("/")
    if len(match[2]) != 2 or not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{url!r}: pass {scheme}://bucket/prefix as a str, as a Path drops a slash; a bucket's name has 2 to 255 letters, "
            "digits, '.', '_' and '-'"
        )
    if any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise UsageError(f"{url!r}: a prefix has no empty part, no '.', no '..' and no backslash; write the place itself")
    return [scheme, bucket, *parts]


def open_storage(path: str | os.PathLike[str], *, timeout_s: float = MOMENTS_S) -> Storage:
    """Open the store that a path names: a folder, ``file:///folder``, ``memory://name``, or a prefix in an object store.

    `publish` waits at most `timeout_s` for another process that publishes in the same folder, and a request to an object store is
    repeated for as long.

    >>> open_storage("memory://run/step_100").url
    'memory://run/step_100'
    """
    text = path_text(path)
    match = _SCHEME.match(text)
    if match is None:
        return LocalStorage(text, timeout_s=timeout_s)
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme in _OBJECTS:
        from .object_store import ObjectStorage  # only here: it is imported when it is used

        _, bucket, *parts = _place(text)
        return ObjectStorage(scheme, bucket, "/".join(parts), timeout_s=timeout_s)
    if len(match[2]) < 2:
        raise UsageError(f"{text!r}: pass {scheme}://… as a str, as a Path drops a slash; a folder of that name is './{text}'")
    if scheme == "memory" and len(match[2]) == 2 and rest.strip("/"):
        return MemoryStorage(rest.strip("/"))
    if scheme == "file":  # RFC 8089
        host, slash, absolute = text[len("file://") :].partition("/")
        if host not in ("", "localhost") or not absolute:
            raise UsageError(f"{text!r}: a file URL reads file:///absolute/folder, without a host")
        return LocalStorage(slash + unquote(absolute), timeout_s=timeout_s)
    schemes = ", ".join(f"{name}://bucket/prefix" for name in _OBJECTS)
    raise UsageError(f"{text!r}: no store serves this scheme; there are a folder, file:///folder, {schemes} and memory://name")


def open_below(storage: Storage, folder: str) -> Storage:
    """Open the store of a folder below another store. A `ListedStorage` passes on its list of names and sizes."""
    below = open_storage(f"{storage.url}/{folder}", timeout_s=storage.hints.retry_s)
    return storage.below(folder, below) if isinstance(storage, ListedStorage) else below


def open_beside(storage: Storage, relative: str, key: str) -> Storage:
    """Open the store at a path relative to another store, such as ``../step_90``, to read its file `key`.

    The other store's folder may be a symbolic link. Then the path is relative to the link or to the link's target: of the two
    stores, the one that has the key is opened. Raise `CorruptError` if the path leads above the root of the file system or of the
    memory store, or out of the run's prefix in an object store.
    """
    scheme, _, rest = storage.url.rpartition("://")
    if scheme:
        place = posixpath.normpath(f"{rest}/{relative}")
        # In a bucket, a hostile catalog must not reach the files of other users beside the run. One level above is the run.
        inside = f"{place}/".startswith(f"{rest.rpartition('/')[0]}/") and "/" in rest
        if place.startswith(".") or (scheme in _OBJECTS and not inside):
            raise CorruptError(f"{storage.url}: refers to files at {relative!r}, outside of the run; use another checkpoint")
        return open_storage(f"{scheme}://{place}", timeout_s=storage.hints.retry_s)
    found = LocalStorage(os.path.normpath(os.path.join(rest, relative)))
    if found.size(key) is None:
        behind = LocalStorage(os.path.normpath(os.path.join(os.path.realpath(rest), relative)))
        return behind if behind.size(key) is not None else found
    return found
