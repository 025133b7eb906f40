"""What `test_live_calls` runs with the real megatron-core, in a process:
``python -m tests.families.megatron.live_cases [CASE …]``.

The process pretends that the CPU is CUDA; its forks are the ranks. What is wrong is printed, a line each.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.families.megatron import cpu_shim

warnings.filterwarnings("ignore")
cpu_shim.install()
logging.disable(logging.WARNING)

import torch  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from reshard_ckpt import checkpoint, megatron  # noqa: E402
from tests.families.megatron import jobs  # noqa: E402
from tests.families.megatron.folders import unpack  # noqa: E402
from tests.families.megatron.live_model import Grid, Job, steps_left_alone  # noqa: E402

CAN_RESHARD = "fully_reshardable" in getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable" if CAN_RESHARD else "fully_sharded_model_space",
    "chained_optim_avoid_prefix": True,
}

CHANGES = {
    "dense": [
        (Grid(tp=2, pp=2), Grid(bucket=3000)),
        (Grid(tp=2, pp=2), Grid(tp=4)),
        (Grid(bucket=1000), Grid(pp=2)),
        (Grid(tp=4), Grid(tp=2, pp=2)),
        (Grid(pp=2, vpp=2), Grid(tp=2)),
        (Grid(pp=2, uneven=True), Grid(tp=2, pp=2)),
        (Grid(tp=2, pp=2, tied=False), Grid(pp=4, tied=False)),
        (Grid(tp=2, homogeneous=False), Grid(pp=2, homogeneous=False)),
    ],
    "experts": [
        (Grid(tp=2, ep=2, experts=4), Grid(pp=2, ep=2, experts=4)),
        (Grid(pp=1, ep=4, experts=4), Grid(tp=2, ep=2, experts=4)),
        (Grid(ep=4, experts=4), Grid(tp=2, experts=4)),
        (Grid(tp=2, pp=2, experts=4), Grid(ep=4, experts=4)),
    ],
    "eight": [
        (Grid(tp=2, ep=2, experts=4), Grid(pp=2, ep=4, experts=4)),
        (Grid(pp=2, ep=4, experts=4), Grid(tp=2, ep=2, experts=4)),
    ],
    "whole": [
        (Grid(tp=2, pp=2, distributed=False), Grid(tp=4, distributed=False)),
        (Grid(tp=2, distributed=False, bf16=False), Grid(pp=2, distributed=False, bf16=False)),
        (Grid(tp=2, experts=4, distributed=False), Grid(pp=2, experts=4, distributed=False)),
    ],
    "vocabulary": [
        (Grid(tp=2, pp=2, vocabulary=128), Grid(tp=4, vocabulary=160)),
        (Grid(vocabulary=128), Grid(pp=2, vocabulary=160)),
    ],
}


def changes(root: str, pairs: list[tuple[Grid, Grid]]) -> list[str]:
    """Save on one grid and load on another, optimizers standing in the trees as themselves."""
    wrong = []
    for i, (saved, loaded) in enumerate(pairs):
        job, path = Job(saved, filled=True), f"{root}/{i}"
        wrong += [f"{saved}: filled: {line}" for line in job.wrong()]
        megatron.save(job.tree(), path)
        new = Job(loaded, filled=False)
        out = megatron.load(new.tree(), path)
        wrong += [f"{saved} -> {loaded}: {line}" for line in new.wrong(saved.vocabulary)]
        if out["iteration"] != 12 or out["args"] != job.tree()["args"]:
            wrong.append(f"{saved}: {out['iteration']} {out['args']}")
        new.optimizer.load_state_dict(out["optimizer"])  # as training does with what it is given
        wrong += [f"{saved} -> {loaded}, given back: {line}" for line in new.wrong(saved.vocabulary)]
    return wrong


def trees(root: str) -> list[str]:
    """Save an optimizer as itself and load it by the tree that Megatron makes, and the other way round."""
    wrong = []
    for i, (saved, loaded) in enumerate(
        [(Grid(tp=2, pp=2), Grid(tp=2)), (Grid(tp=2, ep=2, experts=4), Grid(pp=2, ep=2, experts=4))]
    ):
        job, own, made = Job(saved, filled=True), f"{root}/own{i}", f"{root}/made{i}"
        megatron.save(job.tree(), own)
        tree = job.model_tree()
        megatron.save({**job.tree(), **tree, "optimizer": job.optimizer.sharded_state_dict(tree, metadata=METADATA)}, made)
        if rank() == 0:
            found = checkpoint.diff(own, made, values=True)
            differ = (*found.removed, *found.added, *found.shape, *found.tensors)
            wrong += [f"{saved}: {what}" for what in differ if ".param_state." not in what]  # flat trees have a step each there
        new = Job(loaded, filled=False)
        megatron.load({**new.model_tree(), "optimizer": new.optimizer}, made)
        wrong += [f"own of made {saved} -> {loaded}: {line}" for line in new.wrong()]
        new = Job(loaded, filled=False)
        new.prepare()
        tree = new.model_tree()
        tree["optimizer"] = new.optimizer.sharded_state_dict(tree, is_loading=True, metadata=METADATA)
        out = megatron.load(tree, own)
        with steps_left_alone():
            new.optimizer.load_state_dict(out["optimizer"])
        wrong += [f"made of own {saved} -> {loaded}: {line}" for line in new.wrong()]
    return wrong


def strategies(root: str) -> list[str]:
    """Pass the strategies to Megatron's own functions, also wrapped; our functions take what Megatron's take."""
    wrong = [line for name in CALLS for line in unlike(name)]
    for i, wrapped in enumerate((False, True)):
        job, path = Job(Grid(tp=2, pp=2), filled=True), f"{root}/{i}"
        folder(path)
        save, load = megatron.SaveStrategy("torch_dist", 1), megatron.LoadStrategy()
        if wrapped:
            save = FullyParallelSaveStrategyWrapper(save, parallel_state.get_data_parallel_group(with_context_parallel=True))
            load = FullyParallelLoadStrategyWrapper(load)
        common = {"iteration": 3, "rng": dist_checkpointing.ShardedObject("rng", [rank()], (4,), (rank(),))}
        dist_checkpointing.save({**job.model_tree(), **common}, path, save)
        new = Job(Grid(tp=4), filled=False)
        out = dist_checkpointing.load({**new.model_tree(), "rng": common["rng"]}, path, load)
        for chunk, name in zip(new.chunks, new.model_tree(), strict=True):
            chunk.module.load_state_dict(out[name])
        wrong += [f"wrapped={wrapped}: {line}" for line in new.wrong_parameters()]
        if (out["iteration"], out["rng"]) != (3, [rank()]):
            wrong.append(f"wrapped={wrapped}: {out['iteration']}, {out['rng']}")
        keys = set(load.load_tensors_metadata(path)) if not wrapped else set(megatron.load_tensors_metadata(path))
        if keys != {shard.key for shard in Job(Grid(), filled=False).shards()}:
            wrong.append(f"keys: {keys}")
    return wrong


NONE = inspect.Parameter.empty
CALLS = [
    "save",
    "load",
    "load_common_state_dict",
    "load_tensors_metadata",
    "load_sharded_metadata",
    "load_plain_tensors",
    "load_content_metadata",
]


def unlike(name: str) -> list[str]:
    """Say how a function's arguments are not those of Megatron's: their names, their order, and which must be given."""
    theirs = getattr(dist_checkpointing, name, None)
    if theirs is None:
        return []  # this version lacks it
    wanted, ours = (inspect.signature(function).parameters for function in (theirs, getattr(megatron, name)))
    same = [p for p in ours if p in wanted]
    wrong = [f"{name}: {p}" for p in wanted if p not in ours or (wanted[p].default is NONE) != (ours[p].default is NONE)]
    by_place = [p for p in same if ours[p].kind is not ours[p].KEYWORD_ONLY]
    return wrong if by_place == list(wanted)[: len(by_place)] else [*wrong, f"{name}: {by_place} of {list(wanted)}"]


def scheduled(root: str) -> list[str]:
    """Schedule saves as Megatron's training does: in forked processes, and in one that stays."""
    wrong = []
    for i, options in enumerate(({}, {"persistent": True})):
        job, path = Job(Grid(tp=2, pp=2), filled=True), f"{root}/{i}"
        folder(path)
        queue, done = AsyncCallsQueue(**options), []
        request = megatron.save(job.tree(), path, async_sharded_save=True)
        request.add_finalize_fn(lambda done=done: done.append(1))
        queue.schedule_async_request(request)
        with torch.no_grad():
            for parameter in job.optimizer.get_parameters():
                parameter.zero_()  # training goes on
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        new = Job(Grid(tp=4), filled=False)
        megatron.load(new.tree(), path)
        wrong += [f"{options}: {line}" for line in new.wrong()] + ([] if done == [1] else [f"{options}: finalized {done}"])
    return wrong


def folders(root: str) -> list[str]:
    """Load from folders that Megatron saved, straight into other layouts; and give Megatron what was saved here, converted."""
    wrong = []
    pairs = [
        (Grid(tp=2, pp=2), Grid(tp=4)),
        (Grid(tp=2, pp=2), Grid(pp=2)),
        (Grid(tp=2, ep=2, experts=4), Grid(pp=2, ep=2, experts=4)),
    ]
    for i, (saved, loaded) in enumerate(pairs):
        job, path = Job(saved, filled=True), f"{root}/theirs{i}"
        tree = job.tree()
        tree["optimizer"] = job.optimizer.sharded_state_dict(job.model_tree(), metadata=METADATA)
        folder(path)
        dist_checkpointing.save(tree, path, validate_access_integrity=False)
        new = Job(loaded, filled=False)
        out = megatron.load(new.tree(), path)
        wrong += [f"theirs {saved} -> {loaded}: {line}" for line in new.wrong()]
        if out["iteration"] != 12 or out["args"] != job.tree()["args"]:
            wrong.append(f"theirs {saved}: {out['args']}")
        if not CAN_RESHARD:
            continue  # what is converted is for versions that load whole tensors
        own, converted = f"{root}/own{i}", f"{root}/converted{i}"
        megatron.save(Job(saved, filled=True).tree(), own)
        if rank() == 0:
            checkpoint.convert(own, converted, to="megatron")
        torch.distributed.barrier()
        new = Job(loaded, filled=False)
        new.prepare()
        tree = new.model_tree()
        metadata = dist_checkpointing.load_content_metadata(converted)  # by which training makes its tree
        tree["optimizer"] = new.optimizer.sharded_state_dict(tree, is_loading=True, metadata=metadata)
        out = dist_checkpointing.load(tree, converted)
        with steps_left_alone():
            new.optimizer.load_state_dict(out["optimizer"])
        wrong += [f"converted {saved} -> {loaded}: {line}" for line in new.wrong()]
        if out["iteration"] != 12 or out["args"] != job.tree()["args"]:
            wrong.append(f"converted {saved}: {out['args']}")
    return wrong


def ranks(root: str) -> list[str]:
    """Have Megatron load folders that have a file of each rank, converted, into jobs of other layouts."""
    wrong = []
    for name, layouts in RANKS.items():
        converted = Path(root, name, "iter_0000007")
        if rank() == 0:
            old = unpack(f"0.16.1-ranks-{name}", Path(root, "old"))
            checkpoint.convert(old, converted, to="megatron", optimizer="fully_reshardable")
        torch.distributed.barrier()
        for layout in layouts if CAN_RESHARD else ():
            wrong += [f"{name} -> {layout}: {line}" for line in jobs.load(jobs.Case(**layout), str(converted), of_weights)]
    return wrong


RANKS: dict[str, list[dict[str, Any]]] = {
    "dense": [{"pp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}],
    "uneven": [{"tp": 2, "layers": 3, "tied": True}],
    "virtual": [{"tp": 2, "pp": 2, "layers": 4, "vpp": 2}, {"pp": 4, "layers": 4}],
    "moe": [{"tp": 2, "ep": 2, "experts": 4}, {"ep": 4, "experts": 4}],
}


def of_weights(one: dist_checkpointing.ShardedTensor) -> torch.Tensor:
    """What the rank jobs saved: of the optimizer a function of the weights."""
    match = re.fullmatch(r"optimizer\.state\.(\w+)\.(.+)", one.key)
    if match is None:
        return jobs.wanted(one)
    weight = jobs.wanted(replace(one, key=match[2], dtype=torch.bfloat16, data=None)).float()
    return {"param": weight, "exp_avg": weight * 2 + 1, "exp_avg_sq": weight * 4 + 3}[match[1]]


def rank() -> int:
    return torch.distributed.get_rank()


def folder(path: str) -> None:
    """Make a folder, on all ranks."""
    Path(path).mkdir(exist_ok=True)
    torch.distributed.barrier()


OTHERS = {"trees": trees, "strategies": strategies, "scheduled": scheduled, "folders": folders, "ranks": ranks}


def main(*cases: str) -> None:
    """Run cases on four ranks each, or eight, one after the other: what they import takes longer than some of them."""
    for case in cases:
        try:
            results = results_of(case)
        except RuntimeError as error:  # the tracebacks of the ranks
            print(f"{case}: {error}")
            continue
        for number, lines in enumerate(results):
            for line in lines:
                print(f"{case}: rank {number}: {line}")
        print(f"{case}: done", flush=True)


def results_of(case: str) -> list[list[str]]:
    """Run a case; return what is wrong, of each rank."""
    with tempfile.TemporaryDirectory() as root:
        if case in CHANGES:
            return cpu_shim.run_forked(changes, 8 if case == "eight" else 4, root, CHANGES[case])
        return cpu_shim.run_forked(OTHERS[case], 4, root)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [*CHANGES, *OTHERS]))
