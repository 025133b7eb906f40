"""What may be missing or is not looked at, names with and without wrappers, and errors that say some of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.core.planning.match import match
from reshard_ckpt.core.report import nearest
from reshard_ckpt.errors import MismatchError, UsageError
from reshard_ckpt.state import capture
from tests.helpers import position_values
from tests.launch import on_ranks


def lora_like(value: float) -> nn.Module:
    return nn.ModuleDict(
        {"base": nn.Linear(3, 2), "lora_a": nn.Linear(3, 1, bias=False), "lora_b": nn.Linear(1, 2, bias=False)}
    ).apply(lambda m: nn.init.constant_(m.weight, value) if isinstance(m, nn.Linear) else None)


def test_what_may_be_missing_keeps_its_value_and_is_reported(tmp_path: Path):
    model = lora_like(2.0)
    checkpoint.save(tmp_path, {"model": {"base": model["base"]}, "extra": {"step": 3}})
    into, extra = lora_like(5.0), {"step": 0, "note": "mine"}
    with pytest.raises(MismatchError, match=r"allow_missing=\[patterns\]"):
        checkpoint.load(tmp_path, {"model": into, "extra": extra})
    report = checkpoint.load(tmp_path, {"model": into, "extra": extra}, allow_missing=["*.lora_?.*", "extra.note"])
    assert report.problems == ()
    assert report.kept == (
        "model.lora_a.weight: not in the checkpoint",
        "model.lora_b.weight: not in the checkpoint",
        "extra.note: not in the checkpoint",
    )
    assert (into["base"].weight == 2).all()
    assert (into["lora_a"].weight == 5).all()
    assert extra == {"step": 3, "note": "mine"}


def test_a_name_stands_for_all_below_it_in_every_option(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": {"a": torch.ones(3), "b": torch.ones(2)}, "old": {"x": torch.ones(1), "y": 1}})
    into: dict[str, Any] = {
        "model": {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float64), "new": {"c": torch.zeros(1)}},
        "old": {},
    }
    options = {"allow_resize": ["model.a"], "cast": ["model"], "allow_missing": ["model.new"], "ignore": ["old"]}
    checkpoint.load(tmp_path, into, **options)
    assert into["model"]["a"].tolist() == [1, 1, 1, 0]
    assert into["model"]["b"].tolist() == [1, 1]
    assert into["old"] == {}


@pytest.mark.parametrize("first", ["w", ""])
def test_what_shares_memory_with_what_is_found_is_not_missing(tmp_path: Path, first: str):
    checkpoint.save(tmp_path, {first: torch.arange(3.0)})
    memory = torch.zeros(3)
    specs = [tensor.spec for tensor in capture({first: memory, "tied": memory}).tensors]
    found = match(specs, checkpoint.catalog(tmp_path), cast=False, allow_resize=False, tied_under_one_name=True)
    assert (found.specs, found.missing) == ((0,), ())


def test_only_what_is_allowed_may_be_missing(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": nn.Linear(3, 2)})
    with pytest.raises(MismatchError, match=r"model\.lora_a\.weight: not in the checkpoint") as said:
        checkpoint.load(
            tmp_path, {"model": lora_like(1.0)}, allow_missing=["*.lora_b.*", "model.base", "model.lora_c"], ignore=["none"]
        )
    assert "allow_missing=['model.lora_c'] fits no name" in str(said.value)
    assert "ignore=['none'] fits no name" in str(said.value)
    assert len(said.value.problems) == 3  # and two of the saved ones that nothing wants


def test_what_is_saved_loads_though_it_may_be_missing(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": lora_like(2.0)})
    into = lora_like(5.0)
    assert checkpoint.load(tmp_path, {"model": into}, allow_missing=True).kept == ()
    assert (into["lora_a"].weight == 2).all()


def test_another_shape_is_not_missing(tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(MismatchError, match="global shape"):
        checkpoint.load(tmp_path, {"w": torch.ones(4)}, allow_missing=True)


def test_a_parameter_that_the_saved_optimizer_does_not_know_may_be_missing(tmp_path: Path):
    base = nn.ModuleDict({"base": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(base.parameters(), lr=0.5)
    base["base"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"model": base, "optimizer": optimizer})
    model = lora_like(1.0)
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError, match="no saved group holds parameter"):
        checkpoint.load(tmp_path, {"model": model, "optimizer": other}, allow_missing=["model.lora_?"])
    report = checkpoint.load(tmp_path, {"model": model, "optimizer": other}, allow_missing=["*.lora_?.*"])
    assert report.problems == ()
    assert len(report.kept) == 4
    assert other.param_groups[0]["lr"] == 0.5
    assert set(other.state) == set(model["base"].parameters())


@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_ignored_is_not_looked_at_on_either_side(stepped: bool, tmp_path: Path):
    def job(value: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, value)
        optimizer = torch.optim.AdamW(model.parameters(), lr=value)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

    model, optimizer, scheduler = job(0.5)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    extra = {"step": 2, "gone": torch.ones(2), "both": torch.ones(1)}
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": extra})
    model2, optimizer2, scheduler2 = job(0.25)
    if stepped:
        model2(torch.ones(1, 3)).sum().backward()
        optimizer2.step()
    moments = {p: optimizer2.state[p]["exp_avg"].clone() for p in optimizer2.state}
    extra2 = {"step": 0, "here": torch.zeros(1), "both": torch.zeros(1)}
    state = {"model": model2, "optimizer": optimizer2, "scheduler": scheduler2, "extra": extra2}
    report = checkpoint.load(tmp_path, state, ignore=["optimizer", "scheduler", "extra.gone", "extra.here", "*.both"])
    assert report.problems == report.kept == ()
    assert torch.equal(model2.weight, model.weight)
    assert extra2 == {"step": 2, "here": torch.zeros(1), "both": torch.zeros(1)}
    assert optimizer2.param_groups[0]["lr"] == 0.25
    assert set(optimizer2.state) == set(moments)
    assert all(torch.equal(optimizer2.state[p]["exp_avg"], moment) for p, moment in moments.items())
    assert scheduler2.last_epoch == 0


@pytest.mark.parametrize("options", [{"allow_missing": "*.lora"}, {"ignore": "model.*"}, {"ignore": True}])
def test_patterns_are_lists(options: dict[str, Any], tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(UsageError, match="pass a list of patterns"):
        checkpoint.load(tmp_path, {"w": torch.ones(3)}, **options)


@on_ranks(2)
def test_patterns_hold_on_all_ranks(tmp_path: Path):
    """Each rank has another part of the model; both have something that the checkpoint lacks."""
    rank = dist.get_rank()
    checkpoint.save(tmp_path, {"model": {"layer0": torch.ones(2), "layer1": torch.ones(2), "old": torch.ones(1)}})
    mine = {f"layer{rank}": torch.zeros(2), f"lora{rank}": torch.full((1,), 7.0)}
    report = checkpoint.load(tmp_path, {"model": mine}, allow_missing=["model.lora*"], ignore=["model.old"])
    assert report.kept == ("model.lora0: not in the checkpoint", "model.lora1: not in the checkpoint")
    with pytest.raises(MismatchError, match="^model.lora1: not in the checkpoint; load"):
        checkpoint.load(tmp_path, {"model": mine}, allow_missing=["model.lora0"], ignore=["model.old"])
    assert (mine[f"layer{rank}"].tolist(), mine[f"lora{rank}"].tolist()) == ([1, 1], [7])


def test_the_newest_step_takes_the_same_options(tmp_path: Path):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, {"model": {"w": torch.ones(2), "old": torch.ones(1)}})
        state = {"model": {"w": torch.zeros(2), "lora": torch.zeros(1)}}
        loaded = manager.load_latest(state, allow_missing=["*.lora"], ignore=["*.old"])
        assert loaded.report.kept == ("model.lora: not in the checkpoint",)
    assert state["model"]["w"].all()


def test_a_message_has_some_lines_of_each_kind(tmp_path: Path):
    saved = {f"s{i}": torch.ones(1) for i in range(40)}
    checkpoint.save(tmp_path, {"t": {**saved, "shape": torch.ones(2), "dtype": torch.ones(2), "v": 1}})
    wanted = {f"w{i}": torch.ones(1) for i in range(30)}
    state = {**wanted, "shape": torch.ones(3), "dtype": torch.ones(2).double(), "v": 1, "value": 2}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path, {"t": state})
    text = str(caught.value)
    lines = text.splitlines()
    assert len(caught.value.problems) == 73
    assert len(lines) <= 14
    assert lines[0].startswith("73 problems; load with allow_missing=")
    assert lines[0].endswith("or with strict=False to load what fits and leave the rest as it is:")
    for line in (
        "  t.shape: saved with global shape (2,), wanted (3,)",
        "  t.dtype: saved as F32, wanted F64",
        "  t.value: not in the checkpoint",
    ):
        assert line in text
    assert sum(line.endswith(": not in the checkpoint") for line in lines) >= 4
    assert sum(line.endswith("but not in the state passed") for line in lines) >= 3
    assert [line.split()[-1] for line in lines if line.startswith("  … and")] == ["missing", "unexpected"]


def test_a_name_that_is_nearly_there_is_suggested(tmp_path: Path):
    checkpoint.save(
        tmp_path, {"model": {"layers.0.weight": torch.ones(1), "layers.1.weight": torch.ones(1)}, "extra": {"step": 1}}
    )
    state = {"model": {"layers.0.weight": torch.ones(1), "layer.1.weight": torch.ones(1)}, "extra": {"stpe": 1}}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path, state)
    text = str(caught.value)
    assert "model.layer.1.weight: not in the checkpoint (did you mean model.layers.1.weight?)" in text
    assert "extra.stpe: not in the checkpoint (did you mean extra.step?)" in text
    assert "model.layer.1.weight: not in the checkpoint" in caught.value.problems
    with pytest.raises(MismatchError, match=r"model\.layer\.1\.weight.*did you mean model\.layers\.1\.weight"):
        checkpoint.read(tmp_path, ["model.layer.1.weight"])
    with pytest.raises(MismatchError) as caught:
        checkpoint.read(tmp_path, ["model.layers.2.weight"])
    assert "did you mean" not in str(caught.value)  # another layer is not meant


def test_near_names_are_found_among_many():
    names = [f"model.layers.{i}.mlp.experts.{j}.weight" for i in range(100) for j in range(1000)]
    right = names[50_007]
    slips = [right.replace("experts", "expert"), right.replace("layers", "layer"), right.replace("weight", "wieght")]
    slips += [right.removeprefix("model."), right.replace(".mlp", ""), f"net.{right}"]
    others = ["something.else", right.replace("50", "100"), right.replace("mlp", "attention"), right.replace(".mlp.experts", "")]
    assert nearest([*slips, *others], names) == dict.fromkeys(slips, right)


class Plain(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        for i, parameter in enumerate(self.parameters()):
            parameter.data = position_values(parameter.shape, salt=i) * value


class HasModule(nn.Module):
    """A user's own, whose only part is really called ``module``."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.module = Plain(value)


def averaged(model: nn.Module) -> nn.Module:
    out = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        out.update_parameters(model)
    return out


WRAPPERS = {
    "compiled": lambda m: torch.compile(m),
    "data parallel": nn.DataParallel,
    "both": lambda m: nn.DataParallel(torch.compile(m)),
    "the other way": lambda m: torch.compile(nn.DataParallel(m)),
    "averaged": averaged,
    "averaged compiled": lambda m: averaged(torch.compile(m)),
}


def names_of(path: Path) -> list[str]:
    return [name for name in checkpoint.catalog(path).names if not name.endswith("n_averaged")]


@pytest.mark.parametrize(
    "form", [lambda m: m, lambda m: dict(m.state_dict()), lambda m: m.state_dict()], ids=["module", "dict", "ordered"]
)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_leave_no_trace_in_names_of_modules_and_of_dicts(wrap: str, form: Any, tmp_path: Path):
    checkpoint.save(tmp_path / "plain", {"ema": Plain(1.0)})
    checkpoint.save(tmp_path / "wrapped", {"ema": form(WRAPPERS[wrap](Plain(1.0)))})
    assert names_of(tmp_path / "wrapped") == names_of(tmp_path / "plain")
    target = Plain()
    checkpoint.load(tmp_path / "wrapped", {"ema": target}, ignore=["ema.n_averaged"])
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), Plain(1.0).parameters(), strict=True))
    other = WRAPPERS[wrap](Plain())
    checkpoint.load(tmp_path / "wrapped", {"ema": form(other)})
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), Plain(1.0).parameters(), strict=True))
    if "averaged" in wrap:
        assert int(other.n_averaged) == 3


def test_state_dicts_at_the_top_are_stripped_too(tmp_path: Path):
    checkpoint.save(tmp_path, nn.DataParallel(Plain(1.0)).state_dict())
    target = Plain()
    checkpoint.load(tmp_path, target.state_dict())
    assert torch.equal(target.layers[0].weight, Plain(1.0).layers[0].weight)


@pytest.mark.parametrize("saved", ["module", "dict"])
@pytest.mark.parametrize("wanted", ["module", "dict"])
def test_a_users_own_module_of_that_name_loads_whichever_way_it_was_saved(saved: str, wanted: str, tmp_path: Path):
    def form(model: nn.Module, kind: str) -> Any:
        return model if kind == "module" else dict(model.state_dict())

    checkpoint.save(tmp_path, {"model": form(HasModule(1.0), saved)})
    target = HasModule()
    report = checkpoint.load(tmp_path, {"model": form(target, wanted)})
    assert torch.equal(target.module.layers[1].weight, Plain(1.0).layers[1].weight)
    assert len(report.saved_as) == (0 if saved == wanted else 4)


def test_a_name_that_could_mean_two_tensors_is_missing(tmp_path: Path):
    checkpoint.save(tmp_path, {"m": {"module.w": torch.ones(1), "_orig_mod.w": torch.ones(1), "head": torch.ones(1)}})
    assert sorted(checkpoint.catalog(tmp_path).names) == ["m.head", "m.module.w", "m.w"]
    checkpoint.save(tmp_path, {"m": {"a.module.w": torch.ones(1), "module.a.w": torch.ones(1), "x": torch.ones(1)}})
    with pytest.raises(MismatchError, match=r"m\.a\.w: not in the checkpoint"):
        checkpoint.load(tmp_path, {"m": {"a.w": torch.zeros(1)}})


def test_names_that_would_collide_stay(tmp_path: Path):
    checkpoint.save(tmp_path, {"m": {"a._orig_mod.w": torch.ones(1), "a.w": torch.zeros(1), "_orig_mod.b": torch.ones(1)}})
    assert sorted(checkpoint.catalog(tmp_path).names) == ["m.a._orig_mod.w", "m.a.w", "m.b"]


def test_keys_of_dicts_without_tensors_are_left_as_they_are(tmp_path: Path):
    extra = {"config": {"module.lr": 1, "module.steps": [1, 2]}, "names": {"_orig_mod.a": "x"}}
    checkpoint.save(tmp_path, {"extra": extra})
    loaded: dict[str, Any] = {}
    checkpoint.load(tmp_path, {"extra": loaded})
    assert loaded == extra


def test_values_among_wrapped_tensors_go_back_under_their_own_key(tmp_path: Path):
    source = {"module.w": torch.ones(2), "module._extra_state": {"k": 5}, "module.n": 7}
    checkpoint.save(tmp_path, {"m": source})
    assert set(checkpoint.catalog(tmp_path).value_names) == {"m._extra_state.k", "m.n"}
    target = {"module.w": torch.zeros(2), "module._extra_state": {"k": 0}, "module.n": 0}
    checkpoint.load(tmp_path, {"m": target})
    assert target == {"module.w": target["module.w"], "module._extra_state": {"k": 5}, "module.n": 7}
    assert target["module.w"].all()
