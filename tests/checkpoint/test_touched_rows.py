"""Saves with `rows=`: only rows that training used are written, and the checkpoint is still that of a whole save."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager, TouchedRows
from reshard_ckpt.core.catalog.packed import BITS
from reshard_ckpt.core.catalog.specs import Piece, TensorSpec
from reshard_ckpt.engine.common.tensor_bytes import LocalTensor
from reshard_ckpt.engine.saving import commit
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.messages import RunColumns
from reshard_ckpt.engine.saving.touched import pick
from reshard_ckpt.engine.saving.unchanged import Base
from reshard_ckpt.errors import CheckpointError, UsageError
from reshard_ckpt.state import touched_rows
from reshard_ckpt.state.row_policies import POLICIES
from reshard_ckpt.storage.memory import MemoryStorage
from tests.checkpoint.test_incremental import needed, on_disk
from tests.core.catalog.test_packed import packed_one_by_one
from tests.format import independent_reader
from tests.helpers import NEWER
from tests.jobs import save_job
from tests.launch import on_ranks, run_ranks
from tests.layouts import whole_piece
from tests.tries import examples

ROWS, DIM = 3000, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
    "sparse": lambda p: torch.optim.SparseAdam(p, lr=0.5),
}


class Job:
    """A table of embeddings and a dense layer, with an optimizer for each."""

    def __init__(self, kind: str = "adagrad", **options: Any) -> None:
        table = nn.EmbeddingBag(ROWS, DIM, sparse=kind == "sparse", **options)
        self.model = nn.ModuleDict({"table": table, "top": nn.Linear(DIM, 1)})
        with torch.no_grad():  # values depend on their place
            self.table.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM) / 1000)
        self.optimizers = [OPTIMIZERS[kind]([self.table]), torch.optim.AdamW(self.model["top"].parameters())]
        self.state = {"model": self.model, "sparse": self.optimizers[0], "dense": self.optimizers[1]}

    @property
    def table(self) -> torch.Tensor:
        return self.model["table"].weight

    def forward(self, rows: list[int]) -> torch.Tensor:
        return self.model["top"](self.model["table"](torch.tensor([rows]))).sum()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, rows: list[int]) -> None:
        self.forward(rows).backward()
        self.update()

    def values(self) -> dict[str, torch.Tensor]:
        """The table, and its optimizer's state, as they are now."""
        held = {"model.table.weight": self.table.detach().clone(), "model.top.weight": self.model["top"].weight.detach().clone()}
        for key, value in self.optimizers[0].state[self.table].items():
            if isinstance(value, torch.Tensor):
                held[f"sparse.state.table.weight.{key}"] = value.clone()
        return held


def assert_holds(path: Any, wanted: dict[str, torch.Tensor]) -> None:
    found = checkpoint.read(path)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


rows = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=40)
events = st.one_of(
    st.tuples(st.just("step"), rows),
    st.tuples(st.just("look"), rows),  # a forward pass that no step follows
    st.tuples(st.just("late"), rows),  # a save between a forward pass and its step
    st.tuples(st.sampled_from(["save", "async", "small", "lazy", "over", "full", "older", "verify"]), st.just([])),
    st.tuples(st.sampled_from(["edit", "load", "fail"]), rows),
)


@examples(15)
@given(st.sampled_from([*OPTIMIZERS]), st.lists(events, min_size=2, max_size=12))
def test_any_sequence_of_steps_and_saves_holds_each_state(
    tmp_path_factory: pytest.TempPathFactory, kind: str, did: list[tuple[str, list[int]]]
):
    root = tmp_path_factory.mktemp("run")
    job = Job(kind)
    tracker = TouchedRows(job.model)
    held: dict[str, dict[str, torch.Tensor]] = {}
    last = ""
    for n, (what, picked) in enumerate([*did, ("save", [])]):
        if what == "step":
            job.step(picked)
        elif what == "look":
            with torch.no_grad():
                job.forward(picked)
        elif what == "edit":
            with torch.no_grad():
                job.table[picked] += 1
        elif what == "load" and held:
            name = sorted(held)[picked[0] % len(held)]
            checkpoint.load(root / name, {"model": job.model, "sparse": job.optimizers[0]}, strict=False)
        elif what == "fail":
            with mock.patch.object(commit, "encode_catalog", side_effect=CheckpointError("no")), pytest.raises(CheckpointError):
                checkpoint.save(root / str(n), job.state, base=root / last if last else None, rows=tracker)
        else:
            if what == "late":
                job.forward(picked).backward()
            base = None if what == "full" or not held else sorted(held)[0] if what == "older" else last
            name = last if what == "over" and last else str(n)
            options: dict[str, Any] = {"base": base and root / base, "rows": tracker, "verify_base": what == "verify"}
            if what in ("async", "small", "lazy"):
                more = {"small": {"host_buffer_bytes": 16 << 20}, "lazy": {"staging": "lazy"}}.get(what, {})
                handle = checkpoint.async_save(root / name, job.state, **options, **more)
                wanted = job.values()
                handle.staged()
                handle.result()
            else:
                wanted = job.values()
                checkpoint.save(root / name, job.state, **options)
            held[name], last = wanted, name
            if what == "late":
                job.update()
        for name, wanted in held.items():
            assert_holds(root / name, wanted)
    assert all(checkpoint.verify(root / name).ok for name in held)
    assert not checkpoint.catalog(root / last).lossy


def test_only_the_rows_of_steps_are_written(tmp_path: Path):
    job = Job("adagrad")
    tracker = TouchedRows(job.model)
    job.step([5, 6, 7])
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    job.step([5, 2000, 5, ROWS - 1])
    with torch.no_grad():
        job.forward([9])
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    catalog = checkpoint.catalog(tmp_path / "1")
    for name in ("model.table.weight", "sparse.state.table.weight.sum"):
        own = [shard for shard in catalog.tensor(name).shards if not shard.file.checkpoint]
        assert [(shard.offsets, shard.lengths) for shard in own] == [((row, 0), (1, DIM)) for row in (5, 2000, ROWS - 1)]
    assert_holds(tmp_path / "1", job.values())
    packed = load_file(next((tmp_path / "1").rglob("*.safetensors")))
    (name,) = (name for name in packed if name.startswith("model.table.weight@[rows,"))
    assert torch.equal(packed[name], job.table[[5, 2000, ROWS - 1]])


def test_a_file_that_holds_few_live_rows_is_written_anew(tmp_path: Path):
    job = Job("sgd")
    tracker = TouchedRows(job.model)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    for n in range(1, 9):
        job.step(list(range((n - 1) * 375, n * 375)))
        checkpoint.save(tmp_path / str(n), job.state, base=tmp_path / str(n - 1), rows=tracker)
        assert_holds(tmp_path / str(n), job.values())
    assert "../0" not in {file.checkpoint for file in checkpoint.catalog(tmp_path / "8").files}


def test_a_table_that_is_renormed_in_forward_is_written(tmp_path: Path):
    job = Job("sgd", max_norm=1.0)
    tracker = TouchedRows(job.model)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    with torch.no_grad():
        job.forward([7, 11])
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    assert_holds(tmp_path / "1", job.values())
    own = [s for s in checkpoint.catalog(tmp_path / "1").tensor("model.table.weight").shards if not s.file.checkpoint]
    assert [shard.offsets[0] for shard in own] == [7, 11]


def test_a_parameter_is_tracked_by_its_gradients_and_by_marks(tmp_path: Path):
    table = nn.Parameter(torch.arange(ROWS * DIM).view(ROWS, DIM).float())
    optimizer = torch.optim.SGD([table], lr=1.0)
    tracker = TouchedRows(table)
    checkpoint.save(tmp_path / "0", {"table": table}, rows=tracker)
    for n, is_sparse in enumerate([False, True], 1):
        nn.functional.embedding(torch.tensor([3, 50 * n]), table, sparse=is_sparse).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            table[[77, -2]] += 1
            tracker.mark(table, torch.tensor([77, -2]))
        checkpoint.save(tmp_path / str(n), {"table": table}, base=tmp_path / str(n - 1), rows=tracker)
        shards = checkpoint.catalog(tmp_path / str(n)).tensor("table").shards
        assert sorted(s.offsets[0] for s in shards if not s.file.checkpoint) == sorted([3, 50 * n, 77, len(table) - 2])
        assert_holds(tmp_path / str(n), {"table": table.detach()})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", ["not cleared", "stepped twice", "kept graph"])
def test_rows_of_a_gradient_that_outlives_its_step_are_written(tmp_path: Path, kind: str, how: str):
    """A loop may step again with a gradient of an earlier forward pass, whose rows the last save has forgotten."""
    job = Job(kind)
    tracker = TouchedRows(job.model)
    job.step([7])
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    loss = job.model["table"](torch.tensor([[1, 2, ROWS - 1]])).sum()
    loss.backward(retain_graph=how == "kept graph")
    for optimizer in job.optimizers:
        optimizer.step()
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    if how == "not cleared":
        job.forward([50]).backward()
    elif how == "kept graph":
        job.optimizers[0].zero_grad()
        with torch.no_grad():
            job.forward([60])
        loss.backward()
    job.update()
    report = checkpoint.save(tmp_path / "2", job.state, base=tmp_path / "1", rows=tracker)
    assert_holds(tmp_path / "2", job.values())
    assert report.bytes_written < 4096


def test_changes_of_optimizer_state_between_steps_are_written(tmp_path: Path):
    job = Job("adagrad")
    tracker = TouchedRows(job.model)
    job.step([5])
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)

    def reset() -> None:
        job.optimizers[0].state[job.table]["sum"][100:200] = 0.25

    def load() -> None:
        held = job.optimizers[0].state_dict()
        held["state"][0]["sum"] = held["state"][0]["sum"] + 1
        job.optimizers[0].load_state_dict(held)

    def replace() -> None:
        job.optimizers[0] = job.state["sparse"] = torch.optim.Adagrad([job.table], lr=0.5)

    n = 0
    for change in (reset, load, replace):
        for steps_after in (False, True):
            job.step([1, 2])
            checkpoint.save(tmp_path / str(n + 1), job.state, base=tmp_path / str(n), rows=tracker)
            change()
            if steps_after:
                job.step([9])
            checkpoint.save(tmp_path / str(n + 2), job.state, base=tmp_path / str(n + 1), rows=tracker)
            n += 2
            assert_holds(tmp_path / str(n), job.values())


def test_changes_of_optimizer_state_of_inference_mode_are_written(tmp_path: Path):
    """Its tensors have no version counters that would show the changes."""
    job = Job("adagrad")
    with torch.inference_mode():
        job.optimizers[0] = job.state["sparse"] = torch.optim.Adagrad([job.table], lr=0.5)
    tracker = TouchedRows(job.model)
    for n in range(3):
        job.forward([1, 2]).backward()
        with torch.inference_mode():
            job.update()
            job.optimizers[0].state[job.table]["sum"][100:200] += 1
        checkpoint.save(tmp_path / str(n), job.state, base=tmp_path / str(n - 1) if n else None, rows=tracker)
        assert_holds(tmp_path / str(n), job.values())


def test_memory_at_the_address_of_freed_memory_is_written(tmp_path: Path):
    job = Job("adagrad")
    tracker = TouchedRows(job.model)
    job.step([5])
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    first = job.table.untyped_storage()._cdata
    for _ in range(20):  # an assignment to `.data` leaves the version as it is
        job.table.data = torch.rand_like(job.table)
        if job.table.untyped_storage()._cdata == first:
            break
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    assert_holds(tmp_path / "1", job.values())
    assert not any(memory.expired() for table in tracker._tables.values() for memory, *_ in table._versions)


def test_tables_that_trade_names_are_written(tmp_path: Path):
    """Rows of a base belong to the table that had the name then."""
    tables = [nn.Embedding(ROWS, DIM) for _ in range(3)]
    tracker = TouchedRows(nn.ModuleList(tables[:2]))
    for n, (first, second) in enumerate([(0, 1), (1, 0), (2, 0), (1, 0)]):  # the third table is not tracked
        state = {"model": nn.ModuleList([tables[first], tables[second]])}
        checkpoint.save(tmp_path / str(n), state, base=tmp_path / str(n - 1) if n else None, rows=tracker)
        assert_holds(tmp_path / str(n), {f"model.{name}": value for name, value in state["model"].state_dict().items()})


def test_rows_are_compared_with_the_base_on_request(tmp_path: Path):
    """A change that nothing shows, through `.data`, is found by verify_base alone."""
    job = Job("sgd")
    tracker = TouchedRows(job.model)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    job.table.data[1234] += 1
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker, verify_base=True)
    assert_holds(tmp_path / "1", job.values())


def test_optimizers_that_move_other_rows_are_refused(tmp_path: Path):
    sgd = [partial(torch.optim.SGD, **options) for options in ({"momentum": 0.9}, {"weight_decay": 0.1})]
    for make in (torch.optim.AdamW, *sgd, torch.optim.LBFGS):
        job = Job("sgd")
        job.optimizers[0] = make([job.table])
        tracker = TouchedRows(job.model)
        job.forward([1, 2]).backward()
        job.optimizers[0].step(lambda: torch.zeros(()))
        with pytest.raises(UsageError, match=r"model.table.weight: \w+ also moves rows that a step did not touch"):
            checkpoint.save(tmp_path / "0", {"model": job.model}, rows=tracker)
        checkpoint.save(tmp_path / "0", {"model": job.model}, rows=TouchedRows(job.model, policy="most_used"))


class DecayedBy(torch.optim.SGD):
    """An optimizer whose hyperparameters are not all in its groups, so that no other of its kind can be made."""

    def __init__(self, params: Any, factor: float) -> None:
        super().__init__(params, lr=0.5)
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(self.factor)


def test_rows_that_an_unknown_optimizer_may_have_moved_are_written(tmp_path: Path):
    job = Job("sgd")
    tracker = TouchedRows(job.model)
    job.optimizers[0] = job.state["sparse"] = DecayedBy([job.table], 0.9)
    for n in range(3):
        job.step([n])
        checkpoint.save(tmp_path / str(n), job.state, base=tmp_path / str(n - 1) if n else None, rows=tracker)
        assert_holds(tmp_path / str(n), job.values())


@pytest.mark.parametrize("how", ["another decay", "another optimizer", "rate 0"])
def test_rows_that_earlier_steps_decayed_are_written(tmp_path: Path, how: str):
    """At the save, the optimizer of these steps is gone, or has other hyperparameters."""
    job = Job("sgd")
    tracker = TouchedRows(job.model)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    job.optimizers[0] = job.state["sparse"] = torch.optim.SGD([job.table], lr=0.5, weight_decay=0.1)
    job.step([1])
    group = job.optimizers[0].param_groups[0]
    if how == "another decay":
        group["weight_decay"] = 0.0
    elif how == "another optimizer":
        job.optimizers[0] = job.state["sparse"] = OPTIMIZERS["sgd"]([job.table])
        gc.collect()
    else:
        group["lr"] = 0.0
        with pytest.raises(UsageError, match="also moves rows"):
            checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
        group["weight_decay"] = 0.0
    job.step([2])
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    assert_holds(tmp_path / "1", job.values())
    job.step([3])
    report = checkpoint.save(tmp_path / "2", job.state, base=tmp_path / "1", rows=tracker)
    assert_holds(tmp_path / "2", job.values())
    assert report.bytes_written < 4096


@pytest.mark.parametrize("policy", [*POLICIES])
@pytest.mark.parametrize(("num_rows", "dtype"), [(40, torch.float32), (90, torch.float32), (60, torch.bfloat16)])
def test_a_table_that_changes_its_shape_or_dtype_in_place_is_written(
    tmp_path: Path, policy: str, num_rows: int, dtype: torch.dtype
):
    table = nn.Embedding(60, DIM)
    tracker, optimizer = TouchedRows(table, policy=policy), torch.optim.SGD(table.parameters(), lr=0.5)

    def step(row: int) -> None:
        table(torch.tensor([1, row])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(59)
    checkpoint.save(tmp_path / "0", {"model": table}, rows=tracker)
    table(torch.tensor([59]))  # these rows wait for a step
    table.weight.data = torch.arange(num_rows * DIM).view(num_rows, DIM).to(dtype)
    for name in ("1", "2"):
        step(num_rows - 1)
        checkpoint.save(tmp_path / name, {"model": table}, base=tmp_path / str(int(name) - 1), rows=tracker)
        if name == "1" or policy == "touched":
            assert_holds(tmp_path / name, {"model.weight": table.weight.detach()})


def test_what_is_refused(tmp_path: Path):
    job = Job()
    with pytest.raises(UsageError, match="mark: this parameter is no table"):
        TouchedRows(job.model).mark(nn.Parameter(torch.ones(2)), torch.tensor([0]))
    with pytest.raises(UsageError, match=f"mark: rows 0 to {ROWS} of a table of {ROWS} rows"):
        TouchedRows(job.model).mark(job.table, torch.tensor([0, ROWS]))
    mask = torch.zeros(ROWS, dtype=torch.bool)
    for wrong in (mask, mask.byte(), mask.float(), torch.tensor([0], device="meta"), [0]):
        with pytest.raises(UsageError, match=r"pass a tensor of indices, such as mask.nonzero\(\)"):
            TouchedRows(job.model).mark(job.table, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Linear has no nn.Embedding"):
        TouchedRows(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"policy='mfu': pass one of 'touched', 'most_used'"):
        TouchedRows(job.model, policy="mfu")
    for bits in (0, 16, 3):
        with pytest.raises(UsageError, match=f"bits={bits}: pass one of 8, 4"):
            TouchedRows(job.model, bits=bits)
    for options in ({"fraction": 0.5}, {"policy": "sampled", "fraction": 0.0}, {"policy": "sampled", "fraction": 1.5}):
        with pytest.raises(UsageError, match="pass a share above 0 and up to 1"):
            TouchedRows(job.model, **options)
    with pytest.raises(UsageError, match="the state has none of its tables"):
        checkpoint.save(tmp_path / "0", {"model": Job().model}, rows=TouchedRows(job.model))
    tied = nn.ModuleDict({"table": nn.Embedding(50, 4), "head": nn.Linear(4, 50, bias=False)})
    tied["head"].weight = tied["table"].weight
    with pytest.raises(UsageError, match=r"model.*are one tensor, and TouchedRows was given 1 of the modules"):
        checkpoint.save(tmp_path / "0", {"model": tied}, rows=TouchedRows(tied))
    both = nn.ModuleDict({"a": nn.Embedding(50, 4), "b": nn.Embedding(50, 4)})
    both["b"].weight = both["a"].weight
    checkpoint.save(tmp_path / "0", {"model": both}, rows=TouchedRows(both))


def test_a_tracker_ends_with_its_last_reference():
    job = Job()
    tracker = TouchedRows(job.model)
    gone = weakref.ref(tracker)
    tracker.close()
    assert not job.model["table"]._forward_pre_hooks
    tracker = TouchedRows(job.model)
    gone = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert gone() is None
    job.step([1])


# --- policies that lose ---

LOSSY = ["most_used", "sampled", "largest_change"]
uses = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=30), min_size=1, max_size=4)


@examples(10)
@given(st.sampled_from(LOSSY), st.sampled_from([0.002, 0.01, 1.0]), st.lists(uses, min_size=1, max_size=4))
def test_a_policy_saves_its_rows_and_keeps_the_base_s_for_the_others(
    tmp_path_factory: pytest.TempPathFactory, policy: str, fraction: float, saves: list[list[list[int]]]
):
    root = tmp_path_factory.mktemp("run")
    job = Job("adagrad")
    job.step([0])
    tracker = TouchedRows(job.model, policy=policy, fraction=fraction)
    checkpoint.save(root / "0", job.state, rows=tracker)
    limit = math.ceil(fraction * ROWS)
    saved, counts = job.values(), torch.zeros(ROWS, dtype=torch.int64)
    used: set[int] = set()
    for n, steps in enumerate(saves, 1):
        for one in steps:
            job.step(one)
            counts += torch.bincount(torch.tensor(one), minlength=ROWS)
            used.update(one)
        checkpoint.save(root / str(n), job.state, base=root / str(n - 1), rows=tracker)
        found, now = checkpoint.read(root / str(n)), job.values()
        name, change = "model.table.weight", (job.table.detach() - saved["model.table.weight"]).square().sum(1)
        new = torch.zeros(ROWS, dtype=torch.bool)
        for shard in checkpoint.catalog(root / str(n)).tensor(name).shards:
            if not shard.file.checkpoint:
                new[shard.offsets[0] : shard.offsets[0] + shard.lengths[0]] = True
        assert int(new.sum()) <= limit
        scores = {"most_used": counts, "largest_change": change}.get(policy)
        if scores is None:
            assert set(new.nonzero().flatten().tolist()) <= used
        else:
            assert int(new.sum()) == min(limit, int((scores > 0).sum()))
            assert scores[new].min() >= scores[~new].max() or not new.any()
        for key, value in now.items():
            if value.shape[:1] == (ROWS,):
                saved[key] = torch.where(new[:, None], value, saved[key])
            else:
                saved[key] = value
            assert torch.equal(found[key], saved[key]), key
        counts[new] = 0
        lossy = f"{policy}, {fraction:g} of the rows"
        assert checkpoint.catalog(root / str(n)).lossy == {name: lossy, "sparse.state.table.weight.sum": lossy}
    checkpoint.save(root / "whole", job.state, base=root / str(len(saves)))
    assert_holds(root / "whole", job.values())
    assert not checkpoint.catalog(root / "whole").lossy


def test_rows_that_became_nan_are_farthest_and_saved_once(tmp_path: Path):
    job = Job("sgd")
    with torch.no_grad():
        job.table[5] = math.inf
        job.table[11] = 0
    tracker = TouchedRows(job.model, policy="largest_change", fraction=2 / ROWS)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)

    def saved(n: int, changes: dict[int, float]) -> list[int]:
        """Set the first elements of some rows, save two rows, and return which these are."""
        with torch.no_grad():
            for row, value in changes.items():
                job.table[row, 0] = value
        tracker.mark(job.table, torch.tensor([*changes]))
        checkpoint.save(tmp_path / str(n), job.state, base=tmp_path / str(n - 1), rows=tracker)
        shards = checkpoint.catalog(tmp_path / str(n)).tensor("model.table.weight").shards
        own = [(shard.offsets[0], shard.lengths[0]) for shard in shards if not shard.file.checkpoint]
        return [row for first, count in own for row in range(first, first + count)]

    assert saved(1, {3: math.nan, 4: math.nan, 9: 1e6}) == [3, 4]
    assert saved(2, {11: 1e-30}) == [9, 11]  # the square of such a change is 0
    assert saved(3, {3: 1.0}) == [3]


# --- rows in 8 or 4 bits ---


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.tensor([packed_one_by_one(row, bits)[1] for row in rows.tolist()], dtype=torch.float32).view(rows.shape)


ways = st.sampled_from(["save", "async", "small", "lazy"])


@examples(10)
@given(st.sampled_from(BITS), st.sampled_from(["touched", "most_used"]), st.lists(st.tuples(ways, uses), min_size=1, max_size=4))
def test_chosen_rows_are_rounded_and_all_else_is_exact(
    tmp_path_factory: pytest.TempPathFactory, bits: int, policy: str, saves: list[tuple[str, list[list[int]]]]
):
    root, name, job = tmp_path_factory.mktemp("run"), "model.table.weight", Job("adagrad")
    tracker = TouchedRows(job.model, policy=policy, bits=bits)
    job.step([0, 1])
    checkpoint.save(root / "0", job.state, rows=tracker)
    assert_holds(root / "0", job.values())
    wanted = job.values()[name]
    for n, (how, steps) in enumerate(saves, 1):
        for one in steps:
            job.step(one)
        used = sorted({row for one in steps for row in one})
        wanted[used] = rounded(job.table.detach()[used], bits)
        options: dict[str, Any] = {"base": root / str(n - 1), "rows": tracker}
        if how == "save":
            checkpoint.save(root / str(n), job.state, **options)
        else:
            more = {"small": {"host_buffer_bytes": 16 << 20}, "lazy": {"staging": "lazy"}}.get(how, {})
            checkpoint.async_save(root / str(n), job.state, **options, **more).result()
        assert_holds(root / str(n), job.values() | {name: wanted})
        assert checkpoint.verify(root / str(n)).ok
        assert checkpoint.catalog(root / str(n)).lossy[name].endswith(f"rows in {bits} bits")
    last = root / str(len(saves))
    checkpoint.save(root / "plain", job.state, base=last)  # a save that chooses no rows is exact again
    checkpoint.save(root / "full", job.state)
    for path in (root / "plain", root / "full"):
        assert_holds(path, job.values())
        assert not checkpoint.catalog(path).lossy
    checkpoint.compact(last)
    assert_holds(last, job.values() | {name: wanted})
    differ = {line.name for line in checkpoint.diff(last, root / "full", values=True).tensors}
    assert differ == (set() if torch.equal(wanted, job.table) else {name})


@pytest.fixture
def narrow(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """Two checkpoints in a row, with rows in 4 bits, and the table that the last one holds."""
    job = Job("sgd")
    tracker = TouchedRows(job.model, bits=4)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    wanted = job.table.detach().clone()
    for n in (1, 2):
        used = [*range(5 * n, 900, 3)]
        job.step(used)
        wanted[used] = rounded(job.table.detach()[used], 4)
        checkpoint.save(tmp_path / str(n), job.state, base=tmp_path / str(n - 1), rows=tracker)
    return tmp_path, wanted


def test_rows_in_few_bits_load_into_any_layout_and_dtype(narrow: tuple[Path, torch.Tensor]):
    root, wanted = narrow
    catalog = checkpoint.catalog(root / "2")
    assert sorted(bool(file.packed) for file in catalog.files) == [False, True, True]
    for file in catalog.files:
        assert (root / "2" / file.key).stat().st_size == file.stored_bytes <= file.size
    for offsets, lengths in (((0, 0), (ROWS, DIM)), ((7, 0), (888, DIM)), ((0, 3), (ROWS, 2)), ((11, 1), (301, 5))):
        part = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            local = torch.zeros(lengths, dtype=dtype)
            shard = LocalShard(local, (ROWS, DIM), offsets)
            checkpoint.load(root / "2", {"model": {"table": {"weight": shard}}}, strict=False, cast=True)
            assert torch.equal(local, wanted[part].to(dtype))
    checkpoint.reshard(root / "2", root / "halves", mesh={"dp": 2})
    assert_holds(root / "halves", {"model.table.weight": wanted})
    assert checkpoint.catalog(root / "halves").lossy == catalog.lossy == {"model.table.weight": "rows in 4 bits"}
    checkpoint.reshard(root / "2", root / "named", mesh={}, rename={"model": "dlrm"})
    assert checkpoint.catalog(root / "named").lossy == {"dlrm.table.weight": "rows in 4 bits"}
    checkpoint.convert(root / "2", root / "plain")
    assert_holds(root / "plain", {"model.table.weight": wanted})
    assert not checkpoint.diff(root / "2", root / "halves", values=True).values
    assert np.array_equal(independent_reader.read(root / "2")[0]["model.table.weight"], wanted.numpy())
    checkpoint.write_manifest(root / "2")
    assert checkpoint.verify(root / "2", sha256=True).ok
    checkpoint.compact(root / "2")
    assert checkpoint.verify(root / "2", sha256=True).ok
    assert_holds(root / "2", {"model.table.weight": wanted})
    assert [bool(file.packed) for file in checkpoint.catalog(root / "2").files].count(True) == 1


def test_damage_in_rows_in_few_bits_is_found(narrow: tuple[Path, torch.Tensor]):
    root, _ = narrow
    (path,) = (root / "1").rglob("*.packed")
    data = path.read_bytes()
    path.write_bytes(data[:-40] + bytes(byte ^ 0x55 for byte in data[-40:]))
    (problem,) = checkpoint.verify(root / "2").problems
    assert "is damaged in bytes" in problem
    assert "model.table.weight" in problem
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(root / "2")
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, the catalog says"):
        checkpoint.read(root / "2")


def test_rows_without_a_finite_range_stay_exact(tmp_path: Path):
    job = Job("sgd")
    tracker = TouchedRows(job.model, bits=8)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    job.step([3, 9])
    with torch.no_grad():
        job.table[9, 2] = torch.inf
        tracker.mark(job.table, torch.tensor([9]))
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    assert_holds(tmp_path / "1", job.values())


# --- ranks ---

SHAPES = {"fsdp": (1001, 6), "ddp": (500, 4), "rows": (64, 8), "columns": (90, 8), "whole": (70, 3), "own": (80, 4)}


class Lookup(nn.Module):
    """A table whose values depend on their place."""

    def __init__(self, name: str, first: int = 0, count: int | None = None) -> None:
        super().__init__()
        num, dim = SHAPES[name]
        values = (torch.arange(num * dim).view(num, dim) / 100)[first : num if count is None else first + count]
        self.table = nn.Embedding.from_pretrained(values.clone(), freeze=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(rows).sum()


class Layouts:
    """A table of each layout: FSDP2, DDP, tensor parallel by rows and by columns, whole on rank 2, and rows as local shards."""

    def __init__(self, policy: str = "touched", fraction: float | None = None, bits: int | None = None) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
        alike: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Replicate()}
        self.modules: dict[str, nn.Module] = {
            "fsdp": fully_shard(Lookup("fsdp"), mesh=mesh),
            "ddp": DistributedDataParallel(Lookup("ddp")),
            "rows": parallelize_module(Lookup("rows"), mesh, {"table": RowwiseParallel(**alike)}),
            "columns": parallelize_module(Lookup("columns"), mesh, {"table": ColwiseParallel(**alike)}),
            "own": Lookup("own", rank * SHAPES["own"][0] // size, SHAPES["own"][0] // size),
        }
        if rank == 2:
            self.modules["whole"] = Lookup("whole")
        self.model = nn.ModuleDict({name: module for name, module in self.modules.items() if name != "own"})
        self.own = self.modules["own"].table.weight
        self.tracker = TouchedRows(nn.ModuleDict(self.modules), policy=policy, fraction=fraction, bits=bits)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.5)
        self.own_optimizer = torch.optim.Adagrad([self.own], lr=0.5)

    def state(self) -> dict[str, Any]:
        own = LocalShard(self.own, SHAPES["own"], (dist.get_rank() * len(self.own), 0))
        return {"model": self.model, "own": own, "optimizer": self.optimizer}

    def step(self, n: int, *, clears: bool = True) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for name, module in self.modules.items():
            # Tensor parallel ranks look up the same rows, and all others look up rows of their own.
            seen = torch.Generator().manual_seed(10 * n + (0 if name in ("rows", "columns") else rank))
            num = SHAPES[name][0] // (size if name == "own" else 1)
            module(torch.randint(0, num, (5,), generator=seen)).backward()
        for optimizer in (self.optimizer, self.own_optimizer):
            optimizer.step()
            if clears:
                optimizer.zero_grad()


def saves_of_all_layouts(
    root: str, policy: str, fraction: float | None = None, bits: int | None = None, clears: bool = True
) -> list[int]:
    """Save after a few steps, again and again: with rows, and whole for comparison; return the bytes that this rank wrote."""
    job, written = Layouts(policy, fraction, bits), []
    for n in range(5):
        for step in range(3 if n else 1):
            job.step(10 * n + step, clears=clears)
        save = checkpoint.save if n % 2 else lambda *a, **k: checkpoint.async_save(*a, **k).result()
        report = save(f"{root}/{n}", job.state(), base=f"{root}/{n - 1}" if n else None, rows=job.tracker)
        written.append(report.bytes_written)
        checkpoint.save(f"{root}/{n}-whole", job.state())
    return written


Runs = tuple[Path, list[dict[str, list[int]]]]
FRACTION = 0.05
RUNS: dict[str, tuple[Any, ...]] = {
    "cleared": ("touched",),
    "not cleared": ("touched", None, None, False),
    "narrow": ("touched", None, 4),
    **{policy: (policy, FRACTION) for policy in LOSSY},
}
"""By name: the arguments of `saves_of_all_layouts`."""


def all_runs(root: str) -> dict[str, list[int]]:
    return {name: saves_of_all_layouts(f"{root}/{name}", *arguments) for name, arguments in RUNS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Make all runs in one job of four ranks. Return the folder above the runs, and the bytes that each rank wrote."""
    if not NEWER:
        pytest.skip("fully_shard of torch 2.6 runs no forward on the CPU")
    root = tmp_path_factory.mktemp("layouts")
    return root, run_ranks(all_runs, 4, str(root))


@pytest.mark.parametrize("run", ["cleared", "not cleared"])
def test_every_layout_holds_what_a_whole_save_holds(runs: Runs, run: str):
    """Also if the gradients of earlier steps move rows again."""
    root, written = runs[0] / run, [of_rank[run] for of_rank in runs[1]]
    for n in range(5):
        found, whole = checkpoint.read(root / str(n)), checkpoint.read(root / f"{n}-whole")
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, (n, name)
        assert checkpoint.verify(root / str(n)).ok
        if n:
            assert {file.checkpoint for file in checkpoint.catalog(root / str(n)).files} >= {"", "../0"}
    assert all(rank[n] < rank[0] + 4096 for rank in written for n in range(1, 5))


def test_every_layout_holds_rows_within_half_a_step(runs: Runs):
    root, narrow = runs[0] / "narrow", set()
    for n in range(5):
        found, whole = checkpoint.read(root / str(n)), checkpoint.read(root / f"{n}-whole")
        for name, value in whole.items():
            if name in checkpoint.catalog(root / str(n)).lossy:
                step = (value.amax(1) - value.amin(1)) / 15
                assert ((found[name] - value).abs() <= 0.501 * step[:, None] + 1e-6 * value.abs()).all(), (n, name)
                narrow |= set() if torch.equal(found[name], value) else {name}
            else:
                assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, (n, name)
        assert checkpoint.verify(root / str(n)).ok
    # Half rows of 2 elements, in the table that columns divide, would not become shorter.
    tables = {"own" if name == "own" else f"model.{name}.table.weight" for name in SHAPES}
    assert narrow == tables - {"model.columns.table.weight"}


@pytest.mark.parametrize("policy", LOSSY)
def test_all_ranks_choose_the_same_rows(runs: Runs, policy: str):
    root = runs[0] / policy
    before = checkpoint.read(root / "0")
    for n in range(1, 5):
        found, whole = checkpoint.read(root / str(n)), checkpoint.read(root / f"{n}-whole")
        for name, (num, _) in SHAPES.items():
            key = "own" if name == "own" else f"model.{name}.table.weight"
            kept, new = ((found[key] == held[key]).all(1) for held in (before, whole))
            assert (kept | new).all(), (n, name)  # a row that columns divide is of one save
            assert 0 < int((~kept).sum()) <= math.ceil(FRACTION * num), (n, name)
            if name != "own":
                (state,) = (key for key in whole if key.endswith(f"{name}.table.weight.sum"))
                assert torch.equal(found[state], torch.where(kept[:, None], before[state], whole[state])), (n, name)
        tensors = {key for key in whole if key.endswith((".weight", ".sum", "own"))}
        assert checkpoint.catalog(root / str(n)).lossy.keys() == tensors
        before = found


@on_ranks(2)
def test_a_rank_that_cannot_choose_rows_fails_all_at_once(tmp_path: Path):
    """Rank 1 fails, and lives on until rank 0 has raised."""
    rank, model = dist.get_rank(), Lookup("ddp")
    tracker, state = TouchedRows(model), {"model": DistributedDataParallel(model)}
    checkpoint.save(tmp_path / "0", state, rows=tracker)
    failing = mock.patch.object(touched_rows.Table, "scores", side_effect=MemoryError("too little")) if rank else nullcontext()
    error, says = (MemoryError, "^too little$") if rank else (CheckpointError, "rank 1: MemoryError: too little")
    with failing, pytest.raises(error, match=says):
        checkpoint.save(tmp_path / "1", state, base=tmp_path / "0", rows=tracker, timeout_s=60)
    dist.barrier()


@on_ranks(2)
def test_ranks_merge_their_rows_in_host_memory_whatever_the_default_device(tmp_path: Path):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, DIM)
    tracker = TouchedRows(table)
    checkpoint.save(tmp_path / "1", {"model": table}, rows=tracker)
    own = torch.tensor([dist.get_rank()])
    with torch.device("meta"):  # which keeps nothing: host memory must not be taken there
        tracker.mark(table.weight, own)
        report = checkpoint.save(tmp_path / "2", {"model": table}, rows=tracker, base=tmp_path / "1")
    written = torch.tensor(report.bytes_written)
    dist.all_reduce(written)
    assert 0 < written < ROWS * DIM * 4


@on_ranks(2)
def test_ranks_that_differ_in_their_tracker_are_told(tmp_path: Path):
    job = Layouts("most_used", 0.1 if dist.get_rank() else 0.2)
    told = r"different policy=, fraction= and bits=: \[\('most_used', 0.1, None\), \('most_used', 0.2, None\)\]"
    with pytest.raises(UsageError, match=told):
        checkpoint.save(tmp_path / "0", {"ddp": job.modules["ddp"]}, rows=job.tracker, timeout_s=60)


# --- runs ---


actions = st.tuples(st.sampled_from(["save", "async", "back", "delete", "reopen"]), rows)


@examples(6)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(actions, min_size=3, max_size=8))
def test_a_run_loads_every_step_that_it_lists(tmp_path_factory: pytest.TempPathFactory, keep: int, full: int, did: list[Any]):
    root = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"keep_last": keep, "incremental": True, "full_every": full}
    job, held, step = Job("adagrad"), {}, 0
    job.step([1])
    tracker = TouchedRows(job.model)
    manager = Manager(root, **options)
    for what, picked in did:
        known = manager.steps()
        if what in ("save", "async") or not known:
            job.step(picked)
            step += 1
            wanted = job.values()
            if what == "async":
                manager.async_save(step, job.state, rows=tracker).result()
                manager._wait()
            else:
                manager.save(step, job.state, rows=tracker)
            held[step] = wanted
        elif what == "back":
            manager.load(known[picked[0] % len(known)], job.state)
        elif what == "delete":
            manager.delete(known[picked[0] % len(known)])
        else:
            manager.close()
            manager = Manager(root, **options)
            manager.load_latest(job.state)
        for one in manager.steps():
            assert_holds(root / f"step_{one}", held[one])
    manager.close()
    Manager(root).close()
    committed = [int(path.parent.name[5:]) for path in root.glob("step_*/catalog.msgpack")]
    assert on_disk(root) == needed(root, committed)


def test_compact_keeps_the_rows_and_says_so(tmp_path: Path):
    job = Job("sgd")
    tracker = TouchedRows(job.model, policy="most_used", fraction=0.001)
    checkpoint.save(tmp_path / "0", job.state, rows=tracker)
    job.step([1, 2, 3, 3, 2, 3, 9])
    checkpoint.save(tmp_path / "1", job.state, base=tmp_path / "0", rows=tracker)
    before = checkpoint.read(tmp_path / "1")
    checkpoint.compact(tmp_path / "1")
    assert all(not file.checkpoint for file in checkpoint.catalog(tmp_path / "1").files)
    assert torch.equal(checkpoint.read(tmp_path / "1")["model.table.weight"], before["model.table.weight"])
    assert checkpoint.catalog(tmp_path / "1").lossy == {"model.table.weight": "most_used, 0.001 of the rows"}


@pytest.mark.parametrize(("code", "dtype", "bits"), [("F32", np.float32, [8]), ("I32", np.int32, [])])
def test_rows_of_a_part_of_a_table_are_found_in_whatever_order_the_base_has_them(code: str, dtype: Any, bits: list[int]):
    """Flat runs that are a box of their own come after runs that are not, whichever is first in the tensor."""
    storage, whole = MemoryStorage("runs"), torch.from_numpy(np.arange(12, dtype=dtype).reshape(4, 3))
    cuts = [Piece((0, 0), (4, 3), start, end - start, 0, (3, 1)) for start, end in pairwise([0, 3, 6, 10, 12])]
    catalog = save_job(storage, [[(TensorSpec("t", code, (4, 3), tuple(cuts)), whole)]])
    assert (np.diff(catalog.rows.start + catalog.boxes.offsets[catalog.rows.box] @ (3, 1)) < 0).any()
    local = describe_local([LocalTensor(TensorSpec("t", code, (4, 3), (whole_piece((4, 3)),)), whole)], (), None, 0)
    items = RunColumns(*np.array([[0], [2], [10]]))
    shards, _, picked = pick(Base(storage, catalog, catalog.files, False), local, items, {"t": np.zeros(4, bool)}, 8)
    found = {}
    for _, start, count, file, offset in picked.stored.rows():
        data = bytearray(4 * count)
        storage.read_into(catalog.files[file].key, offset, [memoryview(data)])
        found |= dict(enumerate(np.frombuffer(data, dtype).tolist(), start))
    # No run has all of the last row, so that one is written, as is the part of the first row.
    assert found == {i: i for i in range(3, 9)}
    assert list(picked.runs.rows()) == [(1, 9, 3)]
    assert torch.equal(shards.rows[-1][1].tensor, whole[3:])
    assert list(picked.bits.values()) == bits
