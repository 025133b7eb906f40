"""Checkpoints in an object store: every function and command with an ``s3://`` path, on moto's S3."""

from __future__ import annotations

import os
import posixpath
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import converting
from reshard_ckpt.checkpoint.listing import list_run
from reshard_ckpt.engine.common import reader_notes
from reshard_ckpt.engine.common.reader_notes import note_removed, removed_within
from reshard_ckpt.engine.common.step_folders import remove_files, remove_step
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError, UsageError
from reshard_ckpt.format.files import CONVERT_LOCK, RESHARD_LOCK, export_note_key
from reshard_ckpt.formats import destination
from reshard_ckpt.formats.source import open_source
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.object_client import client_of
from reshard_ckpt.storage.object_lease import content
from reshard_ckpt.storage.object_store import _QUOTED, ObjectStorage
from reshard_ckpt.storage.protocol import read_range
from tests.cli.running import run
from tests.formats.test_conformance import CASES, Case
from tests.launch import run_ranks
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.object_servers import KEYS, make_bucket, set_endpoint


@pytest.fixture
def url(endpoint: str) -> str:
    return f"{make_bucket(endpoint)}/runs/a"


def state(seed: int = 0) -> dict[str, Any]:
    """Make a model, an optimizer that has stepped, and values."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": {"step": seed, "long": "x" * 9000}}


def same(path: str | Path, wanted: dict[str, Any]) -> bool:
    found = checkpoint.read(path)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        for name, value in wanted.items()
    )


def test_what_is_saved_loads_bit_for_bit(url: str, tmp_path: Path) -> None:
    saved, other = state(1), state(2)
    checkpoint.save(tmp_path / "local", saved)
    wanted = checkpoint.read(tmp_path / "local")
    checkpoint.save(f"{url}/step_1", saved)
    assert same(f"{url}/step_1", wanted)
    checkpoint.load(f"{url}/step_1", other)
    checkpoint.async_save(f"{url}/step_1", other).result()
    assert same(f"{url}/step_1", wanted)
    assert checkpoint.verify(f"{url}/step_1").ok
    with open_storage(f"{url}/step_1") as storage:
        assert len(storage.folders()) == 2  # that of the replaced save stays for its readers


def test_checkpoints_are_resharded_and_converted_between_stores(url: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "local", state())
    wanted = checkpoint.read(tmp_path / "local")
    checkpoint.reshard(tmp_path / "local", f"{url}/two", mesh={"dp": 2})
    checkpoint.reshard(f"{url}/two", f"{url}/three", mesh={"dp": 3})
    assert same(f"{url}/three", wanted)
    checkpoint.convert(f"{url}/three", f"{url}/dcp", to="dcp")
    checkpoint.convert(f"{url}/dcp", f"{url}/state.pt", to="torch")
    checkpoint.convert(f"{url}/state.pt", f"{url}/own", to="reshard")
    assert same(f"{url}/own", wanted)
    report = checkpoint.convert(f"{url}/own", f"{url}/hf", to="safetensors", max_shard_size=600)
    assert len(report.files) > 2
    assert report.files[-1] == "model.safetensors.index.json"
    model = {name: value for name, value in wanted.items() if name.startswith("model.")}
    assert {name.removeprefix("model.") for name in checkpoint.read(f"{url}/hf")} == {n.removeprefix("model.") for n in model}
    assert same(f"{url}/hf", model)
    with pytest.raises(UsageError, match="hf: already exists; pass another path, or overwrite=True"):
        checkpoint.convert(f"{url}/own", f"{url}/hf", to="safetensors")
    assert same(f"{url}/hf", model)


def test_a_conversion_replaces_a_checkpoint_on_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(f"{url}/own", state(1))
    checkpoint.save(f"{url}/new", state(2))
    for to in ("safetensors", "dcp", "reshard"):
        checkpoint.convert(f"{url}/own", f"{url}/{to}", to=to, max_shard_size=600)
        checkpoint.convert(f"{url}/new", f"{url}/{to}", to=to, max_shard_size=900, overwrite=True)
        checkpoint.convert(f"{url}/new", f"{url}/fresh-{to}", to=to, max_shard_size=900)
        assert same(f"{url}/{to}", checkpoint.read(f"{url}/fresh-{to}"))
        with open_storage(url) as storage:
            assert len(storage.list(to)) == len(storage.list(f"fresh-{to}"))  # nothing of the old one stays
            assert not storage.list(f".{to}.partial")
    monkeypatch.setattr("reshard_ckpt.formats.safetensors._index", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(f"{url}/own", f"{url}/safetensors", to="safetensors", max_shard_size=600, overwrite=True)
    assert same(f"{url}/safetensors", checkpoint.read(f"{url}/fresh-safetensors"))


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_conversion_replaces_nothing_but_a_checkpoint(url: str) -> None:
    shared = {"w": torch.arange(70_000)}
    checkpoint.save(f"{url}/run/step_1", shared)
    checkpoint.save(f"{url}/run/step_2", shared, base=f"{url}/run/step_1")
    checkpoint.save(f"{url}/other", state(2))
    with open_storage(url) as storage:
        storage.publish("notes/plan.txt", b"plan")
        before = storage.list()
        for path, why in {
            "notes": "holds no checkpoint, and nothing else is replaced",
            "run": "holds no checkpoint, and nothing else is replaced",
            "other": "is, or holds, the checkpoint to be read",
            "run/step_1": "step_2 of the same run refer to its files",
        }.items():
            with pytest.raises(UsageError, match=why):
                checkpoint.convert(f"{url}/other", f"{url}/{path}", to="dcp", overwrite=True)
        assert storage.list() == before


def test_a_conversion_to_one_file_replaces_nothing_but_a_checkpoint(url: str) -> None:
    checkpoint.save(f"{url}/other", state(2))
    checkpoint.convert(f"{url}/other", f"{url}/old.pt", to="torch")
    with open_storage(url) as storage:
        storage.publish("plan.txt", b"plan")
        before = storage.list()
        (file,) = (key for key, _ in before if key.endswith(".safetensors"))
        for path, why in {
            "plan.txt": "holds no checkpoint, and nothing else is replaced",
            "other": "other: is a folder, and the result is one file",
            "other/catalog.msgpack": "holds no checkpoint, and nothing else is replaced",
            file: "is, or holds, the checkpoint to be read",
        }.items():
            with pytest.raises(UsageError, match=why):
                checkpoint.convert(f"{url}/other", f"{url}/{path}", to="torch", overwrite=True)
        with pytest.raises(UsageError, match="is, or holds, the checkpoint to be read"):
            checkpoint.convert(f"{url}/old.pt", f"{url}/old.pt", to="torch", select="model", overwrite=True)
        assert storage.list() == before
    checkpoint.convert(f"{url}/other", f"{url}/old.pt", to="torch", select="model", overwrite=True)
    assert "extra.step" not in checkpoint.read(f"{url}/old.pt")


def test_what_refers_to_it_in_the_last_moment_of_a_conversion_survives(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, leased = {"w": torch.arange(70_000)}, destination._leased
    checkpoint.save(f"{url}/run/step_1", shared)
    checkpoint.save(f"{url}/other", state(2))

    def late(storage: Any, *note: str) -> Any:
        if storage.url.endswith("/step_1"):
            checkpoint.save(f"{url}/run/step_2", shared, base=f"{url}/run/step_1")
        return leased(storage, *note)

    monkeypatch.setattr(destination, "_leased", late)
    with pytest.raises(UsageError, match="step_1: is not replaced: step_2"):
        checkpoint.convert(f"{url}/other", f"{url}/run/step_1", to="dcp", overwrite=True)
    for step in (1, 2):
        assert torch.equal(checkpoint.read(f"{url}/run/step_{step}")["w"], shared["w"])


def test_what_a_killed_conversion_left_is_no_checkpoint(url: str) -> None:
    checkpoint.save(f"{url}/own", state(1))
    checkpoint.convert(f"{url}/own", f"{url}/hf", to="safetensors")
    with open_storage(f"{url}/hf") as storage:
        storage.publish(CONVERT_LOCK, b"")
    with pytest.raises(CheckpointNotFound, match="a conversion writes there now, or was killed"):
        checkpoint.read(f"{url}/hf")


def test_a_checkpoint_that_a_killed_conversion_was_to_replace_is_deleted_only_on_request(url: str) -> None:
    """The conversion had its lease, and had deleted nothing yet."""
    checkpoint.save(f"{url}/own", state(1))
    checkpoint.save(f"{url}/new", state(2))
    for to in ("reshard", "safetensors"):
        checkpoint.convert(f"{url}/own", f"{url}/{to}", to=to)
        with open_storage(f"{url}/{to}") as storage:
            storage.publish(CONVERT_LOCK, content(b"replacement", 0.0))
            before = storage.list()
            with pytest.raises(UsageError, match="already exists; pass another path, or overwrite=True"):
                checkpoint.convert(f"{url}/new", f"{url}/{to}", to=to)
            assert storage.list() == before
        checkpoint.convert(f"{url}/new", f"{url}/{to}", to=to, overwrite=True)
        checkpoint.convert(f"{url}/new", f"{url}/fresh-{to}", to=to)
        assert same(f"{url}/{to}", checkpoint.read(f"{url}/fresh-{to}"))


def leave_lease(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Return a function that puts the last lease of a conversion to this prefix back, as the lease of a killed process."""
    notes: list[bytes] = []
    lease = ObjectStorage.lease

    def spy(self: ObjectStorage, key: str, note: bytes, **options: Any) -> Any:
        notes.extend([note] if (self.url, key) == (url, CONVERT_LOCK) else [])
        return lease(self, key, note, **options)

    monkeypatch.setattr(ObjectStorage, "lease", spy)
    return lambda: open_storage(url).publish(CONVERT_LOCK, content(notes[-1], 0.0))


def test_a_conversion_goes_on_if_it_was_killed_between_its_commit_and_its_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("own", "new"):
        checkpoint.save(f"{url}/{source}", state(source == "new"))
    leave = leave_lease(f"{url}/made", monkeypatch)
    written = checkpoint.convert(f"{url}/own", f"{url}/made", to="reshard")
    leave()
    with pytest.raises(UsageError, match="made: already exists; pass another path, or overwrite=True"):
        checkpoint.convert(f"{url}/new", f"{url}/made", to="reshard")
    assert same(f"{url}/made", checkpoint.read(f"{url}/own"))
    again = checkpoint.convert(f"{url}/own", f"{url}/made", to="reshard")
    assert again.bytes_kept > written.num_bytes
    assert again.files == written.files
    assert same(f"{url}/made", checkpoint.read(f"{url}/own"))
    with open_storage(f"{url}/made") as storage:
        assert storage.size(CONVERT_LOCK) is None


def test_what_a_killed_conversion_in_place_made_beside_is_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is a whole checkpoint, of another state."""
    for source in ("own", "new"):
        checkpoint.save(f"{url}/{source}", state(source == "new"))
    checkpoint.convert(f"{url}/own", f"{url}/made", to="reshard")
    leave = leave_lease(f"{url}/.made.partial", monkeypatch)
    checkpoint.convert(f"{url}/own", f"{url}/.made.partial", to="reshard")
    leave()
    checkpoint.convert(f"{url}/new", f"{url}/made", to="reshard", overwrite=True)
    assert same(f"{url}/made", checkpoint.read(f"{url}/new"))
    assert checkpoint.verify(f"{url}/made").ok
    with open_storage(url) as storage:
        assert not [key for key, _ in storage.list() if key.startswith(".made") or key.endswith(CONVERT_LOCK)]


@pytest.mark.parametrize(
    ("to", "seen"),
    [("reshard", "lease"), ("safetensors", "lease"), ("safetensors", "nothing"), ("safetensors", "all but the end")],
)
def test_a_conversion_that_ends_while_another_one_begins_is_not_deleted(
    url: str, to: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has seen this much of the first one, and asks for its lease once it has ended."""
    checkpoint.save(f"{url}/own", state())
    leased, sources, began = destination._leased, open_storage(f"{url}/made"), []
    if seen == "all but the end":
        checkpoint.convert(f"{url}/own", f"{url}/made", to=to)
    if seen != "nothing":
        sources.publish(CONVERT_LOCK, content(b"conversion", 0.0))

    def late(storage: Any, *note: str) -> Any:
        if not began:
            began.append(storage)
            if seen == "all but the end":
                sources.delete([CONVERT_LOCK])
            else:
                checkpoint.convert(f"{url}/own", f"{url}/made", to=to)
        return leased(storage, *note)

    monkeypatch.setattr(destination, "_leased", late)
    with pytest.raises(StorageError, match="made: another conversion writes there now"):
        checkpoint.convert(f"{url}/own", f"{url}/made", to=to, select="model.0")
    checkpoint.convert(f"{url}/own", f"{url}/fresh", to=to)
    assert same(f"{url}/made", checkpoint.read(f"{url}/fresh"))


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_conversion_that_stood_still_writes_nothing_over_the_next_one(
    url: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still while it reads, until its lease is over and another conversion has taken it, and ended."""
    for source in ("own", "new"):
        checkpoint.save(f"{url}/{source}", state(source == "new"))
    stream, lease, held = converting.stream, ObjectStorage.lease, list[Any]()

    def spy(self: ObjectStorage, *args: Any, **options: Any) -> Any:
        held.append(lease(self, *args, **options))
        return held[-1]

    def late(*args: Any, **options: Any) -> Iterator[memoryview]:
        monkeypatch.setattr(converting, "stream", stream)
        held[-1]._renewed -= 3600
        open_storage(f"{url}/made").publish(CONVERT_LOCK, content(b"conversion", 0.0))
        checkpoint.convert(f"{url}/new", f"{url}/made", to=to)
        yield from stream(*args, **options)

    monkeypatch.setattr(ObjectStorage, "lease", spy)
    monkeypatch.setattr(converting, "stream", late)
    with pytest.raises(StorageError, match="did not renew its lease"):
        checkpoint.convert(f"{url}/own", f"{url}/made", to=to)
    checkpoint.convert(f"{url}/new", f"{url}/fresh", to=to)
    assert same(f"{url}/made", checkpoint.read(f"{url}/fresh"))


def test_compact_lets_the_store_copy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = {"w": torch.arange(100_000)}, {"w": torch.arange(100_000) * (torch.arange(100_000) < 50_000)}
    checkpoint.save(f"{url}/step_1", first)
    checkpoint.save(f"{url}/step_2", second, base=f"{url}/step_1")
    copied: list[str] = []
    copy = ObjectStorage.copy

    def spy(self: ObjectStorage, source: Any, key: str, to: str) -> bool:
        copied.append(key)
        return copy(self, source, key, to)

    monkeypatch.setattr(ObjectStorage, "copy", spy)
    report = checkpoint.compact(f"{url}/step_2")
    assert len(copied) == report.num_files == 1
    with open_storage(f"{url}/step_1") as storage:
        storage.delete(key for key, _ in storage.list())
    assert torch.equal(checkpoint.read(f"{url}/step_2")["w"], second["w"])
    assert checkpoint.verify(f"{url}/step_2").ok


def test_compact_finds_damage_in_what_the_store_copied(url: str) -> None:
    first = {"w": torch.arange(100_000)}
    checkpoint.save(f"{url}/step_1", first)
    checkpoint.save(f"{url}/step_2", first, base=f"{url}/step_1")
    with open_storage(f"{url}/step_1") as storage:
        key = checkpoint.catalog(f"{url}/step_1").files[0].key
        data = bytearray(storage.read(key, 1 << 30))
        data[-100] ^= 1
        storage.publish(key, bytes(data))
    with open_storage(f"{url}/step_2") as storage:
        before = storage.list()
        with pytest.raises(CorruptError, match="is damaged in the block from byte"):
            checkpoint.compact(f"{url}/step_2")
        assert storage.list() == before


def test_a_conversion_that_failed_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(f"{url}/own", state())

    monkeypatch.setattr("reshard_ckpt.formats.safetensors._index", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(f"{url}/own", f"{url}/hf", to="safetensors", max_shard_size=600)
    with open_storage(f"{url}/hf") as storage:
        assert storage.list() == []


def test_a_manager_keeps_a_run(url: str) -> None:
    with checkpoint.Manager(url, keep_last=2) as manager:
        for step in range(4):
            manager.save(step, state(step))
        assert manager.steps() == [2, 3]
        with pytest.raises(UsageError, match="has a manager of the checkpoints there already"):
            checkpoint.Manager(url)
    loaded = state()
    with checkpoint.Manager(url, keep_last=2) as manager:
        assert manager.load_latest(loaded).step == 3
    assert loaded["extra"]["step"] == 3


def test_the_files_of_a_removed_step_stay_for_its_readers(url: str) -> None:
    with checkpoint.Manager(url, keep_last=1, grace=3600) as manager:
        for step in range(2):
            manager.save(step, state(step))
        with open_storage(f"{url}/step_0") as storage:
            assert len(storage.list()) == 4  # two files of the save, its timeline, and the note that it was removed
            assert storage.size("catalog.msgpack") is None
        assert manager.steps() == [1]
    with pytest.raises(CheckpointNotFound, match="step_0: no committed checkpoint: it was removed"):
        checkpoint.read(f"{url}/step_0")
    with checkpoint.Manager(url, keep_last=1, grace=3600), open_storage(url) as storage:
        assert storage.folders() == ("step_0", "step_1")
    with checkpoint.Manager(url, keep_last=1, grace=1e-9) as manager, open_storage(url) as storage:
        assert storage.folders() == ("step_1",)
        for step in (2, 3):
            manager.save(step, state(step))
        assert storage.folders() == ("step_2", "step_3")  # step_2 was removed just now; the next save deletes its files
    assert checkpoint.read(f"{url}/step_3", ["extra.step"]) == {"extra.step": 3}


def test_the_note_of_a_removed_step_of_ten_thousand_ranks_is_read(url: str) -> None:
    """An incremental step needs two files of each rank for each save since the last full one; the note names all of them."""
    files = [f"step_{n}/20260101T000000Z-0123{n:04x}/rank{rank:05d}-0" for n in range(10) for rank in range(10_000)]
    needs = [f"{file}.{end}" for file in files for end in ("safetensors", "digests")]
    with checkpoint.Manager(url, keep_last=1, grace=3600) as manager, open_storage(url) as storage:
        for step in range(2):
            manager.save(step, state(step))
        note_removed(storage, "step_0", needs)
        assert removed_within(storage, ["step_0"], 600) == ({"step_0": sorted(needs)}, {})
        manager.save(2, state(2))
    checkpoint.Manager(url, keep_last=1, grace=3600).close()
    with open_storage(url) as storage:  # as earlier versions wrote it
        storage.publish("step_0/removed", f"{time.time()}\nstep_1/a\nstep_1/b".encode())
        assert removed_within(storage, ["step_0"], 600) == ({"step_0": ["step_1/a", "step_1/b"]}, {})
        storage.publish("step_0/removed", f"{time.time()}".encode())
        assert removed_within(storage, ["step_0"], 600) == ({"step_0": []}, {})


def test_what_a_save_replaces_stays_as_long_as_it_says(url: str) -> None:
    def saves(step: int) -> int:
        with open_storage(f"{url}/step_{step}") as storage:
            return len(storage.folders())

    with checkpoint.Manager(url, grace=0) as manager:
        manager.save(1, state(1))
        manager.save(1, state(2))
        assert saves(1) == 1
        manager.async_save(1, state(3), grace=3600).result()
        assert saves(1) == 2
    checkpoint.save(f"{url}/step_1", state(4), grace=0)
    assert saves(1) == 1
    checkpoint.save(f"{url}/step_1", state(5))
    assert saves(1) == 2
    with pytest.raises(UsageError, match="grace=-1: wanted a duration"):
        checkpoint.save(f"{url}/step_1", state(6), grace=-1)


@pytest.mark.filterwarnings("ignore:the save to .* is in memory, but not in the store")
def test_what_memory_sends_to_the_store_is_taken_back_if_its_files_were_deleted_meanwhile(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was paused, another took its files for those of a dead one, and the store published the catalog after that."""
    publish = ObjectStorage.publish

    def paused(self: ObjectStorage, key: str, data: bytes, **expected: Any) -> Any:
        if key == "catalog.msgpack":
            self.delete([key for key, _ in self.list()])
        return publish(self, key, data, **expected)

    memory = checkpoint.Memory(copies=0, folder=str(tmp_path))
    with checkpoint.Manager(url, memory=memory, persist_every=1) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStorage, "publish", paused)
            with pytest.raises(CheckpointError, match="another job deleted files of this save before it was committed"):
                manager.async_save(1, state(1)).persisted()
        assert not [key for key, _ in open_storage(f"{url}/step_1").list()]
        assert manager.async_save(2, state(2)).persisted()
    assert checkpoint.read(f"{url}/step_2", ["extra.step"]) == {"extra.step": 2}


def test_an_export_appears_beside_its_step_is_written_anew_with_it_and_goes_with_it(url: str) -> None:
    def exported() -> dict[str, list[str]]:
        with open_storage(url) as storage:
            keys = [key for key, _ in storage.list() if "/safetensors/" in key]
        return {key.split("/")[0]: sorted(k.rpartition("/")[2] for k in keys if k.startswith(key[:7])) for key in keys}

    for seed in (1, 2):
        with checkpoint.Manager(url, keep_last=1, grace=0, also="safetensors") as manager:
            manager.save(1, state(seed))
        note = f"{checkpoint.catalog(f'{url}/step_1').save_id}.exported"
        expected = {"step_1": sorted([note, "model.safetensors"])}
        assert exported() == expected
        with open_storage(url) as root, root.create("step_1/20200101T000000Z-00000000/f") as writer:  # of a save that was killed
            writer.write(b"data")
        with checkpoint.Manager(url, grace=0):
            assert exported() == expected
        found = checkpoint.read(f"{url}/step_1/safetensors")
        assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in state(seed)["model"].state_dict().items())
    with checkpoint.Manager(url, keep_last=1, grace=0) as manager:
        manager.save(2, state())
    assert exported() == {}


def test_a_save_to_a_step_that_was_removed_keeps_its_files_when_the_old_ones_go(url: str) -> None:
    """A prune may run while the next save is under way, which has no catalog yet."""
    checkpoint.save(f"{url}/step_1", state(1))
    with open_storage(url) as root:
        assert remove_step(root, "step_1", frozenset, keep_files=True)
        later = "29990101T000000Z-00000000"
        under_way = [f"step_1/{later}/rank00000-0.safetensors", f"step_1/{export_note_key(later)}"]
        for key in under_way:
            with root.create(key) as writer:
                writer.write(b"data")
        young, old = removed_within(root, ["step_1"], 0)
        assert ([*young], [*old]) == ([], ["step_1"])
        remove_files(root, "step_1", frozenset(), old["step_1"])
        assert [key for key, _ in root.list()] == under_way


def test_a_replaced_checkpoint_stays_for_its_readers_until_a_save_after_the_grace(url: str) -> None:
    grace = 600.0

    def saved(seed: int) -> str:
        return checkpoint.save(f"{url}/step_1", state(seed), grace=grace).save_id

    def folders() -> set[str]:
        with open_storage(f"{url}/step_1") as storage:
            return {*storage.folders()}

    first, second = saved(1), saved(2)
    with open_source(f"{url}/step_1") as source:
        third = saved(3)
        assert folders() == {first, second, third}
        assert read_range(source.storage, source.catalog.files[0].key, 0, 8)  # of the second, which is replaced
    grace = 1e-9
    fourth = saved(4)
    assert folders() == {third, fourth}  # the third was replaced just now
    assert same(f"{url}/step_1", checkpoint.read(f"{url}/step_1"))


def note_of_reader(url: str) -> bool:
    with open_storage(url) as root:
        return any("/reader-" in key for key, _ in root.list())


def test_files_stay_while_the_note_of_a_reader_is_young(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_notes, "NOTE_EVERY_S", 0.01)
    with checkpoint.Manager(url, keep_last=1, grace=1e-9, incremental=True) as manager:
        whole = {"w": torch.arange(70_000)}
        manager.save(1, whole)
        manager.save(2, whole)
        with open_source(f"{url}/step_2") as source:
            while not note_of_reader(url):
                pass
            monkeypatch.setattr(reader_notes, "NOTE_EVERY_S", 3600)
            for step in range(3, 6):  # not incremental: no later step needs the files of steps 1 and 2
                manager.save(step, whole, base=None)
            assert [line.problem for line in list_run(url)][:2] == ["removed; its files stay for readers until a later save"] * 2
            files = [file.key for file in source.catalog.files]
            assert any(key.startswith("../step_1/") for key in files)
            assert all(read_range(source.storage, key, 0, 8) for key in files)
            with checkpoint.Manager(url, read_only=True):
                pass
        assert not note_of_reader(url)
        manager.save(6, whole, base=None)
        with open_storage(url) as root:
            assert root.folders() == ("step_5", "step_6")


def test_the_note_of_a_reader_that_was_killed_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(f"{url}/step_1", state(1))
    with open_storage(url) as root:
        assert remove_step(root, "step_1", frozenset, keep_files=True)
        [(key, _), *_] = root.list("step_1")
        for age_s, ends in ((0, False), (reader_notes.NOTE_S, True)):
            root.publish(f"{posixpath.dirname(key)}/reader-{'0' * 32}", repr(time.time() - age_s).encode())
            before = root.list()
            remove_files(root, "step_1", frozenset())
            assert root.list() == ([] if ends else before)


def test_a_sweep_leaves_an_offline_reshard_that_is_under_way(url: str) -> None:
    checkpoint.save(f"{url}/own", state(1))
    with open_storage(url) as root:
        folder = f"step_1/20200101T000000Z-{'0' * 32}"
        with root.lease(f"{folder}/{RESHARD_LOCK}", b"reshard") as lease, root.create(f"{folder}/f") as writer:
            assert lease is not None
            writer.write(b"data")
        with root.lease(f"{folder}/{RESHARD_LOCK}", b"reshard"):
            remove_files(root, "step_1", frozenset())
            assert root.size(f"{folder}/f") == 4
        remove_files(root, "step_1", frozenset())
        assert root.list("step_1") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{url}"),
        ("inspect", "{url}/step_1"),
        ("verify", "{url}/step_1"),
        ("diff", "{url}/step_1", "{url}/step_2"),
        ("reshard", "{url}/step_1", "{url}/made", "--mesh", "dp=2"),
        ("convert", "{url}/step_1", "{url}/made", "--to", "safetensors"),
        ("compact", "{url}/step_1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_take_the_path(url: str, arguments: tuple[str, ...]) -> None:
    for step in (1, 2):
        checkpoint.save(f"{url}/step_{step}", {"model": torch.nn.Linear(2, 2), "step": 1})
    ran = run(*(argument.format(url=url) for argument in arguments))
    assert ran.code == 0, ran.err
    assert not Path("s3:").exists()


def save_sharded(endpoint: str, url: str) -> None:
    """Save from the ranks of this job, and load what is there first if it is."""
    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
    torch.manual_seed(dist.get_world_size())
    model = torch.nn.Sequential(torch.nn.Linear(13, 40), torch.nn.Linear(40, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # torch 2.6 runs no forward of FSDP2 on the CPU
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = {"model": model, "optimizer": optimizer}
    if dist.get_world_size() == 3:
        checkpoint.load(f"{url}/two", made)
        checkpoint.save(f"{url}/three", made)
    else:
        checkpoint.save(f"{url}/two", made)


def test_two_ranks_save_and_three_load_bit_for_bit(endpoint: str, url: str) -> None:
    run_ranks(save_sharded, 2, endpoint, url)
    run_ranks(save_sharded, 3, endpoint, url)
    assert same(f"{url}/three", checkpoint.read(f"{url}/two"))


# --- depth: the longest chain of requests, each of which waits for the answer of the one before it ---


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with fault_proxy(endpoint) as proxy:
        set_endpoint(monkeypatch, proxy.endpoint)
        yield proxy
    client_of.cache_clear()


def check_depth(proxy: FaultProxy, at_most: int, call: Callable[[], object]) -> None:
    """Check the length of the longest chain of requests in a call."""
    proxy.rounds = []
    call()
    rounds, proxy.rounds = proxy.rounds, None
    assert len(rounds) <= at_most, "\n".join(f"{len(requests)}: {requests[:3]}" for requests in rounds)


def test_round_trips_of_saves_and_loads_are_few(proxy: FaultProxy, url: str) -> None:
    made = state()
    check_depth(proxy, 10, lambda: checkpoint.save(f"{url}/a", made))  # with the probe of the bucket
    check_depth(proxy, 8, lambda: checkpoint.save(f"{url}/a", made))  # in place of the first
    _QUOTED.clear()  # as in a new process, which asks while it writes
    check_depth(proxy, 10, lambda: checkpoint.save(f"{url}/a", made))
    check_depth(proxy, 5, lambda: checkpoint.load(f"{url}/a", made))


def test_round_trips_of_a_reshard_do_not_grow_with_the_files(proxy: FaultProxy, url: str) -> None:
    made = {"model": torch.nn.Linear(9, 64), "long": ["x" * 9000, "y" * 9000]}
    checkpoint.save(f"{url}/a", made)
    checkpoint.reshard(f"{url}/a", f"{url}/first", mesh={"dp": 32})  # imports what it needs, which takes as long as a request
    check_depth(
        proxy, 7, lambda: checkpoint.reshard(f"{url}/a", f"{url}/b", mesh={"dp": 32}, rules={"model.*": {"dp": "shard(0)"}})
    )
    assert len(checkpoint.catalog(f"{url}/b").files) == 32
    check_depth(proxy, 7, lambda: checkpoint.reshard(f"{url}/b", f"{url}/c", mesh={"dp": 32}))  # from 32 files to 32
    check_depth(proxy, 6, lambda: checkpoint.load(f"{url}/b", made))
    check_depth(proxy, 3, lambda: checkpoint.verify(f"{url}/b"))
    with open_storage(f"{url}/b") as storage:
        assert not [key for key, _ in storage.list() if key.endswith(".lock")]


def test_round_trips_of_a_manager_are_few(proxy: FaultProxy, url: str) -> None:
    made = state()
    checkpoint.save(f"{url}/probe", made)

    def save_four() -> None:
        with checkpoint.Manager(f"{url}/run", keep_last=2) as manager:
            for step in range(4):
                manager.save(step, made)

    check_depth(proxy, 30, save_four)
    with checkpoint.Manager(f"{url}/run", keep_last=2) as manager:
        assert manager.steps() == [2, 3]


def upload(folder: Path, url: str) -> None:
    """Copy a folder, or a file, to an object store."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [folder]
    with open_storage(url.rpartition("/")[0]) as storage:
        for path in files:
            storage.publish(f"{url.rpartition('/')[2]}/{path.relative_to(folder)}".removesuffix("/."), path.read_bytes())


@pytest.mark.parametrize("case", [case for case in CASES if case.format != "npy"], ids=lambda case: case.format)
def test_round_trips_of_opening_a_foreign_checkpoint_are_few(proxy: FaultProxy, url: str, tmp_path: Path, case: Case) -> None:
    check = case.make(tmp_path / "made")
    upload(tmp_path / "made", f"{url}/made")
    check_depth(proxy, 8, lambda: checkpoint.catalog(f"{url}/made"))
    check(checkpoint.read(f"{url}/made"))


def test_foreign_files_that_are_replaced_while_they_are_read_are_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no checksums: a tensor of the old save and one of the new would be loaded without a word."""
    names = ("a.safetensors", "b.safetensors")

    def write(number: int) -> None:
        with open_storage(url) as storage:
            for name in names:
                storage.publish(name, save({name[0]: torch.arange(number, number + 40_000)}))

    def read(self: ObjectStorage, key: str, offset: int, buffers: Any) -> None:
        read_into(self, key, offset, buffers)
        if offset:  # not the heads of files, which are smaller
            write(2)

    read_into, target = ObjectStorage.read_into, {name[0]: torch.zeros(40_000, dtype=torch.int64) for name in names}
    for call in (
        lambda: checkpoint.read(url),
        lambda: checkpoint.load(url, {"model": target}),
        lambda: checkpoint.convert(url, tmp_path / "dst"),
    ):
        write(1)
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStorage, "read_into", read)
            with pytest.raises(StorageError, match="safetensors was changed while it was read"):
                call()
    assert not (tmp_path / "dst").exists()


def test_each_store_that_a_manager_opens_waits_for_its_timeout(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one save waits for minutes after its time, and the other ranks blame rank 0."""
    waits: dict[float, str] = {}
    opened = ObjectStorage.__init__

    def note(self: ObjectStorage, scheme: str, bucket: str, prefix: str, *, timeout_s: float) -> None:
        waits[timeout_s] = "".join(traceback.format_stack(limit=6))
        opened(self, scheme, bucket, prefix, timeout_s=timeout_s)

    monkeypatch.setattr(ObjectStorage, "__init__", note)
    for step in (3, 5):
        with checkpoint.Manager(f"{url}/run", keep_last=1, grace=0, incremental=True, timeout_s=77) as manager:
            manager.load_latest(state(0))
            for more in range(2):
                manager.save(step + more, state(step))
                manager.catalog(step + more)
                manager.read(step + more, [])
        with open_storage(f"{url}/run", timeout_s=77) as storage:
            storage.publish(f"step_{step + 1}/20200101T000000Z-01234567/rank00000-0.safetensors", b"killed")
            storage.publish("step_1/model.safetensors", save({"w": torch.ones(2)}))  # of another library
    assert waits.keys() == {77}, waits


def test_round_trips_of_opening_many_files_are_few(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "own", {"model": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(20))})
    report = checkpoint.convert(tmp_path / "own", tmp_path / "hf", to="safetensors", max_shard_size=300)
    assert len(report.files) > 20
    upload(tmp_path / "hf", f"{url}/hf")
    check_depth(proxy, 8, lambda: checkpoint.catalog(f"{url}/hf"))
