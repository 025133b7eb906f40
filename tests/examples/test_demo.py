"""The parts of the demo against plain training, and the demo itself with a few steps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from examples.demo.digests import differences, digest, digests_of_job
from examples.demo.layouts import Layout, OneProcess, PipelineTensorParallel, ZeroTensorParallel
from examples.demo.model import Config
from examples.demo.report import rectangles_of, split_tensor
from examples.demo.text import VOCABULARY, Text, prose
from examples.demo.zero import ZeroAdamW
from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.model import FileEntry, ShardView
from tests.docs.runner import not_imported
from tests.launch import ROOT, on_ranks, run_ranks
from tests.warm_python import warm_python

SMALL = Config(vocabulary=31, dim=16, num_heads=2, num_layers=2, context=8, init_std=0.2)
NUM_STEPS = 3
BUSY_S = 1800
"""Before a hang is given up: far more than four ranks take on a machine that does much else."""


def _batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SMALL.vocabulary, (8, SMALL.context + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def _plain() -> OneProcess:
    torch.manual_seed(0)
    return OneProcess(SMALL)


def _trained(layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    losses = [layout.train(*_batch(step)) for step in range(NUM_STEPS)]
    losses.append(layout.evaluate(*_batch(NUM_STEPS)))
    return losses, {name: tensor.detach().clone() for name, tensor in layout.whole_tensors()}


def _assert_same_training(layout: Layout, *, holds_all: bool) -> None:
    losses, tensors = _trained(layout)
    expected_losses, expected = _trained(_plain())
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert not tensors.keys() - expected.keys()
    names: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(names, set(tensors))
    assert set.union(*names) == expected.keys()
    assert not holds_all or {name for name in tensors if not name.endswith(".step")} >= {n for n in expected if "step" not in n}
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(4, timeout_s=BUSY_S)
def test_zero_over_tensor_parallel_trains_as_plain_adamw():
    torch.manual_seed(0)
    layout = ZeroTensorParallel(SMALL)
    assert any(part.start or part.stop < part.parameter.numel() // 2 for part in layout.optimizer.owned), "no range is cut"
    _assert_same_training(layout, holds_all=True)


@on_ranks(4, timeout_s=BUSY_S)
def test_pipeline_over_tensor_parallel_trains_as_one_process():
    layout = PipelineTensorParallel(SMALL)
    whole = dict(_plain().model.named_parameters())
    with torch.no_grad():
        for name, parameter in layout.model.submod.named_parameters():
            value = whole[name].detach()
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    _assert_same_training(layout, holds_all=False)


def _groups(names: list[str], weight_decay: float) -> list[dict[str, object]]:
    sizes = {"a": (3, 5), "b": (7,), "c": (2, 2, 3)}
    parameters = [
        (name, torch.nn.Parameter(torch.arange(float(torch.Size(sizes[name]).numel())).view(sizes[name]))) for name in names
    ]
    return [{"params": parameters[:2], "weight_decay": weight_decay}, {"params": parameters[2:], "weight_decay": weight_decay}]


def _reordered_zero(path: str) -> None:
    """The same parameters in another order, so that every range begins elsewhere."""
    world = dist.group.WORLD
    saving = ZeroAdamW(_groups(["a", "b", "c"], 0.3), world, lr=0.1)
    for _, parameter in saving.named_parameters():
        parameter.grad = parameter.detach().cos()
    saving.step()
    checkpoint.save(path, {"model": dict(saving.named_parameters()), "optimizer": saving})
    loading = ZeroAdamW(_groups(["c", "a", "b"], 0.7), world)
    checkpoint.load(path, {"model": dict(loading.named_parameters()), "optimizer": loading})
    assert [group["weight_decay"] for group in loading.param_groups] == [0.3, 0.3]
    assert [group["lr"] for group in loading.param_groups] == [0.1, 0.1]
    for name, parameter in loading.named_parameters():
        assert torch.equal(parameter, dict(saving.named_parameters())[name])
    for part in loading.owned:
        gradient = _groups([part.name], 0)[0]["params"][0][1].detach().cos().flatten()[part.start : part.stop]  # type: ignore[index]
        state = loading.state[part.name]
        torch.testing.assert_close(state["exp_avg"], gradient * 0.1)
        torch.testing.assert_close(state["exp_avg_sq"], gradient**2 * 0.001)
        assert state["step"] == 1


def test_zero_loads_its_state_at_other_ranges(tmp_path: Path):
    run_ranks(_reordered_zero, 3, str(tmp_path / "checkpoint"))


def test_text_is_prose_that_comes_back():
    text, sample = Text(), prose()[:2000]
    assert text.decode(text.encode(sample)) == sample
    assert len(sample) > 1500
    assert int(text.train.max()) < VOCABULARY
    inputs, targets = text.batch(3, 4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, text.batch(3, 4, 16)[0])


def test_digest_sees_one_bit_one_dim_and_the_dtype():
    tensor = torch.arange(6.0).view(2, 3)
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [flipped, tensor.view(3, 2), tensor.view(torch.int32), tensor.flatten()]
    assert len({digest(t) for t in [tensor, *others]}) == 5
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(torch.tensor(1.0)).startswith("float32 () ")


def test_differences_names_changed_missing_and_added():
    saved = {"same": "1", "changed": "2", "missing": "3"}
    assert differences(saved, {"same": "1", "changed": "0", "added": "4"}) == ["added", "changed", "missing"]


def _disagreeing() -> str:
    try:
        digests_of_job([("w", torch.tensor(float(dist.get_rank())))])
    except ValueError as error:
        return str(error)
    return "no error"


def test_digests_of_ranks_that_disagree_are_refused():
    assert all(message.startswith("w: rank 1 holds") for message in run_ranks(_disagreeing, 2))


@pytest.mark.parametrize(("start", "count"), [(0, 12), (0, 3), (1, 2), (1, 11), (5, 6), (3, 4), (11, 1), (4, 4)])
def test_rectangles_cover_a_run_and_nothing_else(start: int, count: int):
    file = FileEntry("f", 0, "d", b"", "s", 0)
    shard = ShardView((2, 5), (3, 4), start, count, file, 0, count * 4)
    drawn = torch.zeros(3, 4, dtype=torch.int64)
    for top, left, height, width in rectangles_of(shard):
        drawn[top - 2 : top - 2 + height, left - 5 : left - 5 + width] += 1
    assert drawn.flatten().tolist() == [int(start <= i < start + count) for i in range(12)]


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "demo").glob("*.py")), ids=lambda path: path.stem)
def test_each_module_of_torch_that_the_demo_uses_is_imported(path: Path):
    """The processes of the next test have imported more than the demo does."""
    assert not not_imported(path.read_text())


@pytest.mark.slow
def test_demo_changes_layout_twice_bit_for_bit(tmp_path: Path):
    command = [warm_python(), "-m", "examples.demo", "--out", str(tmp_path / "out"), "--steps", "1", "1", "1"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)  # no deadline: a busy machine takes its time
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("148 of 148") == 2
    for picture in ("loss.png", "layout.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
    commands = [line.strip() for line in done.stdout.partition("To try next:\n")[2].splitlines()]
    assert len(commands) > 3
    for line in commands:
        tried = subprocess.run(line, shell=True, cwd=ROOT, text=True, capture_output=True)
        assert tried.returncode == 0, f"{line}\n{tried.stdout}{tried.stderr}"
    cut = split_tensor(checkpoint.catalog(tmp_path / "out" / "phase_1"))
    assert len(checkpoint.catalog(tmp_path / "out" / "phase_1").tensor(cut).shards) == 4
    assert len(checkpoint.catalog(tmp_path / "out" / "phase_3").tensor(cut).shards) == 1
