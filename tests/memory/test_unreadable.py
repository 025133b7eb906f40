"""Memory whose files cannot be opened: that does not mean that they are gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import StorageError
from reshard_ckpt.memory import generations, node, slots
from tests.memory.test_manager import killed, loaded, state
from tests.reliability.faults import FaultyOs, fails


@pytest.mark.parametrize(("module", "name"), [(slots, "open"), (generations, "open"), (node, "listdir")])
def test_what_cannot_be_opened_in_memory_is_not_taken_for_gone(tmp_path: Path, shm: Path, module: Any, name: str):
    """Else an older one would be loaded from the store, which supersedes it; or its slots would be taken for free ones."""
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    manager.save(1, state(1))
    manager.async_save(2, state(2)).result()
    killed(manager)
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    with mock.patch.object(module, "os", FaultyOs(name, None, fails(errno.EMFILE))):
        with pytest.raises(StorageError, match=os.strerror(errno.EMFILE)):
            manager.load_latest(state(0))
        with pytest.warns(UserWarning, match=rf"goes to the store, not to memory.*{os.strerror(errno.EMFILE)}"):
            manager.async_save(3, state(3)).result()
    manager.delete(3)
    assert loaded(manager) == (2, "memory")
    killed(manager)
