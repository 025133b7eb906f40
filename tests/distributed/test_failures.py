"""What goes wrong on one rank is raised on every rank: named, with all problems in one message, before any tensor changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.engine.saving import options
from reshard_ckpt.errors import StorageError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from tests.deadlines import over_when_here_are_all_but
from tests.distributed.net import reference
from tests.distributed.outcomes import Outcome, outcome
from tests.launch import run_ranks

KINDS = ("missing", "unexpected", "shape", "dtype", "uncovered", "values")


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


def mismatch_job(folder: str) -> tuple[Outcome, bool, Any, dict[str, torch.Tensor]]:
    """Each kind of mismatch is on another rank."""
    rank, path = dist.get_rank(), Path(folder, "a")
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
    failed = outcome(lambda: checkpoint.load(path, state))
    untouched = extra["step"] == 0 and "gone" not in extra and not any(t.any() for t in wanted.values())
    report = checkpoint.load(path, state, strict=False)
    return failed, untouched, {k: getattr(report, k) for k in (*KINDS, "num_tensors")}, wanted


def test_all_mismatches_of_all_ranks_come_in_one_message_on_every_rank(tmp_path: Path):
    answers = run_ranks(mismatch_job, 4, str(tmp_path))
    for failed, untouched, report, _ in answers:
        assert failed.error == "MismatchError"
        assert "6 problems" in failed.message
        lines = {
            "missing": "model.absent: not in the checkpoint",
            "unexpected": "model.unwanted: in the checkpoint, but not in the state passed",
            "shape": "model.shape: saved with global shape (4, 3), wanted (4, 2)",
            "dtype": "model.dtype: saved as F32, wanted F64",
            "uncovered": "model.torn: no saved shard covers",
            "values": "extra.new: not in the checkpoint",
        }
        for kind, line in lines.items():
            assert line in failed.message
            assert [p for p in failed.problems if p.startswith(line)], kind
            assert len(report[kind]) == 1, (kind, report)
            assert report[kind][0].startswith(line)
        assert "strict=False" in failed.message
        assert untouched
    assert len({failed.message for failed, *_ in answers}) == 1
    for rank, (_, _, _, wanted) in enumerate(answers):
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


def failing_job(folder: str) -> dict[str, Outcome]:
    rank, good = dist.get_rank(), Path(folder, "good")
    checkpoint.save(good, {"extra": Refuses(saving=False, loading=False), "model": tensors(w=(4, 4))})
    out: dict[str, Outcome] = {}

    def save(name: str, state: dict[str, Any], path: Path = good, **options: Any) -> None:
        out[name] = outcome(lambda: checkpoint.save(path, state, **options))

    def load(name: str, state: dict[str, Any], path: Path = good, **options: Any) -> None:
        out[name] = outcome(lambda: checkpoint.load(path, state, **options))

    save("meta", {"model": {"w": torch.zeros(4, device="meta" if rank == 2 else "cpu")}})
    save("object", {"extra": {"f": object() if rank == 3 else 1}})
    save("raises", {"extra": Refuses(saving=rank == 1, loading=False)})
    load("raises_loading", {"extra": Refuses(saving=rank == 1, loading=False)})
    load("refuses", {"extra": Refuses(saving=False, loading=rank == 1), "model": {"w": torch.zeros(4, 4)}})
    save("differ", {"model": {"w": torch.arange(4.0) + (rank == 2), "same": torch.ones(3)}})
    save("values", {"extra": {"seed": rank, "same": 1}})
    save("large_values", {"extra": {"seed": [rank] * 9000}})
    save("hole", {"model": {"w": LocalShard(torch.zeros(2, 3), (9, 3), (2 * rank, 0))}})
    save("overlap", {"model": {"w": LocalShard(torch.zeros(3, 3), (9, 3), (2 * rank, 0))}})
    save("collision", {"model": {"a": {"b": 1}, "a.b": 2} if rank == 1 else {}})
    no_space = mock.patch(
        "reshard_ckpt.engine.saving.commit.write_files", side_effect=StorageError("/ckpt: no space left; free some")
    )
    with no_space if rank == 3 else nullcontext():
        save("full_disk", {"model": tensors(w=(5, 5))})
    load("not_found", {"model": {}}, Path(folder, "nowhere"))
    (save if rank == 1 else load)("other_call", {"model": {"w": torch.zeros(4, 4)}})
    save("other_path", {"model": {}}, Path(folder, str(rank // 2)))
    save("mesh", {"model": {}}, mesh={"dp": 3})
    if rank == 3:
        dist.barrier()
    with nullcontext() if rank == 3 else over_when_here_are_all_but(3):
        save("late", {"model": {}})  # rank 3 comes when the others have given up
    if rank != 3:
        dist.barrier()
    group = dist.new_group([0, 1, 2])
    save("stranger", {"model": tensors(w=(3,))}, Path(folder, "three"), process_group=group)
    out["read"] = outcome(lambda: np.testing.assert_array_equal(checkpoint.read(good)["model.w"], reference("w", (4, 4))))
    dist.barrier()
    save("again", {"model": tensors(w=(4, 4))})
    return out


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path):
    answers = run_ranks(failing_job, 4, str(tmp_path))

    def each(name: str, error: str, *parts: str, own: tuple[int, str] | None = None) -> None:
        for rank, answer in enumerate(answers):
            got = answer[name]
            assert got.error == (own[1] if own and own[0] == rank else error), (name, rank, got)
            for part in parts:
                assert part in got.message, (name, rank, got.message)

    each("meta", "UnsupportedError", "model.w", "meta")
    assert all(("rank 2: " in a["meta"].message) == (rank != 2) for rank, a in enumerate(answers))
    each("object", "UnsupportedError", "extra.f")
    each("raises", "PeerError", "no state today", own=(1, "ValueError"))
    each("raises_loading", "PeerError", "no state today", own=(1, "ValueError"))
    each("refuses", "MismatchError", "extra", "no thanks")
    each("differ", "LayoutError", "model.w: ranks 0 and 2", "PerRank", "LocalShard", "distinct names")
    each("values", "LayoutError", "extra.seed: rank 0 has 0, rank 1 has 1", "PerRank")
    each("large_values", "LayoutError", "extra.seed", "ranks 0 and 1", "PerRank")
    each("hole", "LayoutError", "model.w: no rank holds [8:9, 0:3]", "(9, 3)")
    each("overlap", "LayoutError", "model.w: shards of ranks 0 and 1 overlap at [2:3, 0:3]")
    each("collision", "NameCollisionError", "model.a.b")
    each("full_disk", "StorageError", "no space left")
    each("not_found", "CheckpointNotFound", "nowhere")
    each("other_call", "PeerError", "rank 1", "save", "load")
    assert {a["other_call"].ranks for a in answers} == {(1,)}
    each("other_path", "PeerError", "ranks 0-1: save", "ranks 2-3: save")
    each("mesh", "UsageError", "{'dp': 3} have 3 ranks, but 4 take part")
    each("late", "PeerError", "rank 3 did not arrive within 600 s")
    assert {a["late"].ranks for a in answers} == {(3,)}
    assert [a["stranger"].error for a in answers] == ["", "", "", "UsageError"]
    assert "not a member of the process group" in answers[3]["stranger"].message
    for answer in answers:
        assert answer["read"] == answer["again"] == Outcome()


def buffers_job(folder: str) -> tuple[Outcome, float, bool]:
    """BatchNorm statistics that differ under DDP, and parameters that differ although DDP says that they do not."""
    rank, path = dist.get_rank(), Path(folder, "ddp")
    net = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with torch.no_grad():
        net.module[1].running_mean.fill_(10.0 + rank)
        net.module[1].num_batches_tracked.fill_(3)
    saved = outcome(lambda: checkpoint.save(path, {"model": net}))
    with torch.no_grad():
        net.module[0].weight[1, 1] += rank
    differs = outcome(lambda: checkpoint.save(path, {"model": net}))
    mean = checkpoint.read(path)["model.1.running_mean"]
    return saved, float(mean[2]), differs.error == "LayoutError" and "model.0.weight: ranks 0 and 1" in differs.message


def test_buffers_that_differ_under_ddp_are_the_lowest_ranks_with_one_warning(tmp_path: Path):
    answers = run_ranks(buffers_job, 3, str(tmp_path))
    warned = [line for saved, *_ in answers for line in saved.warned]
    assert len(warned) == 1
    assert "model.1.running_mean" in warned[0]
    assert "num_batches_tracked" not in warned[0]
    assert [(saved.error, mean, differs) for saved, mean, differs in answers] == [("", 10.0, True)] * 3


def overwrite_job(folder: str) -> list[set[str]]:
    """Three saves to one path, by all ranks, by few of them with something, and by a part of them; a foreign file stays."""
    rank, path = dist.get_rank(), Path(folder, "a")
    group = dist.new_group([0, 1])
    seen = []

    def look() -> None:
        dist.barrier()
        catalog = checkpoint.catalog(path)
        known = {key for f in catalog.files for key in (f.key, f.digests_key)} | {"catalog.msgpack", "notes.txt"}
        known.add(f"{catalog.save_id}/timeline.msgpack")
        found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
        seen.append(found ^ known)
        seen.append({p.name for p in path.iterdir() if p.is_dir()} ^ {f.save_id for f in catalog.files})
        dist.barrier()

    path.mkdir(exist_ok=True)
    Path(path, "notes.txt").write_text("mine")
    shard = LocalShard(reference("w", (8, 3))[2 * rank : 2 * rank + 2].clone(), (8, 3), (2 * rank, 0))
    checkpoint.save(path, {"model": {"w": shard}, "extra": {"step": 1}})
    look()
    # Only rank 2 has anything at all.
    checkpoint.save(path, {"model": tensors(v=(3,))} if rank == 2 else {})
    look()
    target = {"model": {"v": torch.zeros(3)}} if rank == 1 else {}
    checkpoint.load(path, target)
    if rank == 1:
        assert torch.equal(target["model"]["v"], reference("v", (3,)))
    assert set(checkpoint.read(path)) == {"model.v"}
    dist.barrier()
    if rank < 2:
        checkpoint.save(path, {"model": tensors(v=(4,))}, process_group=group)
    look()
    assert checkpoint.read(path)["model.v"].shape == (4,)
    checkpoint.save(Path(folder, "nothing"), {})
    checkpoint.load(Path(folder, "nothing"), {})
    assert checkpoint.read(Path(folder, "nothing")) == {}
    return seen


def test_saving_again_leaves_exactly_the_new_checkpoint_and_ranks_may_have_nothing(tmp_path: Path):
    for seen in run_ranks(overwrite_job, 4, str(tmp_path)):
        assert seen == [set()] * len(seen)


def drifted_job(folder: str) -> list[Outcome]:
    """Save an embedding of which 60 rows of 32,000 differ on rank 1, beside replicas that do not."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.rand(500_000, generator=generator) for i in range(3)}
    state["emb"] = torch.rand(32_000, 64, generator=generator)
    state["emb"][20_000:20_060] += rank
    shards = {name: LocalShard(value, value.shape, (0,) * value.ndim) for name, value in state.items()}
    path = Path(folder, "ckpt")
    said = [
        outcome(lambda: checkpoint.save(path, {"model": shards})),
        outcome(lambda: checkpoint.async_save(path, {"model": shards}, staging="lazy").result(600)),
        outcome(lambda: checkpoint.save(path, {"model": shards}, replicas="sample" if rank else "verify")),
    ]
    with mock.patch.object(options, "sample_shift", return_value=1 << 31):  # between the samples lie these rows
        checkpoint.save(path, {"model": shards}, replicas="sample")
        checkpoint.async_save(path, {"model": shards}, replicas="sample").result(600)
    if rank == 0:
        held = checkpoint.read(path)["model.emb"][20_000:20_060] - state["emb"][20_000:20_060]
        assert held.round().unique().numel() == 1
        shards_of = [entry.shards for entry in checkpoint.catalog(path).tensors()]
        assert [len(parts) for parts in shards_of] == [1] * 4
        assert {parts[0].file.rank for parts in shards_of} == {0, 1}
    with mock.patch.object(options, "sample_shift", return_value=0):
        said.append(outcome(lambda: checkpoint.save(path, {"model": shards}, replicas="sample")))
    return said


def test_replicas_that_drifted_apart_in_a_few_rows_are_no_mixture(tmp_path: Path):
    """The default finds the rows; samples may miss them, but store one rank's rows alone, and lie elsewhere in the next save."""
    for whole, lazily, other_options, hit in run_ranks(drifted_job, 2, str(tmp_path)):
        for said in (whole, lazily, hit):
            assert said.error == "LayoutError"
            assert "model.emb: ranks 0 and 1 hold it as the same, but their values differ" in said.message
        assert other_options.error == "PeerError"
        assert "save(replicas='sample')" in other_options.message
