"""Folders in which each rank has files of its own, with DTensors in them, as verl's checkpoint manager writes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, UnsupportedError
from tests.distributed.test_fsdp1 import CPU, Net, adamw, differences, train
from tests.helpers import NEWER
from tests.launch import run_ranks


def made(what: str) -> torch.nn.Module:
    net = Net(0)
    if what == "fsdp1":
        return FullyShardedDataParallel(net, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)), device_id=CPU)
    sizes = (2, 2) if what == "tp" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    for block in net.blocks:
        if what == "tp":
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return net


def write(folder: str, what: str) -> None:
    """Save as verl does, and with this library, to compare."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = made(what)
    groups = [{"params": net.scale}, {"params": net.embed.parameters()}, *({"params": b.parameters()} for b in net.blocks[::-1])]
    optimizer = torch.optim.AdamW(groups) if what == "groups" else adamw(net)
    if what == "fsdp1":
        train(net, optimizer, 2)
        FullyShardedDataParallel.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
    else:  # a forward with tensor parallelism wants even sizes
        for param in net.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
        checkpoint.save(Path(folder, "own"), {"model": net, "optimizer": optimizer})
    extra = {
        "lr_scheduler": {"last_epoch": 2},
        "rng": {"cpu": torch.full((5,), rank, dtype=torch.uint8), "random": (3, (1, rank))},
    }
    found = {"model": net.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
    Path(folder, "verl").mkdir(exist_ok=True)
    for stem, state in found.items():
        torch.save(state, Path(folder, "verl", f"{stem}_world_size_{size}_rank_{rank}.pt"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not NEWER:
        pytest.skip("fully_shard of torch 2.6 cuts tensor parallel modules evenly alone, and runs no forward on the CPU")
    found = {}
    for what, num in (("tp", 4), ("uneven", 3), ("fsdp1", 2), ("groups", 2)):
        found[what] = tmp_path_factory.mktemp(what)
        run_ranks(write, num, str(found[what]), what, timeout_s=60)
    return found


@pytest.mark.parametrize("what", ["tp", "uneven"])
def test_all_files_together_are_one_checkpoint(what: str, folders: dict[str, Path]) -> None:
    expected, read = checkpoint.read(folders[what] / "own"), checkpoint.read(folders[what] / "verl")
    extra = {name: read.pop(name) for name in list(read) if name.startswith("extra_state")}
    tied = {name: value for name, value in expected.items() if "state.head.weight." in name}
    groups = expected.pop("optimizer.param_groups"), read.pop("optimizer.param_groups")
    assert [{**g, "params": set(g["params"]) - {"head.weight"}} for g in groups[0]] == [
        {**g, "params": set(g["params"])} for g in groups[1]
    ]
    assert differences({name: value for name, value in expected.items() if name not in tied}, read, what) == []
    assert extra["extra_state.lr_scheduler.last_epoch"] == 2
    assert extra["extra_state_of_rank.1.rng.cpu"].tolist() == [1] * 5
    assert extra["extra_state_of_rank.2.rng.random"] == (3, (1, 2))


def test_it_loads_into_a_model_and_a_new_optimizer(folders: dict[str, Path]) -> None:
    net, other = Net(5), Net(6)
    optimizer, another = adamw(net), adamw(other)
    checkpoint.load(folders["tp"] / "verl", {"model": net, "optimizer": optimizer}, allow_missing=["optimizer.state.head.weight"])
    checkpoint.load(folders["tp"] / "own", {"model": other, "optimizer": another})
    train(net, optimizer, 2)
    train(other, another, 2)
    assert differences(dict(net.state_dict()), dict(other.state_dict()), "loaded") == []


def test_the_model_of_fsdp1_loads_and_its_flat_optimizer_is_refused(folders: dict[str, Path]) -> None:
    net, path = Net(5), folders["fsdp1"] / "verl"
    checkpoint.load(path, {"model": net})
    plain = Net(0)
    train(plain, adamw(plain), 2)
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()))
    with pytest.raises(CheckpointError, match=r"flat parameters of FSDP1"):
        checkpoint.load(path, {"model": net, "optimizer": adamw(net)})


def test_an_optimizer_of_several_groups_is_refused_where_shapes_do_not_tell_its_parameters(folders: dict[str, Path]) -> None:
    """Its groups list the blocks backwards, and the blocks have equal shapes: each got the state of the other."""
    net, path = Net(5), folders["groups"] / "verl"
    checkpoint.load(path, {"model": net})
    with pytest.raises(CheckpointError, match=r"numbers the parameters of the optimizer, and the model's files do not show"):
        checkpoint.load(path, {"model": net, "optimizer": adamw(net)})


def test_one_file_of_a_rank_says_that_the_folder_is_the_checkpoint(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"holds DTensors.*one rank's part.*pass the folder"):
        checkpoint.catalog(folders["tp"] / "verl" / "model_world_size_4_rank_0.pt")


def test_the_root_of_verl_is_not_taken_for_that_of_megatron(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["tp"] / "verl", tmp_path / "global_step_100" / "actor")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointNotFound, match=r"no committed checkpoint: \d+ files \(global_step_100/actor/") as said:
        checkpoint.catalog(tmp_path)
    assert "iter_0000100" not in str(said.value)


def step_on(folder: Path) -> None:
    """Let the optimizer of one rank be of a later step than that of the others."""
    path = folder / "optim_world_size_4_rank_2.pt"
    optimizer = torch.load(path, weights_only=False)
    for entry in optimizer["state"].values():
        entry["step"] += 1
    torch.save(optimizer, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (step_on, r"step of .* is 1\.0 in optim_.* and 2\.0 in optim_world_size_4_rank_2.pt, so files of two saves are mixed"),
        (lambda folder: (folder / "optim_world_size_4_rank_2.pt").unlink(), r"optim_\* has no file of rank 2"),
        (
            lambda folder: shutil.copy(folder / "model_world_size_4_rank_2.pt", folder / "model_world_size_4_rank_4.pt"),
            r"model_world_size_4_rank_4.pt is of no job of 4 ranks",
        ),
        (
            lambda folder: [shutil.copy(one, folder / f"model_ema{one.name[5:]}") for one in folder.glob("model_world*")],
            r"model_\* and model_ema_\* are two models; move one of them to another folder",
        ),
        (
            lambda folder: shutil.copy(folder / "model_world_size_4_rank_0.pt", folder / "model_world_size_2_rank_0.pt"),
            r"files of 2 and of 4",
        ),
        (
            lambda folder: [one.rename(folder / one.name.replace("size_4", "size_8")) for one in folder.glob("optim_*")],
            r"files of 4 and of 8 ranks, so of several saves",
        ),
        (
            lambda folder: shutil.copy(folder / "model_world_size_4_rank_1.pt", folder / "model_world_size_4_rank_1.pth"),
            r"model_world_size_4_rank_1.pt and model_world_size_4_rank_1.pth are of one rank",
        ),
    ],
)
def test_incomplete_and_mixed_folders_are_refused(change: Any, message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["tp"] / "verl", tmp_path / "verl")
    change(tmp_path / "verl")
    with pytest.raises(CorruptError, match=message):
        checkpoint.catalog(tmp_path / "verl")


def test_plain_tensors_that_differ_between_ranks_may_be_parts_and_are_refused(tmp_path: Path) -> None:
    """As a program with tensor parallelism of its own saves them, without a word about where they lie."""
    for rank in range(2):
        large = torch.zeros(100_000)
        large[50_000] = rank
        state = {"w": torch.full((4,), float(rank)), "large": large, "norm": torch.ones(3), "config": {"rank": rank}}
        ends = torch.tensor([1.0, 1.0, rank])
        state |= {"front": ends[:2], "end": ends[2:], "shape": torch.ones(2 + rank), "empty": torch.ones(0)}
        torch.save(state, tmp_path / f"model_rank_{rank}.pt")
    for name in ("norm", "front", "empty"):
        assert checkpoint.read(tmp_path, [f"model.{name}"])[f"model.{name}"].eq(1).all()
    for name in ("w", "large", "config.rank", "end", "shape"):
        with pytest.raises(UnsupportedError, match=rf"model_rank_1.pt: model.{name} differs from that of the ranks before"):
            checkpoint.read(tmp_path, [f"model.{name}"])
    assert checkpoint.read(tmp_path / "model_rank_1.pt")["w"].tolist() == [1] * 4


def test_a_plain_tensor_beside_dtensors_has_one_shape_on_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["tp"] / "verl", tmp_path / "verl")
    for rank in range(4):
        path = tmp_path / "verl" / f"model_world_size_4_rank_{rank}.pt"
        torch.save({**torch.load(path, weights_only=False), "seen": torch.zeros(1 + rank // 3)}, path)
    with pytest.raises(CorruptError, match=r"model.seen is F32 of shape \(1,\) in one file and F32 of shape \(2,\)"):
        checkpoint.catalog(tmp_path / "verl")


def test_replicas_that_differ_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """As files of two saves leave them: the optimizer of the later one was not written yet."""
    shutil.copytree(folders["tp"] / "verl", tmp_path / "verl")
    path = tmp_path / "verl" / "model_world_size_4_rank_1.pt"
    model = torch.load(path, weights_only=False)
    replicated = [name for name, tensor in model.items() if name.endswith("down.bias")]
    for tensor in model.values():
        getattr(tensor, "_local_tensor", tensor).add_(1)
    torch.save(model, path)
    for name in replicated:
        with pytest.raises(CorruptError, match=rf"{name} differs between .*rank_0.pt and .*rank_1.pt, which hold"):
            checkpoint.read(tmp_path / "verl", [f"model.{name}"])
    assert replicated
    assert any("differs between" in problem for problem in checkpoint.verify(tmp_path / "verl").problems)
