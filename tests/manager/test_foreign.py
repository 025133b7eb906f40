"""A run that goes on from a folder of another library: it is loaded as the newest, and never removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import CorruptError, NameCollisionError, UsageError
from tests.manager.test_manager import empty, state


def foreign(root: Path, kind: str, step: int) -> None:
    """Write a step as another library would."""
    folder = root / f"step_{step}"
    tensor = torch.full((1000,), float(step))
    if kind == "dcp":
        dcp.save({"model": {"w": tensor}}, checkpoint_id=folder)
    else:
        folder.mkdir(parents=True)
        save_file({"w": tensor}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_folder_of_another_library_is_the_newest(tmp_path: Path, kind: str):
    foreign(tmp_path, kind, 100)
    (tmp_path / "step_200" / "notes").mkdir(parents=True)  # of no format
    before = sorted(path.name for path in (tmp_path / "step_100").iterdir())
    with Manager(tmp_path, keep_last=1) as manager:
        into = {"w": torch.zeros(1000)}
        found = manager.load_latest({"model": into})
        assert (found.step, into["w"][0].item(), manager.steps()) == (100, 100.0, [100])
        assert [*manager.catalog(100).names] == ["model.w"]
        for step in (110, 120):
            manager.save(step, state(step))
        assert manager.steps() == [100, 120]
        with pytest.raises(UsageError, match="step_100: .*another library.*by hand"):
            manager.delete(100)
    assert sorted(path.name for path in (tmp_path / "step_100").iterdir()) == before
    with Manager(tmp_path, keep_last=1) as manager:
        assert manager.load_latest(empty()).step == 120


def test_one_that_was_gone_back_from_does_not_count_until_it_is_saved_anew(tmp_path: Path):
    with Manager(tmp_path) as manager:
        manager.save(90, {"w": torch.ones(1000)})
    foreign(tmp_path, "safetensors", 100)
    with Manager(tmp_path) as manager:
        manager.load(90, {"w": torch.ones(1000)})
        manager.save(95, {"w": torch.ones(1000)})
        assert manager.steps() == [90, 95]
        manager.save(100, {"w": torch.ones(1000)})
        assert manager.steps() == [90, 95, 100]


def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path: Path):
    foreign(tmp_path, "safetensors", 100)
    (tmp_path / "step_100" / "model.safetensors").write_bytes(b"\xff" * 100)
    with (
        Manager(tmp_path) as manager,
        pytest.warns(UserWarning, match="passed over.*step_100"),
        pytest.raises(CorruptError, match="no checkpoint can be loaded"),
    ):
        manager.load_latest({"model": {"w": torch.zeros(1000)}})


def test_one_that_cannot_be_opened_is_an_error_only_where_it_is_wanted(tmp_path: Path):
    foreign(tmp_path, "safetensors", 100)
    save_file({"w": torch.zeros(1000)}, tmp_path / "step_100" / "other.safetensors")  # which one is meant?
    with Manager(tmp_path) as manager:
        with pytest.raises(NameCollisionError, match="step_100: model.w occurs twice"):
            manager.load_latest({"model": {"w": torch.zeros(1000)}})
        manager.save(110, state(110))
        assert manager.steps() == [100, 110]
        assert manager.load_latest(empty()).step == 110


def test_one_that_is_saved_anew_is_kept_for_its_metric(tmp_path: Path):
    foreign(tmp_path, "safetensors", 100)
    with Manager(tmp_path, keep_last=1, keep_best=1) as manager:
        manager.load_latest({"model": {"w": torch.zeros(1000)}})
        for step, metric in ((100, 2.0), (110, 1.0), (120, 0.5)):
            manager.save(step, state(step), metric=metric)
        assert (manager.steps(), manager.best()) == ([100, 120], 100)
