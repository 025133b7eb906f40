"""A GPT of megatron-core on any grid, with values that are functions of global position; import it after `cpu_shim.install`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

LAYERS, HIDDEN, HEADS, EXPERTS, SEQUENCE = 4, 16, 4, 4, 8


@dataclass(frozen=True)
class Grid:
    """How a job is parallel; what is left of its ranks is data parallelism."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int | None = None
    experts: int | None = None
    vocabulary: int = 64
    tied: bool = True
    bf16: bool = True
    distributed: bool = True
    bucket: int | None = None
    uneven: bool = False
    homogeneous: bool = True


class Job:
    """The model and the optimizer of this rank, on a grid."""

    def __init__(self, grid: Grid, *, filled: bool) -> None:
        self.grid = grid
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            grid.tp,
            grid.pp,
            virtual_pipeline_model_parallel_size=grid.vpp,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.tp if grid.ep == 1 else 1,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.chunks = [self._chunk(i) for i in range(grid.vpp or 1)]
        config = OptimizerConfig(
            optimizer="adam", lr=0.1, bf16=grid.bf16, params_dtype=self.dtype, use_distributed_optimizer=grid.distributed
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        if filled:
            self.fill()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.grid.bf16 else torch.float32

    def _chunk(self, number: int) -> Any:
        grid = self.grid
        options = (
            {} if grid.experts is None else {"num_moe_experts": grid.experts, "moe_grouped_gemm": False, "add_bias_linear": False}
        )
        if grid.uneven:
            options["num_layers_in_first_pipeline_stage"] = LAYERS - (grid.pp - 1)
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=32,
            gated_linear_unit=True,
            use_cpu_initialization=True,
            tensor_model_parallel_size=grid.tp,
            sequence_parallel=grid.tp > 1 and grid.ep > 1,  # old versions refuse to be without it
            pipeline_model_parallel_size=grid.pp,
            virtual_pipeline_model_parallel_size=grid.vpp,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.tp if grid.ep == 1 else 1,
            pipeline_dtype=self.dtype,
            params_dtype=self.dtype,
            bf16=grid.bf16,
            hetereogenous_dist_checkpoint=not grid.homogeneous,
            **options,
        )
        config.sequence_parallel = False  # which torch's own norms refuse, and nothing that is saved depends on
        vp = {} if grid.vpp is None else {"vp_stage": number}
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=grid.experts),
            vocab_size=grid.vocabulary,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **vp),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **vp),
            share_embeddings_and_output_weights=grid.tied,
            **vp,
        )
        if grid.bf16:
            model.bfloat16()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=grid.distributed, bucket_size=grid.bucket)
        return DistributedDataParallel(config, ddp, model)

    def model_tree(self) -> dict[str, Any]:
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        return {name: chunk.module.sharded_state_dict() for name, chunk in zip(names, self.chunks, strict=True)}

    def tree(self) -> dict[str, Any]:
        """The model's tree, with the optimizer in it as itself, and what training keeps beside them."""
        args = argparse.Namespace(lr=0.1, params_dtype=torch.bfloat16, backend=AttnBackend.auto)
        return {**self.model_tree(), "optimizer": self.optimizer, "iteration": 12, "args": args}

    def shards(self) -> list[ShardedTensor]:
        """What every tensor of the model is part of."""
        return [s for s in nested_values(_built(self.model_tree())) if isinstance(s, ShardedTensor)]

    def optimizers(self) -> list[Any]:
        """The optimizers of the chain."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def runs(self) -> Iterator[tuple[Any, slice, dict[str, torch.Tensor]]]:
        """Each parameter of which this rank has state, which run of the flattened parameter that is, and the state itself."""
        for one in self.optimizers():
            groups = one.optimizer.param_groups
            if hasattr(one, "gbuf_ranges"):
                for buckets in (b for buffer in one.gbuf_ranges for b in buffer.values()):
                    for param, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                        group, order = one.model_param_group_index_map[param]
                        master = groups[group]["params"][order]
                        run = slice(ranges["param"].start, ranges["param"].end)
                        yield param, run, {"param": master, **one.optimizer.state[master]}
            elif hasattr(one, "float16_groups"):
                for params, masters in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                    for param, master in zip(params, masters, strict=True):
                        yield param, slice(None), {"param": master, **one.optimizer.state[master]}
            else:
                for param in (param for group in groups for param in group["params"]):
                    yield param, slice(None), dict(one.optimizer.state[param])

    def fill(self) -> None:
        """Give every parameter, master and state the values of its place; the optimizer has made seven steps."""
        for one in self.optimizers():
            for master in (param for group in one.optimizer.param_groups for param in group["params"]):
                state = one.optimizer.state[master]
                state["step"] = torch.tensor(7.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.empty_like(master), torch.empty_like(master)
        with torch.no_grad():
            for shard in self.shards():
                shard.data.copy_(expected(shard))
            for param, run, states in self.runs():
                for key, state in states.items():
                    if key != "step":
                        state.view(-1).copy_(self._expected_state(param, key)[run])

    def _expected_state(self, param: torch.Tensor, key: str, vocabulary: int | None = None) -> torch.Tensor:
        """The whole of a parameter's state on this rank, flattened, by what the tree says of the parameter."""
        sharded = next(s for s in nested_values(self.model_tree()) if getattr(s, "data", None) is param)
        state = torch.zeros(param.shape)
        changed = {"key": f"optimizer.state.{key}.{sharded.key}", "data": state}
        tree = (
            replace(sharded, **changed)
            if isinstance(sharded, ShardedTensorFactory)
            else replace(sharded, dtype=state.dtype, **changed)
        )
        for shard in nested_values({"of": _built(tree)}):
            shard.data.copy_(expected(shard, vocabulary))
        return state.flatten()

    def prepare(self) -> None:
        """Have the optimizer make its state, which Megatron's trees for loading are made of."""
        for one in self.optimizers():
            for master in (param for group in one.optimizer.param_groups for param in group["params"]):
                state = one.optimizer.state[master]
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)

    def wrong_parameters(self, vocabulary: int | None = None) -> list[str]:
        """List the parameters that have not the values of their places."""
        bad = (s for s in self.shards() if not torch.equal(s.data, expected(s, vocabulary)))
        return [f"{shard.key} at {shard.global_offset}" for shard in bad]

    def wrong(self, vocabulary: int | None = None) -> list[str]:
        """List what has not the values of its place; beyond the `vocabulary` that was saved, all is zero."""
        bad = self.wrong_parameters(vocabulary)
        for param, run, states in self.runs():
            if "exp_avg" not in states or float(states["step"]) != 7.0:
                bad.append(f"state of {tuple(param.shape)}: {states.keys()} {states.get('step')}")
            for key, state in states.items():
                if key != "step" and not torch.equal(state.view(-1), self._expected_state(param, key, vocabulary)[run]):
                    bad.append(f"{key} of {tuple(param.shape)} {run}")
        return bad


@contextmanager
def steps_left_alone() -> Iterator[None]:
    """Have Megatron's optimizer load what it saved: torch's Adam has a step in its state, which it would look for there."""
    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def take(self: Any, param: torch.Tensor, tensors: dict[str, Any]) -> None:
        own(self, param, {**tensors, "step": self._get_main_param_and_optimizer_states(param)["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = take
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = own


def _built(tree: Any) -> Any:
    if isinstance(tree, ShardedTensorFactory):
        return _built(tree.build())
    if isinstance(tree, dict):
        return {key: _built(value) for key, value in tree.items()}
    return [_built(value) for value in tree] if isinstance(tree, list) else tree


def whole(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a key: each element tells its key and its place, as far as its dtype can."""
    num = int(torch.tensor(shape).prod())
    values = (torch.arange(num) * 7 + crc32(key.encode()) % 1000) % (256 if dtype is torch.bfloat16 else 1 << 20)
    return values.view(shape).to(dtype)


def expected(shard: ShardedTensor, vocabulary: int | None = None) -> torch.Tensor:
    """What the data of a shard should be; of a padded tensor, as many rows as were saved, and zeros."""
    shape = tuple(shard.global_shape)
    full = whole(shard.key, shape, shard.dtype)
    if vocabulary is not None and shard.allow_shape_mismatch:
        full = torch.zeros(shape, dtype=shard.dtype)
        rows = min(vocabulary, shape[0])
        full[:rows] = whole(shard.key, (vocabulary, *shape[1:]), shard.dtype)[:rows]
    return full[shard.global_slice()].view(shard.local_shape)


__all__ = ["Grid", "Job", "ShardedObject", "expected", "steps_left_alone", "whole"]
