"""A rank that raises, hangs, leaves a call out or makes another one: the others are told which and why, the old checkpoint stays,
no file is left of the save that failed, and the job goes on to the next save."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm.store import StoreComm
from reshard_ckpt.engine.common import progress
from reshard_ckpt.engine.saving import commit as save_module
from reshard_ckpt.engine.saving.messages import WrittenFile
from reshard_ckpt.engine.saving.write import ShardFileWriter
from reshard_ckpt.errors import CheckpointError, LayoutError, PeerError, StorageError, UsageError
from reshard_ckpt.format import files
from reshard_ckpt.storage.local import LocalStorage, LocalWriter
from tests.deadlines import Clock, over_when
from tests.reliability.ranks import LOCAL, Job, jobs
from tests.reliability.states import NEW, NEXT, OLD, ROWS, assert_clean, expected, held

SIZE = 4


@pytest.fixture
def job() -> Iterator[Job]:
    """A job that leaves no key in the store."""
    with jobs() as make:
        made = make(SIZE)
        yield made
        assert made.num_keys() == 0


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Deadlines are over when the test says so, and no earlier on a machine that is slow."""
    with over_when(lambda: False) as clock:
        yield clock


def state(rank: int, number: int) -> dict[str, Any]:
    """What a rank holds: some rows of one tensor, all of another, and values."""
    whole, each = expected(number), ROWS // SIZE
    mine = whole["t.rows"][rank * each : (rank + 1) * each].clone()
    rows = LocalShard(mine, (ROWS, 5), (rank * each, 0))
    return {"t": {"rows": rows, "same": whole["t.same"]}, "extra": {"step": number, "long": whole["extra.long"]}}


def save(path: Path, number: int, **options: Any) -> Callable[[int], None]:
    def call(rank: int) -> None:
        checkpoint.save(path, state(rank, number), **options)

    return call


def check(path: Path, number: int) -> None:
    assert held(path) == number
    assert_clean(path)


def begin(job: Job, path: Path) -> None:
    assert job.run(save(path, OLD)) == [None] * SIZE
    check(path, OLD)


def go_on(job: Job, path: Path) -> None:
    assert job.run(save(path, NEXT)) == [None] * SIZE
    check(path, NEXT)


def of_rank(rank: int) -> bool:
    return threading.current_thread().name == f"rank {rank}"


def arrived(job: Job, session: int, step: int, num: int) -> Callable[[], bool]:
    key = f"home/{session}/{step}/arrived"
    return lambda: bool(job.store.check([key])) and job.store.add(key, 0) >= num


def one_is_missing(job: Job, session: int) -> bool:
    """Whether all ranks but one have arrived at some step."""
    return any(arrived(job, session, s, SIZE - 1)() and not arrived(job, session, s, SIZE)() for s in range(9))


# --- it raises ---


class Refuses:
    """An object of the user's whose state cannot be had on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if of_rank(self.rank):
            raise ZeroDivisionError("no state today")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("sick", [0, 2])
def test_what_user_code_raises_reaches_all(job: Job, tmp_path: Path, sick: int):
    begin(job, tmp_path)
    outcomes = job.run(lambda rank: checkpoint.save(tmp_path, {**state(rank, NEW), "user": Refuses(sick)}))
    for rank, error in enumerate(outcomes):
        assert type(error) is (ZeroDivisionError if rank == sick else PeerError)
        assert str(error) == ("no state today" if rank == sick else f"rank {sick}: ZeroDivisionError: no state today")
    check(tmp_path, OLD)
    go_on(job, tmp_path)


@pytest.mark.parametrize("sick", [0, 3])
@pytest.mark.parametrize("error", [StorageError("/ckpt: no space left; free some"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_a_rank_that_fails_at_the_end_of_writing_leaves_no_file_of_any_rank(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sick: int, error: BaseException
):
    begin(job, tmp_path)
    others_wrote = threading.Semaphore(0)
    finish = ShardFileWriter.finish

    def fail(self: ShardFileWriter) -> WrittenFile:
        file = finish(self)
        if of_rank(sick):
            for _ in range(SIZE - 1):
                others_wrote.acquire()
            raise error
        others_wrote.release()
        return file

    with monkeypatch.context() as patch:
        patch.setattr(ShardFileWriter, "finish", fail)
        outcomes = job.run(save(tmp_path, NEW))
    assert outcomes[sick] is error
    assert all(isinstance(other, CheckpointError) and f"rank {sick}: " in str(other) for other in outcomes if other is not error)
    check(tmp_path, OLD)
    go_on(job, tmp_path)


@pytest.mark.parametrize("where", ["publish", "list"])
def test_a_rank_0_that_fails_to_commit_removes_the_files_of_all(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    begin(job, tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("/ckpt: the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, where, fail)
        outcomes = job.run(save(tmp_path, NEW))
    assert {type(error) for error in outcomes} == {StorageError}
    check(tmp_path, OLD)
    go_on(job, tmp_path)


def test_ctrl_c_on_rank_0_at_any_line_of_the_commit_leaves_no_file_of_any_rank(job: Job, tmp_path: Path):
    begin(job, tmp_path)
    commit, reached = save_module.commit.__code__, 0
    codes = {commit, save_module.publish.__code__}
    inside = {StoreComm.gather.__code__, StoreComm._decide.__code__, StoreComm._apply.__code__}

    def interrupted(line: int) -> Callable[[int], None]:
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal reached
            if frame.f_code in inside:
                above = frame.f_back
                while above is not None and above.f_code is not commit:
                    above = above.f_back
                if above is None:
                    return None
            elif frame.f_code not in codes:
                return None
            if event in ("line", "return"):
                reached += 1
                if reached > line:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        def call(rank: int) -> None:
            sys.settrace(trace if rank == 0 else None)
            try:
                checkpoint.save(tmp_path, state(rank, NEW))
            finally:
                sys.settrace(None)

        return call

    for line in range(1000):
        reached = 0
        outcomes = job.run(interrupted(line))
        found = held(tmp_path)
        check(tmp_path, found or OLD)
        if outcomes == [None] * SIZE:
            break
        assert [type(error) for error in outcomes] == [KeyboardInterrupt, *[PeerError] * (SIZE - 1)]
        if found != OLD:  # the interrupt came after the catalog was in place
            begin(job, tmp_path)
    assert held(tmp_path) == NEW
    assert line > 30


def test_an_error_after_the_catalog_is_in_place_deletes_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin(job, tmp_path)
    publish = LocalStorage.publish

    def fail(self: LocalStorage, key: str, data: bytes, **options: Any) -> None:
        publish(self, key, data, **options)
        raise StorageError("/ckpt: cannot sync the folder")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", fail)
        outcomes = job.run(save(tmp_path, NEW))
    assert {type(error) for error in outcomes} == {StorageError}
    assert held(tmp_path) == NEW
    go_on(job, tmp_path)


# --- it hangs ---


@pytest.mark.parametrize("sick", [0, 1])
def test_a_rank_that_hangs_while_it_writes_is_named_and_takes_its_files_back(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, sick: int
):
    begin(job, tmp_path)
    hangs, others_gave_up = threading.Event(), threading.Event()
    told: list[BaseException] = []
    write = LocalWriter.write

    def hang(self: LocalWriter, data: Any) -> None:
        if of_rank(sick):
            hangs.set()
            assert others_gave_up.wait(600)
        write(self, data)

    clock.is_over = lambda: hangs.is_set() and one_is_missing(job, 1)

    def call(rank: int) -> None:
        try:
            save(tmp_path, NEW, timeout_s=600)(rank)
        except PeerError as error:
            told.append(error)
            if len(told) == SIZE - 1:
                clock.is_over = lambda: False
                others_gave_up.set()
            raise

    with monkeypatch.context() as patch:
        patch.setattr(LocalWriter, "write", hang)
        outcomes = job.run(call)
    assert all(isinstance(error, PeerError) and error.ranks == (sick,) for error in outcomes), outcomes
    what = f"rank {sick} did not arrive within 600 s"
    assert all(what in str(error) for error in outcomes)
    check(tmp_path, OLD)
    go_on(job, tmp_path)


def test_a_rank_0_that_hangs_at_the_commit_may_commit_all_the_same_so_nobody_deletes_anything(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
):
    begin(job, tmp_path)
    hangs, others_gave_up = threading.Event(), threading.Semaphore(0)
    publish = LocalStorage.publish

    def hang(self: LocalStorage, key: str, data: bytes, **options: Any) -> None:
        hangs.set()
        for _ in range(SIZE - 1):
            assert others_gave_up.acquire(timeout=600)
        clock.is_over = lambda: False
        publish(self, key, data, **options)

    clock.is_over = lambda: hangs.is_set() and one_is_missing(job, 1)

    def call(rank: int) -> None:
        try:
            save(tmp_path, NEW, timeout_s=600)(rank)
        except PeerError:
            others_gave_up.release()
            raise

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", hang)
        outcomes = job.run(call)
    for error in outcomes:
        assert isinstance(error, PeerError)
        assert error.ranks == (0,)
    check(tmp_path, NEW)
    go_on(job, tmp_path)


# --- it is somewhere else ---


def leave_out(job: Job, clock: Clock, session: int, call: Callable[[int], Any], *absent: int) -> list[Any]:
    """A call that some ranks do not make."""
    present = [rank for rank in range(SIZE) if rank not in absent]
    clock.is_over = arrived(job, session, 0, len(present))
    outcomes = job.run(call, only=present)
    clock.is_over = lambda: False
    for rank in present:
        assert isinstance(outcomes[rank], PeerError)
        assert outcomes[rank].ranks == absent
        assert "did not arrive within 600 s" in str(outcomes[rank])
    return outcomes


@pytest.mark.parametrize("absent", [(0,), (3,), (0, 2), (1, 2, 3)])
@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_that_leaves_saves_out_joins_the_next(job: Job, tmp_path: Path, clock: Clock, absent: tuple[int, ...], times: int):
    """The others are told each time; at the next save it finds by itself that it belongs into a later session."""
    begin(job, tmp_path / "0")
    for i in range(1, times + 1):
        leave_out(job, clock, i, save(tmp_path / str(i), NEW, timeout_s=600), *absent)
    go_on(job, tmp_path / "next")
    go_on(job, tmp_path / "one more")


def test_ranks_that_leave_different_saves_out_meet_again(job: Job, tmp_path: Path, clock: Clock):
    leave_out(job, clock, 0, save(tmp_path / "a", NEW, timeout_s=600), 1)
    # Rank 1 has passed session 0 over by now, rank 2 stays away from session 1.
    leave_out(job, clock, 1, save(tmp_path / "b", NEW, timeout_s=600), 2)
    leave_out(job, clock, 2, save(tmp_path / "c", NEW, timeout_s=600), 0, 1)
    go_on(job, tmp_path / "d")


def test_a_call_that_one_rank_makes_alone_is_passed_over_by_the_others(job: Job, tmp_path: Path, clock: Clock):
    leave_out(job, clock, 0, lambda rank: checkpoint.load(tmp_path / "mine", {}, timeout_s=600), 1, 2, 3)
    go_on(job, tmp_path)


def test_a_slow_rank_is_told_that_it_was_late_and_the_next_save_works(job: Job, tmp_path: Path, clock: Clock):
    begin(job, tmp_path)
    leave_out(job, clock, 1, save(tmp_path, NEW, timeout_s=600), 3)
    (late,) = [error for error in job.run(save(tmp_path, NEW), only=[3]) if error is not None]
    assert isinstance(late, PeerError)
    assert "rank 3 did not arrive within 600 s" in str(late)
    assert "this rank came only after that" in str(late)
    go_on(job, tmp_path)


def test_a_rank_that_leaves_out_a_save_to_the_one_path_is_in_step_again_after_three(job: Job, tmp_path: Path, clock: Clock):
    """Nothing tells its call from the one that it left out; joining would mix the states of two steps."""
    begin(job, tmp_path)
    leave_out(job, clock, 1, save(tmp_path, NEW, timeout_s=600), 2)
    for session in (2, 3):
        (late,) = [error for error in job.run(save(tmp_path, NEW), only=[2]) if error is not None]
        assert "this rank came only after that" in str(late)
        if session == 2:
            leave_out(job, clock, session, save(tmp_path, NEW, timeout_s=600), 2)
    outcomes = job.run(save(tmp_path, NEW), only=[0, 1, 3])
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], PeerError)
        assert outcomes[rank].ranks == (2,)
        assert "rank 2 came too late for save" in str(outcomes[rank])
        assert "twice in a row" in str(outcomes[rank])
    check(tmp_path, OLD)
    go_on(job, tmp_path)


def test_a_rank_that_is_a_call_ahead_waits_for_the_others(job: Job, tmp_path: Path):
    """It left out a, so that its b meets the others' a, and its c their b; then it knows, and c is saved by all."""
    paths = {name: tmp_path / name for name in "abcd"}

    def calls(rank: int) -> list[Any]:
        out = []
        for name in "bc" if rank == 2 else "abc":
            try:
                checkpoint.save(paths[name], state(rank, NEW))
                out.append(None)
            except CheckpointError as error:
                out.append(error)
        return out

    outcomes = job.run(calls)
    for rank, (first, *rest, last) in enumerate(outcomes):
        assert last is None, outcomes
        assert isinstance(first, PeerError)
        assert first.ranks == (2,)
        assert len(rest) == (0 if rank == 2 else 1)
        assert all(isinstance(error, PeerError) and error.ranks == (2,) for error in rest)
    check(paths["c"], NEW)
    go_on(job, paths["d"])


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ("a! b c", {2: "! a? b c"}),  # its a meets the others' b: they pass that over
        ("a! b c? d", {2: "! b a? d"}),  # that was one call ago
        ("a! b? c d", {1: "! a? b? c d", 2: "! b? c d"}),  # one of two is behind
        ("a! b? c d", {1: "! a? c d", 2: "a! z? c d"}),  # another one calls what nobody does
        ("a! b? c d", {2: "! a? a? c d"}),  # passed over once
        ("a? b? c d", {2: "z? a? c d"}),  # nobody has refused a
    ],
)
def test_a_rank_that_is_a_call_behind_misses_one_save_and_is_in_step_again(
    job: Job, tmp_path: Path, usual: str, odd: dict[int, str]
):
    """A call "!" has a wrong argument. A call such as "a!" ends with that error of another rank, and "a?" with a `PeerError`."""
    wanted = [odd.get(rank, usual).split() for rank in range(SIZE)]

    def calls(rank: int) -> list[str]:
        out = []
        for name, *_ in wanted[rank]:
            try:
                if name == "!":
                    checkpoint.load(tmp_path, {}, strict=2)  # type: ignore[arg-type]
                checkpoint.save(tmp_path / name, state(rank, NEW), timeout_s=60)
                out.append(name)
            except CheckpointError as error:
                out.append("!" if name == "!" else name + {UsageError: "!", PeerError: "?"}[type(error)])
        return out

    assert job.run(calls) == wanted
    for name in "abcd":
        assert (tmp_path / name).exists() == (name in usual.split())
    go_on(job, tmp_path / "e")


def test_ranks_that_call_things_crosswise_do_not_wait_for_ever(job: Job, tmp_path: Path):
    a, b = tmp_path / "a", tmp_path / "b"
    for first, second in ((a, b), (b, a), (a, b)):
        outcomes = job.run(lambda rank, x=first, y=second: save(x if rank < 2 else y, NEW)(rank))
        assert {type(error) for error in outcomes} == {PeerError}
    go_on(job, tmp_path / "c")


# --- its state is another one ---


def changed(rank: int, sick: int, name: str) -> dict[str, Any]:
    whole = state(rank, NEW)
    if rank == sick:
        t, extra = whole["t"], whole["extra"]
        if name == "step":
            extra["step"] += 1
        elif name == "hole":
            del t["rows"]
        elif name == "shape":
            t["same"] = t["same"][:2]
        elif name == "dtype":
            t["same"] = t["same"].double()
        elif name == "value":
            t["same"] = t["same"] + 1
        elif name == "kind":
            extra["step"] = torch.tensor(NEW)
        elif name == "global shape":
            t["rows"] = LocalShard(torch.zeros(2, 5), (ROWS + 2, 5), (2 * rank, 0))
    return whole


@pytest.mark.parametrize("sick", [0, 2])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("step", ("extra.step", "rank 0 has ", "PerRank")),
        ("hole", ("t.rows: no rank holds [{low}:{high}, 0:5]",)),
        ("shape", ("t.same", "F32 (3, 3)", "F32 (2, 3)", "rank 0", "rank {other}")),
        ("dtype", ("t.same", "F32 (3, 3)", "F64 (3, 3)", "rank 0", "rank {other}")),
        ("value", ("t.same: ranks 0 and {other} hold it as the same, but their values differ",)),
        ("kind", ("extra.step: a value on rank {valued}, a tensor on another rank",)),
        ("global shape", ("t.rows", "F32 (8, 5)", "F32 (10, 5)", "rank 0", "rank {other}")),
    ],
)
def test_ranks_that_disagree_about_the_state_are_named_on_all(
    job: Job, tmp_path: Path, name: str, parts: tuple[str, ...], sick: int
):
    begin(job, tmp_path)
    outcomes = job.run(lambda rank: checkpoint.save(tmp_path, changed(rank, sick, name)))
    other = sick or 1
    for error in outcomes:
        assert isinstance(error, LayoutError), outcomes
        for part in parts:
            assert part.format(other=other, valued=0 if sick else 1, low=2 * sick, high=2 * sick + 2) in str(error)
    check(tmp_path, OLD)
    go_on(job, tmp_path)


@pytest.mark.parametrize("sick", [0, 2])
@pytest.mark.parametrize(
    ("name", "of_sick", "of_others"),
    [
        ("read_once", {"read_once": True}, {}),
        ("verify_first", {"read_once": True, "verify_first": True}, {"read_once": True}),
        ("verify_first", {"read_once": True, "verify_first": True, "verify": False}, {"read_once": True, "verify_first": True}),
    ],
)
def test_options_with_which_some_would_wait_for_the_others_for_ever_are_refused_on_all(
    job: Job, tmp_path: Path, name: str, of_sick: dict[str, bool], of_others: dict[str, bool], sick: int
):
    begin(job, tmp_path)
    states = [state(rank, NEW) for rank in range(SIZE)]
    outcomes = job.run(lambda rank: checkpoint.load(tmp_path, states[rank], **(of_sick if rank == sick else of_others)))
    who = f"rank {sick}" if sick else f"ranks 1-{SIZE - 1}"
    for error in outcomes:
        assert isinstance(error, UsageError), outcomes
        assert name in str(error)
        assert f"on {who}: pass the same on every rank" in str(error)
    assert all(torch.equal(mine["t"]["same"], expected(NEW)["t.same"]) for mine in states)  # nothing was changed
    go_on(job, tmp_path)


def test_a_tensor_of_one_rank_alone_is_saved(job: Job, tmp_path: Path):
    """Another set of tensors is no mistake by itself: pipeline stages have nothing but."""
    more = torch.arange(5.0)
    outcomes = job.run(lambda rank: checkpoint.save(tmp_path, {**state(rank, NEW), **({"own": more} if rank == 2 else {})}))
    assert [type(outcome) for outcome in outcomes] == [checkpoint.SaveReport] * SIZE
    assert torch.equal(checkpoint.read(tmp_path)["own"], more)


# --- its clock is another one ---


def test_clocks_that_are_hours_apart_change_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The wall clock of each rank is hours off, and that of rank 0 runs backwards from save to save."""
    ahead_s = {rank: 7200.0 * (rank - 1) for rank in range(SIZE)}

    def wrong() -> float:
        rank = getattr(LOCAL, "rank", 0)
        return time.time() + ahead_s[rank]

    skewed = SimpleNamespace(
        time=wrong, monotonic=time.monotonic, strftime=time.strftime, gmtime=lambda: time.gmtime(wrong()), sleep=time.sleep
    )
    for module in (files, save_module, progress):
        monkeypatch.setattr(module, "time", skewed)
    ids = []
    for number in (OLD, NEW, NEXT):
        assert job.run(save(tmp_path, number)) == [None] * SIZE
        check(tmp_path, number)
        ids.append(checkpoint.catalog(tmp_path).save_id)
        ahead_s[0] -= 86400
    assert ids == sorted(ids, reverse=True)
    loaded = job.run(lambda rank: checkpoint.load(tmp_path, state(rank, OLD)))
    assert all(not isinstance(report, BaseException) for report in loaded)
