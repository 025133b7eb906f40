"""Experts that DeepSpeed's MoE divides among ranks: its folders, and its engine with this library attached.

What is there is told by the flat tensors of the live optimizer, put together over the ranks that share each.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UnsupportedError
from tests.families.deepspeed import jobs
from tests.families.deepspeed.expert_jobs import CASES, LOCAL, engine_of, live
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make compat-deepspeed")


def save_both(out: str) -> dict[str, Any]:
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    found = {}
    for case in CASES:
        engine = engine_of(case)
        jobs.train(engine, jobs.STEPS)
        engine.save_checkpoint(f"{out}/{case}/stock", client_state=jobs.CLIENT)
        truth = live(engine)
        reshard_deepspeed.attach(engine).save_checkpoint(f"{out}/{case}/ours", client_state=jobs.CLIENT)
        losses = jobs.train(engine, 2, jobs.STEPS)
        reshard_deepspeed.detach(engine)
        found[case] = truth, losses
    return found


def load_all(out: str) -> dict[str, Any]:
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    found = {}
    for case, (stage, _) in CASES.items():
        for kind in ("ours", "stock") if stage else ("ours",):
            engine = reshard_deepspeed.attach(engine_of(case, seed=9))
            engine.load_checkpoint(f"{out}/{case}/{kind}")
            found[f"{case} {kind}"] = live(engine), jobs.train(engine, 2, jobs.STEPS)
            reshard_deepspeed.detach(engine)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("experts")
    return out, run_ranks(save_both, 4, str(out), timeout_s=1800)[0]


def test_saves_and_folders_have_every_expert_under_its_name_in_the_whole_model(saved: tuple[Path, dict[str, Any]]) -> None:
    out, found = saved
    for case, (stage, _) in CASES.items():
        truth = found[case][0]
        assert sum(f"first.{LOCAL}" in name and name.startswith("model.") for name in truth) == 4 * 4
        assert len({value for name, value in truth.items() if name.startswith("model.first") and "up.weight" in name}) == 4
        ours = jobs.digests(out / case / "ours")
        assert {name: ours.get(name) for name in truth} == truth, case
        stock = out / case / "stock"
        if stage:
            assert jobs.digests(stock) == ours, case
            continue
        module = checkpoint.read(stock, ["model"])
        masters = checkpoint.read(out / case / "ours", ["model"])
        for name, tensor in masters.items():
            assert torch.equal(module[name], tensor.to(module[name].dtype)), (case, name)
        with pytest.raises(UnsupportedError, match="by position alone"):
            checkpoint.read(stock, ["optimizer"])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_loads_on_any_number_of_ranks_bit_for_bit(num_ranks: int, saved: tuple[Path, dict[str, Any]]) -> None:
    out, found = saved
    for which, (got, losses) in run_ranks(load_all, num_ranks, str(out), timeout_s=1800)[0].items():
        truth, next_losses = found[which.split()[0]]
        assert got == truth, which
        if num_ranks == 4:
            assert json.dumps(losses) == json.dumps(next_losses), which
