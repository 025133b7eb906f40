"""Real processes, killed by SIGKILL after real system calls, leave the old checkpoint or the new one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.calls import Calls
from tests.reliability.kills import Case, as_json, save
from tests.reliability.points import figures_of
from tests.reliability.states import NEW, OLD, plain

EVERY = 3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the program: what the undisturbed saves do, and what the kills leave."""
    folder = tmp_path_factory.mktemp("kills")
    options = ["--sample", "--every", str(EVERY), "--traces", str(folder / "traces")]
    out = figures_of("tests.reliability.kills", folder, *options)
    return {"traces": json.loads((folder / "traces").read_text()), "out": list(out.values())}


def named(calls: list[dict[str, Any]]) -> list[tuple[str, str, str, int]]:
    """Calls without what differs from save to save: names made by chance, and how long each step took."""
    ids: dict[str, str] = {}

    def plain_path(path: str) -> str:
        path = re.sub(r"[0-9a-f]{32}", "HEX", path)
        return re.sub(r"\d{8}T\d{6}Z-[0-9a-f]{8}", lambda match: ids.setdefault(match[0], f"save {len(ids)}"), path)

    sizes = [0 if "timeline" in call["path"] else call["size"] for call in calls]
    return [(c["name"], plain_path(c["path"]), plain_path(c["target"]), size) for c, size in zip(calls, sizes, strict=True)]


def test_the_real_system_calls_are_those_that_the_other_tests_stop_at(run: dict[str, Any], tmp_path: Path):
    """What `Calls` records inside of the process, and `Disk` has a model of, is all that the kernel is asked for."""
    for number, (case, traced) in enumerate(run["traces"]):
        case = Case(**case)
        base = tmp_path / str(number)
        base.mkdir()
        if case.old:
            save("sync", base / "p", plain(OLD))
        calls = Calls(str(base))
        with calls.watching():
            save(case.kind, base / "p", plain(NEW))
        assert named([as_json(call) for call in calls.done]) == named(traced), case.label
        assert len(traced) > 15


def test_a_process_killed_after_any_call_leaves_one_whole_checkpoint(run: dict[str, Any]):
    """The harness itself judges what is left after each kill; here, that it did try, and met all outcomes."""
    for tally in run["out"]:
        assert tally["tried"] >= (tally["points"] - EVERY) / EVERY, tally
        assert tally["left_old"] + tally["left_new"] + tally["left_nothing"] == tally["tried"]
        assert (tally["left_nothing"] > 0) == ("first" in tally["label"])
    alone = [tally for tally in run["out"] if "rank" not in tally["label"]]
    assert all(tally["left_new"] and tally["left_new"] < tally["tried"] for tally in alone)
    assert sum(tally["tried"] for tally in run["out"]) > 40


def test_a_process_that_saves_to_memory_killed_at_any_instant_leaves_a_whole_generation(tmp_path: Path):
    found = figures_of("tests.memory.kills", tmp_path, "--every", "9")
    assert found["filling"]["points"] >= 30
    assert found["calls"]["points"] >= 80
    assert sum(found["calls"]["tiers"].values()) == found["calls"]["tried"] >= found["calls"]["points"] // 9
    assert found["calls"]["tiers"]["memory"] > found["calls"]["tiers"].get("", 0)


def test_a_node_killed_at_any_instant_leaves_a_whole_generation_on_the_other(tmp_path: Path):
    found = figures_of("tests.memory.copy_kills", tmp_path, "--victims", "1", "--every", "37")
    assert found["copying 1"]["points"] >= 40
    assert found["calls 1"]["points"] >= 60
    assert all(tried["tried"] >= tried["points"] // 37 for tried in found.values())
