"""Writing a pickle of a few known kinds of objects without their classes: plain data, and names of classes and functions.

The program that reads the pickle looks the names up and makes the objects. So torch's classes need not exist here, and no object
of this process gets into the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """A reference in a pickle to a class, function or constant of a module, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """An object that the pickle's reader makes: it calls `function` with `arguments`, puts in `items`, and sets `state`.

    Without `items`, none are put in. If `state` is None, none is set; else ``__setstate__`` takes it.
    """

    function: Global
    arguments: tuple[Any, ...]
    items: Collection[tuple[Any, Any]] = ()
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)  # so that it can be the key of a dict, whatever its state is
class Instance:
    """An instance of a class, to be written to a pickle: its state is a dict of fields, or the argument of ``__setstate__``."""

    kind: Global
    state: Any


@dataclass(frozen=True, slots=True)
class PersistentId:
    """A reference by persistent id, to be written to a pickle: the reader makes an object of it, such as a storage."""

    identity: Any


def pickled(value: Any, reduced: Callable[[Any], Any] = lambda value: value) -> bytes:
    """Pickle a value made of the classes above, None, booleans, numbers, strings, tuples, lists and dicts.

    The pickle has protocol 2, which ``torch.load(weights_only=True)`` reads.

    Parameters
    ----------
    reduced
        Called with the value, and with each value inside of it, the outermost first. Returns the value itself, or one of the
        classes above in its place.
    """
    emitter = _Emitter(reduced)
    emitter.add(value)
    return bytes(b"\x80\x02" + emitter.out + b".")


class _Emitter:
    def __init__(self, reduced: Callable[[Any], Any]) -> None:
        self.out = bytearray()
        self._reduced = reduced
        self._memo: dict[str | Global, int] = {}

    def add(self, value: Any) -> None:
        """Append the operations that make a value to the pickle."""
        value = self._reduced(value)
        match value:
            # Operations in the order of the cases: NONE; NEWTRUE, NEWFALSE; BINFLOAT; MARK … TUPLE; EMPTY_LIST MARK … APPENDS;
            # EMPTY_DICT MARK … SETITEMS; … REDUCE, MARK … SETITEMS, … BUILD; … EMPTY_TUPLE NEWOBJ, … BUILD; … BINPERSID
            case None:
                self.out += b"N"
            case bool():
                self.out += b"\x88" if value else b"\x89"
            case int():
                self._number(value)
            case float():
                self.out += b"G" + struct.pack(">d", value)
            case str() | Global():
                self._shared(value)
            case tuple():
                self._sequence(b"(", value, b"t")
            case list():
                self._sequence(b"](", value, b"e")
            case dict():
                self._pairs(b"}", value.items())
            case FunctionCall(function, arguments, items, state):
                self._sequence(b"", (function, arguments), b"R")
                if items:
                    self._pairs(b"", items)
                if state is not None:
                    self._sequence(b"", (state,), b"b")
            case Instance(kind, state):
                self._sequence(b"", (kind,), b")\x81")
                self._sequence(b"", (state,), b"b")
            case PersistentId(identity):
                self._sequence(b"", (identity,), b"Q")
            case _:
                raise TypeError(f"a {type(value).__name__} has no place in such a pickle")

    def _pairs(self, before: bytes, items: Iterable[tuple[Any, Any]]) -> None:
        self._sequence(before + b"(", (part for item in items for part in item), b"u")

    def _sequence(self, before: bytes, values: Iterable[Any], after: bytes) -> None:
        self.out += before
        for value in values:
            self.add(value)
        self.out += after

    def _number(self, value: int) -> None:
        # BININT1, BININT or LONG1
        if 0 <= value < 1 << 8:
            self.out += b"K" + value.to_bytes(1, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + len(data).to_bytes(1, "little") + data

    def _shared(self, value: str | Global) -> None:
        """Append a string or a global to the pickle. If it is there already, append a reference to the memo instead."""
        index = self._memo.get(value)
        if index is not None:
            # BINGET or LONG_BINGET; below: GLOBAL or BINUNICODE, then BINPUT or LONG_BINPUT, which sets the memo entry
            self.out += b"h" + index.to_bytes(1, "little") if index < 256 else b"j" + index.to_bytes(4, "little")
            return
        if isinstance(value, Global):
            self.out += f"c{value.module}\n{value.name}\n".encode()
        else:
            data = value.encode()
            self.out += b"X" + len(data).to_bytes(4, "little") + data
        index = self._memo[value] = len(self._memo)
        self.out += b"q" + index.to_bytes(1, "little") if index < 256 else b"r" + index.to_bytes(4, "little")
