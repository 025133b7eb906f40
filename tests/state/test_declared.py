"""Tensors of torch's other classes that say which part of a tensor they hold: saved and loaded as that part, or refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError, UnsupportedError
from reshard_ckpt.state import capture
from tests.helpers import NEWER, load, position_values, save
from tests.launch import on_ranks


def declare(tensor: torch.Tensor, shape: tuple, offsets: tuple, local: tuple, sizes: tuple) -> torch.Tensor:
    """A tensor that says what it holds as torch 2.14's `CheckpointableTensor` does."""
    tensor.global_shape, tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = shape, offsets, local, sizes
    return tensor


def halves(full: torch.Tensor) -> list[torch.Tensor]:
    """Two ranks' rows of a (4, 3) tensor."""
    return [
        declare(full[2 * r : 2 * r + 2].clone(), (4, 3), ((2 * r, 0),), ((0, 0),), ((2, 3),)) for r in range(2)
    ]  # fmt: skip


def boxes(full: torch.Tensor) -> list[torch.Tensor]:
    """Two boxes in one local tensor, with a row of padding between them; and a rank that holds the rest as columns."""
    first = torch.full((4, 3), -1.0)
    first[0], first[2:] = full[0], full[2:]
    one = declare(first, (4, 3), ((0, 0), (2, 0)), ((0, 0), (2, 0)), ((1, 3), (2, 3)))
    return [one, declare(full[1:2].clone(), (4, 3), ((1, 0),), ((0, 0),), ((1, 3),))]


def merged(full: torch.Tensor) -> list[torch.Tensor]:
    """Ranks whose rows are two leading dims merged: (4, 3) seen as (2, 2, 3), and one that holds nothing."""
    shape = (2, 2, 3)
    one = declare(full[:2].clone(), shape, ((0, 0, 0),), ((0, 0),), ((1, 2, 3),))
    two = declare(full[1:].clone(), shape, ((1, 0, 0), (1, 1, 0)), ((1, 0), (2, 0)), ((1, 1, 3), (1, 1, 3)))
    return [one, two, declare(torch.zeros(0, 3), shape, (), (), ())]


@pytest.mark.parametrize("shards_of", [halves, boxes, merged])
@pytest.mark.parametrize("wrap", [lambda t: t, torch.nn.Parameter])
def test_tensors_that_declare_their_boxes_are_saved_and_loaded_as_those(shards_of, wrap):
    full = position_values((4, 3))

    def shards() -> list[torch.Tensor]:
        out = []
        for tensor in shards_of(full):
            new = wrap(tensor.clone())
            vars(new).update(vars(tensor))
            out.append(new)
        return out

    saved = save([capture({"t": shard}) for shard in shards()])
    shape = shards()[0].global_shape
    assert torch.equal(saved.tensors["t"], full.reshape(shape))
    for shard in shards():
        expected, padding = shard.detach().clone(), shard.detach() < 0
        with torch.no_grad():
            shard[~padding] = 0
        load(saved, {"t": shard})
        mine = torch.zeros_like(expected, dtype=torch.bool)
        for first, size in zip(shard.local_offsets, shard.local_sizes, strict=True):
            rows = size[0] if len(size) == 2 else size[0] * size[1]
            mine[first[0] : first[0] + rows] = True
        assert torch.equal(shard.detach()[mine], expected[mine])


def test_a_modules_parameter_that_declares_its_box_has_its_optimizers_state_there_too():
    full = position_values((4, 3))
    ranks = []
    for half in halves(full):
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(half.clone())
        vars(module.w).update(vars(half))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        (module.w * half).sum().backward()
        optimizer.step()
        ranks.append(capture({"m": module, "o": optimizer}))
    tensors = save(ranks).tensors
    assert torch.equal(tensors["m.w"], full - 0.5 * full)
    assert torch.equal(tensors["o.state.w.momentum_buffer"], full)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (((8,), ((4,),), ((0,),), None), UnsupportedError, r"t: has global_shape \(8,\).* no local_sizes"),
        (((8,), ((4,),), ((0,), (2,)), ((4,),)), LayoutError, "t: has 1 global_offsets, 2 local_offsets"),
        (((8,), ((5,),), ((0,),), ((4,),)), LayoutError, r"t: LocalShard piece 0 in the global tensor.* ends at 5 \+ 4"),
        (((8,), ((0,),), ((1,),), ((4,),)), LayoutError, "t: LocalShard piece 0 in the local tensor"),
        (((8,), ((0,), (1,)), ((0,), (2,)), ((2,), (2,))), LayoutError, "t: .*overlap"),
        (((2, 4), ((0, 0),), ((0,),), ((1, 3),)), LayoutError, None),
        (((2, 4), ((0, 0),), ((2,),), ((1, 4),)), LayoutError, "t: local_sizes .* are not rows"),
    ],
)
def test_what_a_tensor_says_of_its_boxes_must_fit(fields, error, message):
    tensor = torch.zeros(4)
    names = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    vars(tensor).update({name: field for name, field in zip(names, fields, strict=True) if field is not None})
    if message is None:  # fits: one row of three of four columns
        assert capture({"t": tensor}).tensors[0].spec.shape == (2, 4)
        return
    with pytest.raises(error, match=message):
        capture({"t": tensor})


class Planned(torch.Tensor):
    """A tensor that tells DCP's planner, and nobody else, which part it is."""

    def __create_chunk_list__(self) -> list[Any]:
        return []


def test_whatever_else_claims_to_be_a_part_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="m.t: Planned plans by itself for DCP"):
        capture({"m": {"t": torch.zeros(4).as_subclass(Planned)}})
    plain = torch.zeros(4)
    plain.__create_write_items__ = lambda fqn, tensor: []
    with pytest.raises(UnsupportedError, match="m.t: Tensor plans by itself"):
        capture({"m": {"t": plain}})


def sharded_job(folder: str) -> None:
    """ShardedTensors of several specs into each other and into whole tensors; a module and a DTensor that hold such."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata

    shape, full = (10, 4), position_values((10, 4))

    def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
        return ChunkShardingSpec(dim=dim, placements=[f"rank:{r}/cpu" for r in ranks])

    def rows(*spans: tuple[int, int, int]) -> EnumerableShardingSpec:
        return EnumerableShardingSpec([ShardMetadata([first, 0], [n, 4], f"rank:{r}/cpu") for first, n, r in spans])

    specs = {
        "even": chunks(0, 0, 1),
        "turns": chunks(0, 0, 1, 1, 0),
        "columns": chunks(1, 1, 0),
        "uneven": rows((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)),
        "one_rank": rows((0, 10, 1)),
    }

    def state(fill: bool) -> dict[str, Any]:
        out = {}
        for name, spec in specs.items():
            tensor = out[name] = sharded_tensor.zeros(spec, *shape)
            for shard in tensor.local_shards() if fill else ():
                at = shard.metadata
                where = tuple(slice(o, o + n) for o, n in zip(at.shard_offsets, at.shard_sizes, strict=True))
                shard.tensor.copy_(full[where])
        return out

    def check(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            for shard in tensor.local_shards():
                at = shard.metadata
                where = tuple(slice(o, o + n) for o, n in zip(at.shard_offsets, at.shard_sizes, strict=True))
                assert torch.equal(shard.tensor, full[where]), name

    saved = state(fill=True)
    checkpoint.save(folder, {"s": saved, "again": {"even": saved["turns"]}})
    for mine, other in pairwise([*specs, "even"]):
        target = {mine: state(fill=False)[mine]}
        checkpoint.load(folder, {"s": target}, rename={f"s.{other}": f"s.{mine}", f"s.{mine}": f"s.{other}"}, strict=False)
        check(target)
    whole = {name: torch.zeros(shape) for name in specs}
    checkpoint.load(folder, {"s": whole, "again": {"even": torch.zeros(shape)}})
    assert all(torch.equal(tensor, full) for tensor in whole.values())

    # DCP's calls, by this library and by torch on its storage.
    dcp.save({"s": saved}, checkpoint_id=folder + "/dcp")
    torch_dcp.save({"s": saved}, storage_writer=dcp.ReshardWriter(folder + "/torch"))
    for path in (folder + "/dcp", folder + "/torch"):
        target = state(fill=False)
        dcp.load({"s": target}, checkpoint_id=path)
        check(target)
        target = state(fill=False)
        torch_dcp.load({"s": target}, storage_reader=dcp.ReshardReader(path))
        check(target)

    class Holds(torch.nn.Module):
        def __init__(self, fill: bool) -> None:
            super().__init__()
            self.table = state(fill)["uneven"]
            self.bias = torch.nn.Parameter(full[:, 0].clone() if fill else torch.zeros(10))
            self._register_state_dict_hook(sharded_tensor.state_dict_hook)

    checkpoint.save(folder + "/module", {"m": Holds(fill=True)})
    module = Holds(fill=False)
    checkpoint.load(folder + "/module", {"m": module})
    check({"table": module.table})
    assert torch.equal(module.bias, full[:, 0])


def wrapper_job(folder: str) -> None:
    """What newer TorchRec hands out: DTensors around several local shards."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    full, rank = position_values((8, 4)), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def dtensor(fill: bool) -> DTensor:
        # Rows [0, 4) as two halves of the columns on rank 0, the others whole on rank 1.
        spans = [((0, 0), (4, 2)), ((0, 2), (4, 2))] if rank == 0 else [((4, 0), (4, 4))]
        parts = [full[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].clone() * fill for o, n in spans]
        return DTensor.from_local(
            LocalShardsWrapper(parts, [o for o, _ in spans]), mesh, [Shard(0)], run_check=False, shape=(8, 4), stride=(4, 1)
        )

    checkpoint.save(folder, {"t": dtensor(True)})
    target = dtensor(False)
    checkpoint.load(folder, {"t": target})
    for got, expected in zip(target._local_tensor.local_shards(), dtensor(True)._local_tensor.local_shards(), strict=True):
        assert torch.equal(got, expected)
    whole = torch.zeros(8, 4)
    checkpoint.load(folder, {"t": whole})
    assert torch.equal(whole, full)


@pytest.mark.filterwarnings("ignore:Please use DTensor")
@on_ranks(2)
def test_sharded_tensors_and_wrapped_shards_go_anywhere_and_come_back_in_place(tmp_path):
    sharded_job(f"{tmp_path}/sharded")
    if NEWER:  # torch 2.6 makes no DTensor of several parts
        wrapper_job(f"{tmp_path}/wrapper")


@on_ranks(4)
def test_dtensors_of_megatron_fsdp_are_what_their_local_tensors_list(tmp_path):
    """In these, tp cuts before dp, unevenly, and only the local tensor says so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_cp", "tp"))
    mesh._shard_order = [1, 0]
    at_dp, at_tp = mesh.get_coordinate()
    low, rows = 4 * at_tp + 3 * at_dp, 1 if at_dp else 3
    full = position_values((8, 2))

    def dtensor(local: torch.Tensor, *, listed: bool) -> DTensor:
        made = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1))
        if listed:
            chunk = ChunkStorageMetadata(torch.Size((low, 0)), torch.Size((rows, 2)))
            made._local_tensor.__create_chunk_list__ = lambda: [chunk]
        return made

    checkpoint.save(tmp_path / "step", {"w": dtensor(full[low : low + rows].clone(), listed=True)})
    back = torch.zeros(rows, 2)
    checkpoint.load(tmp_path / "step", {"w": dtensor(back, listed=True)})
    assert torch.equal(back, full[low : low + rows])
    assert torch.equal(checkpoint.read(tmp_path / "step")["w"], full)
    with pytest.raises(LayoutError, match="w: Megatron-FSDP cuts it in another order than its placements"):
        checkpoint.save(tmp_path / "other", {"w": dtensor(torch.zeros(2, 2), listed=False)})
