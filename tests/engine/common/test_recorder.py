"""The timeline of a save: every step of every rank, whatever the clocks of the ranks say, and never a reason to fail."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.comm.protocol import Comm
from reshard_ckpt.core.catalog.specs import Mesh
from reshard_ckpt.core.timeline import Timeline
from reshard_ckpt.engine.common import progress as recorder_module
from reshard_ckpt.engine.common.progress import Recorder, TimedComm, merged
from reshard_ckpt.errors import CheckpointNotFound, CorruptError
from reshard_ckpt.format.timeline import decode_timeline
from tests.comm.threads import Server, run_session
from tests.launch import run_ranks


def names(made: Timeline, rank: int = 0) -> list[str]:
    return [step.name for step in made.steps if step.rank == rank]


def test_save_has_each_step_once_in_order_and_the_bytes_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.arange(1_000_000.0)})
    made = checkpoint.timeline(tmp_path)
    assert made.save_id == checkpoint.catalog(tmp_path).save_id
    assert [name for name, _ in itertools.groupby(names(made))] == [
        *("meet", "turn", "capture", "agree", "compare", "write", "sync"),
        *("receipts", "sync", "check", "publish", "clean up"),
    ]
    assert {step.thread for step in made.steps} == {"caller"}
    assert sum(s.num_bytes for s in made.steps if s.name == "write") == next(tmp_path.rglob("*.safetensors")).stat().st_size
    for step, following in itertools.pairwise(made.steps):
        assert step.start_s <= step.end_s <= following.start_s + 2e-6  # they are rounded
    assert made.steps[0].start_s == 0
    assert made.uncertainty_s == (0.0,)


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_async_save_shows_what_goes_on_in_the_background(tmp_path: Path, staging: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    checkpoint.async_save(tmp_path, {"model": model, "optimizer": optimizer}, staging=staging).result()
    made = checkpoint.timeline(tmp_path)
    threads = {name: [s.thread for s in made.steps if s.name == name] for name in names(made)}
    assert threads["capture"] == threads["agree"] == ["caller"]
    assert threads["stage"] == (["caller"] if staging == "eager" else ["caller", "stage"])
    assert threads["write"] == threads["publish"] == ["save"]
    staged = [s.num_bytes for s in made.steps if s.name == "stage"]
    assert min(staged) > 0
    file = next(tmp_path.rglob("*.safetensors")).read_bytes()
    assert sum(staged) == len(file) - 8 - int.from_bytes(file[:8], "little")  # all but the header


def test_record_of_a_rank_has_at_most_100_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, encoded = [], Recorder.encoded
    monkeypatch.setattr(Recorder, "encoded", lambda self: sent.append(encoded(self)) or sent[-1])
    checkpoint.save(tmp_path, {"w": torch.arange(1_000_000.0)})
    assert len(checkpoint.timeline(tmp_path).steps) >= 8
    assert len(sent[0]) <= 100


def test_next_save_removes_the_old_timeline_and_timeline_false_keeps_none(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    for _ in range(3):
        checkpoint.save(tmp_path, state)
        assert len(list(tmp_path.rglob("timeline.msgpack"))) == 1
        assert checkpoint.timeline(tmp_path).save_id == checkpoint.catalog(tmp_path).save_id
    checkpoint.save(tmp_path, state, timeline=False)
    assert not list(tmp_path.rglob("timeline.msgpack"))
    with pytest.raises(CheckpointNotFound, match="timeline=True"):
        checkpoint.timeline(tmp_path)


def test_timeline_that_cannot_be_written_is_a_warning_and_the_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room for it")

    monkeypatch.setattr("reshard_ckpt.engine.saving.commit.merged", refuse)
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    assert "saved, but its timeline is not: RuntimeError: no room for it" in caplog.text
    assert checkpoint.verify(tmp_path).ok
    with pytest.raises(CheckpointNotFound):
        checkpoint.timeline(tmp_path)


def test_damaged_timeline_is_refused_and_the_checkpoint_loads(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    next(tmp_path.rglob("timeline.msgpack")).write_bytes(b"{}")
    with pytest.raises(CorruptError, match="timeline.msgpack: is not a timeline"):
        checkpoint.timeline(tmp_path)
    assert checkpoint.verify(tmp_path).ok
    assert checkpoint.read(tmp_path)["w"].all()


class SkewedTime:
    """The `time` module of one machine, whose clock is ahead. Each look at it takes a millisecond, and nothing else any time.

    A thread that looks at both clocks, one after the other, does so at one moment.
    """

    def __init__(self, ahead: Callable[[], float]) -> None:
        self._ahead, self._looks, self._here = ahead, itertools.count(1), threading.local()

    def time(self) -> float:
        self._here.now = self.monotonic()
        return 1e9 + self._here.now + self._ahead()

    def monotonic(self) -> float:
        now: float | None = self._here.__dict__.pop("now", None)
        return now or next(self._looks) * 1e-3


@pytest.mark.parametrize("skews", [(0, 0, 0, 0), (0, 3600, -7, 0.5), (1e6, 0, 0, -1e6)], ids=str)
def test_clocks_that_disagree_are_put_right_as_far_as_messages_prove(
    skews: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common moment, of which all ranks know, lies within the uncertainty of itself on every rank."""
    here = threading.local()
    monkeypatch.setattr(recorder_module, "time", SkewedTime(lambda: here.ahead))
    together = threading.Barrier(len(skews))

    def rank(comm: Comm) -> Timeline | None:
        here.ahead = skews[comm.rank]
        recorder = Recorder()
        timed = TimedComm(comm, recorder)
        timed.gather(b"state")
        timed.broadcast(b"answer" if comm.rank == 0 else None)
        timed.scatter([b"part"] * comm.size if comm.rank == 0 else None)
        together.wait()
        began = recorder.now()
        together.wait()
        recorder.add("moment", began)
        gathered = timed.gather(recorder.encoded())
        if gathered is None:
            return None
        data = merged(recorder, gathered, recorder.now(), save_id="x", mesh=Mesh(("dp",), (comm.size,)))
        return decode_timeline(data, where="x")

    made = run_session(Server(), len(skews), rank)[0]
    assert isinstance(made, Timeline)
    moments = {step.rank: step for step in made.steps}
    assert sorted(moments) == list(range(len(skews)))
    first = moments[0]
    for r, step in moments.items():
        slack = made.uncertainty_s[r] + 1e-3
        # Each rank's moment overlaps rank 0's, since the barriers before and after it are common.
        assert step.start_s <= first.end_s + slack
        assert step.end_s >= first.start_s - slack
        assert made.uncertainty_s[r] < 0.1  # of some looks
        if skews[r] == skews[0]:
            assert step.start_s <= first.end_s + 1e-3  # one clock: nothing was shifted


def _save_on_ranks(folder: str) -> list[str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.getLogger("reshard_ckpt")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    rank = dist.get_rank()
    state = {f"w{rank}": torch.full((1000,), float(rank)), "same": torch.ones(5)}
    checkpoint.save(folder, state, mesh={"dp": 2, "100%tp": 1})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    checkpoint.load(folder, {"same": DTensor.from_local(torch.zeros(5), mesh)})
    return seen


def test_ranks_of_a_real_job_lie_on_one_axis_and_log_lines_say_where(tmp_path: Path) -> None:
    logged = run_ranks(_save_on_ranks, 2, str(tmp_path))
    made = checkpoint.timeline(tmp_path)
    assert made.num_ranks == 2
    assert made.label(1) == "rank 1 dp=1 100%tp=0"
    for rank in range(2):
        assert set(names(made, rank)) >= {"meet", "capture", "agree", "compare", "write", "sync"}
        *saving, loading = logged[rank]
        assert all(line.startswith(f"[rank {rank} dp={rank} 100%tp=0] ") for line in saving)
        assert loading.startswith(f"[rank {rank} dp={rank}] loaded 1 tensors from ")
        assert any("wrote " in line for line in logged[rank])
    assert "receipts" in names(made, 0)
    assert "receipts" not in names(made, 1)
    end = {rank: max(s.end_s for s in made.steps if s.rank == rank) for rank in range(2)}
    waited = next(s for s in made.steps if s.name == "receipts")
    # One machine, one clock: rank 0 cannot have had the receipt of rank 1 before that rank had done its last step.
    assert waited.end_s >= end[1]
    assert any("saved " in line and "by 2 ranks" in line for line in logged[0])
    assert sum(s.num_bytes for s in made.steps if s.name == "write") == sum(
        p.stat().st_size for p in tmp_path.rglob("*.safetensors")
    )
