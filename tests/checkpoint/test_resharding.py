"""A reshard writes what a job of the new topology would have saved: the same files, the same catalog."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_ckpt.checkpoint.resharding import reshard
from reshard_ckpt.core.catalog import Catalog, ValueEntry
from reshard_ckpt.core.state import ValueKind
from reshard_ckpt.engine.load import open_catalog
from reshard_ckpt.format.values import decode_value, encode_value
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.memory import MemoryStorage
from tests.jobs import load_job
from tests.topologies import Job, hold_rank, save, transformer

SRC, DST, WANTED = "memory://reshard/src", "memory://reshard/dst", "memory://reshard/wanted"


def cleared(url: str) -> MemoryStorage:
    storage = open_storage(url)
    storage.delete([key for key, _ in storage.list()])
    return storage


def assert_same(found: Catalog, wanted: Catalog, got, expected) -> None:
    """Equal but for the save's id and time; every file, byte for byte."""
    for a, b in zip(found.files, wanted.files, strict=True):
        assert a.key.split("/")[1] == b.key.split("/")[1]
        assert (a.rank, a.size) == (b.rank, b.size), a.key
        assert got.read(a.key, a.size) == expected.read(b.key, b.size), a.key
        assert a.digest == b.digest
    for table in ("tensors_table", "boxes", "rows"):
        one, other = getattr(found, table), getattr(wanted, table)
        for name in one.__slots__:
            assert np.array_equal(getattr(one, name), getattr(other, name)), f"{table}.{name}"
    assert found.placements == wanted.placements
    assert list(map(unordered, found.values_table)) == list(map(unordered, wanted.values_table))
    assert (found.mesh, found.metadata) == (wanted.mesh, wanted.metadata)


def unordered(value: ValueEntry) -> ValueEntry:
    """Ranks that hold other experts list them in another order."""
    if value.kind is not ValueKind.PARAM_GROUPS:
        return value
    groups = decode_value(value.data or b"")
    return replace(value, data=encode_value([{**group, "params": sorted(group["params"])} for group in groups], ""))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Job, Job, dict[str, dict[str, object]]]:
    """Two jobs of one model on two meshes, and rules for what the first one's checkpoint cannot tell."""
    zero = draw(st.sampled_from([None, None, "vector", "each"]))
    fsdp = zero is None and draw(st.booleans())
    layers, hidden, vocab = draw(st.integers(3, 5)), draw(st.integers(3, 6)), draw(st.integers(1, 13))
    if zero == "vector":  # where tp ranks have unequal shares, each cuts its vector elsewhere, and placements are told by chance
        hidden, vocab = 6, 12
    # A vector is in the order in which the ranks list their parameters, which experts on other ranks change.
    experts = draw(st.sampled_from([0, 0, 3])) if zero is None else 0
    fused, tied = draw(st.booleans()), draw(st.booleans())
    axes = ["pp", "dp", "tp", *(["ep"] if experts else [])]
    old_mesh, new_mesh = ({axis: draw(st.integers(1, 3)) for axis in axes} for _ in range(2))
    rules: dict[str, dict[str, object]] = {}
    if zero and old_mesh["dp"] == 1:  # nothing shows that this was ZeRO
        zero = "vector"
        rules["optimizer.state.*"] = {"dp": "flat"}
    if fused and (old_mesh["tp"] == 1 or hidden % old_mesh["tp"] or (fsdp and old_mesh["dp"] > 1)):
        rules["model.layers.*.qkv.weight"] = {"sections": {0: [2 * hidden, hidden, hidden]}}
    weights = transformer(layers, hidden, vocab, fused=fused, experts=experts)
    same_size = prod(old_mesh.values()) == prod(new_mesh.values())
    aliases = {"head.weight": "emb.weight"} if tied else {}
    old = Job(old_mesh, weights, layers, fsdp, zero, experts=max(experts, 1), own_values=same_size, aliases=aliases)
    return old, replace(old, mesh=new_mesh), rules


@given(pairs(), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_reshard_is_what_that_job_would_have_saved(pair: tuple[Job, Job, dict[str, dict[str, object]]], some: int) -> None:
    old, new, rules = pair
    save(old, cleared(SRC))
    wanted = save(new, cleared(WANTED))
    cleared(DST)
    reshard(SRC, DST, mesh=new.mesh, rules=rules)
    storage = open_storage(DST)
    assert_same(open_catalog(storage), wanted, storage, open_storage(WANTED))
    held = [(spec, memory) for spec, memory in hold_rank(new, some % new.size)[0] if spec.alias_of is None]
    target = [(spec, torch.zeros_like(memory)) for spec, memory in held]
    load_job(storage, target)
    for (spec, got), (_, memory) in zip(target, held, strict=True):
        assert torch.equal(got.view(torch.uint8), memory.view(torch.uint8)), spec.name
