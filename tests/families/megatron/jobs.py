"""Training jobs of megatron-core on a few ranks, which save and load with its own calls; import it after `cpu_shim.install`.

A job is a `Case`: a small GPT on a layout. `save` fills all that it saves with `values`, and `load` compares what it loaded.
"""

from __future__ import annotations

import argparse
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from tests.families.megatron import values

HIDDEN, SEQUENCE = 8, 4


@dataclass(frozen=True)
class Case:
    """A model and its layout; ranks that are left over are data parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int | None = None
    layers: int = 2
    first_stage: int | None = None
    experts: int | None = None
    tied: bool = False
    vocab: int = 32
    distributed: bool = True
    sharding: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """The model and the optimizer of a running job."""

    chunks: list[Any]
    optimizer: Any


def build(case: Case) -> Job:
    """Make the model and the optimizer of a case on this rank."""
    warnings.simplefilter("ignore")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vpp, expert_model_parallel_size=case.ep)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=16,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gated_linear_unit=True,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        sequence_parallel=case.tp > 1 and case.experts is not None,
        num_layers_in_first_pipeline_stage=case.first_stage,
        num_moe_experts=case.experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=16 if case.experts else None,
        add_qkv_bias=True,
    )
    config.sequence_parallel = False  # which experts want that are cut, and torch's norms refuse; nothing is computed here
    chunks = [_chunk(case, config, i) for i in range(case.vpp or 1)]
    settings = OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=case.distributed, lr=1e-3)
    return Job(chunks, get_megatron_optimizer(settings, chunks))


def _chunk(case: Case, config: TransformerConfig, i: int) -> Any:
    options: dict[str, Any] = {}
    if case.vpp:
        parallel_state.set_virtual_pipeline_model_parallel_rank(i)
        if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:
            options["vp_stage"] = i
    ends = {"ignore_virtual": False}
    if "vp_stage" in inspect.signature(parallel_state.is_pipeline_first_stage).parameters and case.vpp:
        ends["vp_stage"] = i
    spec = get_gpt_layer_local_spec(num_experts=case.experts, moe_grouped_gemm=False)
    model = GPTModel(
        config,
        spec,
        case.vocab,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=case.tied,
        **options,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=case.distributed)
    return DistributedDataParallel(config, ddp, model.bfloat16(), disable_bucketing=i > 0)


def set_state(job: Job) -> None:
    """Take a step, so that the optimizer has state."""
    for chunk in job.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.01)
    job.optimizer.step()


def set_moments(job: Job) -> None:
    """Take the master weights from the model, and make each moment a function of its master weight."""
    job.optimizer.reload_model_params()
    for one in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        for parameter, state in one.optimizer.state.items():
            state["exp_avg"].copy_(parameter * 2 + 1)
            state["exp_avg_sq"].copy_(parameter * 4 + 3)


def tree_of(job: Job, case: Case, *, loading: bool = False) -> dict[str, Any]:
    """Make the tree that a pretraining script saves, or asks for."""
    model_options = {"metadata": dict(case.metadata)} if case.metadata else {}
    many = len(job.chunks) > 1
    tree: dict[str, Any] = {}
    for i, chunk in enumerate(job.chunks):
        if many:
            parallel_state.set_virtual_pipeline_model_parallel_rank(i)
        tree[f"model{i}" if many else "model"] = chunk.module.sharded_state_dict(**model_options)
    metadata = dict(case.metadata)
    if case.sharding:
        metadata["distrib_optim_sharding_type"] = case.sharding
        metadata["chained_optim_avoid_prefix"] = True
    tree["optimizer"] = job.optimizer.sharded_state_dict(tree, is_loading=loading, **({"metadata": metadata} if metadata else {}))
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    rng = [{"np_rng_state": ("MT19937", torch.arange(4).numpy(), 3), "torch_rng_state": torch.tensor([*place, 7, 9])}]
    tree["rng_state"] = ShardedObject(
        "rng_state", rng, (case.pp, case.tp), place, replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    return tree


def common_of(case: Case) -> dict[str, Any]:
    """Make what is the same on all ranks."""
    args = argparse.Namespace(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        attention_backend=AttnBackend.unfused,
        params_dtype=torch.bfloat16,
        lr=0.001,
        data_path=["a", "b"],
        data_parallel_size=None,
        nested=argparse.Namespace(x=1),
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 7, "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 70}}


def sharded(tree: Any) -> Iterator[ShardedTensor]:
    """Yield the tensors of a tree, those that factories make among them."""
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from sharded(child)
    elif isinstance(tree, list | tuple):
        for child in tree:
            yield from sharded(child)


def wanted(one: ShardedTensor) -> torch.Tensor:
    """Make what the data of a tensor should be."""
    lengths = (1,) * one.prepend_axis_num + tuple(one.local_shape)
    part = values.box(one.key, tuple(one.global_shape), one.dtype, tuple(one.global_offset), lengths)
    part = part.reshape(one.local_shape)
    flat = getattr(one, "flattened_range", None)
    return part if flat is None else part.reshape(-1)[flat]


def fill(tree: Any, *, optimizer: bool = True) -> None:
    """Fill tensors by their keys and places."""
    apply_factories(tree)
    for one in sharded(tree):
        if one.data is not None and (optimizer or not one.key.startswith(("optimizer.", "chained_"))):
            one.data = one.data.detach()
            one.data.copy_(wanted(one).reshape(one.data.shape))


def save(case: Case, path: str, *, proof: bool = False, **options: Any) -> None:
    """Save a job; with `proof`, the state of the optimizer is a function of the model's weights, element by element."""
    job = build(case)
    set_state(job)
    for chunk in job.chunks:
        fill(chunk.module.sharded_state_dict())
    set_moments(job)
    tree = tree_of(job, case)
    fill(tree, optimizer=not proof)
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()
    content = {"distrib_optim_sharding_type": case.sharding, **case.metadata}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    dist_checkpointing.save({**common_of(case), **tree}, path, content_metadata=content, **options)
    if dist.get_rank() == 0:
        with open(os.path.join(os.path.dirname(path), "latest_checkpointed_iteration.txt"), "w") as file:
            file.write("7")


def load(
    case: Case,
    path: str,
    holds: Callable[[ShardedTensor], torch.Tensor] = wanted,
    calls: Any = dist_checkpointing,
) -> list[str]:
    """Load a checkpoint as training does, all the way into a job; return what is not as it should be.

    Parameters
    ----------
    holds
        Gives what a shard of the job should hold.
    calls
        `load` and the like: Megatron's own, or those in their place.
    """
    job = build(case)
    set_state(job)
    common = calls.load_common_state_dict(path)
    args, content = common["args"], common["content_metadata"]
    if content["distrib_optim_sharding_type"] is None:  # the committed folders of old versions say nothing; scripts would
        content["distrib_optim_sharding_type"] = "fully_sharded_model_space"
    content = calls.load_content_metadata(preloaded_state_dict=common)
    case = replace(case, sharding=content["distrib_optim_sharding_type"])
    layout = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    asked = tree_of(job, case, loading=True)
    if layout != (case.tp, case.pp) or case.ep > 1:
        del asked["rng_state"]  # as pretraining scripts do; with experts, versions divide them in different ways
    loaded = calls.load(asked, path)
    many = len(job.chunks) > 1
    for i, chunk in enumerate(job.chunks):
        chunk.module.load_state_dict(loaded[f"model{i}" if many else "model"])
    for one in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        _keep_steps(one)
    job.optimizer.load_state_dict(loaded["optimizer"])
    tree = tree_of(job, case)
    apply_factories(tree)
    filled = [one for one in sharded(tree) if one.data is not None]
    wrong = {one.key for one in filled if not torch.equal(one.data.reshape(-1), holds(one).reshape(-1))}
    saved = common_of(Case(tp=layout[0], pp=layout[1]))
    told = vars(loaded.pop("args")).items()
    wrong |= {f"args.{key}" for key, value in vars(saved.pop("args")).items() if (key, value) not in told}
    wrong |= {key for key, value in saved.items() if loaded.get(key) != value}
    steps = {float(group["step"]) for group in loaded["optimizer"].get("optimizer", {}).get("param_groups", [])}
    return sorted(wrong | ({"step"} if steps - {1.0} else set()))


def _keep_steps(optimizer: Any) -> None:
    """Give what loads a parameter the step that it has: Megatron wants one there, and loads none, of torch's own Adam."""
    inner = getattr(optimizer, "_set_main_param_and_optimizer_states", None)
    if inner is not None:
        optimizer._set_main_param_and_optimizer_states = lambda parameter, tensors: inner(
            parameter, {"step": torch.tensor(1.0), **tensors}
        )
