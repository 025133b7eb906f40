"""One phase of the demo: build a layout, load, check, train, save. torchrun starts it; rank 0 prints one JSON event a line."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint

from .digests import differences, digest, digests_of_job
from .layouts import LAYOUTS, Layout
from .model import Config, generate
from .text import VOCABULARY, Text

BATCH = 16
PEAK_LR, WARMUP_STEPS = 3e-3, 20


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    text, config = Text(), Config(VOCABULARY)
    layout = LAYOUTS[options.layout](config)
    extra: dict[str, Any] = {"step": 0}
    emit("built", step=options.until)
    if options.load:
        resume(options.load, layout, extra, text)
    train(layout, extra, text, until=options.until, of=options.of)
    if options.save:
        save(options.save, layout, extra, text)
    if options.prompt:
        whole = generate(layout.model, text.encode(options.prompt), num_tokens=100)
        emit("text", text=text.decode(whole))
    if dist.is_initialized():
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--until", type=int, required=True, help="the step to train to")
    parser.add_argument("--of", type=int, required=True, help="the last step of all phases, where the learning rate ends")
    parser.add_argument("--load", type=Path, help="a checkpoint to begin from, saved on any layout")
    parser.add_argument("--save", type=Path, help="where to save in the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", help="text to go on from at the end; for a layout that holds the whole model")
    return parser.parse_args()


def emit(event: str, **values: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"event": event, **values}), flush=True)


def learning_rate(step: int, of: int) -> float:
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / of)))


def train(layout: Layout, extra: dict[str, Any], text: Text, *, until: int, of: int) -> None:
    """Train on from the step in `extra`."""
    context = Config(VOCABULARY).context
    for step in range(extra["step"], until):
        for group in layout.optimizer.param_groups:
            group["lr"] = learning_rate(step, of)
        value = layout.train(*text.batch(step, BATCH, context))
        extra["step"] = step + 1
        emit("step", step=step + 1, loss=value)


def held_back_loss(layout: Layout, text: Text) -> float:
    return layout.evaluate(*text.held_back_batch(BATCH, Config(VOCABULARY).context))


def state_of(layout: Layout, extra: dict[str, Any]) -> dict[str, Any]:
    return {"model": layout.model, "optimizer": layout.optimizer, "extra": extra}


def record_of(path: Path) -> Path:
    """Return where the trainer keeps its own record of what it saved: beside the checkpoint, which does not know of it."""
    return path.with_name(f"{path.name}.record.json")


def save(path: Path, layout: Layout, extra: dict[str, Any], text: Text) -> None:
    """Save, after writing down digests of the whole tensors that do not come from the library."""
    record = {"digests": digests_of_job(layout.whole_tensors()), "loss": held_back_loss(layout, text)}
    begin = time.perf_counter()
    checkpoint.save(path, state_of(layout, extra), mesh=layout.mesh or None)
    seconds = time.perf_counter() - begin
    if int(os.environ.get("RANK", "0")) == 0:
        record_of(path).write_text(json.dumps(record))
    emit("saved", seconds=seconds)


def resume(path: Path, layout: Layout, extra: dict[str, Any], text: Text) -> None:
    """Load, then compare every tensor with the record, and the record with what `checkpoint.read` sees of the files."""
    begin = time.perf_counter()
    checkpoint.load(path, state_of(layout, extra))
    seconds = time.perf_counter() - begin
    record = json.loads(record_of(path).read_text())
    loaded = digests_of_job(layout.whole_tensors())
    stored = {name: digest(value) for name, value in checkpoint.read(path).items() if isinstance(value, torch.Tensor)}
    emit(
        "resumed",
        seconds=seconds,
        step=extra["step"],
        tensors=len(record["digests"]),
        different=differences(record["digests"], loaded),
        different_in_files=differences(record["digests"], stored),
        loss_saved=record["loss"],
        loss_loaded=held_back_loss(layout, text),
    )


if __name__ == "__main__":
    main()
