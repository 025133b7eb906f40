"""Folders that the real package wrote (`tests/data/bytecheckpoint`): bit for bit what its own `load` gave, on any layout."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, MismatchError, UnsupportedError
from tests.damage import Calls
from tests.launch import on_ranks

DATA = Path(os.environ.get("BYTECHECKPOINT_FOLDERS") or Path(__file__).resolve().parents[2] / "data" / "bytecheckpoint").resolve()
FLAVOURS = ["fsdp", "fsdp-flat", "fsdp2", "ddp"]
PARAMETERS = ["up.weight", "up.bias", "down.0.weight"]


class Net(nn.Module):
    """As `make.py` has it, with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Sequential(nn.Linear(5, 2, bias=False))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def expected(flavour: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / flavour / "expected.safetensors")


def rename(flavour: str) -> dict[str, str]:
    """DDP saves ``optimizer.state_dict()``, which knows parameters by number alone."""
    numbered = {f"optimizer.state.{i}": f"optimizer.state.{name}" for i, name in enumerate(PARAMETERS)}
    return numbered if flavour == "ddp" else {}


def same(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    tensors = {name: torch.as_tensor(value) for name, value in found.items() if name.startswith(("model.", "optimizer.state."))}
    assert sorted(tensors) == sorted(wanted)
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_is_read_is_what_the_package_itself_loads(flavour: str) -> None:
    read = checkpoint.read(DATA / flavour / "global_step_5")
    named = {new: old for old, new in rename(flavour).items()}
    wanted = {}
    for name, tensor in expected(flavour).items():
        parameter, _, key = name.rpartition(".")
        wanted[f"{named[parameter]}.{key}" if parameter in named else name] = tensor
    same(read, wanted)
    assert (read["extra_state.step"], read["extra_state.lr.last"]) == (7, [0.5, None])
    for rank in range(2):
        assert read[f"extra_state_of_rank.{rank}.rank"] == rank
        assert read[f"extra_state_of_rank.{rank}.rng"].tolist() == [rank + i for i in range(4)]
    (group,) = read["optimizer.param_groups"]
    assert (group["lr"], len(group["params"])) == (0.1, 3)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_plain_model_and_optimizer_load_it_strictly(flavour: str) -> None:
    net, extra = Net(), {"step": 0, "lr": {"last": None}}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.7)
    checkpoint.load(
        DATA / flavour, {"model": net, "optimizer": optimizer, "extra_state": extra}, rename=rename(flavour)
    )  # the root, at its latest step
    wanted = expected(flavour)
    assert all(torch.equal(tensor, wanted[f"model.{name}"]) for name, tensor in net.state_dict().items())
    for name, param in net.named_parameters():
        assert all(
            torch.equal(optimizer.state[param][key], wanted[f"optimizer.state.{name}.{key}"]) for key in ("exp_avg", "step")
        )
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert extra == {"step": 7, "lr": {"last": [0.5, None]}}


def test_what_differs_between_ranks_is_asked_for_by_rank() -> None:
    with pytest.raises(MismatchError, match=r"rank, rng of extra_state differ between ranks; ask for .*extra_state_of_rank"):
        checkpoint.load(DATA / "fsdp2", {"extra_state": {"step": 0, "lr": {"last": 0}, "rank": 5}})
    own = {"1": {"rank": 0, "rng": torch.zeros(4, dtype=torch.uint8)}, "0": {"rank": 9, "rng": torch.zeros(4, dtype=torch.uint8)}}
    checkpoint.load(DATA / "fsdp2", {"extra_state_of_rank": own})
    assert (own["1"]["rank"], own["1"]["rng"].tolist()) == (1, [1, 2, 3, 4])


@pytest.mark.slow
@on_ranks(3)
def test_ranks_under_fsdp2_load_every_flavour() -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    for flavour in FLAVOURS:
        net = Net()
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters())
        checkpoint.load(DATA / flavour, {"model": net, "optimizer": optimizer}, rename=rename(flavour))
        wanted = expected(flavour)
        for name, param in net.named_parameters():
            held = {f"model.{name}": param, f"optimizer.state.{name}.exp_avg_sq": optimizer.state[param]["exp_avg_sq"]}
            assert all(torch.equal(value.full_tensor(), wanted[key]) for key, value in held.items()), (flavour, name)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "fsdp2" / "global_step_5", tmp_path / "ckpt"))


def change(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_a_cut_folder_names_what_is_missing(copied: Path) -> None:
    with pytest.raises(UnsupportedError, match="is one part of a bytecheckpoint checkpoint; pass the root"):
        checkpoint.catalog(copied / "model")
    data = copied / "model" / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(CorruptError, match=r"should be in bytes .* of model/__1_0.distcp, which has 48 bytes"):
        checkpoint.read(copied, ["model.down.0.weight"])
    data.unlink()
    with pytest.raises(CorruptError, match=r"model/__1_0.distcp, which is missing"):
        checkpoint.read(copied, ["model.up.bias"])
    (copied / "extra_state" / "extra_state_rank_0.pt").unlink()
    with pytest.raises(CorruptError, match="has extra_state of rank 1 and none of rank 0"):
        checkpoint.read(copied, ["extra_state"])
    (copied / "optimizer" / ".metadata").unlink()
    with pytest.raises(CorruptError, match=r"optimizer has .distcp files and no .metadata"):
        checkpoint.catalog(copied)
    shutil.rmtree(copied / "model")
    with pytest.raises(CheckpointNotFound) as said:
        checkpoint.catalog(copied)
    assert any("a folder of ByteCheckpoint, which has model/.metadata" in line for line in said.value.looked_for)


def test_a_file_that_is_longer_than_its_metadata_say_is_of_another_save(copied: Path) -> None:
    """ByteCheckpoint writes cached metadata again, also if the values in front of a file's tensors have grown since."""
    data = copied / "optimizer" / "__0_0.distcp"
    data.write_bytes(b"grown" + data.read_bytes())
    with pytest.raises(CorruptError, match=r"optimizer/__0_0.distcp has \d+ bytes, and its metadata describe \d+: they are of"):
        checkpoint.catalog(copied)


def test_metadata_with_overlapping_parts_of_a_file_are_refused(copied: Path) -> None:
    """The bytes of tensors have no head, so a wrong place would be read without a word."""
    change(copied / "model" / ".metadata", b"__1_0.distcp", b"__0_0.distcp")
    with pytest.raises(CorruptError, match=r"byte \d+ of model/__0_0.distcp is of two entries"):
        checkpoint.catalog(copied)


def test_a_folder_whose_metadata_another_save_began_to_replace_is_refused(copied: Path) -> None:
    shutil.copy(copied / "model" / ".metadata", copied / "model" / ".metadata.tmp")
    with pytest.raises(CorruptError, match=r"has model/.metadata.tmp, so a later save there replaced files and did not end"):
        checkpoint.catalog(copied)


def test_a_root_whose_latest_step_is_lost_says_so(tmp_path: Path) -> None:
    root = Path(shutil.copytree(DATA / "fsdp2", tmp_path / "root"))
    (root / "latest_checkpointed_iteration.txt").write_text("6")
    with pytest.raises(CorruptError, match=r"latest_checkpointed_iteration.txt names global_step_6, .*below: global_step_5"):
        checkpoint.catalog(root)


def test_hostile_metadata_and_extra_state_run_nothing(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = copied / "extra_state" / "extra_state_rank_1.pt"
    torch.save({"step": Calls(print, "executed")}, extra)
    with pytest.raises(UnsupportedError, match=r"calls __builtin__.print, .* nothing was executed"):
        checkpoint.read(copied, ["extra_state"])
    extra.write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(CorruptError, match=r"extra_state_rank_1.pt: is not a whole zip, as torch.save writes it"):
        checkpoint.read(copied, ["extra_state"])
    marker = b"bytecheckpoint.checkpointer.meta_type"
    (copied / "model" / ".metadata").write_bytes(pickle.dumps([marker, Calls(print, "executed")]))
    with pytest.raises(UnsupportedError, match=r"names the global builtins.print"):
        checkpoint.catalog(copied)
    (copied / "model" / ".metadata").write_bytes(marker)
    with pytest.raises(CorruptError, match=r"model/.metadata: not a pickle of the expected kind"):
        checkpoint.catalog(copied)
    assert "executed" not in capsys.readouterr().out


def test_a_tensor_of_extra_state_beyond_its_storage_is_refused(copied: Path) -> None:
    for rank in range(2):
        path = copied / "extra_state" / f"extra_state_rank_{rank}.pt"
        torch.save({"rng": torch.arange(64, dtype=torch.uint8)}, path)
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data[:8] if name.endswith("/data/0") else data)
    with pytest.raises(CorruptError, match=r"a tensor of shape \(64,\) reaches beyond its 8 bytes"):
        checkpoint.read(copied, ["extra_state"])


def test_extra_state_that_grows_when_it_is_read_is_refused(copied: Path) -> None:
    many: Any = [0]
    for _ in range(60):
        many = [many, many]
    for state in ({"x": many}, {"x": torch.zeros(1).expand(1 << 40)}):
        for rank in range(2):
            torch.save(state, copied / "extra_state" / f"extra_state_rank_{rank}.pt", pickle_protocol=4)
        with pytest.raises(CorruptError, match=r"more often than its \d+ bytes can spell|reaches beyond its 4 bytes"):
            checkpoint.read(copied, ["extra_state"])


def test_a_file_outside_of_the_folder_is_refused(copied: Path) -> None:
    change(copied / "model" / ".metadata", b"__1_0.distcp", b"../../../etc")
    with pytest.raises(CorruptError):
        checkpoint.read(copied, ["model.up.weight"])


def test_notes_on_flat_parameters_that_contradict_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "fsdp-flat" / "global_step_5", tmp_path / "ckpt"))
    change(folder / "model" / ".metadata", b"up.bias", b"up.b\xc3\xa9s")
    read = checkpoint.read(folder, ["model.*"])
    assert sorted(read) == ["model.down.0.weight", "model.seen", "model.up.b\xe9s", "model.up.weight"]
    change(folder / "model" / ".metadata", b"fsdp_shapes", b"fsdp_shapez")
    with pytest.raises(CorruptError, match="its notes on flat parameters contradict each other"):
        checkpoint.catalog(folder)
