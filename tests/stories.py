"""Count the functions of the package that one save or one load enters: how much of it a reader must open to follow the story.

``python -m tests.stories save`` saves a two-layer FSDP2 model with AdamW in a fresh process of one rank, and prints the counts as
JSON; ``load`` saves it unseen, and counts a load into a fresh state. With ``--list`` each file is printed with its functions.

1. *functions*: each function or method (``def``, nested ones too) that at least one call entered, in any thread.
2. *frames*: the same with lambdas and with comprehensions and generator expressions, which have a code object of their own.
3. *files*: the files of the package that hold these functions.

Imports are over before the count begins. Methods that `dataclass` generates are in no file, and are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import reshard_ckpt
from reshard_ckpt.checkpoint import load, save

PACKAGE = str(Path(reshard_ckpt.__file__).parent)


def training_state() -> dict[str, Any]:
    """Make a two-layer model under FSDP2, its AdamW after one step, and a step count."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": {"step": 1}}


def entered(call: Callable[[], Any]) -> set[CodeType]:
    """Return the code of each function of the package that a call enters, in this thread and in those that it starts."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {code for code in seen if code.co_filename.startswith(PACKAGE)}


def story(name: str) -> set[CodeType]:
    """Return the code that one save or one load of the state enters."""
    state = training_state()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step_1"
        if name == "save":
            return entered(lambda: save(path, state))
        save(path, state)
        fresh = training_state()
        return entered(lambda: load(path, fresh))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("story", choices=("save", "load"))
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    codes = story(arguments.story)
    dist.destroy_process_group()
    by_file: dict[str, list[str]] = defaultdict(list)
    for code in codes:
        if not code.co_name.startswith("<"):
            by_file[code.co_filename.removeprefix(f"{PACKAGE}/")].append(code.co_qualname)
    if arguments.list:
        for file, functions in sorted(by_file.items()):
            print(f"{file} {len(functions)}: {', '.join(sorted(functions))}")
    print(json.dumps({"functions": sum(map(len, by_file.values())), "frames": len(codes), "files": len(by_file)}))


if __name__ == "__main__":
    main()
