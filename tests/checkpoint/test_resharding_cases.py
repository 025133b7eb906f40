"""Placements that need telling: orders of axes, whole tensors divided over ranks, checkpoints of other formats, ties, stages."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.names import groups_name
from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh, Replication, StateLink, TensorSpec, ValueKind, ValueSpec
from reshard_ckpt.core.planning.pipeline_stages import spread_by_size, stages_of
from reshard_ckpt.engine.common.files import open_catalog
from reshard_ckpt.errors import UsageError
from reshard_ckpt.format.values import encode_path, encode_value
from reshard_ckpt.storage import open_storage
from tests.checkpoint.test_resharding import DST, SRC
from tests.jobs import Tensors, save_job
from tests.layouts import chunk, pack_boxes, values_of, whole_piece
from tests.topologies import Job, cleared, save, transformer

DATA = Path(__file__).parent.parent / "data"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def reshard(mesh: dict[str, int], **options: object) -> Catalog:
    cleared(DST)
    checkpoint.reshard(SRC, DST, mesh=mesh, **options)  # type: ignore[arg-type]
    before, after = checkpoint.read(SRC), checkpoint.read(DST)
    for name in after:
        if isinstance(after[name], torch.Tensor) and after[name].dtype == before[name].dtype:
            assert torch.equal(raw(after[name]), raw(before[name])), name
    return open_catalog(open_storage(DST))


def rows_of(catalog: Catalog, name: str) -> dict[int, list[tuple[int, int]]]:
    """By rank that wrote them, the ranges of dim 0."""
    out: dict[int, list[tuple[int, int]]] = {}
    for shard in catalog.tensor(name).shards:
        out.setdefault(shard.file.rank, []).append((shard.offsets[0], shard.lengths[0]))
    return out


def nested(size: int, num: int, index: int, inner_num: int, inner: int) -> tuple[int, int]:
    first, length = chunk(size, num, index)
    second, rest = chunk(length, inner_num, inner)
    return first + second, rest


@pytest.mark.parametrize("dim", [1, -1])
def test_a_rule_counts_the_dim_of_its_sections_from_either_end(dim: int) -> None:
    checkpoint.save(cleared(SRC).url, {"w": torch.arange(36).view(6, 6)})
    catalog = reshard({"tp": 2}, rules={"w": {"tp": f"shard({dim})", "sections": {dim: [4, 2]}}})
    held = {(shard.file.rank, shard.offsets[1], shard.lengths[1]) for shard in catalog.tensor("w").shards}
    assert held == {(0, 0, 2), (0, 4, 1), (1, 2, 2), (1, 5, 1)}


@pytest.mark.parametrize("first", ["dp", "tp"])
def test_axes_cut_one_dim_in_the_order_that_the_shards_show(first: str) -> None:
    """13 rows, on dp 2 × tp 3: which axis cuts first makes another layout."""
    whole, ranks = values_of((13, 2), "F32", 1), []

    def held(dp: tuple[int, int], tp: tuple[int, int]) -> tuple[int, int]:
        return nested(13, *dp, *tp) if first == "dp" else nested(13, *tp, *dp)

    placement = (AxisPlacement("dp", "shard", 0), AxisPlacement("tp", "shard", 0))
    for dp, tp in product(range(2), range(3)):
        begin, length = held((2, dp), (3, tp))
        pieces, _ = pack_boxes([((begin, 0), (length, 2))])
        spec = TensorSpec("model.w", "F32", (13, 2), pieces, Replication.DECLARED, placement)
        ranks.append([(spec, whole[begin : begin + length].reshape(-1).clone())])
    save_job(cleared(SRC), ranks, mesh=Mesh(("dp", "tp"), (2, 3)))
    got = rows_of(reshard({"dp": 3, "tp": 2}), "model.w")
    wanted = {rank: [held((3, rank // 2), (2, rank % 2))] for rank in range(6)}
    assert got == {rank: ranges for rank, ranges in wanted.items() if ranges[0][1]}
    other = {"model.w": {"order": ["tp", "dp"] if first == "dp" else ["dp", "tp"]}}
    ruled = rows_of(reshard({"dp": 3, "tp": 2}, rules=other), "model.w")
    assert ruled != got


@pytest.mark.parametrize("above", ["optimizer.", ""])
def test_state_that_was_divided_by_whole_parameters_is_divided_so_again(above: str) -> None:
    """As torch's ZeroRedundancyOptimizer has it: all state of a parameter on one rank, by size; also as the root of the state."""
    sizes = {f"layers.{i}.w": (i % 5 + 1, 7) for i in range(12)}
    owner = spread_by_size({name: shape[0] for name, shape in sizes.items()}, 2)
    ranks: list[Tensors] = []
    for rank in range(2):
        held = []
        for i, (name, shape) in enumerate(sizes.items()):
            whole = values_of(shape, "F32", i)
            held.append((TensorSpec(f"model.{name}", "F32", shape, (whole_piece(shape),), Replication.DECLARED), whole))
            for key in ("exp_avg", "exp_avg_sq"):
                if owner[name] == rank:
                    link = StateLink(above.rstrip("."), name, key, f"model.{name}")
                    spec = TensorSpec(link.name, "F32", shape, (whole_piece(shape),), Replication.DECLARED, link=link)
                    held.append((spec, whole))
        ranks.append(held)
    save_job(cleared(SRC), ranks, mesh=Mesh(("dp",), (2,)))
    catalog = reshard({"dp": 3})
    loads = [0, 0, 0]
    for name, shape in sizes.items():
        (place,) = catalog.tensor(f"{above}state.{name}.exp_avg").placement or ()
        assert place == (catalog.tensor(f"{above}state.{name}.exp_avg_sq").placement or ())[0]
        assert (place.kind, len(place.coords)) == ("resident", 1)
        loads[place.coords[0]] += shape[0]
        assert (catalog.tensor(f"model.{name}").placement or ())[0].kind == "replicate"
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("above", ["optimizer", ""])
def test_one_vector_whose_cuts_fell_between_parameters_is_cut_again(above: str) -> None:
    """Also where the optimizer is the root of the state, which has no name."""
    fqns = ["a", "b", "c", "d"]
    groups = groups_name(above)
    value = ValueSpec(groups, encode_path(groups.split(".")), ValueKind.PARAM_GROUPS, encode_value([{"params": fqns}], groups))
    ranks: list[Tensors] = [[], []]
    for i, fqn in enumerate(fqns):
        piece = whole_piece((6,))
        link = StateLink(above, fqn, "exp_avg", None)
        spec = TensorSpec(link.name, "F32", (6,), (piece,), Replication.DECLARED, link=link)
        ranks[i // 2].append((spec, values_of((6,), "F32", i)))
    save_job(cleared(SRC), ranks, [[value], [value]], mesh=Mesh(("dp",), (2,)))
    catalog = reshard({"dp": 3})
    # 24 elements in a row: 8 for each of the new ranks.
    cuts = {"a": {0: (0, 6)}, "b": {0: (0, 2), 1: (2, 4)}, "c": {1: (0, 4), 2: (4, 2)}, "d": {2: (0, 6)}}
    for fqn, expected in cuts.items():
        shards = catalog.tensor(StateLink(above, fqn, "exp_avg").name).shards
        assert {s.file.rank: (s.offsets[0] + s.start, s.count) for s in shards} == expected


def test_an_axis_that_only_one_mesh_has() -> None:
    save(Job({"dp": 2, "tp": 2}, transformer(3, 8, 16), 3, fsdp=True, own_values=False), cleared(SRC))
    name = "model.layers.0.qkv.weight"
    gone = reshard({"dp": 2})
    assert [(p.axis, p.kind, p.dim) for p in gone.tensor(name).placement or ()] == [("dp", "shard", 0)]
    assert rows_of(gone, name) == {0: [(0, 16)], 1: [(16, 16)]}
    new = reshard({"cp": 2, "tp": 2})
    assert [(p.axis, p.kind, p.dim) for p in new.tensor(name).placement or ()] == [("cp", "replicate", None), ("tp", "shard", 0)]
    none = reshard({})
    assert len(none.files) == 1
    assert none.mesh == Mesh((), ())


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    """Nothing is known of its placements: replicated, unless rules say otherwise, and stages from the names."""
    tensors = {f"layers.{i}.{n}.weight": values_of((8, 4), "BF16", i) for i in range(4) for n in ("up", "down")}
    save_file({**tensors, "embed_tokens.weight": values_of((16, 4), "BF16", 9)}, tmp_path / "model.safetensors")
    rules = [{"model.layers.*.down.weight": {"tp": "shard(-1)"}}, {"model.layers.*": {"tp": "shard(0)"}}]
    report = checkpoint.reshard(tmp_path / "model.safetensors", tmp_path / "dst", mesh={"pp": 2, "tp": 2}, rules=rules)
    again = checkpoint.reshard(tmp_path / "model.safetensors", tmp_path / "dst", mesh={"pp": 2, "tp": 2}, rules=rules)
    assert again.bytes_kept == 0  # nothing proves that the file is still the same
    assert report.save_id != again.save_id
    catalog = checkpoint.catalog(tmp_path / "dst")
    kinds = {name: [(p.kind, p.dim, p.coords) for p in catalog.tensor(name).placement or ()] for name in catalog.names}
    assert kinds["model.layers.3.down.weight"] == [("resident", None, (1,)), ("shard", 1, ())]
    assert kinds["model.layers.1.up.weight"] == [("resident", None, (0,)), ("shard", 0, ())]
    assert kinds["model.embed_tokens.weight"] == [("resident", None, (0,)), ("replicate", None, ())]
    assert checkpoint.verify(tmp_path / "dst").ok
    for name, whole in tensors.items():
        assert torch.equal(
            checkpoint.read(tmp_path / "dst", [f"model.{name}"])[f"model.{name}"].view(torch.uint8), whole.view(torch.uint8)
        )


def test_ties_last_as_long_as_both_are_taken_and_of_one_dtype() -> None:
    save(Job({"tp": 2}, transformer(3, 8, 16), 3, own_values=False, aliases={"head.weight": "emb.weight"}), cleared(SRC))
    assert reshard({"pp": 2}).tensor("model.head.weight").alias_of == "model.emb.weight"
    alone = reshard({"tp": 2}, select="model.head")
    assert (alone.names, alone.tensor("model.head.weight").alias_of) == (("model.head.weight",), None)
    apart = reshard({"tp": 2}, cast={"model.head.weight": torch.float32})
    head, emb = apart.tensor("model.head.weight"), apart.tensor("model.emb.weight")
    assert (head.alias_of, head.dtype, emb.alias_of, emb.dtype) == (None, "F32", None, "BF16")


def test_casts_touch_floating_point_alone() -> None:
    specs = [("a.w", "F32", (4, 3)), ("a.ids", "I64", (5,)), ("a.mask", "BOOL", (2, 2))]
    held = [(TensorSpec(n, d, s, (whole_piece(s),)), values_of(s, d, i)) for i, (n, d, s) in enumerate(specs)]
    save_job(cleared(SRC), [held])
    catalog = reshard({"tp": 2}, cast={"a.*": "float16"})
    assert {name: catalog.tensor(name).dtype for name in catalog.names} == {"a.w": "F16", "a.ids": "I64", "a.mask": "BOOL"}
    wanted = values_of((4, 3), "F32", 0).to(torch.float16)
    assert torch.equal(checkpoint.read(DST, ["a.w"])["a.w"].view(torch.uint8), wanted.view(torch.uint8))


def test_stages_at_given_boundaries() -> None:
    names = ["m.emb.w", *(f"m.layers.{i}.w" for i in range(10)), "m.final_norm.w", "m.scale"]
    stages = stages_of(names, 3, boundaries=(2, 9), saved={}, saved_stages=1)
    assert [stages[f"m.layers.{i}.w"] for i in range(10)] == [(0,)] * 2 + [(1,)] * 7 + [(2,)]
    assert (stages["m.emb.w"], stages["m.final_norm.w"], stages["m.scale"]) == ((0,), (2,), (0, 1, 2))


def test_stages_of_a_pipeline_that_keeps_its_size_stay() -> None:
    names = ["m.emb.w", *(f"m.layers.{i}.w" for i in range(4))]
    saved = {"m.emb.w": (0,), **{f"m.layers.{i}.w": (0 if i < 3 else 1,) for i in range(4)}}
    assert stages_of(names, 2, saved=saved, saved_stages=2) == saved
    assert stages_of(names, 2, boundaries=(1,), saved=saved, saved_stages=2)["m.layers.1.w"] == (1,)


def test_small_stacks_are_no_layers() -> None:
    names = [*(f"m.h.{i}.w" for i in range(4)), "m.head.0.w", "m.head.1.w", "m.adapters.0.w"]
    stages = stages_of(names, 4, saved={}, saved_stages=1)
    assert [stages[f"m.h.{i}.w"] for i in range(4)] == [(0,), (1,), (2,), (3,)]
    assert (stages["m.head.0.w"], stages["m.adapters.0.w"]) == ((3,), (0, 1, 2, 3))


@pytest.mark.parametrize("boundaries", [(1, 1), (2, 1), (1,), (0, 2), (1, 7)])
def test_boundaries_that_do_not_divide_are_named(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"stages=\["):
        stages_of([f"l.{i}" for i in range(4)], 3, boundaries=boundaries, saved={}, saved_stages=1)
