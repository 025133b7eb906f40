"""Folders that DeepSpeed 0.19.8 wrote, opened in place; DeepSpeed itself told what is in them: `make_data`."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import FlatShard, checkpoint
from reshard_ckpt.core.catalog.specs import StateLink
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, UnsupportedError
from tests.damage import Calls
from tests.families.deepspeed.jobs import CLIENT, Net, digest, digests
from tests.warm_python import warm_python

DATA = Path(__file__).parent.parent.parent / "data" / "deepspeed"
DIGESTS: dict[str, dict[str, str]] = json.loads((DATA / "digests.json").read_text())
ZERO = "z1-bf16-plain"

Unpack = Callable[[str], Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Unpack a folder of the committed ones: its root, or a universal folder."""

    def unpacked(case: str) -> Path:
        with tarfile.open(DATA / f"{case}.tar.xz") as archive:
            archive.extractall(tmp_path / case, filter="data")
        return tmp_path / case

    return unpacked


@pytest.mark.parametrize("case", sorted(DIGESTS))
def test_every_tensor_is_what_deepspeed_says(case: str, unpack: Unpack) -> None:
    found = digests(unpack(case))
    assert len(DIGESTS[case]) > 20
    assert {name: found.get(name) for name in DIGESTS[case]} == DIGESTS[case]


@pytest.mark.parametrize("case", sorted(DIGESTS))
def test_every_parameter_has_state_linked_to_it_and_values_are_there(case: str, unpack: Unpack) -> None:
    path = unpack(case)
    catalog = checkpoint.catalog(path)
    trained = {
        name.removeprefix("model.")
        for name in catalog.names
        if f"optimizer.state.{name.removeprefix('model.')}.exp_avg" in catalog
    }
    links = catalog.links()
    for fqn in trained:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert links[f"optimizer.state.{fqn}.{key}"] == StateLink("optimizer", fqn, key, f"model.{fqn}")
    values = checkpoint.read(path, ["deepspeed", "optimizer.param_groups"])
    assert (values["deepspeed.me"], values["deepspeed.who.a"]) == (CLIENT["me"], 1.5)
    assert values["deepspeed.global_steps"] == 3
    assert {fqn for group in values["optimizer.param_groups"] for fqn in group["params"]} == trained
    assert catalog.unreadable == {}


def test_tag_folder_and_root_are_the_same_checkpoint(unpack: Unpack) -> None:
    root = unpack(ZERO)
    tag = (root / "latest").read_text()
    (root / "notes.txt").write_text("other files of the root are ignored")
    assert digests(root) == digests(root / tag)


def test_both_names_of_a_tied_weight_and_buffers_are_read(unpack: Unpack) -> None:
    found = checkpoint.read(unpack("z3-fp32-tied"))
    assert torch.equal(found["model.out.weight"], found["model.emb.weight"])
    assert found["model.scale"].tolist() == [0, 1, 2]
    assert checkpoint.catalog(unpack("z3-fp32-tied")).tensor("model.out.weight").alias_of == "model.emb.weight"
    assert checkpoint.catalog(unpack("p1-bf16-tied")).tensor("model.0.weight").alias_of == "model.tied_modules.emb.weight"


def test_frozen_layers_that_look_like_a_tied_one_are_themselves(unpack: Unpack) -> None:
    root = unpack("p1-bf16-tied")
    whole, folder = digests(root), next(root.glob("*/layer_00-model_states.pt")).parent
    tied = torch.load(folder / "layer_00-model_states.pt")["weight"]
    frozen = {20: (tied.float() + 1).to(tied.dtype), 21: torch.arange(25).reshape(5, 5).to(tied.dtype)}
    for number, weight in frozen.items():
        torch.save({"weight": weight}, folder / f"layer_{number}-model_states.pt")
    found = checkpoint.read(root, [f"model.{number}.weight" for number in frozen])
    for number, weight in frozen.items():
        assert torch.equal(found[f"model.{number}.weight"].view(torch.uint8), weight.view(torch.uint8))
    assert {name: one for name, one in digests(root).items() if name in whole} == whole


def test_frozen_parameters_of_zero_3_are_put_together_from_their_stripes(unpack: Unpack) -> None:
    found = checkpoint.read(unpack("z3-bf16-frozen"))
    other = checkpoint.read(unpack("z2-bf16-frozen"))
    for fqn in ("emb.weight", "a.weight"):
        assert found[f"model.{fqn}"].dtype == torch.bfloat16
        assert torch.equal(found[f"model.{fqn}"], other[f"model.{fqn}"])
        assert f"optimizer.state.{fqn}.exp_avg" not in found


def test_loads_into_a_plain_module_and_optimizer(unpack: Unpack) -> None:
    path = unpack("z2-bf16-frozen")
    net = Net()
    for param in (net.emb.weight, net.a.weight):
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.5)
    checkpoint.load(path, {"model": net, "optimizer": optimizer}, cast=["model.emb.weight", "model.a.weight"])
    for name, param in net.named_parameters():
        if param.requires_grad:
            assert digest(param) == DIGESTS["z2-bf16-frozen"][f"model.{name}"]
            for key, value in optimizer.state[param].items():
                assert digest(value) == DIGESTS["z2-bf16-frozen"][f"optimizer.state.{name}.{key}"]
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_a_run_of_one_parameter_is_read_alone(unpack: Unpack) -> None:
    whole = checkpoint.read(unpack("z3-bf16-subgroups"), ["model.emb.weight"])["model.emb.weight"]
    part = torch.zeros(20)
    report = checkpoint.load(
        unpack("z3-bf16-subgroups"), {"model": {"emb.weight": FlatShard(part, whole.shape, 17)}}, strict=False
    )
    assert torch.equal(part, whole.reshape(-1)[17:37])
    assert report.bytes_read <= 20 * 4


def test_deepspeed_is_not_imported(unpack: Unpack) -> None:
    code = "import sys; from reshard_ckpt import checkpoint; checkpoint.read(sys.argv[1]); print('deepspeed' in sys.modules)"
    found = subprocess.run([warm_python(), "-c", code, str(unpack(ZERO))], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"


@pytest.mark.parametrize("fragments", [{}, {"a.weight": torch.zeros(1, dtype=torch.bfloat16)}])
def test_a_stripe_of_a_frozen_parameter_that_is_missing_or_short_is_damage(unpack: Unpack, fragments: dict[str, Any]) -> None:
    root = unpack("z3-bf16-frozen")
    _rewrite(_model_file(root), lambda state: state["frozen_param_fragments"].update({"a.weight": None, **fragments}))
    with pytest.raises(CorruptError, match="lacks its part of the frozen a.weight; use another copy"):
        checkpoint.catalog(root)


def test_root_of_a_native_checkpoint_opens_by_latest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "step3", {"model": {"w": torch.arange(3.0)}})
    (tmp_path / "latest").write_text("step3")
    (tmp_path / "zero_to_fp32.py").write_text("")
    assert checkpoint.read(tmp_path)["model.w"].tolist() == [0, 1, 2]
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointNotFound):
        checkpoint.read(tmp_path)


def _rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(file, weights_only=False, pickle_module=_Lenient)
    change(state)
    torch.save(state, file)


class _Lenient(pickle.Unpickler):
    """Loads DeepSpeed's files without DeepSpeed: a class that is not there is a plain one."""

    Unpickler: Any
    load = pickle.load  # type: ignore[assignment]


class _Stub(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("deepspeed"):
            return type(name, (), {"__module__": __name__}) if name != "ZeroStageEnum" else int
        return super().find_class(module, name)


_Lenient.Unpickler = _Stub


def _model_file(root: Path) -> Path:
    return next(root.glob("*/*mp_rank_00_model_states.pt"))


def test_foreign_class_in_client_state_makes_that_value_unreadable_and_runs_nothing(unpack: Unpack, tmp_path: Path) -> None:
    root = unpack(ZERO)
    _rewrite(
        _model_file(root),
        lambda state: state.update(
            evil=Calls(os.mkdir, str(tmp_path / "run")),
            numpy=np.float64(3),
            tuples={(1, 2): 3},
            object=argparse.Namespace(rate=0.5),
        ),
    )
    catalog = checkpoint.catalog(root)
    assert set(catalog.unreadable) == {"deepspeed.evil", "deepspeed.object", "deepspeed.tuples"}
    with pytest.raises(UnsupportedError, match=r"deepspeed.evil: .* calls posix.mkdir.*nothing was executed"):
        checkpoint.read(root, ["deepspeed.evil"])
    with pytest.raises(UnsupportedError, match=r"deepspeed.object: .* needs argparse.*nothing was executed"):
        checkpoint.read(root, ["deepspeed.object"])
    assert checkpoint.read(root, ["deepspeed.numpy"]) == {"deepspeed.numpy": np.float64(3)}
    assert digests_of(root) == DIGESTS[ZERO]
    assert not (tmp_path / "run").exists()


def test_sets_of_plain_values_are_read(unpack: Unpack) -> None:
    root = unpack(ZERO)  # releases before 0.19 have the names of sparse tensors in one
    sets = {"sparse_tensor_module_names": {"a", "b"}, "seen": frozenset({1, 2.5, None}), "none": set(), "pairs": {(1, 2)}}
    _rewrite(_model_file(root), lambda state: state.update(sets))
    assert not checkpoint.catalog(root).unreadable
    for key in sets:
        assert checkpoint.read(root, [f"deepspeed.{key}"])[f"deepspeed.{key}"] == sets[key]


def digests_of(root: Path) -> dict[str, str]:
    tensors = checkpoint.read(root, ["model", "optimizer.state"])
    return {name: digest(tensors[name]) for name in DIGESTS[ZERO]}


@pytest.mark.parametrize("key", ["param_shapes", "module", None])
def test_hostile_pickle_is_refused_and_not_run(key: str | None, unpack: Unpack, tmp_path: Path) -> None:
    root, evil = unpack(ZERO), Calls(os.mkdir, str(tmp_path / "run"))
    if key is None:
        torch.save(evil, _model_file(root))
    else:
        _rewrite(_model_file(root), lambda state: state.update({key: evil}))
    with pytest.raises(CheckpointError):
        checkpoint.read(root)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", [ZERO, "z3-bf16-frozen", "p1-bf16-tied"])
def test_missing_and_cut_files_are_named(case: str, unpack: Unpack) -> None:
    root = unpack(case)
    whole, files = digests(root), sorted(root.glob("*/*.pt"))
    for file in files:
        data = file.read_bytes()
        file.unlink()
        if (
            file.name == "layer_00-model_states.pt"
        ):  # its one tensor is in the optimizer's files, under the name of the tied module
            assert digests(root) == {name: one for name, one in whole.items() if name != "model.0.weight"}
        elif file.name == "layer_03-model_states.pt":  # the same of a layer that is not tied
            assert digests(root) == whole
        else:
            with pytest.raises(CorruptError, match="copy"):
                checkpoint.catalog(root)
        for size in (len(data) // 2, len(data) - 1):
            file.write_bytes(data[:size])
            with pytest.raises(CorruptError, match=file.name):
                checkpoint.catalog(root)
        file.write_bytes(data)


def test_files_of_two_saves_are_not_mixed(unpack: Unpack) -> None:
    root = unpack(ZERO)
    parts = sorted(root.glob("*/*optim_states.pt"))
    shutil.copy(parts[1], str(parts[1]).replace("rank_1", "rank_2"))
    with pytest.raises(CorruptError, match="2 data-parallel ranks, and there are files of 3"):
        checkpoint.read(root)
    other = next(unpack("z2-bf16-frozen").glob("*/*rank_1_mp_rank_00_optim_states.pt"))
    parts[1].with_name(parts[1].name.replace("rank_1", "rank_2")).unlink()
    shutil.copy(other, parts[1])
    with pytest.raises(CorruptError, match=r"8 parameters have the paddings"):
        checkpoint.read(root)


@pytest.mark.parametrize(("case", "kind", "count"), [(ZERO, "optim", "step of group 0"), ("t1-bf16-tp", "model", "global_steps")])
def test_files_of_two_steps_are_not_mixed(case: str, kind: str, count: str, unpack: Unpack) -> None:
    root = unpack(case)
    last = max(root.glob(f"*/*{kind}_states.pt"))
    with zipfile.ZipFile(last) as old:
        records = {name: old.read(name) for name in old.namelist()}

    def edited(name: str, data: bytes) -> bytes:
        """Write 2 where the job wrote 3: a tensor of one float, or the number behind its key in the pickle."""
        if kind == "optim":
            return struct.pack("<f", 2) if data == struct.pack("<f", 3) else data
        at = data.find(b"K\x03", data.find(b"global_steps")) if name.endswith("data.pkl") else -1
        return data if at < 0 else data[:at] + b"K\x02" + data[at + 2 :]

    with zipfile.ZipFile(last, "w") as new:
        for name, data in records.items():
            new.writestr(name, edited(name, data))
    with pytest.raises(CorruptError, match=rf"{re.escape(count)} is 3.* and 2.* in .*files of two saves are mixed"):
        checkpoint.catalog(root)


def test_folder_without_its_latest_checkpoint_is_named(unpack: Unpack) -> None:
    root = unpack(ZERO)
    (root / "latest").write_text("global_step9")
    with pytest.raises(CorruptError, match="latest names 'global_step9', where no checkpoint is"):
        checkpoint.read(root)


def test_optimizer_that_nothing_names_is_unreadable_and_the_module_is_not(unpack: Unpack) -> None:
    root = unpack("z0-fp32-tied")
    file = _model_file(root)

    def freeze(state: dict[str, Any]) -> None:  # two parameters of one shape, and one of them without state
        state["module"]["twin"] = torch.zeros_like(state["module"]["a.weight"])

    _rewrite(file, freeze)
    with pytest.raises(UnsupportedError, match="by position alone"):
        checkpoint.read(root, ["optimizer"])
    assert len(checkpoint.read(root, ["model"])) == 10


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "state of no parameter": lambda state: state["optimizer"]["optimizer_state_dict"]["state"].update({99: {}}),
    "state that is text": lambda state: state["optimizer"]["optimizer_state_dict"]["state"].update({0: "text"}),
    "master weights that are a number": lambda state: state["optimizer"].update(fp32_groups=7),
    "ties that are a list": lambda state: state.update(shared_params=["a"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_deepspeed_would_not_write_is_damage(what: str, unpack: Unpack) -> None:
    root = unpack("z0-fp16-groups")
    _rewrite(_model_file(root), WRONG[what])
    with pytest.raises(CorruptError, match="is not as deepspeed writes it .*; use another copy"):
        checkpoint.catalog(root)


def test_old_torch_format_is_named(unpack: Unpack) -> None:
    root = unpack(ZERO)
    data = io.BytesIO()
    torch.save({"module": {}}, data, _use_new_zipfile_serialization=False)
    _model_file(root).write_bytes(data.getvalue())
    with pytest.raises(UnsupportedError, match="old format"):
        checkpoint.read(root)
