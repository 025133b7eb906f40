"""What a disk may hold after a power cut: a model of a file system that keeps only what was synced, and perhaps some of the rest.

1. A file has bytes as programs see them, and bytes as of its last fsync. After a cut it may hold either, a beginning of the new
   ones, or nonsense of their length.
2. A folder has names as programs see them, and names as of its last fsync. Each change since then (a name made, moved, removed)
   has happened or not, whatever became of the others; a rename is one change.
3. A folder whose own name is lost is lost with all that is in it.

That is worse than any file system in use: they keep changes of names in order. It is all that POSIX promises.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.reliability.calls import Call


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        """One change, of one name or, a rename, of two."""
        apply(self.names, names)
        self.pending.append(names)


def apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


Tree = dict[str, "Tree | bytes"]


class Disk:
    """A disk on which calls happen; `after_cut` is what it may hold if the power fails now."""

    def __init__(self) -> None:
        self.root = Folder()

    def load(self, calls: Iterable[Call]) -> Disk:
        for call in calls:
            self.do(call)
        return self

    def sync_all(self) -> None:
        """As when a long time has passed."""
        stack = [self.root]
        while stack:
            folder = stack.pop()
            folder.synced, folder.pending = dict(folder.names), []
            for node in folder.names.values():
                if isinstance(node, Folder):
                    stack.append(node)
                else:
                    node.synced = bytes(node.data)

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for name in PurePosixPath(path).parts:
            assert isinstance(node, Folder)
            node = node.names[name]
        return node

    def _above(self, path: str) -> tuple[Folder, str]:
        folder = self._find(str(PurePosixPath(path).parent))
        assert isinstance(folder, Folder)
        return folder, PurePosixPath(path).name

    def do(self, call: Call) -> None:
        """Let one call happen."""
        if call.name == "fsync":
            node = self._find(call.path)
            if isinstance(node, File):
                node.synced = bytes(node.data)
            else:
                node.synced, node.pending = dict(node.names), []
            return
        if call.name == "write":
            node = self._find(call.path)
            assert isinstance(node, File)
            node.data += call.data
            return
        folder, name = self._above(call.path)
        if call.name in ("create", "mkdir"):
            assert name not in folder.names
            folder.change({name: File() if call.name == "create" else Folder()})
        elif call.name in ("unlink", "rmdir"):
            assert name in folder.names
            folder.change({name: None})
        elif call.name == "rename":
            other, target = self._above(call.target)
            assert other is folder, "a rename between folders is two changes, and needs a model of its own"
            folder.change({target: folder.names[name], name: None})
        else:
            raise AssertionError(f"no model of {call.name}")

    def after_kill(self) -> Tree:
        """What the disk holds if the process is killed now: all that it has done."""
        return _seen(self.root)

    def after_cut(self, luck: random.Random | None) -> Tree:
        """What the disk holds after a cut: without luck, only what was synced."""
        return _after(self.root, luck)


def _seen(folder: Folder) -> Tree:
    return {name: _seen(node) if isinstance(node, Folder) else bytes(node.data) for name, node in sorted(folder.names.items())}


def _after(folder: Folder, luck: random.Random | None) -> Tree:
    names = dict(folder.synced)
    for change in folder.pending:
        if luck and luck.random() < 0.5:
            apply(names, change)
    return {
        name: _after(node, luck) if isinstance(node, Folder) else _bytes_after(node, luck) for name, node in sorted(names.items())
    }


def _bytes_after(file: File, luck: random.Random | None) -> bytes:
    data = bytes(file.data)
    if luck is None or data == file.synced:
        return file.synced
    cut = luck.randrange(len(data) + 1)
    return luck.choice([file.synced, data, data[:cut], data[:cut] + bytes(len(data) - cut), luck.randbytes(len(data))])


def write_tree(tree: Tree, at: Path) -> None:
    """Put this on a real disk."""
    at.mkdir(parents=True)
    for name, node in tree.items():
        if isinstance(node, bytes):
            (at / name).write_bytes(node)
        else:
            write_tree(node, at / name)
