"""Sessions among real torchrun processes. Each test is one launch that hosts many cases."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from reshard_ckpt.comm import Comm, open_session
from reshard_ckpt.comm import exchange as exchange_module
from reshard_ckpt.comm import group as group_module
from reshard_ckpt.comm.sessions import current_group
from reshard_ckpt.errors import LayoutError, PeerError, UsageError
from tests.deadlines import over_when_here_are_all_but
from tests.launch import run_ranks


def outcome(
    body: Callable[[Comm], Any], *, kind: str = "save", subject: str = "/ckpt", timeout_s: float = 600, **kwargs: Any
) -> Any:
    """What a session returns, or the class, message and ranks of what it raises."""
    try:
        with open_session(kind, subject, timeout_s=timeout_s, **kwargs) as comm:
            return body(comm)
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())


def exchange(comm: Comm) -> tuple[list[bytes] | None, bytes, bytes]:
    return (
        comm.gather(b"%d" % comm.rank),
        comm.broadcast(b"all" if comm.rank == 0 else None),
        comm.scatter([b"to %d" % rank for rank in range(comm.size)] if comm.rank == 0 else None),
    )


def expected(rank: int, size: int) -> tuple[list[bytes] | None, bytes, bytes]:
    return [b"%d" % r for r in range(size)] if rank == 0 else None, b"all", b"to %d" % rank


def job_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def num_keys() -> int:
    """How many keys of ours the job's store holds, and of sessions the group's own, once every rank is here."""
    dist.barrier()
    group = current_group(None)
    assert group is not None
    # Torch 2.6 cannot list them; how many are left is counted in tests/comm/test_store.py as well, whatever the release.
    store = job_store()
    keys = store.list_keys() if hasattr(store, "list_keys") else []
    count = sum("reshard_ckpt" in key for key in keys)
    if keys and group.rank == 0:  # the number of the session, and so on
        count += sum(
            key.split("/")[0].isdigit()
            for key in dist.PrefixStore(group.home._nonce(), group.home._connection._client).list_keys()
        )
    dist.barrier()
    return count


def many_sessions() -> tuple[bool, int]:
    rank = dist.get_rank()
    right = all(outcome(exchange) == expected(rank, 4) for _ in range(200))
    return right, num_keys()


def large_messages() -> list[int]:
    with open_session("save", "/ckpt") as comm:
        gathered = comm.gather(bytes([comm.rank]) * (24 << 20))
        got = comm.scatter([bytes([rank]) * (24 << 20) for rank in range(4)] if comm.rank == 0 else None)
    assert gathered is None or [message == bytes([rank]) * (24 << 20) for rank, message in enumerate(gathered)] == [True] * 4
    assert got == bytes([dist.get_rank()]) * (24 << 20)
    return [num_keys()]


def failures() -> dict[str, Any]:
    rank = dist.get_rank()

    def fails(error: BaseException, on: int) -> Callable[[Comm], Any]:
        def body(comm: Comm) -> Any:
            exchange(comm)
            if comm.rank == on:
                raise error
            return exchange(comm)

        return body

    return {
        "layout": outcome(fails(LayoutError("w: overlaps"), on=2)),
        "root": outcome(fails(ValueError("boom"), on=0)),
        "interrupt": outcome(fails(KeyboardInterrupt(), on=3)),
        "subject": outcome(exchange, subject="/other" if rank == 1 else "/ckpt"),
        "kind": outcome(exchange, kind="load" if rank in (0, 3) else "save"),
        "after": outcome(exchange) == expected(rank, 4),
        "keys": num_keys(),
    }


def interrupted_while_waiting() -> dict[str, Any]:
    """A real signal reaches a rank that waits for the others, which only go on once it is over."""
    rank = dist.get_rank()
    store = job_store()
    signal.signal(signal.SIGALRM, signal.default_int_handler)

    def body(comm: Comm) -> Any:
        if comm.rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        if comm.rank == 2:
            store.get("rank 1 is out")
        return comm.gather(b"")

    result = outcome(body)
    if rank == 1:
        store.set("rank 1 is out", "")
    return {"result": result, "after": outcome(exchange) == expected(rank, 4), "keys": num_keys()}


def missing_rank() -> dict[str, Any]:
    """Rank 3 comes only after the others have given up; then everyone is in step again."""
    rank = dist.get_rank()
    store = job_store()
    if rank == 3:
        store.get("given up")
    with nullcontext() if rank == 3 else over_when_here_are_all_but(3):
        first = outcome(exchange)
    if rank == 0:
        store.set("given up", "")
    return {"first": first, "after": outcome(exchange) == expected(rank, 4), "keys": num_keys()}


def groups_and_threads() -> dict[str, Any]:
    """Sessions of several groups, and of two threads, at the same time."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    odd = dist.new_group([3, 1])
    result: dict[str, Any] = {"pair": outcome(exchange, process_group=pairs[rank // 2]) == expected(rank % 2, 2)}
    if rank in (1, 3):
        odd_rank = dist.get_group_rank(odd, rank)
        result["odd"] = outcome(exchange, process_group=odd) == expected(odd_rank, 2)
    else:
        try:
            open_session("save", "/ckpt", process_group=odd)
        except UsageError as error:
            result["odd"] = str(error)
    gone = dist.new_group([0, 1, 2, 3])
    dist.destroy_process_group(gone)
    for bad in gone, init_device_mesh("cpu", (4,)), [0, 1]:
        with pytest.raises(UsageError, match=rf"process_group: this {type(bad).__name__} is not a process group of this job"):
            open_session("save", "/ckpt", process_group=bad)
    alone = [dist.new_group([r]) for r in range(4)][rank]
    result["alone"] = outcome(exchange, process_group=alone) == expected(0, 1)
    result["world"] = outcome(exchange, process_group=dist.group.WORLD) == expected(rank, 4)
    # Opened here, entered in a thread: it is the first session although the second may be entered first.
    session, in_thread = open_session("save", "/background"), []

    def background() -> None:
        with session as comm:
            in_thread.append(exchange(comm))

    thread = threading.Thread(target=background)
    thread.start()
    result["foreground"] = [outcome(exchange, kind="load", subject="/f") for _ in range(20)] == [expected(rank, 4)] * 20
    thread.join()
    result["background"] = in_thread == [expected(rank, 4)]
    result["keys"] = num_keys()
    # Ranks 1 and 3 are in more groups than ranks 0 and 2, as in a pipeline only its ends are in the group of tied embeddings.
    for members in ([0, 1], [2, 3]), ([0, 1, 2, 3],):
        own = next(ranks for ranks in members if rank in ranks)
        with mock.patch.object(exchange_module, "carries", return_value=False):
            some = exchange_module.open_exchange(None, timeout_s=600, members=own)
        assert some is not None
        came = some.swap([b"%d to %d" % (rank, other) for other in own])
        result[f"exchange of {len(own)}"] = came == [b"%d to %d" % (other, rank) for other in own]
    # A group that could not be made is tried again in a part of the store that has nothing of the first try.
    seen = []

    def fail(store: Any, *args: object, **options: object) -> None:
        store.allow(600)
        seen.append(store.check([f"try of {rank}"]))
        store.set(f"try of {rank}", b"")
        raise PeerError("no group today")

    for _ in range(2):
        with mock.patch.object(exchange_module, "gloo_group", fail), suppress(PeerError):
            exchange_module.open_exchange(None, timeout_s=600, members=[rank % 2, rank % 2 + 2])
    result["tried twice"] = seen == [False, False]
    return result


def again_after_destroy() -> dict[str, bool]:
    """A process group that is made anew begins anew, and the old connection is let go."""
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    host = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    right = {}
    for name in ("first", "second"):
        dist.init_process_group("gloo", store=dist.PrefixStore(name, host), rank=rank, world_size=3)
        # Some sessions more on one rank than on another, which must not matter to the next group.
        right[f"{name} alone"] = [outcome(exchange, process_group=dist.new_group([r])) for r in range(3)][rank] == expected(0, 1)
        right[name] = outcome(exchange) == expected(rank, 3)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        right[f"{name} forgotten"] = not group_module._GROUPS and not group_module._CONNECTIONS
    return right


def file_store(path: str) -> dict[str, Any]:
    """A job whose store cannot append gets one of its own, also for its smaller groups."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    pair = dist.new_group([1, 2])
    result = {"world": all(outcome(exchange) == expected(rank, 3) for _ in range(3))}
    if rank:
        result["pair"] = outcome(exchange, process_group=pair) == expected(rank - 1, 2)
    result["error"] = outcome(lambda comm: exchange(comm) if comm.rank else torch.zeros(2)[7])
    dist.barrier()
    dist.destroy_process_group()
    return result


def in_turn(*cases: Callable[[], Any]) -> list[Any]:
    return [case() for case in cases]


# --- the tests ---


def test_sessions_between_processes():
    """Many, large ones, and several at a time: nothing is mixed up, and no key stays."""
    for rank, (many, large, together) in enumerate(run_ranks(in_turn, 4, many_sessions, large_messages, groups_and_threads)):
        assert many == (True, 0)
        assert large == [0]
        stranger = f"rank {rank} is not a member of the process group passed; call this on its members only"
        assert together.pop("odd") == (True if rank in (1, 3) else stranger)
        assert together.pop("keys") == 0
        assert set(together.values()) == {True}


def test_failures_are_raised_on_every_rank():
    results = run_ranks(in_turn, 4, failures, interrupted_while_waiting, missing_rank)
    for rank, (raised, interrupted, missed) in enumerate(results):
        check_raised(rank, raised)
        told = ("PeerError", "rank 1: KeyboardInterrupt", (1,))
        assert interrupted["result"] == (("KeyboardInterrupt", "", ()) if rank == 1 else told)
        kind, message, ranks = missed["first"]
        assert (kind, ranks) == ("PeerError", (3,))
        assert "rank 3 did not arrive within 600 s" in message
        for result in (raised, interrupted, missed):
            assert result["after"]
            assert result["keys"] == 0


def check_raised(rank: int, got: dict[str, Any]) -> None:
    assert got["layout"] == ("LayoutError", "w: overlaps" if rank == 2 else "rank 2: w: overlaps", ())
    assert got["root"] == (("ValueError", "boom", ()) if rank == 0 else ("PeerError", "rank 0: ValueError: boom", (0,)))
    told = ("PeerError", "rank 3: KeyboardInterrupt", (3,))
    assert got["interrupt"] == (("KeyboardInterrupt", "", ()) if rank == 3 else told)
    kind, message, ranks = got["subject"]
    assert (kind, ranks) == ("PeerError", (1,))
    assert "ranks 0, 2-3: save '/ckpt'; rank 1: save '/other'" in message
    kind, message, ranks = got["kind"]
    assert (kind, ranks) == ("PeerError", (1, 2))
    assert "ranks 0, 3: load '/ckpt'; ranks 1-2: save '/ckpt'" in message


def test_a_new_process_group_begins_anew_and_any_job_has_a_store(tmp_path: Path):
    for rank, (anew, own) in enumerate(
        run_ranks(in_turn, 3, again_after_destroy, partial(file_store, str(tmp_path / "store")), init=False)
    ):
        kind, message, _ = own.pop("error")
        assert kind == ("IndexError" if rank == 0 else "PeerError")
        assert "index 7 is out of bounds" in message
        assert set(own.values()) == {True}
        assert set(anew.values()) == {True}
