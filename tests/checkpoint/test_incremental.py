"""Incremental saves: `base=` writes what changed, and every checkpoint still loads bit for bit, whatever is deleted."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.engine.common.step_folders import needed_keys, remove_step
from reshard_ckpt.engine.saving import commit
from reshard_ckpt.errors import CheckpointError, StorageError, UsageError
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.manager import manager as manager_module
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.local import LocalStorage
from tests.launch import on_ranks, run_ranks
from tests.storage.faulty import FaultyStorage, StopAt, Stopped
from tests.tries import examples

SIZES = {"big": (384, 512), "bf16": (100_000,), "odd": (333, 77), "bytes": (70_001,), "norm": (64,), "none": (0, 4)}
DTYPES = {"bf16": torch.bfloat16, "bytes": torch.uint8}


def counted(seed: int = 0) -> dict[str, Any]:
    """A state whose values depend on their place."""
    tensors = {
        name: (torch.arange(math.prod(shape)).reshape(shape) * 7 + seed).to(DTYPES.get(name, torch.float32))
        for name, shape in SIZES.items()
    }
    return {**tensors, "step": seed, "text": "x" * 5000}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def assert_holds(path: object, state: dict[str, Any]) -> None:
    found = checkpoint.read(str(path))
    assert found.keys() == state.keys()
    for name, value in state.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def change(state: dict[str, Any], name: str, at: int, count: int, by: int) -> None:
    flat = state[name].view(-1)
    if flat.numel():
        at %= flat.numel()
        flat[at : at + count] = (flat[at : at + count].to(torch.int64) + by).to(flat.dtype)


changes = st.lists(
    st.tuples(st.sampled_from([*SIZES]), st.integers(0, 200_000), st.integers(1, 60_000), st.integers(1, 5)), max_size=3
)


# --- what is written ---


def test_what_did_not_change_is_not_written(tmp_path: Path):
    """Of 64 MiB, 10 % change in one place: at most 1.1 times that is written, and nothing of a frozen base."""
    state = {
        "frozen": torch.arange(14 << 20).float(),
        "lora": torch.arange(1 << 20).float(),
        "head": torch.arange(1 << 20).float(),
    }
    full = checkpoint.save(tmp_path / "full", state)
    total = sum(tensor.nbytes for tensor in state.values())
    assert (full.bytes_referred, full.bytes_written >= total) == (0, True)
    state["lora"] += 1
    changed = checkpoint.save(tmp_path / "inc", state, base=tmp_path / "full")
    assert changed.bytes_written == changed.num_bytes == changed.total_bytes
    assert changed.bytes_written <= 1.1 * state["lora"].nbytes
    assert changed.bytes_referred >= total - 1.05 * state["lora"].nbytes
    same = checkpoint.save(tmp_path / "same", state, base=tmp_path / "inc")
    assert (same.bytes_written, same.bytes_referred) == (0, total)
    assert_holds(tmp_path / "same", state)
    # A reference goes to the file that holds the bytes: the one between is not needed.
    assert {file.checkpoint for file in checkpoint.catalog(tmp_path / "same").files} == {"../full", "../inc"}


def test_scattered_changes_cost_their_blocks_also_the_second_time(tmp_path: Path):
    """Changed blocks lie at the beginning of blocks in the new file, so that a later change of one is one block again."""
    state = {"table": torch.arange(64 * BLOCK_BYTES // 4).float()}
    checkpoint.save(tmp_path / "0", state)
    for n in range(1, 5):
        # Rows of the full save begin behind its header, so that a block of it lies in two blocks of the tensor.
        state["table"][3::17] += 0  # nothing
        for block in range(5, 60, 6):
            state["table"][block * BLOCK_BYTES // 4] += n
        report = checkpoint.save(tmp_path / str(n), state, base=tmp_path / str(n - 1))
        assert report.bytes_written <= (10 + 1) * BLOCK_BYTES, n
        assert_holds(tmp_path / str(n), state)


def test_a_file_that_holds_little_is_written_anew(tmp_path: Path):
    state = {"a": torch.arange(1 << 18).float(), "b": torch.arange(1 << 20).float()}
    checkpoint.save(tmp_path / "0", state)
    state["b"] += 1
    checkpoint.save(tmp_path / "1", state, base=tmp_path / "0")
    state["b"][0] += 1
    checkpoint.save(tmp_path / "2", state, base=tmp_path / "1")
    assert {file.checkpoint for file in checkpoint.catalog(tmp_path / "2").files} == {"", "../1"}  # a fifth of file 0 was in use
    assert_holds(tmp_path / "2", state)


def test_files_that_hold_little_are_written_anew_a_tenth_at_a_time(tmp_path: Path):
    """Each of 8 files is left with a piece of its own. Those that hold the least come first."""
    small = {f"small{k}": torch.arange((48 + 2 * k) << 10).float() for k in (3, 7, 1, 5, 0, 4, 6, 2)}
    state = {f"big{name}": torch.arange(1 << 18).float() for name in small} | small
    checkpoint.save(tmp_path / "0", state)
    for n, name in enumerate(small):
        state[f"big{name}"] += 1
        state[name] += 1
        checkpoint.save(tmp_path / str(n + 1), state, base=tmp_path / str(n))
    for name in small:
        state[f"big{name}"] += 1
    checkpoint.save(tmp_path / "9", state, base=tmp_path / "8")
    total, rewrote = sum(tensor.nbytes for tensor in state.values()), []
    for n in range(10, 15):
        live: Counter[str] = Counter()
        base = checkpoint.catalog(tmp_path / str(n - 1))
        for shard in [shard for name in state for shard in base.tensor(name).shards]:
            live[shard.file.key.removeprefix("../")] += 4 * shard.count
        sizes = {file.key.removeprefix("../"): file.size for file in base.files}
        expected = 0
        for share, key in sorted((live[key] / size, key) for key, size in sizes.items()):
            if share >= 1 / 4 or expected + live[key] > total / 10:
                break
            expected += live[key]
        report = checkpoint.save(tmp_path / str(n), state, base=tmp_path / str(n - 1))
        assert expected <= report.bytes_written <= expected + 8 * BLOCK_BYTES * (expected > 0), n
        assert_holds(tmp_path / str(n), state)
        rewrote.append(expected > 0)
    assert rewrote[:2] == [True, True]
    assert not rewrote[-1]


def test_a_piece_of_more_than_a_tenth_is_written_anew_too(tmp_path: Path):
    state = {"a": torch.arange(1 << 17).float(), "b": torch.arange(1 << 19).float()}
    checkpoint.save(tmp_path / "0", state)
    state["b"] += 1
    checkpoint.save(tmp_path / "1", state, base=tmp_path / "0")
    assert checkpoint.save(tmp_path / "2", state, base=tmp_path / "1").bytes_written >= state["a"].nbytes


def test_a_tensor_of_another_shape_dtype_or_name_is_written(tmp_path: Path):
    rows = torch.arange(1 << 18).float()
    checkpoint.save(tmp_path / "0", {"w": rows})
    for other in ({"w": rows.view(2, -1)}, {"w": rows.view(torch.int32)}, {"v": rows}):
        report = checkpoint.save(tmp_path / "1", other, base=tmp_path / "0")
        assert (report.bytes_referred, report.bytes_written >= rows.nbytes) == (0, True)
        assert_holds(tmp_path / "1", other)


def test_tied_tensors_of_the_base_that_are_untied(tmp_path: Path):
    """Both lie at the same bytes of the base, and only one of them still equals them; then both, then tied again."""
    tied = torch.arange(1 << 18).float()
    checkpoint.save(tmp_path / "0", {"a": tied, "b": tied})
    for n, (a, b) in enumerate(
        [(tied.clone(), tied + 1), (tied + 1, tied.clone()), (tied.clone(), tied.clone()), (tied, tied)], 1
    ):
        checkpoint.save(tmp_path / str(n), {"a": a, "b": b}, base=tmp_path / str(n - 1))
        assert_holds(tmp_path / str(n), {"a": a, "b": b})


@examples(25)
@given(
    st.lists(st.tuples(changes, st.integers(0, 9), st.booleans(), st.booleans(), st.sampled_from(["", "eager", "lazy", "small"])),
             min_size=1, max_size=5)
)  # fmt: skip
def test_any_sequence_of_saves_holds_each_state(tmp_path_factory: pytest.TempPathFactory, saves: list[Any]):
    """A base is any checkpoint so far; a save goes to a new path, or over the base."""
    root = tmp_path_factory.mktemp("run")
    state, held = counted(), {"0": counted()}
    checkpoint.save(root / "0", state)
    for n, (made, base, replaces, verifies, how) in enumerate(saves, 1):
        for one in made:
            change(state, *one)
        state["step"] = n
        name = sorted(held)[base % len(held)]
        path = root / (name if replaces else str(n))
        options: dict[str, Any] = {"base": root / name, "verify_base": verifies}
        if how:
            small = {"host_buffer_bytes": 16 << 20} if how == "small" else {}
            staging = "lazy" if how == "lazy" else "eager"
            report = checkpoint.async_save(path, state, staging=staging, **small, **options).result()
        else:
            report = checkpoint.save(path, state, **options)
        tensors = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        assert report.bytes_written + report.bytes_referred >= tensors
        held[path.name] = copied(state)
        for kept, wanted in held.items():
            assert_holds(root / kept, wanted)
    assert all(checkpoint.verify(root / kept).ok for kept in held)


@contextmanager
def bad_sector(at: int | None) -> Iterator[None]:
    """Let each read of a range of a file that has byte `at` fail."""
    read = LocalStorage.read_into

    def fails(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if at is not None and offset <= at < offset + sum(map(len, buffers)):
            raise StorageError(f"{key}: Input/output error")
        read(self, key, offset, buffers)

    with mock.patch.object(LocalStorage, "read_into", fails):
        yield


def test_damage_in_the_base_is_not_referred_to_where_it_can_be_seen(tmp_path: Path):
    state = {"w": torch.arange(1 << 20).float()}
    checkpoint.save(tmp_path / "0", state)
    for name, offset, referred in (("sound", None, state["w"].nbytes), ("bad sector", 5 * BLOCK_BYTES, 0)):
        with bad_sector(offset):
            report = checkpoint.save(tmp_path / name, state, base=tmp_path / "0", verify_base=True)
        assert report.bytes_referred == referred
        assert_holds(tmp_path / name, state)
    file = next((tmp_path / "0").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[5 * BLOCK_BYTES] ^= 1
    file.write_bytes(data)
    # The digests are whole, so only reading the bytes shows the damage.
    report = checkpoint.save(tmp_path / "1", state, base=tmp_path / "0", verify_base=True)
    assert report.bytes_written > 0
    assert_holds(tmp_path / "1", state)
    file.with_suffix(".digests").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"refers to no byte of a file of its base, and writes them anew: .*damaged"):
        report = checkpoint.save(tmp_path / "2", state, base=tmp_path / "0")
    assert report.bytes_referred == 0
    assert_holds(tmp_path / "2", state)


def test_what_cannot_be_a_base(tmp_path: Path):
    state = {"w": torch.arange(1000).float()}
    checkpoint.save(tmp_path / "a" / "0", state)
    with pytest.raises(UsageError, match=r"base=.*a/0: lies in another folder than .*b/1.*save beside the base"):
        checkpoint.save(tmp_path / "b" / "1", state, base=tmp_path / "a" / "0")
    checkpoint.convert(tmp_path / "a" / "0", tmp_path / "a" / "torch", to="dcp")
    with pytest.raises(UsageError, match="is a dcp checkpoint; the first save must be a full one"):
        checkpoint.save(tmp_path / "a" / "1", state, base=tmp_path / "a" / "torch")
    with pytest.raises(UsageError, match=r"call checkpoint.write_manifest\(path\) after the save"):
        checkpoint.save(tmp_path / "a" / "1", state, base=tmp_path / "a" / "0", sha256=True)
    with pytest.raises(UsageError, match="pass incremental=True or memory=, not both"):
        Manager(tmp_path / "run", incremental=True, memory=Memory())
    with pytest.raises(UsageError, match="full_every=0: pass a whole number, 1 or more"):
        Manager(tmp_path / "run", incremental=True, full_every=0)
    assert not (tmp_path / "b").exists()


# --- ranks ---

ROWS, COLUMNS = 1024, 1024


def rows_of(ranks: int, rank: int, whole: torch.Tensor) -> LocalShard:
    per = ROWS // ranks
    return LocalShard(whole[rank * per : (rank + 1) * per].clone(), tuple(whole.shape), (rank * per, 0))


def columns_of(ranks: int, rank: int, whole: torch.Tensor) -> LocalShard:
    per = COLUMNS // ranks
    return LocalShard(whole[:, rank * per : (rank + 1) * per].clone(), tuple(whole.shape), (0, rank * per))


def wholes(n: int) -> dict[str, torch.Tensor]:
    """Row 100 of `w` and all of `small` change from save to save."""
    w = torch.arange(ROWS * COLUMNS).float().reshape(ROWS, COLUMNS)
    w[100] += n
    return {"w": w, "same": torch.arange(300_000).float(), "small": torch.arange(5000) + n}


def save_by(root: str, n: int, base: str | None, layout: str) -> tuple[int, int]:
    """Save number `n` by rows or columns; the other tensors are held alike by all ranks."""
    rank, ranks, whole = dist.get_rank(), dist.get_world_size(), wholes(n)
    shard = (rows_of if layout == "rows" else columns_of)(ranks, rank, whole["w"])
    state = {**whole, "w": shard}
    save = checkpoint.save if n % 2 else lambda *a, **k: checkpoint.async_save(*a, **k).result()
    report = save(f"{root}/{n}", state, base=base and f"{root}/{base}")
    return report.bytes_written, report.bytes_referred


def test_another_layout_than_the_bases_refers_to_what_lies_in_the_same_order(tmp_path: Path):
    root, total = str(tmp_path), sum(tensor.nbytes for tensor in wholes(0).values())
    run_ranks(save_by, 4, root, 0, None, "rows")
    for n, (ranks, layout) in enumerate([(4, "rows"), (2, "rows"), (1, "rows"), (2, "columns")], 1):
        reports = run_ranks(save_by, ranks, root, n, str(n - 1), layout)
        written, referred = (sum(column) for column in zip(*reports, strict=True))
        assert_holds(tmp_path / str(n), wholes(n))
        assert checkpoint.verify(tmp_path / str(n)).ok
        assert written + referred >= total
        if layout == "rows":  # a row, the small tensor, and the blocks at the ends of what each rank holds
            assert written < 12 * BLOCK_BYTES, (n, written)
        else:  # half a row is 2 KiB: no block of it lies in order
            assert referred < total - 4 * ROWS * COLUMNS + BLOCK_BYTES


@on_ranks(2)
def test_ranks_that_differ_in_base_are_told(tmp_path: Path):
    checkpoint.save(tmp_path / "0", {"w": torch.arange(10)})
    base = {"base": tmp_path / "0"} if dist.get_rank() else {}
    with pytest.raises(CheckpointError, match=r"save\(base=\)"):
        checkpoint.save(tmp_path / "1", {"w": torch.arange(10)}, timeout_s=60, **base)


# --- runs ---


def needed(root: Path, steps: list[int]) -> set[str]:
    """The shard and digests files that the catalogs of these steps name, from the root."""
    keys: set[str] = set()
    for step in steps:
        catalog = checkpoint.catalog(root / f"step_{step}")
        keys.update(needed_keys(f"step_{step}", catalog))
    return keys


def on_disk(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("rank*")}


steps = st.lists(
    st.tuples(st.sampled_from(["save", "save", "async", "back", "delete", "again", "reopen"]), changes, st.integers(0, 99)),
    min_size=3,
    max_size=9,
)


@examples(25)
@given(st.integers(1, 3), st.integers(1, 4), steps)
def test_a_run_loads_every_step_that_it_lists(tmp_path_factory: pytest.TempPathFactory, keep: int, full: int, did: list[Any]):
    root = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"keep_last": keep, "incremental": True, "full_every": full}
    state, held, step = counted(), {}, 0
    manager = Manager(root, **options)
    for what, made, pick in did:
        known = manager.steps()
        if what in ("save", "async", "again") or not known:
            for one in made:
                change(state, *one)
            step = known[-1] if what == "again" and known else step + 1
            state["step"] = step
            if what == "async":
                manager.async_save(step, state).result()
                manager._wait()  # for the pruning: a step that is removed while it is read is no error of the run
            else:
                manager.save(step, state)
            held[step] = copied(state)
        elif what == "back":
            state = {**counted(1), "text": ""}
            older = known[pick % len(known)]
            manager.load(older, state)
            state = copied(held[older])
        elif what == "delete":
            manager.delete(known[pick % len(known)])
        else:
            manager.close()
            manager = Manager(root, **options)
            if manager.load_latest(state) is not None:
                state = copied(held[manager.steps()[-1]])
        for one in manager.steps():
            assert_holds(root / f"step_{one}", held[one])
    manager.close()
    Manager(root).close()  # removes the files that a step referred to before it was saved anew
    committed = [int(path.parent.name[5:]) for path in root.glob("step_*/catalog.msgpack")]
    assert on_disk(root) == needed(root, committed)


def test_every_so_often_a_save_is_full(tmp_path: Path):
    state = counted()
    with Manager(tmp_path, incremental=True, full_every=3, keep_last=2) as manager:
        full = []
        for step in range(1, 8):
            change(state, "odd", 0, 1, 1)
            full.append(manager.save(step, state).bytes_referred == 0)
    assert full == [True, False, False, True, False, False, True]
    assert len(on_disk(tmp_path)) == len(needed(tmp_path, [6, 7]))
    with Manager(tmp_path, incremental=True, full_every=3) as manager:
        assert manager.save(8, state).bytes_referred == 0  # nothing was loaded, so nothing is known of the steps there
    with Manager(tmp_path, incremental=True, full_every=3) as manager:
        manager.load_latest(state)
        assert manager.save(9, state).bytes_referred > 0


def test_a_checkpoint_of_another_name_in_the_root_keeps_what_it_refers_to(tmp_path: Path):
    state = counted()
    with Manager(tmp_path, incremental=True) as manager:
        manager.save(1, state)
        checkpoint.save(tmp_path / "best", state, base=tmp_path / "step_1")
        manager.delete(1)
        manager.save(2, state)
    Manager(tmp_path).close()
    assert_holds(tmp_path / "best", state)
    checkpoint.save(tmp_path / "best", {"w": torch.arange(3)})
    assert_holds(tmp_path / "best", {"w": torch.arange(3)})


@pytest.mark.parametrize("how", ["pruned", "deleted"])
def test_a_step_that_goes_leaves_its_base_of_another_name_alone(tmp_path: Path, how: str):
    state = counted()
    checkpoint.save(tmp_path / "best", state)
    with Manager(tmp_path, keep_last=1) as manager:
        manager.save(1, state, base=tmp_path / "best")
        assert any(file.checkpoint for file in checkpoint.catalog(tmp_path / "step_1").files)
        if how == "deleted":
            manager.delete(1)
        manager.save(2, state)
        assert manager.steps() == [2]
    assert_holds(tmp_path / "best", state)


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_step_that_another_program_saves_over_keeps_what_it_refers_to(tmp_path: Path, memory: str, where: str):
    root, state = (str(tmp_path) if where == "folder" else memory), counted()
    with Manager(root, keep_last=2) as manager:
        for step in (1, 2, 3):  # the removal of step 1 reads what steps 2 and 3 refer to: nothing
            manager.save(step, state)
        checkpoint.save(f"{root}/step_3", state, base=f"{root}/step_2")
        manager.save(4, state)
        assert manager.steps() == [3, 4]
    assert_holds(f"{root}/step_3", state)


@pytest.mark.parametrize("into", ["new", "saved"])
@pytest.mark.parametrize("how", ["saved over", "about to be deleted", "removed by hand", "deleted"])
def test_a_base_that_another_job_replaces_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, into: str):
    """The other job deletes files that no committed catalog names yet: then nothing is committed that would lack them."""
    root, state, old, publish = tmp_path / "run", counted(), counted(3), commit.publish
    checkpoint.save(root / "step_1", state)
    if into == "saved":
        checkpoint.save(root / "saved", old)

    def late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(commit, "publish", publish)
        if how == "saved over":
            checkpoint.save(root / "step_1", counted(5))
        elif how == "about to be deleted":  # the new catalog is there, and the old files are too
            shutil.copytree(root / "step_1", tmp_path / "old", ignore=shutil.ignore_patterns("catalog.msgpack"))
            checkpoint.save(root / "step_1", counted(5))
            shutil.copytree(tmp_path / "old", root / "step_1", dirs_exist_ok=True)
        elif how == "removed by hand":
            shutil.rmtree(root / "step_1")
        else:
            with Manager(root) as manager, pytest.raises(StorageError, match="somebody reads it, so it is not removed"):
                manager.delete(1)
        return publish(*args, **options)

    monkeypatch.setattr(commit, "publish", late)
    if how == "deleted":
        checkpoint.save(root / into, state, base=root / "step_1")
        assert_holds(root / into, state)
        return
    what = "removed" if how == "removed by hand" else "replaced"
    with pytest.raises(StorageError, match=rf"the save is undone: base=.*/step_1 was {what} meanwhile.*save again"):
        checkpoint.save(root / into, state, base=root / "step_1")
    if into == "saved":
        assert_holds(root / into, old)
        assert len([*(root / into).iterdir()]) == 2
    else:
        assert not (root / into / "catalog.msgpack").exists()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_base_that_another_job_compacts_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool):
    """The base then needs no other step any more, but the save that is about to commit does."""
    state, publish = counted(), commit.publish
    checkpoint.save(tmp_path / "step_1", state)
    checkpoint.save(tmp_path / "step_2", state, base=tmp_path / "step_1")

    def late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(commit, "publish", publish)
        checkpoint.compact(tmp_path / "step_2")
        if is_removed:
            shutil.rmtree(tmp_path / "step_1")
        return publish(*args, **options)

    monkeypatch.setattr(commit, "publish", late)
    if is_removed:
        with pytest.raises(StorageError, match="the save is undone"):
            checkpoint.save(tmp_path / "step_3", state, base=tmp_path / "step_2")
        assert not (tmp_path / "step_3" / "catalog.msgpack").exists()
    else:
        checkpoint.save(tmp_path / "step_3", state, base=tmp_path / "step_2")
        assert_holds(tmp_path / "step_3", state)


def test_a_step_is_removed_with_the_references_of_saves_that_committed_before_its_lock(tmp_path: Path):
    state = counted()
    checkpoint.save(tmp_path / "step_1", state)

    def referred() -> frozenset[str]:
        checkpoint.save(tmp_path / "late", state, base=tmp_path / "step_1", timeout_s=1)
        raise AssertionError("a save that begins now must not find the base")

    with open_storage(str(tmp_path)) as storage, pytest.raises(StorageError, match="lock"):
        remove_step(storage, "step_1", referred)
    assert_holds(tmp_path / "step_1", state)


def test_a_base_that_is_saved_anew_keeps_what_others_refer_to(tmp_path: Path):
    state = counted()
    checkpoint.save(tmp_path / "a", state)
    checkpoint.save(tmp_path / "b", state, base=tmp_path / "a")
    checkpoint.save(tmp_path / "a", counted(5))
    assert_holds(tmp_path / "b", state)
    assert_holds(tmp_path / "a", counted(5))
    checkpoint.compact(tmp_path / "b")
    checkpoint.save(tmp_path / "a", counted(6))
    assert len(list((tmp_path / "a").rglob("rank*"))) == 2
    assert_holds(tmp_path / "b", state)


@pytest.mark.parametrize("target", ["step_1", "{root}/step_1", "./newer"])
def test_a_link_to_a_checkpoint_beside_it_is_another_name_of_that_one(tmp_path: Path, target: str):
    """Saved over by the link's name, or as the base, a checkpoint keeps what others refer to; references outlive the link."""
    first, state = counted(), copied(counted())
    root, link = tmp_path / "run", tmp_path / "run" / "latest"
    checkpoint.save(root / "step_1", first)
    (root / "newer").symlink_to(root / "step_1")
    link.symlink_to(target.format(root=root))
    change(state, "norm", 0, 64, 1)
    checkpoint.save(root / "step_2", state, base=link)
    assert {file.checkpoint for file in checkpoint.catalog(root / "step_2").files} == {"", "../step_1"}
    checkpoint.save(link, first | {"step": 3}, base=root / "step_2")
    assert_holds(root / "step_1", first | {"step": 3})
    assert_holds(root / "step_2", state)
    checkpoint.save(link, {"other": torch.ones(3)})
    assert_holds(root / "step_2", state)
    with Manager(root, keep_last=1) as manager:
        checkpoint.save(root / "best", state, base=link)
        manager.save(3, first)
        link.unlink()
        assert manager.steps() == [3]
    assert_holds(root / "best", state)


def test_a_link_to_a_checkpoint_that_is_not_there_yet_is_saved_to(tmp_path: Path):
    (tmp_path / "latest").symlink_to("step_1")
    checkpoint.save(tmp_path / "latest", counted())
    assert_holds(tmp_path / "step_1", counted())


def test_a_checkpoint_that_was_moved_to_another_disk_is_a_base_by_its_link(tmp_path: Path):
    state, elsewhere = counted(), tmp_path / "other" / "folder"
    elsewhere.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_1").symlink_to(elsewhere)
    checkpoint.save(tmp_path / "run" / "step_1", state)
    checkpoint.save(tmp_path / "run" / "step_2", state | {"step": 1}, base=tmp_path / "run" / "step_1")
    assert {file.checkpoint for file in checkpoint.catalog(tmp_path / "run" / "step_2").files} >= {"../step_1"}
    checkpoint.save(tmp_path / "run" / "step_1", {"other": torch.ones(3)})
    assert_holds(tmp_path / "run" / "step_2", state | {"step": 1})


def test_a_base_behind_a_link_whose_files_lie_beside_the_true_folder_is_written_anew(tmp_path: Path):
    state, later = counted(), counted(3) | {"big": counted()["big"]}
    checkpoint.save(tmp_path / "there" / "a", state)
    checkpoint.save(tmp_path / "there" / "b", later, base=tmp_path / "there" / "a")
    assert {file.checkpoint for file in checkpoint.catalog(tmp_path / "there" / "b").files} == {"", "../a"}
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "b").symlink_to("../there/b")
    checkpoint.save(tmp_path / "here" / "c", later, base=tmp_path / "here" / "b")
    assert {file.checkpoint for file in checkpoint.catalog(tmp_path / "here" / "c").files} == {"", "../b"}
    assert_holds(tmp_path / "here" / "c", later)
    Manager(tmp_path / "there").close()  # from now on, a run may remove it
    with pytest.raises(UsageError, match="here/b: lies in another folder than .*here/d"):
        checkpoint.save(tmp_path / "here" / "d", later, base=tmp_path / "here" / "b")


def test_a_save_by_a_link_from_another_folder_keeps_what_others_refer_to(tmp_path: Path):
    state, there = counted(), tmp_path / "there"
    checkpoint.save(there / "a", state)
    checkpoint.save(there / "b", state | {"step": 1}, base=there / "a")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(there / "a")
    checkpoint.save(tmp_path / "here" / "link", {"other": torch.ones(3)})
    assert_holds(there / "a", {"other": torch.ones(3)})
    assert_holds(there / "b", state | {"step": 1})


def test_a_prune_that_is_cut_off_anywhere_loses_nothing(memory: str):
    """Between any two operations of the store, none of which happens any more afterwards."""
    for n in range(200):
        root, state = f"{memory}/{n}", counted()
        with Manager(root, incremental=True) as manager:
            for step in (1, 2, 3):
                change(state, "big", 40_000 * step, 10, 1)
                manager.save(step, state)
        stop, is_stopped = StopAt(n), False

        def faulty(where: object, stop: StopAt = stop, **_: Any) -> Any:
            return FaultyStorage(open_storage(str(where)), stop)

        with mock.patch.object(manager_module, "open_storage", faulty):
            try:
                with Manager(root, incremental=True) as manager:
                    manager.delete(1)
                    manager.delete(2)
            except Stopped:
                is_stopped = True
        assert_holds(f"{root}/step_3", state)
        with Manager(root) as manager:
            assert 3 in manager.steps()
            for step in manager.steps():
                assert checkpoint.verify(manager.path(step)).ok, (n, step)
        with open_storage(root) as storage:
            wanted = set()
            for step in manager.steps():
                catalog = checkpoint.catalog(f"{root}/step_{step}")
                wanted.update(needed_keys(f"step_{step}", catalog))
            assert {key for key, _ in storage.list() if "/rank" in key} == wanted, n
        if not is_stopped:
            break
    else:
        pytest.fail("deleting has more operations than were tried")
    assert n > 5
