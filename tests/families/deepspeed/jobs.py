"""Small jobs of DeepSpeed on the CPU: what is built, trained and saved on every rank, and what its own converters make of it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint

CLIENT = {"me": [1, 2], "who": {"a": 1.5}}
STEPS = 3


def _release() -> tuple[int, ...]:
    try:
        return tuple(map(int, importlib.metadata.version("deepspeed").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return (0, 19)


RELEASE = _release()
"""The first two numbers of the version of DeepSpeed that is installed; of the newest, where none is."""


def import_deepspeed() -> Any:
    """Import DeepSpeed for the CPU: without compiling its operator for shared memory, and with fp16, which the CPU has."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *_: None  # type: ignore[attr-defined]
    type(get_accelerator()).is_fp16_supported = lambda self: True
    _step_without_grad(deepspeed)
    logging.disable(logging.WARNING)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


def _step_without_grad(deepspeed: Any) -> None:
    """Let a release before 0.19 run on torch 2.13: it gathers into views of parameters, which that refuses where grad is on."""
    engine = deepspeed.DeepSpeedEngine
    if RELEASE < (0, 19) and not hasattr(engine, "_stock_model_step"):
        engine._stock_model_step = engine._take_model_step
        engine._take_model_step = torch.no_grad()(engine._stock_model_step)


class Net(nn.Module):
    """A model whose tensors have odd sizes, so that no partition is even."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.a = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.b = nn.Linear(7, 5)
        self.out = nn.Linear(5, 11, bias=False)
        self.register_buffer("scale", torch.arange(3, dtype=torch.float32))
        if tied:
            self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.b(torch.relu(self.norm(self.a(self.emb(x)))))
        return nn.functional.cross_entropy(self.out(hidden).float(), y)


class Block(nn.Module):
    """A layer of the model that is divided among tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(6, 10)
        self.down_proj = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.gate_up_proj = nn.Linear(6, 12, bias=False)
        self.o_proj = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return x + self.o_proj(torch.relu(gate) * up)


class TensorParallelNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(6, 11, bias=False)
        self.register_buffer("scale", torch.arange(3, dtype=torch.float32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.out(hidden).float(), y)


class PipeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.arange(3, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


def head(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, module.weight)


def cross_entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.float(), y)


def config(
    stage: int, dtype: str, *, zero: Mapping[str, Any] | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config of an engine, with a scheduler."""
    partition = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, **partition, **(zero or {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if dtype == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 4}
    return found | dict(extra or {})


def _dense_cases() -> dict[str, tuple[int, str, dict[str, Any]]]:
    cases: dict[str, tuple[int, str, dict[str, Any]]] = {}
    for stage in (0, 1, 2, 3):
        for dtype in ("bf16", "fp16", "fp32"):
            cases[f"z{stage}-{dtype}-plain"] = stage, dtype, {}
            cases[f"z{stage}-{dtype}-groups"] = stage, dtype, {"groups": True}
            cases[f"z{stage}-{dtype}-tied"] = stage, dtype, {"tied": True}
            if (stage, dtype) != (0, "fp32"):  # torch's own optimizer: shapes alone do not tell frozen parameters
                cases[f"z{stage}-{dtype}-frozen"] = stage, dtype, {"frozen": True}
    for stage in (1, 2):
        for dtype in ("bf16", "fp32"):
            if RELEASE >= (0, 18):  # those before cannot save one of torch's AdamW, whose step is a tensor
                cases[f"z{stage}-{dtype}-elastic"] = stage, dtype, {"zero": {"elastic_checkpoint": True}}
            if RELEASE >= (0, 19):
                cases[f"z{stage}-{dtype}-aligned"] = stage, dtype, {"zero": {"parameter_alignment": True}, "groups": True}
            cases[f"z{stage}-{dtype}-robin"] = stage, dtype, {"zero": {"round_robin_gradients": True}, "groups": True}
        cases[f"z{stage}-bf16-bf16grad"] = stage, "bf16", {"extra": {"data_types": {"grad_accum_dtype": "bf16"}}}
    for dtype in ("bf16", "fp32"):
        cases[f"z3-{dtype}-subgroups"] = 3, dtype, {"zero": {"sub_group_size": 20}, "groups": True}
    return cases


CASES = _dense_cases()
"""Engines without model parallelism. ZeRO-1 in bf16 with gradients in fp32 is BF16_Optimizer."""

PIPES = {
    f"p{stage}-{dtype}-{kind}": (stage, dtype, kind)
    for stage in (0, 1)
    for dtype in ("bf16", "fp16", "fp32")
    for kind in ("plain", "tied")
}
PARALLEL = {f"t{stage}-{dtype}-tp": (stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("bf16", "fp32") if RELEASE >= (0, 19)}
"""AutoTP, which says how it divides fused weights since 0.19."""


def dense_engine(case: str, seed: int = 0) -> Any:
    stage, dtype, kind = CASES[case]
    deepspeed = import_deepspeed()
    torch.manual_seed(seed)
    model = Net(tied=kind.get("tied", False))
    if kind.get("frozen"):
        model.a.weight.requires_grad_(False)
        model.emb.weight.requires_grad_(False)
    params: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if kind.get("groups"):
        wide, narrow = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        params = [{"params": wide, "weight_decay": 0.2}, {"params": narrow, "weight_decay": 0.0}]
    wanted = config(stage, dtype, zero=kind.get("zero"), extra=kind.get("extra"))
    return deepspeed.initialize(model=model, model_parameters=params, config=wanted)[0]


def parallel_engine(case: str, seed: int = 0) -> Any:
    """An engine whose layers AutoTP divides between two ranks; with one rank, a plain one."""
    stage, dtype = PARALLEL[case]
    deepspeed = import_deepspeed()
    torch.manual_seed(seed)
    model = TensorParallelNet()
    specs = [
        {"patterns": [r".*\.down_proj\.weight$", r".*\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.up_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    ]
    divided = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}}
    wanted = config(stage, dtype, extra=divided if dist.get_world_size() > 1 else {})
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=wanted)[0]


def pipe_engine(case: str, seed: int = 0) -> Any:
    stage, dtype, kind = PIPES[case]
    deepspeed = import_deepspeed()
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(seed)
    blocks = [LayerSpec(PipeBlock), LayerSpec(PipeBlock)]
    if kind == "tied":
        tied = TiedLayerSpec("emb", nn.Embedding, 11, 5), TiedLayerSpec("emb", nn.Embedding, 11, 5, forward_fn=head)
        layers = [tied[0], *blocks, LayerSpec(nn.Linear, 5, 5), tied[1]]
    else:
        layers = [LayerSpec(nn.Embedding, 11, 5), *blocks, LayerSpec(nn.Linear, 5, 11, bias=False)]
    stages = min(2, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):
        model = PipelineModule(
            layers=layers, num_stages=stages, loss_fn=cross_entropy, partition_method="uniform", seed_layers=True, base_seed=seed
        )
        wanted = config(stage, dtype, extra={"gradient_accumulation_steps": 2})
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=wanted)[0]


def engine_of(case: str, seed: int = 0) -> Any:
    """Build the engine of a case."""
    build = {"z": dense_engine, "t": parallel_engine, "p": pipe_engine}[case[0]]
    return build(case, seed)


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Train from step `first` on; the batches of a step are the same whatever the layout."""
    if hasattr(engine, "train_batch") and hasattr(engine, "grid"):
        batches = _pipe_batches(engine, first)
        return [float(engine.train_batch(batches)) for _ in range(steps)]
    from deepspeed.utils import groups

    rank, size = groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()
    losses = []
    for step in range(first, first + steps):
        x, y = _batch(step, 16)
        part = 16 // size
        loss = engine(x[rank * part :][:part], y[rank * part :][:part])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, 11, (size,), generator=generator), torch.randint(0, 11, (size,), generator=generator)


def _pipe_batches(engine: Any, first: int) -> Any:
    rank, size = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    step = 2 * first
    while True:
        x, y = _batch(step, 4)
        part = 4 // size
        yield x[rank * part :][:part], y[rank * part :][:part]
        step += 1


def digest(value: torch.Tensor) -> str:
    """Tell tensors apart by their elements: as float32 if they are numbers with a point, whatever their shape."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return sha256(
        (flat.float() if flat.is_floating_point() else flat).contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


def digests(path: str | Path) -> dict[str, str]:
    """The digests of the tensors of model and optimizer in a checkpoint, as this library reads it."""
    found = checkpoint.read(path)
    return {
        name: digest(value)
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and name.startswith(("model.", "optimizer.state."))
    }


def converted(root: str, out: str) -> dict[str, str]:
    """The digests of what DeepSpeed's ``zero_to_fp32`` and ``ds_to_universal`` make of a folder, under this library's names."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, str] = {}
    folder = os.path.join(root, Path(root, "latest").read_text())
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(Exception):  # it knows neither model parallelism nor some configs
            state = get_fp32_state_dict_from_zero_checkpoint(root)
            found |= {f"model.{name}": digest(tensor.contiguous()) for name, tensor in state.items()}
        with contextlib.suppress(Exception):
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=folder, output_folder=out, num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
                    strict=True, inject_missing_state=True,
                )
            )  # fmt: skip
    masters = {name for name, _ in _shapes(folder)}
    for file in Path(out, "zero").glob("*/*.pt"):
        fqn, key = file.parent.name, file.stem
        value = torch.load(file, weights_only=False)
        value = value["param"] if isinstance(value, dict) else value
        if fqn in masters:
            name = f"model.{fqn}" if key == "fp32" else f"optimizer.state.{fqn}.{key}"
            found[name] = digest(torch.as_tensor(value))
    return found


def _shapes(folder: str) -> Any:
    """The names of parameters that have master weights: the converter casts all others from the module."""
    for file in Path(folder).glob("*mp_rank_*_model_states.pt"):
        for group in torch.load(file, weights_only=False)["param_shapes"] or ():
            yield from group.items()


def gathered(engine: Any) -> dict[str, str]:
    """The digests of the live parameters of an engine that has them whole on each rank, cast to float32."""
    deepspeed = import_deepspeed()
    found = {}
    for name, param in engine.module.named_parameters():
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters([param]):
                found[name] = digest(param.data)
        else:
            found[name] = digest(param.data)
    return found


def unpartitioned(engine: Any) -> dict[str, str]:
    """The digests of master weights and state of an optimizer without ZeRO, from its own tensors, of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, unpartitioned_here(engine))
    return {name: value for of_rank in every for name, value in of_rank.items()}


def unpartitioned_here(engine: Any) -> dict[str, str]:
    """The same of this rank alone."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    found: dict[str, str] = {}

    def add(param: Any, master: torch.Tensor | None, state: Mapping[str, torch.Tensor]) -> None:
        fqn = engine.param_names[param]
        if master is not None:
            found[f"model.{fqn}"] = digest(master)
        found.update({f"optimizer.state.{fqn}.{key}": digest(value) for key, value in state.items()})

    flat_keys = ("fp32_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    flats = next((getattr(optimizer, key) for key in flat_keys if hasattr(optimizer, key)), None)
    if flats is not None:
        # BF16_Optimizer, ZeRO-1 and 2 divide a group evenly among its data-parallel ranks; the fp16 wrapper has it whole on each.
        owners = getattr(optimizer, "real_dp_process_group", [None] * len(flats))
        groups = next(
            getattr(optimizer, f"{kind}_groups") for kind in ("bf16", "bit16", "fp16") if hasattr(optimizer, f"{kind}_groups")
        )
        for flat, group, owner in zip(flats, groups, owners, strict=True):
            parts = {key: flat_parts(joined(value, owner), group) for key, value in base.state[flat].items()}
            for i, (param, master) in enumerate(zip(group, flat_parts(joined(flat, owner), group), strict=True)):
                add(param, master, {key: part[i] for key, part in parts.items()})
    elif hasattr(optimizer, "fp32_groups"):
        for masters, group in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for param, master in zip(group, masters, strict=True):
                add(param, master, base.state[master])
    else:
        for param in (p for group in base.param_groups for p in group["params"]):
            add(param, param, base.state[param])
    return found


def joined(part: torch.Tensor, owner: Any) -> torch.Tensor:
    """The flat tensor of which each rank of a process group has an even part; of a number, or without a group, that itself."""
    if part.ndim == 0 or owner is None:
        return part
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(owner))]
    dist.all_gather(parts, part.detach().contiguous(), group=owner)
    return torch.cat(parts)


def flat_parts(flat: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """A flat tensor as one tensor for each parameter; what is no flat one, such as the step, is the same for all."""
    if flat.ndim == 0:
        return [flat] * len(group)
    sizes = [param.numel() for param in group]
    return list(flat.detach()[: sum(sizes)].split(sizes))


def write_json(path: str | Path, value: Any) -> None:
    Path(path).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
