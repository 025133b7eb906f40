"""A load waits for a slow store once for all files: small requests are under way together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from reshard_ckpt.core.catalog.specs import TensorSpec
from reshard_ckpt.engine.common.files import open_catalog, open_files
from reshard_ckpt.engine.loading.stream import stream, whole_run
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.storage import Hints
from reshard_ckpt.storage.memory import MemoryStorage
from tests.jobs import load_job, save_job
from tests.layouts import values_of, whole_piece
from tests.storage.faulty import FaultyStorage

FILES = 6
SHAPE = (5, 7)


def tensors() -> list[tuple[TensorSpec, torch.Tensor]]:
    return [(TensorSpec(f"w{i}", "I32", SHAPE, (whole_piece(SHAPE),)), values_of(SHAPE, "I32", i)) for i in range(FILES)]


class SlowStore(FaultyStorage):
    """A store that takes many requests at once, as those of objects do."""

    @property
    def hints(self) -> Hints:
        return Hints(requests=32)


class Rounds:
    """A `before` that answers requests for sizes and digests only once so many are under way."""

    def __init__(self, together: int) -> None:
        self._barrier = threading.Barrier(together, timeout=600)
        self._lock, self.requests = threading.Lock(), 0

    def __call__(self, operation: str, key: str) -> None:
        if (operation, key.rpartition(".")[2]) in (("size", "safetensors"), ("read", "digests")):
            with self._lock:
                self.requests += 1
            self._barrier.wait()


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> MemoryStorage:
    """One tensor a file, a rank each."""
    storage = MemoryStorage(request.node.name)
    save_job(storage, [[item] for item in tensors()])
    return storage


def test_a_load_asks_for_all_sizes_and_digests_in_one_round(storage: MemoryStorage) -> None:
    rounds = Rounds(2 * FILES)
    wanted = [(spec, torch.zeros_like(tensor)) for spec, tensor in tensors()]
    load_job(SlowStore(storage, rounds), wanted)
    assert rounds.requests == 2 * FILES
    assert all(torch.equal(got, tensor) for (_, got), (_, tensor) in zip(wanted, tensors(), strict=True))


def test_a_stream_asks_for_all_sizes_and_digests_in_one_round(storage: MemoryStorage) -> None:
    catalog, rounds = open_catalog(storage), Rounds(2 * FILES)
    runs = [whole_run(catalog, catalog.tensors_table.names.index(f"w{i}")) for i in range(FILES)]
    got = b"".join(bytes(part) for part in stream(SlowStore(storage, rounds), catalog, runs))
    assert rounds.requests == 2 * FILES
    assert got == b"".join(tensor.numpy().tobytes() for _, tensor in tensors())


def test_unproved_files_are_asked_for_their_sizes_alone(storage: MemoryStorage) -> None:
    rounds = Rounds(FILES)
    assert open_files(SlowStore(storage, rounds), open_catalog(storage), range(FILES)) == {}
    assert rounds.requests == FILES


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda entries: [entries[3].digests_key, entries[4].key, entries[5].key], r"rank00004-0.safetensors is missing"),
        (lambda entries: [entries[5].digests_key, entries[2].digests_key], r"rank00002-0.digests is missing"),
    ],
)
def test_of_several_faults_the_first_in_order_is_told(
    storage: MemoryStorage, damage: Callable[[list], list[str]], said: str
) -> None:
    catalog = open_catalog(storage)
    storage.delete(damage(list(catalog.files)))
    with pytest.raises(CorruptError, match=said):
        open_files(storage, catalog, range(FILES), range(FILES))
