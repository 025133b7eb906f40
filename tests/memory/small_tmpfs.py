"""A training job whose tmpfs is too small: it goes on, and each save is somewhere. A script that goes into a namespace."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from reshard_ckpt.checkpoint import Manager, Memory
from tests.memory.namespaces import enter


def train(root: str, folder: str, mebibytes: int) -> dict[str, Any]:
    """Save six times; where each save was then, and what was said."""
    num = mebibytes << 18
    weights, places, tiers = torch.zeros(num, dtype=torch.int32), torch.arange(num, dtype=torch.int32), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Manager(root, memory=Memory(copies=0, folder=folder), persist_every="1h") as manager:
            for step in range(1, 7):
                weights.copy_(places).add_(step)
                handle = manager.async_save(step, {"w": weights})
                handle.staged()
                weights.fill_(-1)  # training goes on
                handle.result()
                found = manager.load_latest({"w": weights})
                assert found.step == step
                assert torch.equal(weights.sub_(step), places)
                tiers.append(found.tier)
                manager._memory.wait()  # type: ignore[union-attr]  # what was loaded goes to the store, and keeps its slot until then
            skipped = manager.memory_skipped
    return {"tiers": tiers, "skipped": skipped, "warnings": [str(one.message) for one in caught]}


def crowd_out(root: str, folder: str) -> list[Any]:
    """Save to memory and be killed; then something else fills the tmpfs, and the job starts again, and another one too."""
    memory, out = Memory(copies=0, folder=folder), []
    manager = Manager(f"{root}/old", memory=memory, persist_every="1h")
    manager.async_save(1, {"w": torch.ones(1 << 20)}).result()
    manager.__exit__(RuntimeError, RuntimeError(), None)
    with suppress(OSError), open(f"{folder}/full", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("old", "new"):
            state = {"w": torch.zeros(1 << 20)}
            with Manager(f"{root}/{name}", memory=memory, persist_every="1h") as manager:
                found = manager.load_latest(state)
                out.append(found and (found.tier, float(state["w"].min())))
                out.append(manager.async_save(2, state).persisted())
    return [*out, sorted({str(one.message).partition(":")[0] for one in caught})]


def main(root: str, folder: str, holder: str) -> None:
    """Train with a state of which a tmpfs of 64 MB, in the namespace of `holder`, has room for two, one or none."""
    enter(int(holder), ["mnt"])
    found: dict[Any, Any] = {}
    for mebibytes in (20, 33, 65):
        found[mebibytes] = train(f"{root}/{mebibytes}", folder, mebibytes)
        for one in Path(folder).iterdir():
            shutil.rmtree(one)
    found["full"] = crowd_out(root, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
