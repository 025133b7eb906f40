"""What a save promises: one commit point, nothing old lost, nothing foreign deleted, false replicas found."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import CODES, Mesh, Replication, TensorSpec, box_piece, row_major_strides
from reshard_ckpt.core.planning.local_metadata import build_local_metadata
from reshard_ckpt.engine.saving import commit as save_module
from reshard_ckpt.engine.saving import write
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.options import SaveContents
from reshard_ckpt.engine.saving.write import WRITE_BYTES, lay_out
from reshard_ckpt.errors import CheckpointNotFound, LayoutError, StorageError, UnsupportedError, UsageError
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.format.files import CATALOG_KEY, BlockHasher
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.local import LocalStorage, LocalWriter
from reshard_ckpt.storage.memory import MemoryStorage
from reshard_ckpt.storage.protocol import PublishUnknown
from tests.jobs import joined, plan_job, save_job, write_assignment
from tests.layouts import values_of
from tests.reliability.faults import faulty


def whole(
    name: str, tensor: torch.Tensor, replication: Replication = Replication.DECLARED, code: str = "F32"
) -> tuple[TensorSpec, torch.Tensor]:
    shape = tuple(tensor.shape)
    return TensorSpec(name, code, shape, (box_piece((0,) * len(shape), shape, 0, row_major_strides(shape)),), replication), tensor


def rows(name: str, tensor: torch.Tensor, begin: int, total: int) -> tuple[TensorSpec, torch.Tensor]:
    shape = tuple(tensor.shape)
    piece = box_piece((begin, *(0,) * (len(shape) - 1)), shape, 0, row_major_strides(shape))
    return TensorSpec(name, "F32", (total, *shape[1:]), (piece,), Replication.DECLARED), tensor


def test_a_one_process_checkpoint_opens_with_safetensors_under_plain_names(tmp_path: Path) -> None:
    state = {code: values_of((3, 5), code, i) for i, code in enumerate(CODES)}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned": torch.arange(12.0).reshape(3, 4).T}
    checkpoint.save(tmp_path / "ckpt", {"t": state})
    (file,) = (tmp_path / "ckpt").glob("*/*.safetensors")
    loaded = load_file(file)
    assert set(loaded) == {f"t.{name}" for name in state}
    for name, tensor in state.items():
        assert loaded[f"t.{name}"].dtype == tensor.dtype
        assert loaded[f"t.{name}"].shape == tensor.shape
        assert torch.equal(loaded[f"t.{name}"].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    state = {code: values_of((7, 3), code, i) for i, code in enumerate(CODES)}
    checkpoint.save(tmp_path, {"t": state})
    into = {code: torch.zeros((7, 3), dtype=TORCH_DTYPES[code]) for code in CODES}
    checkpoint.load(tmp_path, {"t": into})
    for code in CODES:
        assert torch.equal(into[code].view(torch.uint8), state[code].view(torch.uint8))


def test_a_save_over_an_old_one_leaves_the_new_one_alone_and_foreign_files(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.zeros(10)})
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data.bin").write_text("mine too")
    checkpoint.save(tmp_path, {"b": torch.ones(10)})
    names = sorted(p.name for p in tmp_path.iterdir())
    save_id = checkpoint.catalog(tmp_path).save_id
    assert names == sorted([CATALOG_KEY, save_id, "notes.txt", "sub"])
    assert list(checkpoint.read(tmp_path)) == ["b"]
    assert (tmp_path / "sub" / "data.bin").read_text() == "mine too"


def test_a_save_that_fails_before_the_commit_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"a": torch.arange(10.0)})

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(LocalStorage, "publish", refuse)
    with pytest.raises(StorageError, match="no space"):
        checkpoint.save(tmp_path, {"a": torch.zeros(10)})
    monkeypatch.undo()
    assert torch.equal(checkpoint.read(tmp_path)["a"], torch.arange(10.0))
    checkpoint.save(tmp_path, {"a": torch.ones(10)})
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1


def test_a_failed_write_removes_what_the_rank_wrote(tmp_path: Path) -> None:
    def refuse(writer: LocalWriter) -> None:
        raise StorageError("quota")

    with mock.patch.object(LocalWriter, "finish", refuse), LocalStorage(tmp_path) as storage:
        with pytest.raises(StorageError, match="quota"):
            save_job(storage, [[whole("w", torch.ones(4))]])
        assert storage.list() == []


def test_folders_that_cannot_be_made_durable_stop_the_commit_and_all_files_go(tmp_path: Path) -> None:
    def refuse(storage: LocalStorage, keys: Iterable[str]) -> None:
        raise StorageError("no sync")

    with mock.patch.object(LocalStorage, "sync", refuse), pytest.raises(StorageError, match="no sync"):
        checkpoint.save(tmp_path, {"w": torch.ones(4)})
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_syncs_the_folders_that_ranks_share_and_before_it_publishes(tmp_path: Path) -> None:
    synced, renamed, fsync, replace_file = [], [], os.fsync, os.replace

    def noting(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        fsync(fd)

    def renaming(*args: str, **kwargs: int) -> None:
        renamed.append(list(synced))
        replace_file(*args, **kwargs)

    storages = [LocalStorage(tmp_path / "ckpt") for _ in range(5)]
    (tmp_path / "ckpt").mkdir()
    local_shards = [describe_local([rows("w", torch.ones(1, 3), rank, 4)], (), None, rank) for rank in range(4)]
    plan, values, assignments = plan_job(local_shards)
    with mock.patch.object(os, "fsync", noting), mock.patch.object(os, "replace", renaming):
        receipts = [write_assignment(storages[rank], local_shards[rank], assignments[rank], rank) for rank in range(4)]
        assert not {".", "ckpt", f"ckpt/{assignments[0].save_id}"}.intersection(synced)
        save_module.publish(storages[0], SaveContents(plan, values, assignments[0].save_id), joined(receipts))
    assert renamed[0][-4:-1] == [".", f"ckpt/{assignments[0].save_id}", "ckpt"]
    assert synced[len(renamed[0]) :] == ["ckpt"]


def test_memory_that_changes_while_saved_makes_no_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = WRITE_BYTES // 4
    start = torch.arange(2 * each + 5, dtype=torch.int32)
    tensor, hashed = start.clone(), BlockHasher.update

    def hashed_and_changed(hasher: BlockHasher, data: memoryview) -> None:
        hashed(hasher, data)
        tensor.add_(1)  # as another thread may

    with monkeypatch.context() as patch:
        patch.setattr(BlockHasher, "update", hashed_and_changed)
        checkpoint.save(tmp_path, {"t": tensor})
    assert checkpoint.verify(tmp_path).ok
    # Each chunk is of one moment: the header is hashed before the first.
    moments = torch.arange(len(start), dtype=torch.int32) // each + 1
    assert torch.equal(checkpoint.read(tmp_path)["t"], start + moments)


def test_memory_that_is_freed_while_it_is_saved_gives_the_save_up(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"t": torch.ones(3)})
    tensor = torch.arange(100_000.0)

    def free(step: str, done: int, total: int) -> None:
        if not done:
            tensor.untyped_storage().resize_(16)

    with pytest.raises(UsageError, match=r"\d+ bytes were written of \d+: the memory of a tensor was made"):
        checkpoint.save(tmp_path, {"t": tensor, "u": torch.arange(9.0)}, progress=free)
    assert torch.equal(checkpoint.read(tmp_path)["t"], torch.ones(3))
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1


def test_a_path_without_a_commit_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing is there"):
        checkpoint.read(tmp_path)
    (tmp_path / "20260101T000000Z-0123abcd").mkdir()
    (tmp_path / "20260101T000000Z-0123abcd" / "rank00000-0.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointNotFound, match="never committed"):
        checkpoint.catalog(tmp_path)


def test_replicas_that_differ_are_named_with_both_ranks() -> None:
    for size in (10, 3_000_000):
        one, other = torch.zeros(size), torch.zeros(size)
        other[size // 7] = 1  # one element, in none of 16 samples
        with pytest.raises(LayoutError, match=r"w: ranks 0 and 2 hold it as the same, but their values differ.*PerRank"):
            save_job(MemoryStorage("replicas"), [[whole("w", one)], [whole("w", one)], [whole("w", other)]])


def test_buffers_that_differ_under_ddp_take_the_lowest_rank_with_a_warning() -> None:
    storage = MemoryStorage("buffers")
    ranks = [[whole("mean", torch.full((4,), float(r)), Replication.BUFFER)] for r in (5, 6, 7)]
    with pytest.warns(UserWarning, match="rank 0's are saved: mean"):
        catalog = save_job(storage, ranks)
    assert catalog.tensor("mean").shards[0].file.rank == 0


def test_a_plain_tensor_of_several_ranks_is_written_whole_by_one() -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    catalog = save_job(MemoryStorage("plain"), [[whole("w", big, Replication.PLAIN)] for _ in range(4)])
    assert len(catalog.tensor("w").shards) == 1
    catalog = save_job(MemoryStorage("plain"), [[whole("w", big)] for _ in range(4)])
    assert sorted(s.file.rank for s in catalog.tensor("w").shards) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [[rows("w", torch.zeros(2, 4), 0, 4)], []],
            r"w: no rank holds \[2:4, 0:4\] \(8 elements in all\), global shape \(4, 4\)",
        ),
        (
            [[rows("w", torch.zeros(3, 4), 0, 4)], [rows("w", torch.zeros(2, 4), 2, 4)]],
            r"w: shards of ranks 0 and 1 overlap at \[2:3",
        ),
        ([[whole("w", torch.zeros(4))], [whole("w", torch.zeros(5))]], r"w: rank 0 has F32 \(4,\), rank 1 has F32 \(5,\)"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(ranks: list, message: str) -> None:
    storage = MemoryStorage("misfit")
    with pytest.raises(LayoutError, match=message):
        save_job(storage, ranks)
    assert storage.list() == []


def test_a_piece_outside_its_tensor_is_refused() -> None:
    spec, _ = rows("w", torch.zeros(3, 4), 2, 4)
    with pytest.raises(LayoutError, match=r"w: offsets \(2, 0\), lengths \(3, 4\) reach outside global shape \(4, 4\)"):
        build_local_metadata([spec], 0, None)


def test_files_are_cut_where_their_header_would_grow_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "HEADER_BYTES", 2000)
    tensors = [whole(f"layer.{i:03d}.weight", torch.full((3,), float(i))) for i in range(50)]
    local_shards = describe_local(tensors, [], None, 0)
    plan, values, (assignment,) = plan_job([local_shards])
    assert len(lay_out(local_shards, assignment, 0)) > 3
    with open_storage(tmp_path) as storage:
        receipt = write_assignment(storage, local_shards, assignment, 0)
        save_module.publish(storage, SaveContents(plan, values, assignment.save_id), joined([receipt]))
    assert len(receipt.files) > 3
    for i, tensor in enumerate(checkpoint.read(tmp_path).values()):
        assert torch.equal(tensor, torch.full((3,), float(i)))


def test_a_file_that_rank_0_does_not_see_stops_the_commit() -> None:
    class Elsewhere(MemoryStorage):
        def list(self, prefix: str = "") -> list[tuple[str, int]]:
            return [(key, size) for key, size in super().list(prefix) if "rank00001" not in key]

    ranks = [[rows("w", torch.zeros(2, 4), 2 * r, 4)] for r in range(2)]
    with pytest.raises(StorageError, match=r"rank 1 wrote .*rank 0 sees no such file; save to a path that all ranks share"):
        save_job(Elsewhere("elsewhere"), ranks)


def test_placements_are_derived_from_who_holds_what() -> None:
    mesh = Mesh(("pp", "dp", "tp"), (2, 2, 2))
    ranks = []
    for rank in range(8):
        pp, dp, tp = mesh.coordinates(rank)
        tensors = [whole("norm", torch.ones(3))]
        tensors.append(rows(f"stage{pp}.w", torch.zeros(2, 4), 2 * tp, 4))
        flat = box_piece((0,), (8,), 0, (1,))
        spec = TensorSpec(f"stage{pp}.m", "F32", (8,), (), Replication.DECLARED)
        piece = type(flat)((0,), (8,), 4 * dp, 4, -4 * dp, (1,))
        tensors.append((TensorSpec(spec.name, "F32", (8,), (piece,), Replication.DECLARED), torch.zeros(4)))
        ranks.append(tensors)
    catalog = save_job(MemoryStorage("placement"), ranks, mesh=mesh)

    def said(name: str) -> list[tuple]:
        return [(p.axis, p.kind, p.dim, p.coords) for p in catalog.tensor(name).placement or ()]

    assert said("norm") == [(axis, "replicate", None, ()) for axis in mesh.axes]
    assert said("stage1.w") == [("pp", "resident", None, (1,)), ("dp", "replicate", None, ()), ("tp", "shard", 0, ())]
    assert said("stage0.m") == [("pp", "resident", None, (0,)), ("dp", "flat", None, ()), ("tp", "replicate", None, ())]


def test_replicas_are_written_level() -> None:
    generator = np.random.default_rng(0)
    shapes = [(50257, 64), *[(64, 3 * 64), (64, 64), (64, 256), (256, 64), (64,), (64,)] * 6]
    tensors = [whole(f"p{i}", torch.from_numpy(generator.standard_normal(s, np.float32))) for i, s in enumerate(shapes)]
    catalog = save_job(MemoryStorage("level"), [tensors] * 4)
    sizes = [f.size for f in catalog.files]
    assert len(sizes) == 4
    assert max(sizes) / np.mean(sizes) <= 1.05


def test_the_same_state_written_twice_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, {"w": torch.arange(100.0), "extra": {"x": [1, 2]}})
    files = [next((tmp_path / n).glob("*/*.safetensors")).read_bytes() for n in ("a", "b")]
    assert files[0] == files[1]
    assert os.listdir(tmp_path) != []


def test_metadata_is_kept_and_shown_by_the_catalog(tmp_path: Path) -> None:
    said = {"commit": "abc", "tokens": 12_000, "betas": (0.9, 0.95)}
    checkpoint.save(tmp_path, {"a": torch.ones(1)}, metadata=said)
    assert checkpoint.catalog(tmp_path).metadata == said
    with pytest.raises(UnsupportedError, match="metadata"):
        checkpoint.save(tmp_path, {"a": torch.zeros(1)}, metadata=object())
    assert checkpoint.read(tmp_path)["a"] == 1


def test_what_cannot_be_deleted_after_the_commit_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"a": torch.zeros(1)})

    def refuse(*_: object) -> None:
        raise StorageError("busy")

    monkeypatch.setattr(LocalStorage, "delete", refuse)
    with pytest.warns(UserWarning, match="saved, but what it replaced is not all deleted: busy"):
        checkpoint.save(tmp_path, {"a": torch.ones(1)})
    assert checkpoint.read(tmp_path)["a"] == 1


def test_a_catalog_that_may_still_come_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store of objects may carry a request out after the client gave up on it, and after the last look at the path."""
    publish, late = LocalStorage.publish, []

    def unknown(self: LocalStorage, key: str, data: bytes, **expected: object) -> None:
        late.append(lambda: publish(self, key, data))
        raise PublishUnknown(f"{key}: no answer")

    checkpoint.save(tmp_path, {"w": torch.arange(3)})
    monkeypatch.setattr(LocalStorage, "publish", unknown)
    with pytest.raises(PublishUnknown):
        checkpoint.save(tmp_path, {"w": torch.arange(3) + 10})
    monkeypatch.undo()
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.arange(3))
    late[0]()
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.arange(3) + 10)
    assert checkpoint.verify(tmp_path).ok


def test_a_rename_that_was_done_and_reported_as_failed_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A network file system may lose the answer to a rename, and show this machine the old catalog from its cache for a while."""

    def loses_the_answer(real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        real(*args, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoint.save(tmp_path, {"w": torch.arange(3)})
    cached = save_module.read_previous(LocalStorage(tmp_path))
    monkeypatch.setattr(save_module, "read_previous", lambda storage: cached)
    with (
        faulty("replace", 0, loses_the_answer),
        pytest.raises(PublishUnknown, match="it may hold the new file or the old one"),
    ):
        checkpoint.save(tmp_path, {"w": torch.arange(3) + 10})
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.arange(3) + 10)
    assert checkpoint.verify(tmp_path).ok
