"""Train a small GPT on three parallel layouts, one after the other, each from exactly where the last one stopped.

1. Four processes, data-parallel 2 × tensor-parallel 2, with a ZeRO-1 AdamW whose state is split into flat ranges; save, stop.
2. Four processes, pipeline-parallel 2 × tensor-parallel 2, with torch's AdamW: resume from that checkpoint, train, save, stop.
3. One process with the plain model: resume, train, save, and write a few lines of text.
4. For comparison, the same training in one process from the first step to the last, without any checkpoint: its loss is drawn
   under that of the three, so that a jump that comes from the data is not mistaken for one that comes from a checkpoint.

Run it with ``make demo``, or ``python -m examples.demo`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from reshard_ckpt import checkpoint

from .report import PhaseResult, draw_layouts, draw_losses, split_tensor

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = "The"
COMPARED = """\
Compared for each model and optimizer tensor: its SHA-256 as the trainer held it
before saving, as the next layout holds it after loading, and as checkpoint.read
finds it in the files. The loss is that of text held back from training.
"""


@dataclass(frozen=True, slots=True)
class Phase:
    title: str
    layout: str
    num_processes: int


PHASES = (
    Phase("dp 2 × tp 2, ZeRO", "zero_tp", 4),
    Phase("pp 2 × tp 2", "pipeline_tp", 4),
    Phase("one process", "one_process", 1),
)


UNCHANGED = Phase("unchanged run", "one_process", 1)


class PhaseFailed(Exception):
    """A phase ended with an error; the message holds the end of what it printed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for checkpoints and pictures; replaced")
    parser.add_argument("--steps", type=int, nargs=3, default=(110, 50, 180), metavar="N", help="steps of each phase")
    options = parser.parse_args()
    out, console = options.out.resolve(), Console()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        results, unchanged = run_phases(out, options.steps, console)
    except PhaseFailed as error:
        console.print(Text(str(error)), style="red")
        return 1
    return report(results, unchanged, out, console)


def run_phases(out: Path, steps: tuple[int, int, int], console: Console) -> tuple[list[PhaseResult], list[float]]:
    """Run all phases; return the events of each, and the losses of the unchanged run."""
    results: list[PhaseResult] = []
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def run(phase: Phase, result: PhaseResult, options: Sequence[str]) -> None:
            task = progress.add_task(phase.title, total=result.last - result.first, note="starting")
            for event in events(phase, result, sum(steps), options):
                note(event, result)
                if event["event"] == "step":
                    progress.update(task, completed=event["step"] - result.first, note=f"loss {event['loss']:.3f}")

        first = 0
        for number, (phase, count) in enumerate(zip(PHASES, steps, strict=True)):
            result = PhaseResult(phase.title, out / f"phase_{number + 1}", first, first + count)
            # Another seed for each phase: what does not come from the checkpoint would show.
            options = ["--save", str(result.path), "--seed", str(number)]
            options += ["--load", str(results[-1].path)] if results else []
            run(phase, result, options + (["--prompt", PROMPT] if phase.num_processes == 1 else []))
            results.append(result)
            first += count
        unchanged = PhaseResult(UNCHANGED.title, out / "unchanged", 0, first)
        run(UNCHANGED, unchanged, [])
    return results, unchanged.losses


def events(phase: Phase, result: PhaseResult, num_steps: int, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Start a phase; yield the events of its first rank, as they come."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={phase.num_processes}"]
    command = [sys.executable, *(torchrun if phase.num_processes > 1 else []), "-m", "examples.demo.train"]
    command += ["--layout", phase.layout, "--until", str(result.last), "--of", str(num_steps), *options]
    log = result.path.with_name(f"{result.path.name}.log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield from (json.loads(line) for line in process.stdout or () if line.startswith("{"))
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.terminate()
            process.wait()
    if process.returncode:
        raise PhaseFailed(f"{phase.title}: exit status {process.returncode}; all of it is in {log}\n{log.read_text()[-4000:]}")


def note(event: dict[str, Any], result: PhaseResult) -> None:
    """Keep what the report needs."""
    if event["event"] == "resumed":
        result.resumed = event
    elif event["event"] == "step":
        result.losses.append(event["loss"])
    elif event["event"] == "text":
        result.text = event["text"]


def report(results: list[PhaseResult], unchanged: list[float], out: Path, console: Console) -> int:
    """Print the table and the text, draw the pictures; return 0 where every tensor came back bit for bit."""
    table = Table(title="After each change of layout", title_justify="left")
    for heading in ("from", "to", "bit-identical", "loss before", "loss after"):
        table.add_column(heading, justify="left" if heading in ("from", "to") else "right")
    num_different = 0
    for before, after in pairwise(results):
        resumed = after.resumed
        different = sorted({*resumed["different"], *resumed["different_in_files"]})
        num_different += len(different)
        same = f"[{'red' if different else 'green'}]{resumed['tensors'] - len(different)} of {resumed['tensors']}"
        table.add_row(before.title, after.title, same, f"{resumed['loss_saved']:.4f}", f"{resumed['loss_loaded']:.4f}")
        for name in different[:10]:
            console.print(f"differs: {name}", style="red")
    console.print(table)
    console.print(COMPARED)
    console.print(Panel(Text(results[-1].text), title="What one process wrote after that", title_align="left"))
    catalogs = [(result.title, checkpoint.catalog(result.path)) for result in results]
    draw_losses(results, unchanged, out / "loss.png")
    draw_layouts(catalogs, split_tensor(catalogs[0][1]), out / "layout.png")
    for path, what in ((out / "loss.png", "the loss across the changes"), (out / "layout.png", "one tensor on three layouts")):
        console.print(f"{path}: {what}", soft_wrap=True, highlight=False)
    console.print("\nTo try next:")
    for line in to_try(out):
        console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    return 1 if num_different else 0


def to_try(out: Path) -> list[str]:
    """List commands that work on what the demo leaves."""
    program = os.path.relpath(Path(sys.executable).with_name("reshard-ckpt"))
    one, three = (shlex.quote(os.path.relpath(out / f"phase_{n}")) for n in (1, 3))
    page, other = (shlex.quote(os.path.relpath(out / name)) for name in ("phase_1.html", "on_8_ranks"))
    return [
        f"{program} inspect {one}",
        f"{program} inspect {one} {split_tensor(checkpoint.catalog(out / 'phase_1'))}",
        f"{program} verify {three}",
        f"{program} plot {one} -o {page}",
        f"{program} reshard {three} {other} --mesh dp=2,tp=4",
    ]


if __name__ == "__main__":
    sys.exit(main())
