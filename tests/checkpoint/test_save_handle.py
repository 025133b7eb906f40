"""What a save under way shows of itself: its repr, its block, and the seconds that it cost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import saving
from reshard_ckpt.engine.saving import commit
from reshard_ckpt.engine.saving.handle import SaveQueue
from reshard_ckpt.engine.saving.staged_copy import StagedCopy
from reshard_ckpt.errors import CheckpointError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves do not write before this is set."""
    go, write = threading.Event(), commit.write_files

    def slow(*args: object, **options: object) -> object:
        assert go.wait(600)
        return write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "write_files", slow)
    return go


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0)}


def test_repr_says_how_far_it_is(tmp_path: Path, gate: threading.Event):
    handle = checkpoint.async_save(tmp_path / "a", weights())
    assert repr(handle) == f"<SaveHandle '{tmp_path / 'a'}': staged, being written>"
    gate.set()
    handle.result()
    assert repr(handle) == f"<SaveHandle '{tmp_path / 'a'}': committed>"
    (tmp_path / "file").touch()
    failed = checkpoint.async_save(tmp_path / "file", weights())
    with pytest.raises(CheckpointError):
        failed.result()
    assert repr(failed) == f"<SaveHandle '{tmp_path / 'file'}': failed: StorageError>"


def test_leaving_the_block_waits_for_the_commit(tmp_path: Path, gate: threading.Event):
    with checkpoint.async_save(tmp_path / "a", weights()) as handle:
        assert not handle.done()
        gate.set()
    assert handle.done()
    assert checkpoint.read(tmp_path / "a")["w"].tolist() == list(range(6))


def test_leaving_the_block_raises_what_the_save_failed_with(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"), checkpoint.async_save(tmp_path / "file", weights()):
        pass
    checkpoint.save(tmp_path / "a", weights())  # it was told, so it is not raised again


def test_an_error_in_the_block_waits_for_the_save_and_goes_on(tmp_path: Path, gate: threading.Event):
    def training() -> None:
        with checkpoint.async_save(tmp_path / "a", weights()):
            gate.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert checkpoint.read(tmp_path / "a")["w"].tolist() == list(range(6))


def test_an_error_in_the_block_leaves_that_of_the_save_to_the_next_save(tmp_path: Path):
    def training() -> None:
        with checkpoint.async_save(tmp_path / "file", weights()):
            raise ZeroDivisionError

    (tmp_path / "file").touch()
    with pytest.raises(ZeroDivisionError):
        training()
    with pytest.raises(CheckpointError, match="the save before this one failed"):
        checkpoint.save(tmp_path / "a", weights())


def test_stall_counts_the_call_and_what_waited_for_staging_but_not_the_writing(tmp_path: Path, gate: threading.Event):
    handle = checkpoint.async_save(tmp_path / "a", weights())
    handle.staged()
    gate.set()
    report = handle.result()
    assert handle.result() == report
    assert 0 < report.stall_s <= report.duration_s


def test_a_catalog_has_a_short_repr(tmp_path: Path):
    report = checkpoint.save(tmp_path, {"w": torch.zeros(3), "step": 7}, mesh={"dp": 1})
    assert repr(checkpoint.catalog(tmp_path)) == f"<Catalog {report.save_id!r}: 1 tensors, 1 values, mesh {{'dp': 1}}>"


def test_a_save_that_begins_while_another_thread_waits_its_turn_is_not_forgotten(tmp_path: Path):
    (tmp_path / "file").touch()
    first = checkpoint.async_save(tmp_path / "a", weights())
    first.result()
    queue = SaveQueue()
    queue.begun.append(first)
    failed = checkpoint.async_save(tmp_path / "file", weights())
    wait = first.running.wait

    def meanwhile(timeout: float | None = None) -> BaseException | None:
        queue.begun.append(failed)  # as another thread does
        return wait(timeout)

    first.running.wait = meanwhile  # type: ignore[method-assign]
    queue.wait_turn(when_busy="wait")
    with pytest.raises(CheckpointError, match="the save before this one failed in the background"):
        queue.wait_turn(when_busy="wait")


def test_of_saves_that_two_threads_begin_at_once_the_next_save_raises_both_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    both, launch = threading.Barrier(2), saving.launch

    def at_once(*args: Any) -> Any:
        both.wait()  # each has had its turn, and neither has joined the queue
        return launch(*args)

    paths = [tmp_path / "one", tmp_path / "two"]
    with monkeypatch.context() as patch:
        patch.setattr(saving, "launch", at_once)
        threads = [threading.Thread(target=checkpoint.async_save, args=(path, weights())) for path in paths]
        for path, thread in zip(paths, threads, strict=True):
            path.touch()
            thread.start()
        for thread in threads:
            thread.join()
    with pytest.raises(CheckpointError, match="2 saves before this one failed in the background: ") as caught:
        checkpoint.save(tmp_path / "a", weights())
    assert all(str(path) in str(caught.value) for path in paths)
    checkpoint.save(tmp_path / "a", weights())  # they were told


def test_a_save_whose_staging_was_interrupted_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StagedCopy, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.async_save(tmp_path / "a", weights())
    assert f"the save to {tmp_path / 'a'} failed: KeyboardInterrupt" in caplog.text
