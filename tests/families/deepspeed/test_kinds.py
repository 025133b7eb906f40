"""Kinds of engines that are not in every release or on every machine: offload to the CPU; and those that are refused by name."""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UnsupportedError
from tests.families.deepspeed import jobs
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make compat-deepspeed")

OFFLOADED = {"device": "cpu"}


def offloading_engine(stage: int, seed: int = 0, *, offload: bool = True) -> Any:
    """An engine whose master weights and optimizer state are on the host, where torch's AdamW steps."""
    deepspeed = jobs.import_deepspeed()
    torch.manual_seed(seed)
    model = jobs.Net()
    wanted = jobs.config(stage, "bf16", zero={"offload_optimizer": OFFLOADED} if offload else {})
    wanted |= {"zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=wanted)[0]


def offload(out: str) -> dict[str, Any]:
    """Save engines that offload, at the same moment by DeepSpeed; load into those that do not, and the other way."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        engine = offloading_engine(stage)
        jobs.train(engine, jobs.STEPS)
        engine.save_checkpoint(f"{out}/{stage}/stock")
        reshard_deepspeed.attach(engine).save_checkpoint(f"{out}/{stage}/ours")
        losses = jobs.train(engine, 2, jobs.STEPS)
        reshard_deepspeed.detach(engine)
        again = reshard_deepspeed.attach(offloading_engine(stage, 9))
        again.load_checkpoint(f"{out}/{stage}/ours")
        found[f"{stage} again"] = losses, jobs.train(again, 2, jobs.STEPS)
        other = reshard_deepspeed.attach(offloading_engine(4 - stage, 9, offload=stage == 2))
        other.load_checkpoint(f"{out}/{stage}/stock")
        reshard_deepspeed.detach(other)
        other.save_checkpoint(f"{out}/{stage}/other")
        truth = jobs.converted(f"{out}/{stage}/stock", f"{out}/{stage}/universal") if dist.get_rank() == 0 else {}
        found[f"{stage} truth"] = truth
        dist.barrier()
    return found


def test_engines_that_offload_to_the_cpu(tmp_path: Path) -> None:
    found = run_ranks(offload, 2, str(tmp_path), timeout_s=1800)[0]
    for stage in (1, 2, 3):
        truth = found[f"{stage} truth"]
        assert "optimizer.state.emb.weight.exp_avg" in truth
        for kind in ("ours", "stock", "other"):
            got = jobs.digests(tmp_path / str(stage) / kind)
            assert {name: got.get(name) for name in truth} == truth, (stage, kind)
        losses, again = found[f"{stage} again"]
        assert again == losses, stage


def muon_engine(stage: int, seed: int = 0, *, offload: bool = False) -> Any:
    """An engine with DeepSpeed's Muon for the matrices and its Adam for the rest, neither of which is compiled."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    deepspeed = jobs.import_deepspeed()
    deepspeed.DeepSpeedEngine.get_optimizer_configuration = lambda *_, **__: (None, {})
    torch.manual_seed(seed)
    model = jobs.Net()
    for param in model.parameters():
        param.use_muon = param.ndim == 2
    wanted = jobs.config(
        stage, "bf16", zero={"reduce_scatter": stage < 3, **({"offload_optimizer": OFFLOADED} if offload else {})}
    )
    wanted["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=wanted)[0]


def muon(out: str) -> dict[str, Any]:
    """Train while a save that has not copied anything yet is under way; load it, train again, and return all losses."""
    from reshard_ckpt.engine.saving.staging import Staging
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed
    from reshard_ckpt.families.deepspeed.engine import _Running
    from reshard_ckpt.families.deepspeed.engine_state import EngineState

    step, fill, hold = threading.Event(), Staging.fill, _Running.hold

    def late(staging: Any, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            step.wait()
        return fill(staging, *arguments, **options)

    def held(running: Any, register: Any) -> None:
        register(lambda *_: step.set())
        hold(running, register)

    Staging.fill, _Running.hold = late, held  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for stage, offload in ((1, False), (2, False), (2, True), (3, False), (3, True)):
        engine = reshard_deepspeed.attach(muon_engine(stage, offload=offload))
        jobs.train(engine, jobs.STEPS)
        state = EngineState(engine).tensors(with_state=True)[1]
        live = {
            f"optimizer.state.{fqn}.{key}": part.tensor.clone()
            for fqn in state
            for key, part in state[fqn].items()
            if key != "step"
        }
        step.clear()
        engine.save_checkpoint(f"{out}/{stage}{offload}")
        losses = jobs.train(engine, 2, jobs.STEPS)
        step.set()
        engine.destroy()
        saved = checkpoint.read(f"{out}/{stage}{offload}", [*live])
        again = reshard_deepspeed.attach(muon_engine(stage, 9, offload=offload))
        again.load_checkpoint(f"{out}/{stage}{offload}")
        found[f"ZeRO-{stage}{' offloaded' * offload}"] = {
            "wrong": [name for name in live if not saved[name].reshape(-1).equal(live[name].reshape(-1))],
            "with momentum": sum(name.endswith("momentum_buffer") for name in live),
            "losses": (losses, jobs.train(again, 2, jobs.STEPS)),
        }
    return found


@pytest.mark.skipif(jobs.RELEASE < (0, 19), reason="Muon is in this release or not, with other options")
def test_the_momentum_of_muon_is_that_of_the_save_while_training_goes_on(tmp_path: Path) -> None:
    for kind, found in run_ranks(muon, 1, str(tmp_path), timeout_s=900)[0].items():
        assert (found["wrong"], found["with momentum"]) == ([], 4), kind
        assert found["losses"][0] == found["losses"][1], kind


class TwoModelRanks:
    """What Megatron-style model parallelism tells DeepSpeed: both ranks divide the model, and none the data."""

    def __init__(self) -> None:
        self._alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        self._both = dist.new_group([0, 1])

    def get_model_parallel_group(self) -> Any:
        return self._both

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return 2

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self._alone

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1


def refused(out: str) -> dict[str, tuple[str, str]]:
    """Attach to engines that cannot be saved; return what a save and a load of each says."""
    deepspeed = jobs.import_deepspeed()
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    def said(engine: Any) -> tuple[str, str]:
        reshard_deepspeed.attach(engine)
        texts = []
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            try:
                call(f"{out}/none")
                texts.append("nothing")
            except UnsupportedError as error:
                texts.append(str(error))
        reshard_deepspeed.detach(engine)
        return texts[0], texts[1]

    found = {}
    engine = jobs.engine_of("z1-bf16-plain")
    engine.zero_nvme_offload_optimizer = lambda: True  # the operators that this needs are not built here
    found["offloads to NVMe"] = said(engine)
    engine = jobs.engine_of("z1-bf16-plain")
    engine.zenflow = True
    found["ZenFlow"] = said(engine)
    engine = jobs.engine_of("z3-bf16-plain")
    engine.super_offload = lambda: True  # it needs CUDA
    found["SuperOffload"] = said(engine)
    model = nn.Linear(3, 3)
    params = list(model.parameters())
    wanted = jobs.config(0, "fp32")
    found["2 model-parallel ranks of its own mpu"] = said(
        deepspeed.initialize(model=model, model_parameters=params, config=wanted, mpu=TwoModelRanks())[0]
    )
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    layers = [LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3)]
    pipe = PipelineModule(layers=layers, topology=topology, loss_fn=jobs.cross_entropy)
    found["each layer among 2 tensor-parallel ranks"] = said(
        deepspeed.initialize(model=pipe, model_parameters=list(pipe.parameters()), config=jobs.config(0, "fp32"))[0]
    )
    return found


def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, str(tmp_path), timeout_s=900):
        assert len(found) == 5
        for name, texts in found.items():
            assert all(name in text for text in texts), (name, texts)
    assert not list(tmp_path.glob("none/*/*"))
    assert not (tmp_path / "none" / "latest").exists()
