"""Make the committed folder of Megatron-FSDP (``--ckpt-format fsdp_dtensor``):
``python -m tests.families.megatron.make_fsdp FOLDER``.

It needs megatron-core 0.16.1 and einops, and runs on the CPU. The steps are those of ``save_checkpoint`` in Megatron's training.
The elements are those of `values`, by their names here. Every parameter has state on every rank, as Megatron's own handling of
SwiGLU needs it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.families.megatron import cpu_shim

NPROC, TP = 4, 2


def save(path: str) -> None:
    """Save a small GPT and its optimizer from tensor parallelism of 2 and FSDP over 2."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_fp8_extra_state_case, handle_swiglu_in_state_dict

    model, optimizer = _build()
    for group in optimizer.optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.optimizer.step()
    args = argparse.Namespace(lr=0.001, params_dtype=torch.bfloat16, data_path=["a", "b"])
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    saved: dict[str, Any] = {"model": model.state_dict(), "args": args, "iteration": 7, "checkpoint_version": 3.0}
    state = optimizer.sharded_state_dict(saved, metadata=metadata)
    state["state"] = dict(sorted(state["state"].items()))  # the ranks must meet at the same parameters
    handle_fp8_extra_state_case(saved["model"])
    saved["model"], saved["optimizer"] = handle_swiglu_in_state_dict(model, saved["model"], state)
    preprocess_state_dict_for_uneven_dtensor(saved)
    for key, tensor in saved["model"].items():
        _fill(f"model.{key}", tensor)
    for name, states in saved["optimizer"]["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            _fill(f"optimizer.state.{name}.{key}", states[key])
    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True)
        Path(path).with_name("latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(path))


def _build() -> tuple[Any, Any]:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import unwrap_model
    from torch.distributed.device_mesh import DeviceMesh

    mcore_fsdp_adapter.TELinear = type("TELinear", (), {})  # which is None where it is not installed
    of_groups = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, device_type, *args, **options: of_groups(group, "cpu", *args, **options))
    parallel_state.initialize_model_parallel(TP)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        ffn_hidden_size=16,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        gated_linear_unit=True,
        add_bias_linear=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=TP,
    )
    model = Float16Module(config, GPTModel(config, get_gpt_layer_local_spec(), 32, 4))
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    chunk = mcore_fsdp_adapter.FullyShardedDataParallel(config, ddp, model)
    settings = OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, lr=1e-3)
    optimizer = get_megatron_optimizer(settings, [chunk])
    return unwrap_model(chunk), getattr(optimizer, "chained_optimizers", [optimizer])[0]


def _fill(name: str, tensor: Any) -> None:
    """Fill this rank's part of a DTensor with the elements of its place, which Megatron has noted in its list of chunks."""
    from tests.families.megatron import values

    local = tensor._local_tensor
    if local.numel():
        (chunk,) = local.__create_chunk_list__()
        offsets, lengths = tuple(chunk.offsets), tuple(chunk.sizes)
        local.copy_(values.box(name, tuple(tensor.shape), tensor.dtype, offsets, lengths).view(local.shape))


def main(out: str) -> None:
    cpu_shim.install()
    from tests.families.megatron.make import pack

    with tempfile.TemporaryDirectory() as folder:
        cpu_shim.run_forked(save, NPROC, f"{folder}/run/iter_0000007")
        pack(Path(folder, "run"), Path(out, "0.16.1-fsdp.tar.xz"))


if __name__ == "__main__":
    main(*sys.argv[1:])
