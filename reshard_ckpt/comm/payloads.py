"""Payloads of any size as keys of a key-value store, in chunks ``<key>/0``, ``<key>/1``, …; the first has the total length."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

_LENGTH = struct.Struct("<Q")

# TCPStore drops a client that sends a value above 8 MiB; smaller ones also let other ranks have their turn.
_CHUNK_BYTES = 2 << 20

_SAVED_AT_ONCE = 64 << 10
"""The most bytes in one write request, unless one chunk is larger. The server parses a growing request again from its beginning
each time that bytes arrive, so one request of 2,000 keys costs ten times as much as requests of 60 keys."""


class KeyValueStore(Protocol):
    """The methods of `torch.distributed.Store` that this package calls; torch's type stubs lack some of them."""

    def append(self, key: str, value: bytes, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...
    def multi_set(self, keys: list[str], values: list[bytes], /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...


class Payloads:
    """Reads and writes payloads of any size in one key-value store."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def save(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads to the store, each under its key."""
        keys: list[str] = []
        values: list[bytes] = []
        num_bytes = 0
        for key, payload in payloads.items():
            view = memoryview(payload)
            for i in range(_num_chunks(len(payload))):
                length = b"" if i else _LENGTH.pack(len(payload))
                keys.append(f"{key}/{i}")
                values.append(b"".join((length, view[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES])))
                num_bytes += len(values[-1])
                if num_bytes >= _SAVED_AT_ONCE:
                    self._store.multi_set(keys, values)
                    keys, values, num_bytes = [], [], 0
        if keys:
            self._store.multi_set(keys, values)

    def load(self, key: str) -> bytes:
        """Return a payload that is known to be in the store."""
        first = self._store.get(f"{key}/0")
        length = _LENGTH.unpack_from(first)[0]
        payload = bytearray(first[_LENGTH.size :])
        for i in range(1, _num_chunks(length)):
            payload += self._store.get(f"{key}/{i}")
        return bytes(payload)

    def drop(self, key: str) -> None:
        """Delete a payload if the store has it."""
        if self._store.check([f"{key}/0"]):
            self._delete(key, _LENGTH.unpack_from(self._store.get(f"{key}/0"))[0])

    def _delete(self, key: str, length: int) -> None:
        # The first one last, so that an interrupted deletion can be taken up again.
        for i in reversed(range(_num_chunks(length))):
            self._store.delete_key(f"{key}/{i}")

    def take(self, key: str) -> bytes:
        """Return a payload, and delete it from the store."""
        payload = self.load(key)
        self._delete(key, len(payload))
        return payload


def _num_chunks(length: int) -> int:
    return max(1, -(-length // _CHUNK_BYTES))
