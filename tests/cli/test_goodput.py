"""`goodput` prints the intervals of the formulas, what is lost by cause, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_ckpt.core.planning.interval import JobFigures, best_goodput, daly
from tests.cli.running import run

ARGUMENTS = (
    "--state-gb",
    2000,
    "--write-gbps",
    20,
    "--stall",
    5,
    "--mtbf",
    "3h",
    "--nodes",
    64,
    "--copies",
    1,
    "--copy-gbps",
    10,
)
JOB = JobFigures(2e12, 20e9, 20e9, 10e9, 5.0, 10800.0, 300.0, 64, 1)


def test_json_has_what_the_formulas_say():
    said = run("goodput", *ARGUMENTS, "--json").json
    best = best_goodput(JOB)
    assert said["goodput"] == pytest.approx(best.goodput)
    assert said["memory_interval_s"] == pytest.approx(best.memory_s)
    assert sum(said["lost"].values()) == pytest.approx(1 - said["goodput"])
    assert said["alternatives"]["half the stall"]["goodput"] > said["goodput"]
    assert said["alternatives"]["no memory tier"]["goodput"] < said["goodput"]


def test_a_job_without_memory_saves_to_the_store_as_daly_says():
    said = run("goodput", "--state-gb", 10, "--write-gbps", 5, "--stall", 5, "--mtbf", "24h", "--json").json
    assert said["memory_interval_s"] is None
    assert said["store_interval_s"] == pytest.approx(daly(5, 86400) + 5)


def test_text_says_intervals_causes_and_what_would_change_them(tmp_path: Path):
    file = tmp_path / "lost.svg"
    shown = run("goodput", *ARGUMENTS, "--output", file)
    assert (shown.code, shown.err) == (0, f"{file}: {file.stat().st_size:,} bytes\n")
    first, memory, store, total, *rest = shown.out.splitlines()
    assert first.split() == ["tier", "save", "every", "saving", "steps", "again", "restoring", "lost"]
    assert memory.split()[0] == "memory"
    assert store.split()[0] == "store"
    assert f"{best_goodput(JOB).lost.total:.2%}" in total
    assert any(line.startswith("goodput ") for line in rest)
    picture = file.read_text()
    assert "2,000 GB on 64 nodes" in picture
    assert "saves to memory" in picture


@pytest.mark.parametrize(
    "wrong",
    [
        "--mtbf often", "--state-gb 0.0", "--state-gb nan", "--write-gbps inf", "--stall nan", "--node-share 2.0",
        "--max-overhead 2.0", "--copies -1", "--copies 64", "--nodes 0", "--nodes 1",
    ],
)  # fmt: skip
def test_wrong_figures_are_wrong_use(wrong: str):
    shown = run("goodput", *ARGUMENTS, *wrong.split())
    assert shown.code == 2
    assert wrong in shown.err


def test_picture_of_another_kind_is_refused(tmp_path: Path):
    shown = run("goodput", *ARGUMENTS, "-o", tmp_path / "lost.json")
    assert shown.code == 2
    assert ".svg" in shown.err
