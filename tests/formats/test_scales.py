"""Block FP8 weights of Hugging Face folders become floats while they load, as torch's own reader makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.errors import CorruptError, MismatchError

SHAPE = (300, 260)


def folder(path: Path, block: int = 128, code: torch.dtype = torch.float8_e4m3fn) -> dict[str, torch.Tensor]:
    """Write a folder of one FP8 weight with its scale, and a plain one."""
    path.mkdir(exist_ok=True)
    torch.manual_seed(0)
    tensors = {
        "w.weight": (torch.randn(SHAPE) * 50).to(code),
        "w.weight_scale_inv": torch.rand(*(-(-length // block) for length in SHAPE)) + 0.01,
        "norm": torch.randn(7).bfloat16(),
    }
    save_file(tensors, path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [block, block]}}))
    return tensors


def dequantized(path: Path, block: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight as torch's own reader reads it."""
    state = {"w.weight": torch.zeros(SHAPE, dtype=dtype)}
    reader = QuantizedHuggingFaceStorageReader(str(path), target_dtype=dtype, block_size=block)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state["w.weight"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", [128, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_part_is_that_of_torchs_reader(block: int, dtype: torch.dtype, tmp_path: Path):
    folder(tmp_path, block)
    truth = dequantized(tmp_path, block, dtype)
    boxes = [((0, 0), SHAPE), ((100, 30), (77, 200)), ((299, 259), (1, 1)), ((0, 130), (300, 130))]
    parts: list[tuple[Any, torch.Tensor]] = [
        (
            LocalShard(torch.zeros(lengths, dtype=dtype), SHAPE, low),
            truth[low[0] : low[0] + lengths[0], low[1] : low[1] + lengths[1]],
        )
        for low, lengths in boxes
    ]
    parts.append((FlatShard(torch.zeros(30_011, dtype=dtype), SHAPE, 12_345), truth.flatten()[12_345 : 12_345 + 30_011]))
    strided = torch.zeros(SHAPE[::-1], dtype=dtype).t()
    parts.append((strided, truth))
    for part, wanted in parts:
        norm = torch.zeros(7)
        report = checkpoint.load(tmp_path, {"model": {"w": {"weight": part}, "norm": norm}}, cast=True)
        assert report.problems == ()
        assert torch.equal(getattr(part, "tensor", part), wanted)
        assert norm.any()


def test_scales_may_be_ignored_or_loaded_too(tmp_path: Path):
    tensors = folder(tmp_path)
    truth = dequantized(tmp_path, 128, torch.float32)
    into = {"w": {"weight": torch.zeros(SHAPE), "weight_scale_inv": torch.zeros(3, 3)}, "norm": torch.zeros(7)}
    checkpoint.load(tmp_path, {"model": into}, cast=True)
    assert torch.equal(into["w"]["weight"], truth)
    assert torch.equal(into["w"]["weight_scale_inv"], tensors["w.weight_scale_inv"])
    alone = {"w": {"weight": torch.zeros(SHAPE)}}
    checkpoint.load(tmp_path, {"model": alone}, cast=["model.w"], ignore=["model.norm", "*_scale_inv"])
    assert torch.equal(alone["w"]["weight"], truth)
    same = {"w": {"weight": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn)}}
    checkpoint.load(tmp_path, {"model": same}, cast=True, ignore=["model.norm", "*_scale_inv"])
    assert torch.equal(same["w"]["weight"].float(), tensors["w.weight"].float())


def test_only_blocks_that_overlap_are_read(tmp_path: Path):
    tensors = folder(tmp_path)
    tensors["w.weight_scale_inv"][2, 2] = float("nan")  # of no block that is wanted here
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    part = LocalShard(torch.zeros(256, 256), SHAPE, (0, 0))
    checkpoint.load(tmp_path, {"model": {"w": {"weight": part}}}, cast=True, ignore=["model.norm"])
    assert part.tensor.isfinite().all()


def test_blocks_that_do_not_fit_are_refused(tmp_path: Path):
    folder(tmp_path, 50)
    (tmp_path / "config.json").unlink()  # so that blocks are 128 × 128
    with pytest.raises(MismatchError, match="with the scale model.w.weight_scale_inv.*dequantize it before"):
        checkpoint.load(tmp_path, {"model": {"w": {"weight": torch.zeros(SHAPE)}}}, cast=True, ignore=["model.norm"])
    integers = {"w": {"weight": torch.zeros(SHAPE, dtype=torch.int8)}}
    folder(tmp_path)
    with pytest.raises(MismatchError, match="dequantize it before"):
        checkpoint.load(tmp_path, {"model": integers}, cast=True, ignore=["model.norm", "*_scale_inv"])
    with pytest.raises((MismatchError, CorruptError)):
        checkpoint.load(tmp_path, {"model": {"w": {"weight": torch.zeros(2, 2)}}}, cast=True, ignore=["model.norm"])


PACKED = {
    "gptq": {"w.qweight": torch.zeros(4, 8, dtype=torch.int32), "w.scales": torch.zeros(1, 8)},
    "awq": {"w.qweight": torch.zeros(8, 1, dtype=torch.int32), "w.scales": torch.zeros(1, 8)},
    "bitsandbytes": {"w.weight": torch.zeros(32, 1, dtype=torch.uint8), "w.weight.absmax": torch.zeros(1)},
    "compressed-tensors": {"w.weight_packed": torch.zeros(8, 1, dtype=torch.int32), "w.weight_scale": torch.zeros(8, 1)},
    "mxfp4": {
        "w.weight_blocks": torch.zeros(8, 1, 16, dtype=torch.uint8),
        "w.weight_scales": torch.zeros(8, 1, dtype=torch.uint8),
    },
}


@pytest.mark.parametrize("method", PACKED)
def test_other_quantized_folders_are_refused_by_name(method: str, tmp_path: Path):
    save_file(PACKED[method], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    weight = torch.zeros(8, 8)
    with pytest.raises(MismatchError, match=f"quantized by {method} .*dequantize it before"):
        checkpoint.load(tmp_path, {"model": {"w": {"weight": weight}}}, cast=True)
