"""What goes wrong on one rank is raised on every rank: named, with all problems in one message, before any tensor changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.engine.saving import options
from reshard_ckpt.errors import (
    CheckpointNotFound,
    LayoutError,
    MismatchError,
    NameCollisionError,
    PeerError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from tests.deadlines import over_when_here_are_all_but
from tests.distributed.net import reference
from tests.distributed.outcomes import Outcome, outcome
from tests.launch import on_ranks

MISMATCHES = {
    "missing": "model.absent: not in the checkpoint",
    "unexpected": "model.unwanted: in the checkpoint, but not in the state passed",
    "shape": "model.shape: saved with global shape (4, 3), wanted (4, 2)",
    "dtype": "model.dtype: saved as F32, wanted F64",
    "uncovered": "model.torn: no saved shard covers",
    "values": "extra.new: not in the checkpoint",
}


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: reference(name, shape) for name, shape in shapes.items()}


def tear(path: Path, name: str) -> None:
    """Make the catalog forget the last shard of a tensor, as no save would."""
    file = path / "catalog.msgpack"
    catalog = decode_catalog(file.read_bytes())
    index = catalog.index(name)
    row_start = catalog.tensors_table.row_start.copy()
    lost = int(row_start[index + 1]) - 1
    row_start[index + 1 :] -= 1
    columns = ("box", "start", "count", "file", "offset")
    rows = replace(catalog.rows, **{name: np.delete(getattr(catalog.rows, name), lost) for name in columns})
    table = replace(catalog.tensors_table, row_start=row_start)
    file.write_bytes(encode_catalog(replace(catalog, tensors_table=table, rows=rows)))


@on_ranks(4)
def test_all_mismatches_of_all_ranks_come_in_one_message_on_every_rank(tmp_path: Path):
    """Each kind of mismatch is on another rank."""
    rank, path = dist.get_rank(), tmp_path / "a"
    torn = LocalShard(reference("torn", (8, 3))[2 * rank : 2 * rank + 2].clone(), (8, 3), (2 * rank, 0))
    model = tensors(fits=(5,), shape=(4, 3), dtype=(6,), unwanted=(2,))
    checkpoint.save(path, {"model": {**model, "torn": torn}, "extra": {"step": 1, "gone": 2}})
    dist.barrier()
    if rank == 0:
        tear(path, "model.torn")
    dist.barrier()

    wanted: dict[str, Any] = {"fits": torch.zeros(5), "dtype": torch.zeros(6)}
    if rank == 1:
        wanted["absent"] = torch.zeros(3)
    if rank == 2:
        wanted["shape"] = torch.zeros(4, 2)
    if rank == 3:
        wanted["dtype"] = torch.zeros(6, dtype=torch.float64)
        wanted["torn"] = torch.zeros(8, 3)
    extra = {"step": 0, "new": 7} if rank == 1 else {"step": 0}
    state = {"model": wanted, "extra": extra}
    with pytest.raises(MismatchError, match="6 problems(?s:.*)strict=False") as raised:
        checkpoint.load(path, state)
    assert extra["step"] == 0
    assert "gone" not in extra
    assert not any(t.any() for t in wanted.values())
    messages: list[str] = [""] * 4
    dist.all_gather_object(messages, str(raised.value))
    assert len({*messages}) == 1
    report = checkpoint.load(path, state, strict=False)
    for kind, line in MISMATCHES.items():
        assert [p for p in raised.value.problems if p.startswith(line)], kind
        (told,) = getattr(report, kind)
        assert told.startswith(line)
    assert torch.equal(wanted["fits"], reference("fits", (5,)))
    assert torch.equal(wanted["dtype"], reference("dtype", (6,))) == (rank != 3)
    assert all(not wanted[name].any() for name in ("absent", "shape", "torn") if name in wanted)


class Refuses:
    """An object whose state cannot be had, or not be given back."""

    def __init__(self, *, saving: bool, loading: bool) -> None:
        self.saving, self.loading = saving, loading

    def state_dict(self) -> dict[str, Any]:
        if self.saving:
            raise ValueError("no state today")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.loading:
            raise ValueError("no thanks")


@on_ranks(4)
def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path):
    rank, good = dist.get_rank(), tmp_path / "good"
    checkpoint.save(good, {"extra": Refuses(saving=False, loading=False), "model": tensors(w=(4, 4))})

    def fails(
        call: Any, state: dict[str, Any], error: type[BaseException], *parts: str, path: Path = good, **options: Any
    ) -> Any:
        with pytest.raises(error) as raised:
            call(path, state, **options)
        assert type(raised.value).__name__ == error.__name__
        for part in parts:
            assert part in str(raised.value)
        return raised.value

    save, load = checkpoint.save, checkpoint.load
    meta = {"model": {"w": torch.zeros(4, device="meta" if rank == 2 else "cpu")}}
    assert ("rank 2: " in str(fails(save, meta, UnsupportedError, "model.w", "meta"))) == (rank != 2)
    fails(save, {"extra": {"f": object() if rank == 3 else 1}}, UnsupportedError, "extra.f")
    raises, own = {"extra": Refuses(saving=rank == 1, loading=False)}, ValueError if rank == 1 else PeerError
    fails(save, raises, own, "no state today")
    fails(load, raises, own, "no state today")
    refuses = {"extra": Refuses(saving=False, loading=rank == 1), "model": {"w": torch.zeros(4, 4)}}
    fails(load, refuses, MismatchError, "extra", "no thanks")
    fails(load, {"model": {}} if rank == 2 else {}, MismatchError, "model.w: in the checkpoint, but not in the state passed")
    differ = {"model": {"w": torch.arange(4.0) + (rank == 2), "same": torch.ones(3)}}
    fails(save, differ, LayoutError, "model.w: ranks 0 and 2", "PerRank", "LocalShard", "distinct names")
    fails(save, {"extra": {"seed": rank, "same": 1}}, LayoutError, "extra.seed: rank 0 has 0, rank 1 has 1", "PerRank")
    fails(save, {"extra": {"seed": [rank] * 9000}}, LayoutError, "extra.seed", "ranks 0 and 1", "PerRank")
    hole = {"model": {"w": LocalShard(torch.zeros(2, 3), (9, 3), (2 * rank, 0))}}
    fails(save, hole, LayoutError, "model.w: no rank holds [8:9, 0:3]", "(9, 3)")
    overlap = {"model": {"w": LocalShard(torch.zeros(3, 3), (9, 3), (2 * rank, 0))}}
    fails(save, overlap, LayoutError, "model.w: shards of ranks 0 and 1 overlap at [2:3, 0:3]")
    fails(save, {"model": {"a": {"b": 1}, "a.b": 2} if rank == 1 else {}}, NameCollisionError, "model.a.b")
    no_space = mock.patch(
        "reshard_ckpt.engine.saving.commit.write_files", side_effect=StorageError("/ckpt: no space left; free some")
    )
    with no_space if rank == 3 else nullcontext():
        fails(save, {"model": tensors(w=(5, 5))}, StorageError, "no space left")
    fails(load, {"model": {}}, CheckpointNotFound, "nowhere", path=tmp_path / "nowhere")
    other_call = fails(save if rank == 1 else load, {"model": {"w": torch.zeros(4, 4)}}, PeerError, "rank 1", "save", "load")
    assert other_call.ranks == (1,)
    fails(save, {"model": {}}, PeerError, "ranks 0-1: save", "ranks 2-3: save", path=tmp_path / str(rank // 2))
    fails(save, {"model": {}}, UsageError, "{'dp': 3} have 3 ranks, but 4 take part", mesh={"dp": 3})
    if rank == 3:
        dist.barrier()
    with nullcontext() if rank == 3 else over_when_here_are_all_but(3):  # rank 3 comes when the others have given up
        assert fails(save, {"model": {}}, PeerError, "rank 3 did not arrive within 600 s").ranks == (3,)
    if rank != 3:
        dist.barrier()
    three = {"path": tmp_path / "three", "process_group": dist.new_group([0, 1, 2])}
    if rank == 3:
        fails(save, {"model": tensors(w=(3,))}, UsageError, "not a member of the process group", **three)
    else:
        save(state={"model": tensors(w=(3,))}, **three)
    assert torch.equal(checkpoint.read(good)["model.w"], reference("w", (4, 4)))
    dist.barrier()
    assert outcome(lambda: save(good, {"model": tensors(w=(4, 4))})) == Outcome()


@on_ranks(4)
def test_saving_again_leaves_exactly_the_new_checkpoint_and_ranks_may_have_nothing(tmp_path: Path):
    """Three saves to one path, by all ranks, by few of them with something, and by a part of them; a foreign file stays."""
    rank, path = dist.get_rank(), tmp_path / "a"
    group = dist.new_group([0, 1])

    def look() -> None:
        dist.barrier()
        catalog = checkpoint.catalog(path)
        known = {key for f in catalog.files for key in (f.key, f.digests_key)} | {"catalog.msgpack", "notes.txt"}
        known.add(f"{catalog.save_id}/timeline.msgpack")
        assert {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} == known
        assert {p.name for p in path.iterdir() if p.is_dir()} == {f.save_id for f in catalog.files}
        dist.barrier()

    path.mkdir(exist_ok=True)
    (path / "notes.txt").write_text("mine")
    shard = LocalShard(reference("w", (8, 3))[2 * rank : 2 * rank + 2].clone(), (8, 3), (2 * rank, 0))
    checkpoint.save(path, {"model": {"w": shard}, "extra": {"step": 1}})
    look()
    # Only rank 2 has anything at all.
    checkpoint.save(path, {"model": tensors(v=(3,))} if rank == 2 else {})
    look()
    target = {"model": {"v": torch.zeros(3)}} if rank == 1 else {}
    checkpoint.load(path, target)
    assert rank != 1 or torch.equal(target["model"]["v"], reference("v", (3,)))
    assert set(checkpoint.read(path)) == {"model.v"}
    dist.barrier()
    if rank < 2:
        checkpoint.save(path, {"model": tensors(v=(4,))}, process_group=group)
    look()
    assert checkpoint.read(path)["model.v"].shape == (4,)
    checkpoint.save(tmp_path / "nothing", {})
    checkpoint.load(tmp_path / "nothing", {})
    assert checkpoint.read(tmp_path / "nothing") == {}


@on_ranks(2)
def test_replicas_that_drifted_apart_in_a_few_rows_are_no_mixture(tmp_path: Path):
    """Of an embedding, 60 rows of 32,000 differ on rank 1. The default finds them; samples may miss them, but store one rank's
    rows alone, and lie elsewhere in the next save."""
    rank, path = dist.get_rank(), tmp_path / "ckpt"
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.rand(500_000, generator=generator) for i in range(3)}
    state["emb"] = torch.rand(32_000, 64, generator=generator)
    state["emb"][20_000:20_060] += rank
    model = {"model": {name: LocalShard(value, value.shape, (0,) * value.ndim) for name, value in state.items()}}
    said = "model.emb: ranks 0 and 1 hold it as the same, but their values differ"
    with pytest.raises(LayoutError, match=said):
        checkpoint.save(path, model)
    with pytest.raises(LayoutError, match=said):
        checkpoint.async_save(path, model, staging="lazy").result(600)
    with pytest.raises(PeerError, match=r"save\(replicas='sample'\)"):
        checkpoint.save(path, model, replicas="sample" if rank else "verify")
    with mock.patch.object(options, "sample_shift", return_value=1 << 31):  # between the samples lie these rows
        checkpoint.save(path, model, replicas="sample")
        checkpoint.async_save(path, model, replicas="sample").result(600)
    if rank == 0:
        held = checkpoint.read(path)["model.emb"][20_000:20_060] - state["emb"][20_000:20_060]
        assert held.round().unique().numel() == 1
        shards_of = [entry.shards for entry in checkpoint.catalog(path).tensors()]
        assert [len(parts) for parts in shards_of] == [1] * 4
        assert {parts[0].file.rank for parts in shards_of} == {0, 1}
    with mock.patch.object(options, "sample_shift", return_value=0), pytest.raises(LayoutError, match=said):
        checkpoint.save(path, model, replicas="sample")


@on_ranks(3)
def test_an_argument_that_one_rank_may_not_pass_is_refused_on_all_ranks_at_once(tmp_path: Path):
    """The others neither wait for the rank, nor get out of step with it: each of their calls is in the same order after it."""
    wrong = dist.get_rank() == 1
    state = {"w": torch.arange(6.0)}
    checkpoint.save(tmp_path / "a", state)
    memory = checkpoint.Memory(copies=0, folder=str(tmp_path / "memory"))
    with checkpoint.Manager(tmp_path / "run") as manager, checkpoint.Manager(tmp_path / "fast", memory=memory) as fast:
        manager.save(1, state)
        calls = {
            "grace": lambda: checkpoint.save(tmp_path / "a", state, grace=-1 if wrong else 0),
            "staging": lambda: checkpoint.async_save(tmp_path / "a", state, staging="x" if wrong else "eager"),
            "strict": lambda: checkpoint.load(tmp_path / "a", state, strict=2 if wrong else True),
            "step": lambda: manager.save(-1 if wrong else 2, state),
            "metric": lambda: manager.async_save(2, state, metric="x" if wrong else 1.0),
            "verify": lambda: manager.load(1, state, verify=None if wrong else True),
            "cast": lambda: manager.load_latest(state, cast="w" if wrong else False),
            "staged": lambda: checkpoint.reshard_live(state, {"w": torch.zeros(6)}, staged=0 if wrong else True),  # type: ignore[arg-type]
            "memory_bytes": lambda: checkpoint.LiveReshard(state, {"w": torch.zeros(6)}, memory_bytes=1 if wrong else 1 << 20),
            "exclude": lambda: fast.async_save(1, state, exclude="w" if wrong else []),
            "host_buffer_bytes": lambda: checkpoint.prepare(state, host_buffer_bytes=0 if wrong else None),
            "alive": lambda: checkpoint.recover(state, alive=None if wrong else True, manager=manager),  # type: ignore[arg-type]
            "keep_last": lambda: checkpoint.Manager(tmp_path / "new", keep_last=0 if wrong else 1),
            "max_failures": lambda: checkpoint.Manager(tmp_path / "new", on_failure="warn", max_failures=0 if wrong else 1),
        }
        for option, call in calls.items():
            with pytest.raises(UsageError, match=f"^{option}" if wrong else f"^rank 1: {option}"):
                call()
            assert checkpoint.load(tmp_path / "a", state).num_tensors == 1
    with pytest.raises(CheckpointNotFound, match="pass manager= or path= to go back"):
        checkpoint.recover(state, alive=False, path=None if wrong else tmp_path / "a")


@on_ranks(2)
def test_ranks_that_compare_values_and_ranks_that_do_not_are_told(tmp_path: Path):
    checkpoint.save(tmp_path / "a", {"w": torch.arange(6.0)})
    with pytest.raises(PeerError, match=r"rank 0: diff '.*rank 1: diff\(values=True\) '"):
        checkpoint.diff(tmp_path / "a", tmp_path / "a", values=dist.get_rank() == 1, process_group=None)
