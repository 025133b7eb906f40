"""The report of a run of `compare`: a table of figures beside their bars, and a bar chart of the times."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .ranks import Samples


@dataclass(frozen=True, slots=True)
class Figure:
    """One ratio, what it may be at most (None where there is no bar), and the times that it was made of."""

    name: str
    value: float
    bar: float | None = None
    of: str = ""
    unit: str = ""

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.value > self.bar


@dataclass(frozen=True, slots=True)
class Result:
    """All that a run measured."""

    options: dict[str, Any]
    machine: dict[str, str]
    layout: str
    loads: dict[str, bool]
    """The loads by name, and whether most of what each wants is cut along other dims than what is saved."""
    num_tensors: int
    needed_bytes: int
    facts: dict[str, float]
    notes: tuple[str, ...]
    samples: Samples

    def as_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "samples"}
        figures = [{"name": f.name, "value": f.value, "bar": f.bar, "of": f.of} for f in figures_of(self)]
        return {**plain, "figures": figures, "samples": self.samples.as_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        by_rows = {
            "same layout": False,
            **{f"to {target}": False for target in data.get("targets", ())},
        }  # before there were others
        plain = {"loads": by_rows, **{name: data[name] for name in cls.__slots__ if name in data and name != "samples"}}
        plain["notes"] = tuple(data["notes"])
        return cls(**plain, samples=Samples.from_json(data["samples"]))


def machine() -> dict[str, str]:
    """Return where and when a run was made."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": f"{os.cpu_count()} × {model}",
        "memory": f"{memory / (1 << 20):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load_average": f"{os.getloadavg()[0]:.1f}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def figures_of(result: Result) -> list[Figure]:
    """Return the figures of the parts that ran."""
    return [*_save_figures(result), *_stall_figures(result), *_load_figures(result)]


class _Ratios:
    """Ratios of minima."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __call__(self, label: str, name: str, limit: str, bar: float | None = None, what: str = "wall_s") -> Iterator[Figure]:
        if name in self.samples and limit in self.samples:
            mine, least = self.samples.least(name, what), self.samples.least(limit, what)
            yield Figure(label, mine / least, bar, f"{mine:.3f} / {least:.3f} s", "×")


def _save_figures(result: Result) -> Iterator[Figure]:
    ratio, samples = _Ratios(result.samples), result.samples
    if "save" not in samples:
        return
    yield from ratio("durable save ÷ raw write + fsync", "save", "raw write", 1.10)
    yield from ratio("  CPU seconds ÷ raw's", "save", "raw write", 1.5, "cpu_s")
    yield from ratio("save ÷ that with replicas sampled", "save", "save, replicas sampled")
    mine, limit = samples.median("save", "cpu_s"), samples.median("raw write", "cpu_s")
    yield Figure("  the same of medians", mine / limit, None, f"{mine:.3f} / {limit:.3f} s", "×")
    written = samples.least("save", "written_bytes")
    yield Figure("  bytes written ÷ needed", written / result.needed_bytes, 1.005, f"{written / 1e9:.3f} GB", "×")
    yield _peak("  host memory beyond the tensors, save", result, "save", 64)
    first, least = samples.first("save"), samples.least("raw write")
    yield Figure("  first save", first / least, None, f"{first:.3f} / {least:.3f} s", "×")
    for peer in ("dcp save", "torchsnapshot save"):
        yield from ratio(f"{peer} ÷ raw", peer, "raw write")
        yield from ratio("  its CPU seconds ÷ raw's", peer, "raw write", None, "cpu_s")


def _peak(label: str, result: Result, name: str, bar: float) -> Figure:
    peak = max(sample.peak_bytes for sample in result.samples.by_name[name])
    return Figure(label, peak / (1 << 20), bar, "worst rank of all rounds", " MiB")


def _stall_figures(result: Result) -> Iterator[Figure]:
    ratio, samples = _Ratios(result.samples), result.samples
    if "eager" not in samples:
        return
    yield from ratio("eager stall ÷ memcpy of the held bytes", "eager", "memcpy", 1.2)
    first, untouched = samples.first("eager, first"), samples.first("memcpy, untouched")
    yield Figure("first eager stall ÷ memcpy, untouched", first / untouched, 1.3, f"{first:.3f} / {untouched:.3f} s", "×")
    yield from ratio("eager into new memory ÷ memcpy, untouched", "eager, new memory", "memcpy, untouched", 1.3)
    yield from ratio("eager after prepare ÷ steady eager", "eager, prepared", "eager", 1.3)
    yield from ratio("lazy call ÷ memcpy", "lazy, call", "memcpy", 0.1)
    if "lazy, caller holds" in samples:  # figures of before 2026-11-27 lack it
        yield from ratio("lazy call with hold='caller' ÷ memcpy", "lazy, caller holds", "memcpy", 0.05)
    yield from ratio("eager stall ÷ that with replicas sampled", "eager", "eager, replicas sampled")
    yield from ratio("lazy until staged ÷ memcpy", "lazy, until staged", "memcpy")
    for mode in ("thread", "process"):
        name = f"dcp async {mode}"
        yield from ratio(f"{name} ÷ memcpy", name, "memcpy")
        first, copy = samples.first(name), samples.least("memcpy")
        yield Figure("  first", first / copy, None, f"{first:.3f} / {copy:.3f} s", "×")
    best = min(samples.least(f"dcp async {mode}") for mode in ("thread", "process"))
    eager = samples.least("eager")
    yield Figure("eager stall ÷ DCP's better mode", eager / best, None, f"{eager:.3f} / {best:.3f} s", "×")


def _load_figures(result: Result) -> Iterator[Figure]:
    ratio = _Ratios(result.samples)
    # Fixed costs weigh less in a large state: bars of the same layout, of that unverified, and of any other.
    same_bar, unverified_bar, other_bar = (1.3, 1.1, 2.3) if result.needed_bytes > 4e9 else (1.5, 1.3, 2.5)
    for what in result.loads:
        if f"load, {what}" not in result.samples:
            continue
        # Held to bars by CPU seconds, which other work on the machine changes least.
        load, raw, peer, same = f"load, {what}", f"raw read, {what}", f"dcp load, {what}", what == "same layout"
        yield from ratio(f"{load}: CPU seconds ÷ raw read's", load, raw, same_bar if same else other_bar, "cpu_s")
        yield from ratio("  verification off", f"load unverified, {what}", raw, unverified_bar if same else None, "cpu_s")
        yield from ratio("  ÷ DCP's", load, peer, 0.33, "cpu_s")
        yield from ratio("  DCP's ÷ raw read's", peer, raw, None, "cpu_s")
        yield from ratio("  time ÷ raw read's", load, raw)
        yield from _read_figures(result, what)
        yield _peak("  host memory beyond the tensors", result, f"load, {what}", 256)
    yield from ratio("torchsnapshot load: CPU seconds ÷ raw read's", "torchsnapshot load", "raw read, same layout", None, "cpu_s")


def _read_figures(result: Result, what: str) -> Iterator[Figure]:
    read = result.samples.least(f"load, {what}", "read_bytes")
    wanted, touched = result.facts[f"wanted, {what}"], result.facts[f"touched, {what}"]
    yield Figure("  bytes read ÷ wanted", read / wanted, None, f"{read / 1e9:.3f} / {wanted / 1e9:.3f} GB", "×")
    yield Figure("  bytes read ÷ blocks touched", read / touched, 1.005, f"{read / 1e9:.3f} / {touched / 1e9:.3f} GB", "×")
    for name, bar in (("load", 1.04), ("load unverified", 1.02)):
        long_runs = f"long runs {what}"
        if f"{name}, {long_runs}" in result.samples:
            read, wanted = result.samples.least(f"{name}, {long_runs}", "read_bytes"), result.facts[f"wanted, {long_runs}"]
            label = f"  long runs, {'verified' if name == 'load' else 'verification off'}: bytes read ÷ wanted"
            yield Figure(label, read / wanted, bar, f"{read / 1e6:.1f} / {wanted / 1e6:.1f} MB", "×")


def show(path: Path) -> None:
    """Print the table of a result file, and draw the chart beside it."""
    from rich.console import Console
    from rich.table import Table

    data = json.loads(path.read_text())
    result = Result.from_json(data)
    ranks = data["options"]["ranks"]
    title = f"{result.num_tensors} tensors, {result.needed_bytes / 1e9:.2f} GB, {ranks} ranks as {result.layout}"
    table = Table(title=title, caption="; ".join(f"{k} {v}" for k, v in result.machine.items()))
    for column, justify in (("figure", "left"), ("value", "right"), ("at most", "right"), ("made of (minima)", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for f in figures_of(result):
        bar = "" if f.bar is None else f"{f.bar:g}{f.unit}"
        style = "red" if f.missed else "green" if f.bar is not None else ""
        table.add_row(f.name, f"[{style}]{f.value:.3f}{f.unit}[/]" if style else f"{f.value:.3f}{f.unit}", bar, f.of)
    console = Console()
    console.print(table)
    for note in result.notes:
        console.print(note, soft_wrap=True)
    draw(result, path.with_suffix(".png"))
    console.print(f"{path} and {path.with_suffix('.png')}", soft_wrap=True)


def markdown(path: Path) -> str:
    """Return the table of a result file as docs/benchmarks.md holds it; what misses its bar is in bold."""
    result = Result.from_json(json.loads(path.read_text()))
    rows = ["| figure | value | at most | made of (minima) |", "| --- | ---: | ---: | --- |"]
    for f in figures_of(result):
        value = f"{f.value:.3g}{f.unit}"
        rows.append(
            f"| {f.name.strip()} | {f'**{value}**' if f.missed else value} | {'' if f.bar is None else f'{f.bar:g}'} | {f.of} |"
        )
    return "\n".join(rows)


PANELS = {
    "durable save": (
        ("write + fsync", "raw write"), ("save", "save"), ("DCP", "dcp save"), ("torchsnapshot", "torchsnapshot save"),
    ),
    "caller blocked by an async save": (
        ("memcpy", "memcpy"), ("eager", "eager"), ("lazy", "lazy, call"),
        ("DCP thread", "dcp async thread"), ("DCP process", "dcp async process"),
    ),
    "load": (("read", "raw read, {}"), ("unverified", "load unverified, {}"), ("load", "load, {}"), ("DCP", "dcp load, {}")),
}  # fmt: skip
COLOURS = {"limit": "#9aa0a6", "ours": "#1a73e8", "peer": "#e8a33d"}


def draw(result: Result, path: Path) -> None:
    """Draw least times as horizontal bars: grey is the limit, blue this library, orange the peers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [panel for panel in _panels(result) if panel[1]]
    heights = [len(bars) + 1.5 for _, bars in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 0.32 * sum(heights) + 0.6), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (title, bars) in zip(axes[:, 0], panels, strict=True):
        labels, names = [label for label, _ in bars], [name for _, name in bars]
        values = [result.samples.least(name) for name in names]
        places = range(len(bars))
        axis.barh(places, values, color=[COLOURS[_role(name)] for name in names], height=0.7)
        for place, value in zip(places, values, strict=True):
            axis.annotate(f" {value:.2f} s, {value / values[0]:.2f} ×", (value, place), va="center", fontsize=8)
        axis.set_yticks(list(places), labels, fontsize=8)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlim(0, max(values) * 1.22)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=7)
    axes[-1, 0].set_xlabel("least seconds of all rounds; × the first bar of each panel, the machine's limit", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panels(result: Result) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for title, bars in PANELS.items():
        whats = tuple(result.loads) if title == "load" else ("",)
        for what in whats:
            present = [(label, name.format(what)) for label, name in bars if name.format(what) in result.samples]
            yield f"{title} {what}".strip(), present


def _role(name: str) -> str:
    if name.startswith(("raw", "memcpy")):
        return "limit"
    return "peer" if name.startswith(("dcp", "torchsnapshot")) else "ours"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(markdown(Path(argument)))
