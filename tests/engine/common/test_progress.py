"""What is told of work under way: every byte, in order, to a function or on a line that people can read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.progress import StatusLine, Tally, reporter
from reshard_ckpt.errors import UsageError
from tests.comm.threads import run_together


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def run(stream: io.StringIO, times: list[tuple[float, int]], total: int, step: str = "save") -> str:
    clock = Clock()
    line = StatusLine(stream, clock)
    line(step, 0, total)
    for now, done in times:
        clock.now = 5.0 + now
        line(step, done, total)
    return stream.getvalue()


def test_line_says_bytes_rate_and_time_left() -> None:
    assert run(io.StringIO(), [(2.0, 500_000_000)], 2_000_000_000) == ("save: 500 MB of 2 GB (25%), 250 MB/s, 6.0 s left\n")


def test_work_of_a_moment_has_no_line() -> None:
    assert run(Terminal(), [(0.2, 10), (0.4, 60), (0.9, 100)], 100) == ""


def test_terminal_line_is_rewritten_and_its_rest_wiped() -> None:
    text = run(Terminal(), [(1.5, 1_000), (1.6, 1_100), (2.0, 9_000), (4.0, 10_000)], 10_000)
    first, second, last = text.removeprefix("\r").removesuffix("\n").split("\r")
    assert first == "save: 1 kB of 10 kB (10%), 667 B/s, 14 s left"
    assert second.rstrip() == "save: 9 kB of 10 kB (90%), 4.5 kB/s, 0.2 s left"
    assert last.rstrip() == "save: 10 kB in 4.0 s, 2.5 kB/s"
    assert len(last) == len(second.rstrip())  # nothing of the longer line before remains
    assert text.endswith("\n")
    assert text.count("\n") == 1


def test_elsewhere_lines_are_few_and_whole() -> None:
    text = run(io.StringIO(), [(t / 10, t * 10) for t in range(1, 401)], 4_000)
    lines = text.splitlines()
    assert lines[-1] == "save: 4 kB in 40 s, 100 B/s"
    assert len(lines) == 5  # after 1, 11, 21 and 31 seconds, and the last
    assert "\r" not in text


def test_second_step_begins_anew_after_one_that_was_cut_off() -> None:
    stream, clock = Terminal(), Clock()
    line = StatusLine(stream, clock)
    line("verify", 0, 100)
    clock.now += 2
    line("verify", 50, 100)
    line("load", 0, 100)
    clock.now += 2
    line("load", 100, 100)
    assert stream.getvalue() == "\rverify: 50 B of 100 B (50%), 25 B/s, 2.0 s left\n\rload: 100 B in 2.0 s, 50 B/s\n"


def test_broken_stream_does_not_stop_the_work() -> None:
    closed = io.StringIO()
    closed.close()
    line = StatusLine(closed, clock := Clock())
    line("save", 0, 10)
    clock.now += 3
    line("save", 5, 10)
    line("save", 10, 10)


def test_tally_adds_up_over_threads() -> None:
    seen: list[tuple[str, int, int]] = []
    tally = Tally("load", 8_000, lambda *what: seen.append(what))
    run_together(lambda _: [tally.add(1) for _ in range(1_000)], range(8))
    assert seen == [("load", done, 8_000) for done in range(8_001)]


def test_false_tells_nobody() -> None:
    reporter(False)("save", 1, 2)
    assert reporter(print) is print


class Told:
    """Every call, proved to begin at 0, to grow, and to end with all."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, step: str, done: int, total: int) -> None:
        self.calls.append((step, done, total))

    def totals(self) -> dict[str, int]:
        out = {}
        for name in dict.fromkeys(step for step, _, _ in self.calls):
            done = [d for step, d, _ in self.calls if step == name]
            assert done[0] == 0
            assert done == sorted(done)
            assert {total for step, _, total in self.calls if step == name} == {done[-1]}, name
            out[name] = done[-1]
        return out


@pytest.mark.parametrize("how", ["save", "eager", "lazy"])
def test_save_tells_every_byte_of_its_files(tmp_path: Path, how: str) -> None:
    state, told = {"w": torch.arange(3_000_000.0)}, Told()
    if how == "save":
        checkpoint.save(tmp_path, state, progress=told)
    else:
        checkpoint.async_save(tmp_path, state, staging=how, progress=told).result()
    assert told.totals() == {"save": sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))}
    assert len(told.calls) > 3


def test_load_and_read_tell_every_byte_that_they_read(tmp_path: Path) -> None:
    w = torch.arange(6_000_000.0)
    checkpoint.save(tmp_path, {"w": w})
    told, into = Told(), torch.zeros_like(w)
    report = checkpoint.load(tmp_path, {"w": into}, verify_first=True, progress=told)
    assert torch.equal(into, w)
    totals = told.totals()
    assert set(totals) == {"verify", "load"}
    assert sum(totals.values()) == report.bytes_read
    told = Told()
    assert torch.equal(checkpoint.read(tmp_path, progress=told)["w"], w)
    assert told.totals() == {"load": totals["load"]}


def test_nothing_to_load_is_told_too(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1})
    told = Told()
    checkpoint.load(tmp_path, {"x": 0}, progress=told)
    assert told.totals() == {"load": 0}


def test_what_the_function_raises_ends_a_save_and_leaves_what_was(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(4)})

    def stop(step: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, {"w": torch.zeros(4)}, progress=stop)
    assert checkpoint.read(tmp_path)["w"].all()
    checkpoint.save(tmp_path, {"w": torch.zeros(4)})
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_true_writes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard_ckpt.engine.common.progress.MOMENT_S", 0.0)
    checkpoint.save(tmp_path, {"w": torch.ones(1000)}, progress=True)
    checkpoint.load(tmp_path, {"w": torch.ones(1000)}, progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(":")[0] for line in told.err.splitlines()][:1] == ["save"]
    assert any(line.startswith("load: 4.") and " in " in line for line in told.err.splitlines())


@pytest.mark.parametrize("progress", [1, "yes", None])
def test_what_cannot_be_called_is_wrong_use(tmp_path: Path, progress: Any) -> None:
    with pytest.raises(UsageError, match=f"progress={progress!r}: pass True, False, or a function"):
        checkpoint.save(tmp_path, {"w": torch.ones(3)}, progress=progress)
