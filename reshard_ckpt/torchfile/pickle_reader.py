"""Reading the plain data in a pickle with a stack machine that makes only listed objects, and executes no code.

Pickle is a small stack language. Two of its operations are dangerous: one looks up any global of any module, the other calls it.
Here, a global is looked up in a table of stand-ins that the caller passes, and nowhere else. No module is imported, and a global
that is not in the table is an error with its name.

A hostile stream must not exhaust the machine either, so every operation is cheap, and objects take memory in proportion to the
stream. Strings and numbers are no longer than the bytes that spell them, memo entries are counted, and calls get a few small
arguments. Keys of dicts are strings, bytes, None, stand-ins, numbers below 2⁶⁰, or flat tuples of constants: the hash of a nested
tuple may take for ever, and larger numbers can be chosen to collide. Nothing is walked recursively, so depth costs nothing.

A file may also hold a user's own values. The result of a call that the table does not allow, an object whose content is not read,
and a key of any other kind become an `Opaque`, which holds only a name. So one such value does not make the file unreadable: only
a reader that needs the value raises an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.report import type_in_words
from ..errors import CorruptError, UnsupportedError

MAX_ARGUMENTS = 64
"""The most arguments of a call in a pickle, and the most dims of a size; no tensor has as many."""

_MAX_INT_KEY = 2**60
"""Integers that are keys of dicts must be below this: larger ones can be chosen to have one hash, which makes dicts slow."""

_UINT32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StandInClass:
    """The stand-in of a class that a pickle names; its instances are `StandInObject`.

    If the pickle calls the class, `make` makes the result; without `make`, the result is an `Opaque`.
    """

    name: str
    make: Callable[..., Any] | None = None


class StandInObject:
    """An instance of a class that is not imported; `state` is the dict or tuple that the pickle gives it."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: StandInClass) -> None:
        self.kind = kind
        self.state: Any = None

    def take(self, items: list[Any]) -> None:
        """Record that the pickle puts items into this object, as its class derives from dict or list. The items are not kept."""
        self.state = Opaque(self.kind.name)


@dataclass(frozen=True, slots=True)
class StandInFunction:
    """The stand-in of a function or class that the pickle may call: `make` gets the arguments, which are all plain data."""

    name: str
    make: Callable[..., Any]


class Opaque:
    """Stands for a value that is not read: the result of a call, the state of an object with items, or an odd key of a dict."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def attributes_of(made: Any) -> dict[Any, Any] | None:
    """Return the dict of attributes in a `StandInObject`; None for any other value, and if the attributes are no dict."""
    return made.state if isinstance(made, StandInObject) and isinstance(made.state, dict) else None


def class_of(made: Any) -> str | None:
    """Return the name of the class or function behind a stand-in, or behind an instance of one; None for plain data."""
    if isinstance(made, StandInObject):
        return made.kind.name
    return made.name if isinstance(made, Opaque | StandInClass | StandInFunction) else None


class PicklingError(Exception):
    """Raised when a pickle names a class or function that is not allowed; `read_pickle` adds the file's name."""


Table = Mapping[tuple[str, str], Any]
"""Maps ``(module, name)`` to a `StandInClass`, a `StandInFunction` or a plain constant."""


def read_pickle(data: bytes | memoryview, table: Table, *, name: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the data that a pickle describes.

    Raise `UnsupportedError` if the pickle names a global that is not in the table, and `CorruptError` if the data are not a
    pickle, or one that no writer of such a file makes.

    Parameters
    ----------
    table
        The globals that the pickle may name.
    name
        The name of the pickle in messages.
    persistent
        Returns the object of a persistent id; None if the pickle may have no such ids.
    """
    try:
        return _Machine(bytes(data), table, persistent).run()
    except PicklingError as error:
        raise UnsupportedError(
            f"{name}: {error}; nothing was executed. If you trust the file, load it with the program that wrote it"
        ) from None
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise CorruptError(f"{name}: not a pickle of the expected kind ({error}); nothing was run, use another file") from None


class _Machine:
    """The state of the stack machine for one pickle: the stack, the positions of marks on it, and the memo."""

    def __init__(self, data: bytes, table: Table, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.at = data, 0
        self.table, self.persistent = table, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """Execute the stream, and return its one result. Frequent operations are inlined; the others are in `_OPERATIONS`.

        The byte after nearly every new object puts it into the memo, and the two bytes after a class from the memo make an
        instance of it. Both are executed together with the operation before them, which saves half of the rounds.
        """
        data, stack, marks, memo, operations = self.data, self.stack, self.marks, self.memo, _OPERATIONS
        push, pop, remember, number = stack.append, stack.pop, memo.append, _UINT32.unpack_from
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
                if code == 0x68:
                    value = memo[data[at]]
                    at += 1
                else:
                    value = memo[number(data, at)[0]]
                    at += 4
                if type(value) is StandInClass and data[at] == 0x29 and data[at + 1] == 0x81:  # EMPTY_TUPLE, NEWOBJ
                    value = StandInObject(value)
                    at += 2
                    if data[at] == 0x94:
                        at += 1
                        remember(value)
                push(value)
                continue
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
                continue
            elif code == 0x28:  # MARK
                marks.append(len(stack))
                continue
            elif code == 0x7D:  # EMPTY_DICT
                push({})
            elif code == 0x62:  # BUILD
                state, made = pop(), stack[-1]
                if type(made) is not StandInObject or made.state is not None or type(state) is not dict:
                    _build(made, state)
                else:
                    made.state = state
                continue
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x86:  # TUPLE2
                last = pop()
                stack[-1] = (stack[-1], last)
            elif code == 0x52:  # REDUCE
                arguments, call = pop(), stack[-1]
                make = call.make if type(call) is StandInFunction or type(call) is StandInClass else None
                if make is None:
                    stack[-1] = _opaque(call)
                elif type(arguments) is tuple and len(arguments) <= MAX_ARGUMENTS:
                    stack[-1] = make(*arguments)
                else:
                    raise ValueError(f"calls {_shown(call)} with {_shown(arguments)}")
            elif code == 0x75:  # SETITEMS
                low = marks.pop()
                values = stack[low:]
                del stack[low:]
                _set_items(stack[-1], values)
                continue
            elif code == 0x94:  # MEMOIZE
                remember(stack[-1])
                continue
            elif code == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                push(data[at + 1 : end].decode())
                at = end
            elif code == 0x29:  # EMPTY_TUPLE
                push(())
                continue
            elif code == 0x74:  # TUPLE
                low = marks.pop()
                stack[low:] = (tuple(stack[low:]),)
            elif code == 0x81:  # NEWOBJ
                arguments, kind = pop(), stack[-1]
                is_empty = arguments == () and type(kind) is StandInClass
                stack[-1] = StandInObject(kind) if is_empty else _opaque(kind)
            elif code == 0x2E:  # STOP
                (result,) = stack
                return result
            else:
                operation = operations.get(code)
                if operation is None:
                    raise ValueError(f"byte {at - 1} holds the operation {code:#04x}")
                self.at = at
                operation(self)
                at = self.at
                continue
            if data[at] == 0x94:  # MEMOIZE
                at += 1
                remember(stack[-1])

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes of the pickle."""
        low, self.at = self.at, self.at + size
        if size < 0 or self.at > len(self.data):
            raise ValueError("it ends too early")
        return self.data[low : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def look_up(self, module: Any, name: Any) -> Any:
        """Return the stand-in of a class or function that the pickle names."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("the name of a global is not text")
        try:
            return self.table[module, name]
        except KeyError:
            raise PicklingError(f"names the global {module[:100]}.{name[:100]}, which such a file does not need") from None


def _opaque(kind: Any) -> Opaque:
    """Return an `Opaque` for a call of a class that the reader does not make: it has no `make`, or gets arguments."""
    if not isinstance(kind, StandInClass | Opaque):
        raise ValueError(f"calls {_shown(kind)}")
    return Opaque(kind.name)


def _tuple3(machine: _Machine) -> None:
    stack = machine.stack
    last, middle = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], middle, last)


def _build(made: Any, state: Any) -> None:
    if isinstance(made, StandInObject):
        if made.state is None:
            made.state = state if isinstance(state, dict | tuple) else Opaque(made.kind.name)
        elif type(made.state) is not Opaque:
            raise ValueError(f"gives {made.kind.name} a second state")
    elif not (isinstance(made, Opaque) or (isinstance(made, dict) and _is_attributes(state))):
        raise ValueError(f"gives {_shown(made)} a state")


def _is_attributes(state: Any) -> bool:
    """Tell whether a pickle may set this state on an ``OrderedDict``: an empty dict, or a module's ``_metadata``."""
    return state == {} or (type(state) is dict and list(state) == ["_metadata"])


def _key(key: Any) -> Any:
    # Larger integers can be chosen to have the same hash, which makes the dict slow.
    if isinstance(key, str | bytes | bool | None | StandInObject) or (type(key) is int and abs(key) < _MAX_INT_KEY):
        return key
    # Constants of the table, such as dtypes, hash by their address, and strings by a secret; nobody can choose them to collide.
    if type(key) is tuple and len(key) <= MAX_ARGUMENTS and not any(isinstance(part, tuple | int | float) for part in key):
        return key
    return Opaque(f"the key of a dict, {_shown(key)}")


def _set_items(target: Any, values: list[Any]) -> None:
    if isinstance(target, StandInObject):
        target.take(values)
        return
    if type(target) is Opaque:
        return
    if type(target) is not dict or len(values) % 2:
        raise ValueError(f"puts items into {_shown(target)}")
    for i in range(0, len(values), 2):
        key = values[i]
        target[key if type(key) is str else _key(key)] = values[i + 1]


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_items(machine.stack[-1], [key, value])


def _extend(machine: _Machine, low: int) -> None:
    """Append the items on the machine's stack, from index `low` on, to the list below them."""
    stack, target = machine.stack, machine.stack[low - 1]
    if type(target) is list:
        target.extend(stack[low:])
    elif isinstance(target, StandInObject):
        target.take(stack[low:])
    elif type(target) is not Opaque:
        raise ValueError(f"appends to {_shown(target)}")
    del stack[low:]


def _called(machine: _Machine, name: str, argument: Any) -> Any:
    """Make an object as if the pickle called a class of Python: operations of newer protocols do without the call."""
    kind = machine.look_up("builtins", name)
    return kind.make(argument) if type(kind) is StandInFunction else Opaque(name)


def _frozenset(machine: _Machine) -> None:
    low = machine.marks.pop()
    machine.stack[low:] = [_called(machine, "frozenset", machine.stack[low:])]


def _shown(value: Any) -> str:
    return value.name if isinstance(value, StandInClass | StandInFunction) else type_in_words(value)


def _move_into_place(size: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        # Writers number the memo's entries in order. A jump would let a few bytes claim a huge memo.
        index, memo = machine.number(size), machine.memo
        if index > len(memo):
            raise ValueError(f"remembers something as number {index}, after {len(memo)} others")
        memo[index : index + 1] = [machine.stack[-1]]

    return operation


def _protocol(machine: _Machine) -> None:
    if machine.number(1) not in (2, 3, 4, 5):
        raise ValueError("a protocol that is unknown")


def _line(machine: _Machine) -> str:
    end = machine.data.index(b"\n", machine.at)
    line = machine.take(end - machine.at)
    machine.at += 1
    return line.decode()


def _stack_global(machine: _Machine) -> Any:
    name, module = machine.stack.pop(), machine.stack.pop()
    return machine.look_up(module, name)


def _persistent(machine: _Machine) -> Any:
    if machine.persistent is None:
        raise ValueError("it has a persistent id")
    return machine.persistent(machine.stack.pop())


def _pushed(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


_VALUES: dict[int, Callable[[_Machine], Any]] = {
    # BINUNICODE, BINUNICODE8; SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8: bytes of the length, then the text or the bytes
    0x58: lambda machine: machine.take(machine.number(4)).decode(),
    0x8D: lambda machine: machine.take(machine.number(8)).decode(),
    0x43: lambda machine: machine.take(machine.number(1)),
    0x42: lambda machine: machine.take(machine.number(4)),
    0x8E: lambda machine: machine.take(machine.number(8)),
    0x96: lambda machine: _called(machine, "bytearray", machine.take(machine.number(8))),
    # BININT2, BININT, LONG1, BINFLOAT
    0x4D: lambda machine: machine.number(2),
    0x4A: lambda machine: int.from_bytes(machine.take(4), "little", signed=True),
    0x8A: lambda machine: int.from_bytes(machine.take(machine.number(1)), "little", signed=True),
    0x47: lambda machine: struct.unpack(">d", machine.take(8))[0],
    # NONE, NEWTRUE, NEWFALSE, EMPTY_LIST, EMPTY_SET
    0x4E: lambda machine: None,
    0x88: lambda machine: True,
    0x89: lambda machine: False,
    0x5D: lambda machine: [],
    0x8F: lambda machine: _called(machine, "set", []),
    # STACK_GLOBAL, GLOBAL, BINPERSID
    0x93: _stack_global,
    0x63: lambda machine: machine.look_up(_line(machine), _line(machine)),
    0x51: _persistent,
}
"""Operations of a pickle that push one value on the stack, by their opcodes."""

_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    **{code: _pushed(value) for code, value in _VALUES.items()},
    # PROTO and FRAME. The length of a frame is a hint for reading ahead, and not needed here.
    0x80: _protocol,
    0x95: lambda machine: (machine.number(8), None)[1],
    # TUPLE3, APPEND, APPENDS, SETITEM, ADDITEMS, FROZENSET
    0x87: _tuple3,
    0x61: lambda machine: _extend(machine, len(machine.stack) - 1),
    0x65: lambda machine: _extend(machine, machine.marks.pop()),
    0x73: _set_item,
    0x90: lambda machine: _extend(machine, machine.marks.pop()),
    0x91: _frozenset,
    # BINPUT, LONG_BINPUT: set a memo entry, whose index has one byte or four
    0x71: _move_into_place(1),
    0x72: _move_into_place(4),
}
