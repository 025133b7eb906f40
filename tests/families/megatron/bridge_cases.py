"""What `test_bridge` runs with the real megatron-core and Megatron-Bridge, in a process of its own.

``python -m tests.families.megatron.bridge_cases`` prints a line for each value that is wrong, and a last one.

The process pretends that the CPU is CUDA; its forks are the ranks. Packages that need CUDA to be installed have stand-ins, which
are there to be imported: transformer_engine and modelopt. The rest is real, with a config of plain namespaces.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
import tempfile
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.families.megatron import cpu_shim

warnings.filterwarnings("ignore")
cpu_shim.install()
logging.disable(logging.WARNING)

import torch  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402

from tests.families.megatron.live_model import Grid, Job, steps_left_alone  # noqa: E402  (before the stand-ins: megatron-core needs none)

STAND_INS = ("transformer_engine", "modelopt")


class Anything(type):
    """A class that has any attribute, which is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **options: None})


class StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "2.10.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **options: None})


class StandIns:
    """Finds the modules of packages that cannot be installed without CUDA."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STAND_INS else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, StandIns())  # type: ignore[arg-type]

from megatron.bridge.training import checkpointing  # noqa: E402
from megatron.bridge.training.config import CheckpointConfig  # noqa: E402
from megatron.bridge.training.state import FaultToleranceState, TrainState  # noqa: E402

from reshard_ckpt import checkpoint  # noqa: E402
from reshard_ckpt.integrations import megatron_bridge  # noqa: E402

STEP = 12


def state_of(folder: str, grid: Grid) -> Any:
    """The global state of a job of Megatron-Bridge: its own train state and checkpoint config, and namespaces for the rest."""
    config = CheckpointConfig(
        save=folder,
        load=folder,
        fully_parallel_save=True,
        dist_ckpt_optim_fully_reshardable=True,
        save_rng=False,
        load_rng=False,
    )
    run = {
        "model": {"tensor_model_parallel_size": grid.tp, "pipeline_model_parallel_size": grid.pp},
        "checkpoint": {"save_optim": True, "save_rng": False, "fully_parallel_save": True},
    }
    cfg = SimpleNamespace(
        checkpoint=config,
        model=SimpleNamespace(**run["model"], fp16=False, bf16=True),
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
        rng=SimpleNamespace(data_parallel_random_init=False),
        logger=SimpleNamespace(log_progress=False),
        dataset=None, peft=None, dist=None, tokenizer=None, ft=None,
        to_yaml=lambda path: Path(path).write_text(json.dumps(run)),
    )  # fmt: skip
    train_state = TrainState()
    train_state.step = STEP
    nothing = dict.fromkeys(("wandb_logger", "mlflow_logger", "rank_monitor_client"))
    return SimpleNamespace(cfg=cfg, train_state=train_state, fault_tolerance_state=FaultToleranceState(), **nothing)


def begun(ours: bool) -> None:
    torch.distributed.init_process_group("gloo") if not torch.distributed.is_initialized() else None
    checkpointing.save_sharded_modelopt_state = checkpointing.restore_modelopt_state = lambda *args, **options: None
    if ours:
        megatron_bridge.install()


def save(folder: str, grid: Grid, ours: bool, dies: bool = False) -> list[str]:
    begun(ours)
    init_num_microbatches_calculator(0, None, 12, 1, 12 // torch.distributed.get_world_size())
    job = Job(grid, filled=True)
    if dies:
        from tests.families.kills import die_at_commit

        die_at_commit("iter_0000012")
    checkpointing.save_checkpoint(state_of(folder, grid), job.chunks, job.optimizer, None, 0)
    return job.wrong()


def load(folder: str, grid: Grid, ours: bool) -> list[str]:
    begun(ours)
    size = torch.distributed.get_world_size()
    init_num_microbatches_calculator(0, None, 12, 1, 12 // size)
    job = Job(grid, filled=False)
    job.prepare()
    state = state_of(folder, grid)
    state.train_state.step = 0
    with steps_left_alone():
        step, _ = checkpointing.load_checkpoint(state, job.chunks, job.optimizer, None)
    return job.wrong() + ([] if step == STEP == state.train_state.step else [f"step {step}"])


def train(folder: str, ours: bool, goes_on: bool) -> list[float]:
    """Train a GPT, with the same samples on each rank, and save, or load; return the losses of the steps after that."""
    begun(ours)
    init_num_microbatches_calculator(0, None, 12, 1, 12 // torch.distributed.get_world_size())
    grid = Grid(bf16=False)
    job = Job(grid, filled=False)
    if not goes_on:
        steps(job, range(2))
        checkpointing.save_checkpoint(state_of(folder, grid), job.chunks, job.optimizer, None, 0)
        return steps(job, range(2, 4))
    with torch.no_grad():
        for parameter in job.chunks[0].parameters():
            parameter.zero_()
    job.prepare()
    with steps_left_alone():
        checkpointing.load_checkpoint(state_of(folder, grid), job.chunks, job.optimizer, None)
    for state in job.optimizers()[0].optimizer.state.values():
        state["step"] = state["step"].clone()  # Megatron makes one for all, in which torch's Adam counts each parameter
    return steps(job, range(2, 4))


def steps(job: Job, numbers: range) -> list[float]:
    """Make optimizer steps; return their losses."""
    model = job.chunks[0]
    model.eval()  # without dropout
    losses = []
    for number in numbers:
        model.zero_grad_buffer()
        job.optimizer.zero_grad()
        tokens = torch.arange(16).view(2, 8).add(5 * number).remainder(64)
        mask = torch.ones(8, 8).tril()[None, None] < 0.5
        loss = model(tokens, torch.arange(8).expand(2, 8), mask, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        model.finish_grad_sync()
        job.optimizer.step()
        losses.append(float(loss))
    return losses


def main() -> None:
    wrong: list[str] = []

    def run(what: str, function: Any, ranks: int, *args: Any) -> None:
        for lines in cpu_shim.run_forked(function, ranks, *args):
            wrong.extend(f"{what} on {ranks} ranks: {line}" for line in lines)

    with tempfile.TemporaryDirectory() as root:
        own, stock = f"{root}/own", f"{root}/stock"
        run("save", save, 2, own, Grid(), True)
        iteration = f"{own}/iter_{STEP:07d}"
        if checkpoint.inspect(iteration).format != "reshard_ckpt" or not checkpoint.verify(iteration).ok:
            wrong.append(f"the folder is of {checkpoint.inspect(iteration).format}")
        run("load", load, 1, own, Grid(), True)
        run("load", load, 3, own, Grid(), True)
        run("load", load, 2, own, Grid(tp=2), True)
        run("load", load, 4, own, Grid(tp=2, pp=2), True)
        run("stock save", save, 2, stock, Grid(), False)
        run("load of stock", load, 3, stock, Grid(), True)
        for ranks in (1, 3):
            run("stock load", load, ranks, stock, Grid(), False)
        unbroken = {ours: cpu_shim.run_forked(train, 2, f"{root}/losses-{ours}", ours, False)[0] for ours in (True, False)}
        if unbroken[True] != unbroken[False]:
            wrong.append(f"losses: {unbroken}")
        for ours, ranks in ((True, 2), (True, 1), (True, 3), (False, 2), (False, 1), (False, 3)):
            for losses in cpu_shim.run_forked(train, ranks, f"{root}/losses-{ours}", ours, True):
                if any(abs(loss / of - 1) > 1e-5 for loss, of in zip(losses, unbroken[ours], strict=True)):
                    wrong.append(f"losses on {ranks} ranks, ours {ours}: {losses}, without a stop {unbroken[ours]}")
        try:
            run("killed", save, 2, f"{root}/killed", Grid(), True, True)
            wrong.append("nobody was killed")
        except Exception as error:
            print(f"killed: {type(error).__name__}")
        killed = Path(root, "killed")
        if (killed / "latest_checkpointed_iteration.txt").exists() or list(killed.rglob("catalog.msgpack")):
            wrong.append("a killed save left a tracker or a catalog")
    for line in wrong:
        print(line)
    print("bridge: done" if not wrong else "bridge: wrong")


if __name__ == "__main__":
    main()
