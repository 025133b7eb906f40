"""Encoding an object of a listed class, such as a date, a path or an enum, as the name of its class and a plain value.

A reader that has the class makes the object again; any other reader returns the plain value. So a checkpoint with an enum of a
user's program opens everywhere, and classes can be added to the list without a new version of the format.

1. Standard library: dates, times, time spans, fixed time zones, paths, buffers of bytes and parsed arguments; not their
   subclasses.
2. Objects from the files of other programs, as `Named`, without their classes.
3. Members of enums, by value. Their class is looked up in the namespaces of modules that are imported already: nothing is
   imported, no ``__getattr__`` runs, and no class is called. Flags are joined by their operators.
"""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, Flag
from types import ModuleType
from typing import Any

from ..errors import CorruptError

_DAY = "2000-01-01T00:00:00"
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_NO_MEMBER = object()
_KEEPS_NAMES: ContextVar[bool] = ContextVar("keeps_names", default=False)


@dataclass(frozen=True, slots=True)
class Named:
    """An object as the name of its class and a plain value. It is from another program's file; the class may be missing here."""

    module: str
    name: str
    plain: Any


def _datetime_text(value: datetime.datetime | datetime.time) -> str | None:
    """Write a date or time as text, in ISO 8601.

    Return None if that would lose something: a named time zone, or the second of two equal hours.
    """
    zone = value.tzinfo
    if value.fold or (zone is not None and (type(zone) is not datetime.timezone or _zone_text(zone) is None)):
        return None
    return value.isoformat()


def _zone_text(value: datetime.timezone) -> str | None:
    text = datetime.datetime(2000, 1, 1, tzinfo=value).isoformat().removeprefix(_DAY)
    return text if repr(_zone(text)) == repr(value) else None


def _zone(text: str) -> datetime.tzinfo | None:
    return datetime.datetime.fromisoformat(_DAY + text).tzinfo


# class: (its module in the documentation, function to a plain value, function back)
_CLASSES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    datetime.datetime: ("datetime", _datetime_text, datetime.datetime.fromisoformat),
    datetime.date: ("datetime", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("datetime", _datetime_text, datetime.time.fromisoformat),
    datetime.timedelta: (
        "datetime",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    datetime.timezone: ("datetime", _zone_text, _zone),
    io.BytesIO: ("io", io.BytesIO.getvalue, io.BytesIO),
    argparse.Namespace: ("argparse", vars, lambda parts: argparse.Namespace(**parts)),
    **{path: ("pathlib", str, path) for path in _PATHS},
}
_BY_NAME = {(module, kind.__name__): kind for kind, (module, _, _) in _CLASSES.items()}


def is_object(value: Any) -> bool:
    """Return whether a value is saved as a class name and a plain value: an enum member, a `Named`, or of a listed class."""
    return type(value) in _CLASSES or isinstance(value, Enum | Named)


def parts_of(value: Any) -> tuple[str, str, Any] | None:
    """Return the module, the class and the plain value of an object; None if `rebuilt` could not make it again here."""
    kind = type(value)
    if isinstance(value, Named):
        return value.module, value.name, value.plain
    if isinstance(value, Enum):
        module, name, plain = kind.__module__, kind.__qualname__, value._value_
        return (module, name, plain) if rebuilt(module, name, plain) is value else None
    module, to_plain, _ = _CLASSES[kind]
    plain = to_plain(value)
    return None if plain is None else (module, kind.__name__, plain)


def plain_key(key: Hashable) -> Hashable:
    """Return a dict's key as a program without the key's classes would decode it: with plain values in place of objects.

    >>> plain_key((pathlib.PurePosixPath("a"), 1))
    ('a', 1)
    """
    if isinstance(key, tuple | frozenset):
        return (tuple if isinstance(key, tuple) else frozenset)(map(plain_key, key))
    if isinstance(key, Enum):
        return plain_key(key.value)
    return str(key) if type(key) in _PATHS else key


@contextmanager
def names_kept() -> Iterator[None]:
    """Inside the ``with`` block, decode objects whose class is missing as `Named`, so that they can be saved again unchanged."""
    token = _KEEPS_NAMES.set(True)
    try:
        yield
    finally:
        _KEEPS_NAMES.reset(token)


def rebuilt(module: str, name: str, plain: Any) -> Any:
    """Make an object again from the name of its class and a plain value.

    Return the plain value itself if this program has no such class, or the enum no such member.

    Raises
    ------
    CorruptError
        The class refuses the value.
    """
    kind = _BY_NAME.get((module, name))
    if kind is None:
        found = _imported(module, name)
        member = _member(found, plain) if isinstance(found, type) and issubclass(found, Enum) else _NO_MEMBER
        if member is _NO_MEMBER:
            return Named(module, name, plain) if _KEEPS_NAMES.get() else plain
        return member
    _, to_plain, make = _CLASSES[kind]
    try:
        made = make(plain)
    except NotImplementedError:  # a path of another operating system
        return plain
    if type(made) is not kind or to_plain(made) != plain:
        raise CorruptError(f"{plain!r:.80} is not a {module}.{name}")
    return made


def _imported(module: str, name: str) -> Any:
    """Look up a name, such as that of a class, in a module that is imported already; None if it is not there.

    Nothing is imported or called, and `getattr` is not used: each could run code.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def _member(kind: type[Enum], plain: Any) -> Any:
    """Return the member of an enum that has this value, or `_NO_MEMBER`; flags are joined.

    The class is not called: that could run its ``_missing_``.
    """
    members: list[Any] = list(kind.__members__.values())
    for member in members:
        if type(member._value_) is type(plain) and _equal(member._value_, plain):
            return member
    if not members or not issubclass(kind, Flag) or type(plain) is not int:
        return _NO_MEMBER
    joined = members[0] ^ members[0]
    for part in members:
        if part._value_ & plain == part._value_:
            joined |= part
    return joined if type(joined) is kind and joined._value_ == plain else _NO_MEMBER


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (ValueError, TypeError, RuntimeError):  # the value is an array, and no member has an array as value
        return False
