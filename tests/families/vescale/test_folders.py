"""Folders of ``vescale.checkpoint`` 0.1: model and optimizer in one catalog, loaded on layouts that veScale itself could not."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CorruptError, UnsupportedError
from reshard_ckpt.families.vescale.open import open_vescale
from reshard_ckpt.storage import open_storage
from tests.damage import Calls
from tests.distributed.net import reference
from tests.families.vescale.writing import MASTER, Sharded, known_as_vescale, split, write_folder
from tests.launch import run_ranks

SHAPES = {"emb.weight": (6, 4), "layers.0.up.weight": (8, 4), "layers.0.up.bias": (8,), "layers.1.down.weight": (4, 8)}
STAGES = [["emb.weight", "layers.0.up.weight", "layers.0.up.bias"], ["layers.1.down.weight", "emb.weight"]]
CUT = {"emb.weight": 0, "layers.0.up.weight": 0, "layers.0.up.bias": 0, "layers.1.down.weight": 1}
KEYS = ("exp_avg", "exp_avg_sq")
GROUP = {"lr": 0.25, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}


def whole(name: str, key: str = "") -> torch.Tensor:
    return reference(name, SHAPES[name], key)


def weights(name: str) -> torch.Tensor:
    """The fp32 master, as no 16-bit weight is."""
    return whole(name) + 2.0**-12


def model_state(dtype: torch.dtype) -> dict[str, Sharded]:
    return {name: split(weights(name).to(dtype), 2, CUT[name]) for name in SHAPES}


def stage_state(stage: int, *, master: bool, groups: list[dict[str, Any]]) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for name in STAGES[stage]:
        state: dict[str, Any] = {"step": torch.tensor(11.0)}
        state |= {key: split(whole(name, key), 2, CUT[name]) for key in KEYS}
        if master:
            state[MASTER] = split(weights(name), 2, CUT[name])
        entries[(0, name)] = state
    return {"param_group_meta": groups, torch.float32 if master else torch.bfloat16: entries}


def write(root: Path, *, master: bool = True, groups: list[dict[str, Any]] | None = None) -> Path:
    """Two stages of tensor parallelism 2, with tied embeddings on both."""
    write_folder(root / "model", model_state(torch.bfloat16 if master else torch.float32))
    for stage in range(2):
        listed = groups or [{**GROUP, "params": [0, 1]}, {**GROUP, "params": [2]}]
        write_folder(root / "optimizer" / f"pp_{stage}", stage_state(stage, master=master, groups=listed))
    return root


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(4, 8)}), nn.ModuleDict({"down": nn.Linear(8, 4, bias=False)})]
        )


def expected() -> dict[str, torch.Tensor]:
    out = {f"model.{name}": weights(name) for name in SHAPES}
    out |= {f"optimizer.state.{name}.{key}": whole(name, key) for name in SHAPES for key in KEYS}
    return out | {f"optimizer.state.{name}.step": torch.tensor(11.0) for name in SHAPES}


@pytest.mark.parametrize("master", [True, False])
def test_a_root_is_one_checkpoint_under_the_names_of_the_model(master: bool, tmp_path: Path) -> None:
    read = checkpoint.read(write(tmp_path / "ckpt", master=master))
    (group,) = read.pop("optimizer.param_groups")
    assert {key: group[key] for key in GROUP} == {**GROUP, "betas": (0.9, 0.95)}
    assert sorted(group["params"]) == sorted(SHAPES)
    for name, tensor in expected().items():
        assert torch.equal(read.pop(name), tensor), name
    rounded = {f"vescale.model.{name}": weights(name).bfloat16() for name in SHAPES} if master else {}
    assert sorted(read) == sorted(rounded)
    assert all(torch.equal(read[name], tensor) for name, tensor in rounded.items())


def test_a_plain_model_and_adamw_load_it_strictly(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    checkpoint.load(write(tmp_path / "ckpt"), {"model": net, "optimizer": optimizer})
    for name, param in net.named_parameters():
        assert torch.equal(param, weights(name))
        assert all(torch.equal(optimizer.state[param][key], whole(name, key)) for key in KEYS)
        assert optimizer.state[param]["step"] == 11
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_names_of_the_calls_keep_weights_and_master_apart(tmp_path: Path) -> None:
    found = open_vescale(open_storage(write(tmp_path / "ckpt")), as_saved=True)
    assert found is not None
    with found.storage:
        assert found.catalog.tensor("model.emb.weight").dtype == "BF16"
        assert found.catalog.tensor(f"optimizer.state.emb.weight.{MASTER}").dtype == "F32"


def load_on_ranks(folder: str) -> list[str]:
    bad = []
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    net = Net()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    checkpoint.load(folder, {"model": net, "optimizer": optimizer})
    for name, param in net.named_parameters():
        held = {f"model.{name}": param, **{f"optimizer.state.{name}.{key}": optimizer.state[param][key] for key in KEYS}}
        bad += [key for key, value in held.items() if not torch.equal(value.full_tensor(), expected()[key])]
    # A pipeline of four stages, where there were two.
    stages = ["emb", "layers.0", "layers.1", None]
    stage = stages[mesh.get_local_rank()]
    net = Net()
    kept = nn.ModuleDict({"emb": net.emb}) if stage == "emb" else nn.Module()
    if stage is not None and stage.startswith("layers."):
        kept.layers = nn.ModuleDict({stage[-1]: net.layers[int(stage[-1])]})
    checkpoint.load(folder, {"model": kept})
    return bad + [name for name, param in kept.named_parameters() if not torch.equal(param, weights(name))]


def test_ranks_under_fsdp2_and_a_longer_pipeline_load_it(tmp_path: Path) -> None:
    assert run_ranks(load_on_ranks, 4, str(write(tmp_path / "ckpt"))) == [[]] * 4


def test_groups_whose_members_nobody_knows_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt", groups=[{**GROUP, "params": [0]}, {**GROUP, "lr": 9.0, "params": [1, 2]}])
    with pytest.raises(UnsupportedError, match=r"the 2 groups of optimizer/pp_0 have different hyperparameters"):
        checkpoint.read(path, ["optimizer.param_groups"])
    assert torch.equal(checkpoint.read(path, ["model.emb.weight"])["model.emb.weight"], weights("emb.weight"))


def test_what_differs_between_stages_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt")
    shutil.rmtree(path / "optimizer" / "pp_1")
    state = stage_state(1, master=True, groups=[{**GROUP, "params": [0]}])
    state[torch.float32][0, "emb.weight"]["exp_avg"].boxes[1][1][0] += 1
    write_folder(path / "optimizer" / "pp_1", state)
    with pytest.raises(UnsupportedError, match=r"optimizer.state.emb.weight.exp_avg differs between"):
        checkpoint.read(path, ["optimizer.state.emb.weight.exp_avg"])
    assert len(checkpoint.read(path, ["optimizer.state.emb.weight.exp_avg_sq"])) == 1


def test_cut_folders_name_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt")
    with pytest.raises(UnsupportedError, match="is one part of a vescale checkpoint; pass the root"):
        checkpoint.catalog(path / "model")
    (path / "optimizer" / "pp_1" / "__1_0.distcp").unlink()
    with pytest.raises(CorruptError, match=r"optimizer/pp_1/__1_0.distcp, which is missing"):
        checkpoint.read(path, ["optimizer.state.layers.1.down.weight.exp_avg"])
    (path / "optimizer" / "pp_1" / ".metadata").unlink()
    with pytest.raises(CorruptError, match=r"optimizer/pp_1 has .distcp files and no .metadata"):
        checkpoint.catalog(path)
    (path / "optimizer" / "pp_0").rename(path / "optimizer" / "pp_2")
    with pytest.raises(CorruptError, match=r"has optimizer/pp_2 and no optimizer/pp_0"):
        checkpoint.catalog(path)


def test_hostile_metadata_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "ckpt")
    marker = "vescale.checkpoint.storage.filesystem"
    (path / "model" / ".metadata").write_bytes(pickle.dumps([marker, Calls(print, "executed")]))
    with pytest.raises(UnsupportedError, match=r"names the global builtins.print"):
        checkpoint.catalog(path)
    good = write(tmp_path / "other") / "optimizer" / "pp_0" / ".metadata"
    data = good.read_bytes()
    for old, new in ((b"__1_0.distcp", b"../../../etc"), (b"(0, 'emb.weight')", b"[0, 'emb.weight']")):
        good.write_bytes(data.replace(old, new))
        with pytest.raises(CheckpointError):
            checkpoint.read(tmp_path / "other")
    for cut in range(0, len(data), 97):
        good.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            checkpoint.read(tmp_path / "other")
    assert "executed" not in capsys.readouterr().out


def test_the_writer_of_these_tests_writes_what_veScale_can_unpickle(tmp_path: Path) -> None:
    data = (write(tmp_path / "ckpt") / "model" / ".metadata").read_bytes()
    with known_as_vescale():
        metadata = pickle.loads(data)
    assert {type(info).__module__ for info in metadata.storage_data.values()} == {"vescale.checkpoint.storage.filesystem"}
