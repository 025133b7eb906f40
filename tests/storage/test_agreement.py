"""Both storages do the same, whatever is done: any sequence of operations on each, compared step by step."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reshard_ckpt.errors import CheckpointError
from reshard_ckpt.storage import ABSENT, ANY, LocalStorage, MemoryStorage, Storage, Version
from tests.storage.contract import read_range
from tests.tries import examples

KEYS = st.sampled_from(["a", "b", "a/c", "a/d", "a/c/e", "b/f/g"])
DATA = st.binary(max_size=20)


def outcome(act: Callable[[Storage], object], storage: Storage) -> object:
    try:
        return act(storage)
    except CheckpointError as error:
        return type(error)


class Storages(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.local = LocalStorage(Path(self.folder, "root"))
        self.memory = MemoryStorage(uuid.uuid4().hex)

    def both(self, act: Callable[[Storage], object]) -> None:
        assert outcome(act, self.local) == outcome(act, self.memory)

    @rule(key=KEYS, parts=st.lists(DATA, max_size=3), abort=st.booleans())
    def write(self, key: str, parts: list[bytes], abort: bool) -> None:
        def act(storage: Storage) -> None:
            writer = storage.create(key)
            for part in parts:
                writer.write(part)
            writer.abort() if abort else writer.finish()

        self.both(act)

    @rule(key=KEYS, data=DATA, expected=st.sampled_from([ANY, ABSENT, Version("other")]))
    def publish(self, key: str, data: bytes, expected: Version) -> None:
        self.both(lambda storage: storage.publish(key, data, expected=expected))

    @rule(key=KEYS, data=DATA)
    def publish_over_what_is_there(self, key: str, data: bytes) -> None:
        def act(storage: Storage) -> object:
            [found] = storage.read_many([key], 100)
            return storage.publish(key, data, expected=found.version if found else ABSENT)

        self.both(act)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.both(lambda storage: storage.delete([key]))

    @rule()
    def delete_all(self) -> None:
        self.both(lambda storage: storage.delete([key for key, _ in storage.list()]))

    @rule(key=KEYS, limit=st.integers(0, 20))
    def read(self, key: str, limit: int) -> None:
        self.both(lambda storage: storage.read(key, limit))

    @rule(key=KEYS, offset=st.integers(0, 20), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3))
    def read_range(self, key: str, offset: int, sizes: list[int]) -> None:
        self.both(lambda storage: read_range(storage, key, offset, *sizes))

    @rule(prefix=KEYS)
    def look(self, prefix: str) -> None:
        self.both(lambda storage: (storage.size(prefix), storage.list(prefix), storage.sync([prefix])))

    @invariant()
    def hold_the_same(self) -> None:
        assert self.local.list() == self.memory.list()

    def teardown(self) -> None:
        self.local.close()
        shutil.rmtree(self.folder)
        self.memory.delete([key for key, _ in self.memory.list()])


TestStorages = Storages.TestCase
TestStorages.settings = examples(30, stateful_step_count=25)
