"""FP8 weights of Hugging Face folders become floats while they are read, as torch's own reader and transformers make them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.dcp import ReshardReader
from reshard_ckpt.errors import CorruptError, MismatchError, UnsupportedError, UsageError

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
    quantized = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    reader = quantized.QuantizedHuggingFaceStorageReader(str(path), target_dtype=dtype, block_size=block)
    dcp.load(state, storage_reader=reader)
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


@dataclass(frozen=True)
class Case:
    """A scale: the end of its name, its shape, the elements that share a number, and what config.json says."""

    end: str
    scale: tuple[int, ...]
    block: tuple[int, ...]
    config: Mapping[str, Any]
    shape: tuple[int, ...] = SHAPE
    dtype: torch.dtype = torch.float32
    code: torch.dtype = torch.float8_e4m3fn


def compressed(**weights: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors, as llm-compressor writes it."""
    group = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BF16 = torch.bfloat16
CASES = {
    "blocks": Case("_scale_inv", (3, 3), (128, 128), FP8),
    # torch 2.6 has no such dtype
    "powers of two": Case("_scale_inv", (3, 3), (128, 128), FP8, dtype=getattr(torch, "float8_e8m0fnu", torch.float32)),
    "blocks of experts": Case("_scale_inv", (3, 2, 3), (1, 128, 128), FP8, (3, 200, 260)),
    "one number": Case("_scale_inv", (), SHAPE, {"quant_method": "fp8"}),
    "one number of compressed-tensors": Case("_scale", (1,), SHAPE, compressed(strategy="tensor"), dtype=BF16),
    "rows of compressed-tensors": Case("_scale", (300, 1), (1, 260), compressed(strategy="channel"), dtype=BF16),
    "groups of compressed-tensors": Case("_scale", (300, 13), (1, 20), compressed(strategy="group", group_size=20)),
    "blocks of compressed-tensors": Case("_scale", (6, 4), (50, 80), compressed(strategy="block", block_structure=[50, 80])),
    "one number of modelopt": Case("_scale", (), SHAPE, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "rows of modelopt": Case("_scale", (300,), (1, 260), {"quant_method": "modelopt"}, code=torch.float8_e5m2),
    "rows of fbgemm": Case("_scale", (300, 1), (1, 260), {"quant_method": "fbgemm_fp8"}),
    "a vector": Case("_scale", (1,), (260,), compressed(strategy="tensor"), (260,), torch.float16),
}


def write(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float16", "quantization_config": config}))


def case_folder(path: Path, case: Case) -> torch.Tensor:
    """Write a folder of a case; return its weight, dequantized element by element in float32."""
    weight = (torch.arange(torch.Size(case.shape).numel()) % 401 - 200).reshape(case.shape).to(case.code)
    scale = (torch.arange(1, torch.Size(case.scale).numel() + 1) / 64).to(case.dtype).reshape(case.scale)
    write(path, {"w.weight": weight, f"w.weight{case.end}": scale, "norm": torch.arange(7).bfloat16()}, case.config)
    # number[i]: which number of the scale is for element i
    grid = [-(-length // each) for length, each in zip(case.shape, case.block, strict=True)]
    at = torch.meshgrid(*(torch.arange(n) // b for n, b in zip(case.shape, case.block, strict=True)), indexing="ij")
    return weight.float() * scale.float().reshape(grid)[at]


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_scale_is_applied_in_a_load(name: str, tmp_path: Path):
    case = CASES[name]
    truth = case_folder(tmp_path, case)
    for dtype in (torch.float32, BF16, torch.float16):
        whole = torch.zeros(case.shape, dtype=dtype)
        checkpoint.load(tmp_path, {"model": {"w": {"weight": whole}}}, cast=True, ignore=["model.norm"])
        assert torch.equal(whole, truth.to(dtype))
        by_dcp = {"model.w.weight": torch.zeros(case.shape, dtype=dtype)}
        dcp.load(by_dcp, storage_reader=ReshardReader(tmp_path))
        assert torch.equal(by_dcp["model.w.weight"], truth.to(dtype))
        count = truth.numel() // 3
        flat = FlatShard(torch.zeros(count, dtype=dtype), case.shape, count + 5)
        checkpoint.load(tmp_path, {"model": {"w": {"weight": flat}}}, cast=True, ignore=["model.norm"])
        assert torch.equal(flat.tensor, truth.flatten()[count + 5 : 2 * count + 5].to(dtype))
        low, lengths = tuple(n // 3 for n in case.shape), tuple(n // 2 for n in case.shape)
        part = LocalShard(torch.zeros(lengths, dtype=dtype), case.shape, low)
        checkpoint.load(tmp_path, {"model": {"w": {"weight": part}}}, cast=True, ignore=["model.norm"])
        assert torch.equal(part.tensor, truth[tuple(slice(a, a + n) for a, n in zip(low, lengths, strict=True))].to(dtype))
        larger, wanted = (torch.full([n + 90 for n in case.shape], 7, dtype=dtype) for _ in range(2))
        wanted[tuple(map(slice, case.shape))] = truth.to(dtype)
        checkpoint.load(tmp_path, {"model": {"w": {"weight": larger}}}, cast=True, allow_resize=True, ignore=["model.norm"])
        assert torch.equal(larger, wanted), "what the checkpoint lacks was multiplied too"


def test_tied_weights_of_which_one_has_a_scale_are_refused(tmp_path: Path):
    """Their memory would be multiplied by each scale in turn, or all of it by the scale of one."""
    weight, scale, tied = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.full((4, 1), 2.0), torch.zeros(4, 4)
    for other in ({"b.weight": weight, "b.weight_scale": scale}, {"b.weight": weight.bfloat16()}):
        for a, b in ("ab", "ba"):
            write(tmp_path, {"a.weight": weight, "a.weight_scale": scale} | other, compressed())
            with pytest.raises(MismatchError, match=f"{b}.weight: tied to model.{a}.weight.*a scale") as raised:
                checkpoint.load(tmp_path, {"model": {a: {"weight": tied}, b: {"weight": tied}}}, cast=True)
            assert not tied.any()
            assert "ignore=" in str(raised.value)
    checkpoint.load(tmp_path, {"model": {"a": {"weight": tied}, "b": {"weight": tied}}}, cast=True, ignore=["model.b*"])
    assert (tied == 2).all()


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_scale_is_applied_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("reshard_ckpt.engine.loading.stream.WINDOW_BYTES", 1 << 12)
    truth = case_folder(tmp_path / "fp8", CASES[name]).bfloat16()
    mesh = {"dp": 2, "tp": 2}
    rules = {"model.w.weight": {"tp": f"shard({truth.ndim - 1})"}}
    checkpoint.reshard(tmp_path / "fp8", tmp_path / "new", mesh=mesh, rules=rules, cast={"*": "bfloat16"})
    for to in ("safetensors", "torch", "dcp", "reshard"):
        report = checkpoint.convert(tmp_path / "fp8", tmp_path / to, to=to, cast={"model.w": "bfloat16"}, root="")
        assert report.left_out == (f"model.w.weight{CASES[name].end}",)
    for result in ("new", "safetensors", "torch", "dcp", "reshard"):
        found = {name.removeprefix("model."): tensor for name, tensor in checkpoint.read(tmp_path / result).items()}
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
        assert set(found) == {"w.weight", "norm"}
        assert torch.equal(found["w.weight"], truth)
    assert json.loads((tmp_path / "safetensors" / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


def test_a_weight_renamed_without_its_scale_is_still_multiplied_by_it(tmp_path: Path):
    truth = case_folder(tmp_path / "fp8", CASES["rows of fbgemm"])
    rename = {"model.w.weight": "model.other.weight"}
    into = {"other": {"weight": torch.zeros(SHAPE)}}
    checkpoint.load(tmp_path / "fp8", {"model": into}, rename=rename, cast=True, ignore=["model.norm"])
    assert torch.equal(into["other"]["weight"], truth)
    options: dict[str, Any] = {"rename": rename, "select": ["model.other.weight"], "cast": {"*": "float32"}}
    checkpoint.convert(tmp_path / "fp8", tmp_path / "out", **options)
    assert torch.equal(checkpoint.read(tmp_path / "out")["model.other.weight"], truth)


def test_a_conversion_that_dequantizes_only_a_part_is_refused_where_one_config_is_for_all(tmp_path: Path):
    weight, scale = torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(4, 1)
    write(tmp_path / "fp8", {f"{w}.weight": weight for w in "ab"} | {f"{w}.weight_scale": scale for w in "ab"}, compressed())
    with pytest.raises(UsageError, match="model.b.weight stays quantized.*cast it too"):
        checkpoint.convert(tmp_path / "fp8", tmp_path / "out", cast={"model.a": "float32"})
    checkpoint.convert(tmp_path / "fp8", tmp_path / "own", to="reshard", cast={"model.a": "float32"})
    assert "model.b.weight_scale" in checkpoint.catalog(tmp_path / "own")


@pytest.mark.parametrize("blocks", [True, False])
def test_a_model_is_as_transformers_dequantizes_it(blocks: bool, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, dtype="bfloat16"
    )
    torch.manual_seed(0)
    tensors = dict(transformers.LlamaForCausalLM(config).bfloat16().state_dict())
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[f"{name}_scale_inv"] = torch.rand(rows // 32, columns // 32) + 0.01 if blocks else torch.rand(()) + 0.01
        tensors[name] = (tensors[name].float() * 1000).to(torch.float8_e4m3fn)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32] if blocks else None}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "fp8")
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    quantization = transformers.FineGrainedFP8Config(weight_block_size=[32, 32] if blocks else None, dequantize=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch.bfloat16, quantization_config=quantization
    ).state_dict()
    config.quantization_config = None
    own = transformers.LlamaForCausalLM(config).bfloat16()
    checkpoint.load(tmp_path / "fp8", {"model": own}, cast=True)
    checkpoint.convert(tmp_path / "fp8", tmp_path / "bf16", cast={"*": "bfloat16"})
    converted = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "bf16").state_dict()
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
        assert torch.equal(tensor, converted[name]), name
    assert converted.keys() == theirs.keys()


BYTES, INTS, NUMBERS = torch.ones(8, 1, dtype=torch.uint8), torch.ones(8, 1, dtype=torch.int32), torch.ones(8, 1)
SAME = torch.ones(8, 8)
PACKED = {
    "gptq": {"w.qweight": INTS, "w.scales": NUMBERS, "w.qzeros": INTS, "w.g_idx": INTS},
    "awq": {"w.qweight": INTS, "w.scales": NUMBERS, "w.qzeros": INTS},
    "bitsandbytes": {
        "w.weight": torch.zeros(32, 1, dtype=torch.uint8),
        "w.weight.absmax": NUMBERS,
        "w.weight.quant_map": NUMBERS,
    },
    "compressed-tensors": {"w.weight_packed": INTS, "w.weight_scale": NUMBERS, "w.weight_shape": INTS},
    "mxfp4": {"w.weight_blocks": torch.zeros(8, 1, 16, dtype=torch.uint8), "w.weight_scales": BYTES},
    "hqq": {"w.W_q": BYTES, "w.scale": NUMBERS, "w.zero": NUMBERS},
    "torchao": {"w._weight_qdata": SAME.to(torch.int8), "w._weight_scale": NUMBERS},
    "bitnet": {"w.weight": torch.zeros(2, 8, dtype=torch.uint8), "w.weight_scale": torch.ones(1)},
    "modelopt": {
        "w.weight": torch.zeros(8, 4, dtype=torch.uint8),
        "w.weight_scale": NUMBERS.to(torch.float8_e4m3fn),
        "w.weight_scale_2": torch.ones(()),
    },
}
"""Tensors whose shapes or names are others than those of the float weight, by the method that wrote them."""

UNLIKE = {
    "bitsandbytes": {"w.weight": SAME.to(torch.int8), "w.SCB": torch.ones(8)},
    "eetq": {"w.weight": SAME.to(torch.int8), "w.weight_scales": torch.ones(8)},
    "compressed-tensors": {"w.weight": SAME.to(torch.int8), "w.weight_scale": NUMBERS, "w.weight_zero_point": NUMBERS},
    "mxfp8": {"w.weight": SAME.to(torch.float8_e4m3fn), "w.weight_scale_inv": BYTES},
    "modelopt": {"w.weight": SAME.to(torch.float8_e4m3fn), "w.weight_scale": torch.ones(()), "w.pre_quant_scale": torch.ones(8)},
    "deepseek": {"w.weight": SAME.to(torch.float8_e4m3fn), "w.scale": NUMBERS},
    "unknown": {"w.weight": SAME.to(torch.float8_e4m3fn)},
    "quark": {"w.weight": SAME.to(torch.float8_e4m3fn), "w.weight_scale": torch.ones(())},
}
"""Weights of the shape of the float weight whose scales are not applied."""


@pytest.mark.parametrize("method", PACKED)
def test_other_quantized_folders_are_refused_by_name(method: str, tmp_path: Path):
    write(tmp_path / method, PACKED[method], {"quant_method": method})
    weight = torch.zeros(8, 8)
    with pytest.raises(MismatchError, match=f"quantized by {method} .*dequantize it before"):
        checkpoint.load(tmp_path / method, {"model": {"w": {"weight": weight}}}, cast=True)
    assert not weight.any()
    with pytest.raises(UnsupportedError, match=f"is quantized by {method} .*dequantize it before"):
        checkpoint.convert(tmp_path / method, tmp_path / "out", cast={"*": "bfloat16"})
    with pytest.raises(UnsupportedError, match=f"is quantized by {method} .*dequantize it before"):
        checkpoint.reshard(tmp_path / method, tmp_path / "out", mesh={"dp": 2}, cast={"*": "bfloat16"})
    load_as_it_is(tmp_path / method, PACKED[method])


@pytest.mark.parametrize("method", UNLIKE)
def test_a_weight_whose_scale_is_not_understood_is_refused(method: str, tmp_path: Path):
    write(tmp_path / method, UNLIKE[method], {"quant_method": method})
    weight = torch.zeros(8, 8)
    with pytest.raises(MismatchError, match=r"model.w.weight: wanted F32, saved as .*dequantize it before"):
        checkpoint.load(tmp_path / method, {"model": {"w": {"weight": weight}}}, cast=True, ignore=["model.w.[!w]*", "*weight_*"])
    assert not weight.any()
    with pytest.raises(UnsupportedError, match="dequantize it before"):
        checkpoint.convert(tmp_path / method, tmp_path / "out", cast={"model.w.weight": "bfloat16"})
    load_as_it_is(tmp_path / method, UNLIKE[method])


def load_as_it_is(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load every tensor into one of its own dtype, and compare."""
    same = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint.load(path, {"model": same})
    assert all(torch.equal(same[name].float(), tensor.float()) for name, tensor in tensors.items())
