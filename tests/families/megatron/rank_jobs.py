"""Jobs of megatron-core that save a file of each model-parallel rank, as its training program does with ``--ckpt-format torch``.

The program itself is no part of the package, so `save` makes the folders, files and state dicts that its ``save_checkpoint``
does. Import this after `cpu_shim.install`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tests.families.megatron import jobs


def save(case: jobs.Case, path: str) -> None:
    """Save a GPT with its optimizer, whose state is a function of the weights, element by element."""
    job = jobs.build(case)
    jobs.set_state(job)
    for chunk in job.chunks:
        jobs.fill(chunk.module.sharded_state_dict())
    jobs.set_moments(job)
    folder = _folder(path, case)
    if case.distributed:
        job.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        many = len(job.chunks) > 1
        models = {
            f"model{i}" if many else "model": chunk.module.state_dict_for_save_checkpoint() for i, chunk in enumerate(job.chunks)
        }
        torch.save({**_common(case), **models, "optimizer": job.optimizer.state_dict()}, folder / "model_optim_rng.pt")


def save_other(kind: str, path: str, tp: int, pp: int) -> None:
    """Save a small BERT or T5, the model alone."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    ends = {"pre_process": first, "post_process": last, "share_embeddings_and_output_weights": True}
    if kind == "bert":
        model: Any = BertModel(config, 2, bert_layer_local_spec, 32, 8, **ends)
    else:
        specs = (
            TransformerBlockSubmodules([spec()] * 2) for spec in (encoder_model_with_local_spec, decoder_model_with_local_spec)
        )
        model = T5Model(
            config, config, *specs, 32, 8, position_embedding_type="relative", relative_attention_num_buckets=4, **ends
        )
    jobs.fill(model.sharded_state_dict())
    case = jobs.Case(tp=tp, pp=pp, tied=True)
    folder = _folder(path, case)
    torch.save({**_common(case), "model": model.state_dict_for_save_checkpoint()}, folder / "model_optim_rng.pt")


def _folder(path: str, case: jobs.Case) -> Path:
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if case.pp > 1 else ""
    name += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if case.ep > 1 else ""
    folder = Path(path, name)
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        Path(path).parent.joinpath("latest_checkpointed_iteration.txt").write_text("7")
    return folder


def _common(case: jobs.Case) -> dict[str, Any]:
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    common = jobs.common_of(case)
    of_job = {"expert_model_parallel_size": case.ep, "untie_embeddings_and_output_weights": not case.tied, "moe_layer_freq": 1}
    common["args"] = argparse.Namespace(**vars(common["args"]), **of_job, rank=dist.get_rank())
    rng = [{"np_rng_state": ("MT19937", torch.arange(4).numpy(), 3), "torch_rng_state": torch.tensor([*place, 7, 9])}]
    return {**common, "rng_state": rng}
