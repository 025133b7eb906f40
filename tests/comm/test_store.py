"""Ranks as threads over one store: what they tell each other, and every way to fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.comm import StoreComm, payloads
from reshard_ckpt.comm import node as node_module
from reshard_ckpt.comm import store as store_module
from reshard_ckpt.comm.bounded import BoundedStore
from reshard_ckpt.comm.node import NodeComm
from reshard_ckpt.comm.peers import Machine
from reshard_ckpt.comm.wire import Refusal
from reshard_ckpt.errors import CorruptError, LayoutError, MismatchError, PeerError, StorageError
from reshard_ckpt.storage import MissingKey
from tests.comm.contract import CommContract, Run
from tests.comm.threads import Server, nodes_of, run_session, run_together
from tests.deadlines import Clock, over_when, over_when_here_are_all_but
from tests.tries import examples, is_long

needs_clone = pytest.mark.skipif(
    not hasattr(dist.Store, "clone"), reason="before torch 2.8, sessions poll, and machines have no stores of their own"
)


@pytest.fixture(params=["hash", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A store that is empty again in the end."""
    server = Server(request.param)
    yield server
    assert server.num_keys() == 0


@pytest.mark.parametrize("size", [2, 5])
class TestStoreComm(CommContract):
    @pytest.fixture
    def run(self, server: Server, size: int) -> Run:
        return lambda body: run_session(server, size, body)


@needs_clone
@pytest.mark.parametrize("joined", [False, True], ids=["first session", "later session"])
class TestNodeComm(CommContract):
    """Ranks 0 and 1 are on one machine, ranks 2 to 4 on another, and rank 5 is alone."""

    @pytest.fixture
    def run(self, server: Server, joined: bool) -> Run:
        nodes = nodes_of((0, 1), (2, 3, 4), (5,))
        if joined:
            run_session(server, 6, lambda comm: None, name="before", nodes=nodes)
            assert [node.store is not None for node in nodes] == [rank in (2, 3, 4) for rank in range(6)]
        yield lambda body: run_session(server, 6, body, nodes=nodes)
        server.store.delete_key("node/2")
        for node in nodes[2:5]:  # each deletes the session's keys; the machine's store is empty again
            assert BoundedStore.of(node.store, 10).on_worker(lambda store: store.num_keys()) == 0


def test_a_session_of_one_rank_works_too(server: Server):
    assert run_session(server, 1, lambda comm: (comm.gather(b"a"), comm.broadcast(b"b"), comm.scatter([b"c"]))) == [
        ([b"a"], b"b", b"c")
    ]


def test_many_ranks(server: Server):
    def body(comm: StoreComm) -> Any:
        return comm.gather(b"%d" % comm.rank), comm.scatter([b"%d" % r for r in range(comm.size)] if comm.rank == 0 else None)

    first, *others = run_session(server, 40, body)
    assert first == ([b"%d" % rank for rank in range(40)], b"0")
    assert others == [(None, b"%d" % rank) for rank in range(1, 40)]


# --- a rank fails ---


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the messages of `program` have keys of their own, and several."""
    monkeypatch.setattr(store_module, "_INLINE_BYTES", 50)
    monkeypatch.setattr(payloads, "_CHUNK_BYTES", 80)


def program(comm: StoreComm, at: Callable[[int], None]) -> str:
    """A session as the engine has them; `at` runs before each step, and once more at the end."""
    at(0)
    comm.gather(bytes(100))
    at(1)
    comm.scatter([bytes(100)] * comm.size if comm.rank == 0 else None)
    at(2)
    comm.broadcast(bytes(300) if comm.rank == 0 else None)
    at(3)
    comm.broadcast(b"" if comm.rank == 0 else None)
    at(4)
    comm.gather(b"receipt")
    at(5)
    return "done"


MACHINES = ([(0, 1, 2)], [(0,), (1, 2)])


def joined(server: Server, machines: Sequence[Sequence[int]]) -> list[Machine]:
    """Return the nodes of these machines after a first session."""
    nodes = nodes_of(*machines)
    run_session(server, len(nodes), lambda comm: None, name="before", nodes=nodes)
    for node in nodes:
        server.store.delete_key(f"node/{node.ranks(server.store)[0]}")
    return nodes


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("machines", MACHINES, ids=["one machine", "two machines"])
def test_an_error_on_one_rank_is_raised_on_all(server: Server, failing: int, step: int, machines: Any):
    nodes = joined(server, machines)

    def body(comm: StoreComm) -> str:
        def at(now: int) -> None:
            if (comm.rank, now) == (failing, step):
                raise LayoutError("tensor w: overlaps")

        return program(comm, at)

    outcomes = run_session(server, 3, body, nodes=nodes)
    for rank, error in enumerate(outcomes):
        assert type(error) is LayoutError
        assert str(error) == ("tensor w: overlaps" if rank == failing else f"rank {failing}: tensor w: overlaps")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (CorruptError("bad block"), CorruptError, "rank 1: bad block"),
        (MissingKey("f: no such file"), StorageError, "rank 1: f: no such file"),
        (ValueError("boom"), PeerError, "rank 1: ValueError: boom"),
        (KeyError("k"), PeerError, "rank 1: KeyError: 'k'"),
        (KeyboardInterrupt(), PeerError, "rank 1: KeyboardInterrupt"),
        (SystemExit(3), PeerError, "rank 1: SystemExit: 3"),
        (MemoryError(), PeerError, "rank 1: MemoryError"),
        (ValueError("ß \ud800 \0"), PeerError, r"rank 1: ValueError: ß \ud800 \x00"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_what_other_ranks_raise(server: Server, error: BaseException, kind: type[Exception], message: str):
    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            raise error

    first, own, last = run_session(server, 3, body)
    assert own is error
    for other in (first, last):
        assert type(other) is kind
        assert str(other) == message
        if kind is PeerError:
            assert other.ranks == (1,)


def test_problems_and_ranks_of_an_error_reach_all(server: Server):
    def mismatch(comm: StoreComm) -> None:
        if comm.rank == 0:
            raise MismatchError("2 tensors differ", ["a: shape", "b: dtype"])

    def peer(comm: StoreComm) -> None:
        if comm.rank == 0:
            raise PeerError("ranks 4, 5 hold other bytes", [4, 5])

    assert run_session(server, 2, mismatch)[1].problems == ("a: shape", "b: dtype")
    assert run_session(server, 2, peer)[1].ranks == (4, 5)


def test_an_error_that_cannot_be_printed_is_told_all_the_same(server: Server):
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            raise Unprintable

    other, own = run_session(server, 2, body)
    assert type(own) is Unprintable
    assert "Unprintable" in str(other)


def test_an_error_with_endless_text_is_cut(server: Server):
    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            raise MismatchError("\U0001f600" * 1_000_000, ["\U0001f600" * 100] * 10_000)

    other, _ = run_session(server, 2, body)
    assert type(other) is MismatchError
    assert 1000 < len(other.problems) < 10_000


def test_an_error_is_raised_again_by_every_later_call(server: Server):
    """Also where the code in the block swallows it."""

    def body(comm: StoreComm) -> list[str]:
        if comm.rank == 1:
            raise ValueError("boom")
        said = []
        for call in (comm.gather, comm.broadcast, lambda data: comm.scatter([data] * comm.size)):
            with pytest.raises(PeerError) as caught:
                call(b"")
            said.append(str(caught.value))
        raise AssertionError(said)

    first, own, last = run_session(server, 3, body)
    assert type(own) is ValueError
    for error in (first, last):
        assert error.args == (["rank 1: ValueError: boom"] * 3,)


@pytest.mark.parametrize(("slow", "call"), [(2, lambda comm: comm.gather(b"")), (0, lambda comm: comm.broadcast(b"plan"))])
def test_a_failure_reaches_the_others_while_one_of_them_is_busy(server: Server, slow: int, call: Callable[[StoreComm], object]):
    """It comes only after another one has raised: that is rank 0 in a gather, and rank 2 in a broadcast of rank 0."""
    raised = threading.Event()

    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            raise ValueError("boom")
        if comm.rank == slow:
            assert raised.wait(600)
        try:
            call(comm)
        finally:
            raised.set()

    assert [type(error) for error in run_session(server, 3, body)] == [PeerError, ValueError, PeerError]


def test_two_sessions_at_a_time_do_not_meet(server: Server):
    names: dict[str, list[Any]] = {}

    def run(name: str) -> None:
        names[name] = run_session(server, 3, lambda comm: comm.broadcast(name.encode() if comm.rank == 0 else None), name=name)

    run_together(run, ("a", "b", "c"))
    assert names == {name: [name.encode()] * 3 for name in ("a", "b", "c")}


@given(data=st.data(), size=st.integers(1, 4), calls=st.lists(st.sampled_from("gbs"), max_size=5))
@examples(150)
def test_all_ranks_go_on_or_all_raise_the_same(data: st.DataObject, size: int, calls: list[str]):
    check_program(data, size, calls, Server())


@given(data=st.data(), calls=st.lists(st.sampled_from("gbsn"), max_size=5))
@examples(40)
def test_all_ranks_of_machines_go_on_or_all_raise_the_same(data: st.DataObject, calls: list[str]):
    server = Server("tcp")
    check_program(data, 4, calls, server, joined(server, [(0,), (1, 2, 3)]))


def test_a_rank_that_waits_on_its_machine_while_rank_0_is_steps_ahead_leaves_nothing_behind():
    """Rank 0 has let a scatter pass that ranks 2 and 3 never reach: their leader fails before it."""
    server, passed = Server("tcp"), threading.Event()

    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            assert passed.wait(600)
            raise ValueError("boom")
        comm.broadcast_near(b"near" if comm.rank == 0 else None)
        comm.scatter([b"%d" % rank for rank in range(4)] if comm.rank == 0 else None)
        passed.set()

    outcomes = run_session(server, 4, body, nodes=joined(server, [(0,), (1, 2, 3)]))
    assert [type(outcome) for outcome in outcomes] == [PeerError, ValueError, PeerError, PeerError]
    assert server.num_keys() == 0


def check_program(
    data: st.DataObject, size: int, calls: list[str], server: Server, nodes: Sequence[Machine | None] = (None,) * 4
) -> None:
    """Any program, and any ranks that fail anywhere in it, several at once too."""
    failures = data.draw(st.dictionaries(st.integers(0, size - 1), st.integers(0, len(calls)), max_size=2), label="failures")

    def body(comm: StoreComm) -> str:
        for i, call in enumerate([*calls, "end"]):
            if failures.get(comm.rank) == i:
                raise ValueError(f"boom {comm.rank}")
            if call == "g":
                assert comm.gather(b"%d" % comm.rank) == ([b"%d" % r for r in range(size)] if comm.rank == 0 else None)
            elif call == "b":
                assert comm.broadcast(b"%d" % i if comm.rank == 0 else None) == b"%d" % i
            elif call == "n":
                first = comm.neighbours()[0]
                assert comm.broadcast_near(b"%d" % i if comm.rank == first else None) == b"%d" % i
            elif call == "s":
                assert comm.scatter([b"%d" % r for r in range(size)] if comm.rank == 0 else None) == b"%d" % comm.rank
        return "done"

    outcomes = run_session(server, size, body, nodes=nodes)
    assert server.num_keys() == 0
    if not failures:
        assert outcomes == ["done"] * size
        return
    originals = {rank for rank, outcome in enumerate(outcomes) if type(outcome) is ValueError}
    assert originals <= set(failures)
    assert originals
    told = {str(outcome) for rank, outcome in enumerate(outcomes) if rank not in originals}
    assert len(told) <= 1
    assert told <= {f"rank {rank}: ValueError: boom {rank}" for rank in originals}


@needs_clone
def test_only_the_leader_of_a_machine_speaks_with_rank_0s_store():
    server = Server("tcp")
    nodes = joined(server, [(0,), (1, 2, 3)])
    calls: list[list[str]] = [[] for _ in nodes]

    def body(comm: StoreComm) -> None:
        comm.gather(b"%d" % comm.rank)
        comm.broadcast(bytes(9 << 20) if comm.rank == 0 else None)
        comm.broadcast_near(b"near" if comm.rank < 2 else None)

    def noting(store: Any, rank: int) -> Any:
        return Noting(store, calls[rank], threading.Event())

    assert run_session(server, 4, body, nodes=nodes, wrap=noting) == [None] * 4
    assert calls[2] == calls[3] == []
    # Three gathers and a broadcast are a wait each; a gather is an append and a count besides. To leave is a
    # count, and to tell rank 0 another.
    of_leader = {"append": 3, "add": 5, "set_timeout": 4, "get": 4 + 5, "check": 1}
    assert {name: number for name, number in Counter(until_left(calls[1])).items() if name != "set"} == of_leader


@needs_clone
def test_the_ranks_of_a_machine_get_their_parts_of_a_scatter_in_one_payload(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payloads, "_SAVED_AT_ONCE", 1)
    server = Server("tcp")
    nodes = joined(server, [(0,), (1, 2, 3), (4,)])
    calls: list[list[str]] = [[] for _ in nodes]

    def body(comm: StoreComm) -> bytes:
        comm.gather(b"")
        calls[comm.rank].clear()
        return comm.scatter([b"part %d" % rank for rank in range(5)] if comm.rank == 0 else None)

    outcomes = run_session(server, 5, body, nodes=nodes, wrap=lambda store, rank: Noting(store, calls[rank], threading.Event()))
    assert outcomes == [b"part %d" % rank for rank in range(5)]
    assert calls[2] == calls[3] == []
    assert Counter(calls[0])["multi_set"] == 2
    assert [until_left(calls[rank]).count("delete_key") for rank in (1, 4)] == [1, 1]
    assert server.num_keys() == 0


def test_a_scatter_reaches_ranks_whose_messages_their_leader_sends_after_its_own(monkeypatch: pytest.MonkeyPatch):
    """They come so late to the gather before that their leader has stopped waiting for them."""
    server = Server("tcp")
    nodes, sent, ends, send = joined(server, [(0,), (1, 2, 3)]), threading.Event(), NodeComm._ends, NodeComm._send

    def stops_waiting(self: NodeComm, *args: Any) -> bool:
        return (self.rank != 1 or self._step != 1 or sent.is_set()) and ends(self, *args)

    def sends(self: NodeComm, *frames: Any) -> None:
        send(self, *frames)
        if self.rank == self._step == 1:
            sent.set()

    monkeypatch.setattr(NodeComm, "_ends", stops_waiting)
    monkeypatch.setattr(NodeComm, "_send", sends)

    def body(comm: StoreComm) -> bytes:
        assert comm.rank < 2 or sent.wait(600)
        comm.gather(b"")
        return comm.scatter([b"part %d" % rank for rank in range(4)] if comm.rank == 0 else None)

    outcomes = run_session(server, 4, body, timeout_s=60, nodes=nodes)
    assert outcomes == [b"part %d" % rank for rank in range(4)]
    assert server.num_keys() == 0


@pytest.mark.parametrize("absent", [1, 3], ids=["leader", "another"])
def test_only_the_absent_rank_of_a_machine_is_named(monkeypatch: pytest.MonkeyPatch, absent: int):
    monkeypatch.setattr(node_module, "_MEETING_S", 0.0)
    server = Server("tcp")
    nodes, here = joined(server, [(0,), (1, 2, 3)]), {0, 1, 2, 3} - {absent}
    with over_when_here_are_all_but(absent):
        outcomes = run_session(server, 4, lambda comm: None, nodes=nodes, only=here)
    for rank in here:
        assert outcomes[rank].ranks == (absent,)


def test_ranks_that_do_not_wait_for_their_leader_send_each_message_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_module, "_MEETING_S", 0.0)
    server = Server("tcp")
    nodes = joined(server, [(0,), (1, 2, 3)])
    for name in ("a", "b", "c"):
        outcomes = run_session(server, 4, lambda comm: comm.gather(b"%d" % comm.rank), nodes=nodes, name=name)
        assert outcomes == [[b"0", b"1", b"2", b"3"], None, None, None]
    assert server.num_keys() == 0


def until_left(calls: Sequence[str]) -> Sequence[str]:
    """Return the calls of a rank to the last count. Whoever completes the count of ranks that left deletes all keys after it."""
    return calls[: len(calls) - calls[::-1].index("add")]


class Noting:
    """A store that notes the names of the calls to it, also to its clones, and says when a rank waits in it."""

    def __init__(self, store: Any, calls: list[str], waits: threading.Event) -> None:
        self.store, self.calls, self.waits = store, calls, waits

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            clone = self.store.clone  # missing before torch 2.8
            return lambda: Noting(clone(), self.calls, self.waits)
        self.calls.append(name)
        if name == "get":
            self.waits.set()
        return getattr(self.store, name)


@needs_clone
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_waits_in_the_server_and_asks_nothing_meanwhile(server: Server, fails: bool):
    calls, waits = {rank: [] for rank in range(3)}, {rank: threading.Event() for rank in range(3)}

    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            assert waits[0].wait(600)
            assert waits[2].wait(600)
            if fails:
                raise LayoutError("tensor w: overlaps")
        elif comm.rank == 2:
            waits[2].clear()
        comm.gather(b"")

    outcomes = run_session(server, 3, body, wrap=lambda store, rank: Noting(store, calls[rank], waits[rank]))
    assert [type(outcome) for outcome in outcomes] == ([LayoutError] * 3 if fails else [type(None)] * 3)
    # A gather is an append, a count, and a wait. Rank 2 leaves by a count; the last of those that rank 0 waits for counts twice.
    gather = ["append", "add", "set_timeout", "get"]
    num_gathers = 2 if fails else 3
    asked = [name for name in until_left(calls[2]) if name not in ("set", "delete_key")]
    assert asked[: -1 - (asked[-2] == "add")] == gather * num_gathers
    assert asked[-1] == "add"


# --- interrupted at any moment ---


@pytest.fixture
def clock() -> Iterator[Clock]:
    with over_when(lambda: False) as clock:
        yield clock


class Interrupting:
    """A store that raises KeyboardInterrupt in place of (or just after) the n-th operation."""

    def __init__(self, store: Any, n: int, after: bool, waits: bool) -> None:
        self.store, self.n, self.after, self.waits = store, n, after, waits

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            if not self.waits:
                raise AttributeError(name)
            return lambda: self
        operation = getattr(self.store, name)

        def run(*args: Any) -> Any:
            self.n -= 1
            if self.n == -1 and not self.after:
                raise KeyboardInterrupt
            result = operation(*args)
            if self.n == -1:
                raise KeyboardInterrupt
            return result

        return run


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("waits", [False, True], ids=["polls", "waits"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_interrupt_at_any_operation_leaves_the_ranks_agreed(rank: int, after: bool, waits: bool, clock: Clock):
    """All others finish, or all others are told; and no key stays, unless the interrupt hit the very act of leaving."""
    clock.is_over = lambda: all(thread.name != f"rank {rank}" for thread in threading.enumerate())
    leaving, told, finished = 0, 0, 0
    # Just after one operation the store is as before the next one, so that every second operation shows it in all its states.
    for n in range(0, 1000, 1 if is_long() else 2):
        server = Server()
        faulty: list[Interrupting] = []

        def wrap(store: Any, of: int, n: int = n, faulty: list[Interrupting] = faulty) -> Any:
            if of != rank:
                return store
            faulty.append(Interrupting(store, n, after, waits))
            return faulty[0]

        outcomes = run_session(server, 3, lambda comm: program(comm, lambda step: None), wrap=wrap)
        if faulty[0].n >= 0:  # the session needs no more than n operations
            assert outcomes == ["done"] * 3
            break
        others = [str(outcome) for of, outcome in enumerate(outcomes) if of != rank]
        assert others in (["done"] * 2, [f"rank {rank}: KeyboardInterrupt"] * 2)
        told += others[0] != "done"
        finished += others[0] == "done"
        assert isinstance(outcomes[rank], KeyboardInterrupt)
        leaving += server.num_keys() > 0
    else:
        raise AssertionError("the session never ends")
    assert told > 5
    assert leaving <= finished


class LateGone:
    """A store in which the key "gone" is set only once the rank that waits for it has given up and left."""

    def __init__(self, store: Any, waiting: int, gives_up: threading.Event) -> None:
        self.store, self.waiting, self.gives_up = store, waiting, gives_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def set(self, key: str, value: bytes) -> None:
        if key == "gone":
            self.gives_up.set()
            for thread in threading.enumerate():
                if thread.name == f"rank {self.waiting}":
                    thread.join()
        self.store.set(key, value)


@needs_clone
@pytest.mark.parametrize(("waiting", "machines"), [(0, [(0,), (1,)]), (1, [(0,), (1, 2)])], ids=["rank 0", "leader"])
def test_no_key_comes_back_if_a_rank_gives_up_waiting_for_the_others_to_leave(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch, waiting: int, machines: Any
):
    nodes, gives_up = joined(server, machines), threading.Event()
    clock.is_over = gives_up.is_set
    owner, name = (NodeComm, "_leave_machine") if waiting else (StoreComm, "_leave")
    leave = getattr(owner, name)

    def late(self: StoreComm, *args: Any) -> Any:
        return leave(self, *args[:-1], LateGone(args[-1], waiting, gives_up))

    monkeypatch.setattr(owner, name, late)
    assert run_session(server, len(nodes), lambda comm: "done", nodes=nodes) == ["done"] * len(nodes)
    assert gives_up.is_set()
    for node in nodes[waiting:]:
        if node.store is not None:
            assert BoundedStore.of(node.store, 10).on_worker(lambda store: store.num_keys()) == 0


# --- a rank does not come ---


def arrived(server: Server, step: int, num_ranks: int) -> Callable[[], bool]:
    """Whether that many ranks have arrived at a step."""
    return lambda: server.store.check([f"session/{step}/arrived"]) and server.store.add(f"session/{step}/arrived", 0) >= num_ranks


class SilentBell:
    """A store that rings a step's bell, but whose reply to that does not come."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)
        if key.endswith("/bell"):
            raise dist.DistError("no reply came")


@pytest.mark.parametrize("silent", [(), (0,), (4,), (0, 1, 4)])
def test_ranks_that_do_not_arrive_are_named_on_all_that_did(server: Server, clock: Clock, silent: tuple[int, ...]):
    """Also on ranks that lose the store once they know the refusal."""
    clock.is_over = arrived(server, 0, 3)

    def wrap(store: Any, rank: int) -> Any:
        return SilentBell(store) if rank in silent else store

    outcomes = run_session(server, 6, lambda comm: None, only=[0, 1, 4], timeout_s=600, wrap=wrap)
    message = "save '/ckpt': ranks 2-3, 5 did not arrive within 600 s. Did every rank "
    for rank in (0, 1, 4):
        assert type(outcomes[rank]) is PeerError
        assert str(outcomes[rank]).startswith(message)
        assert outcomes[rank].ranks == (2, 3, 5)
    # Those that come after all are told that it is over, and the last of them cleans up.
    clock.is_over = lambda: False
    late = run_session(server, 6, lambda comm: None, only=[2, 3, 5])
    for rank in (2, 3, 5):
        assert type(late[rank]) is PeerError
        assert str(late[rank]).startswith(message)
    if silent:
        server.store = dist.HashStore()  # the keys stay in the old one: these ranks could not count themselves as gone


def test_a_missing_rank_0_is_named(server: Server, clock: Clock):
    clock.is_over = arrived(server, 0, 2)
    outcomes = run_session(server, 3, lambda comm: None, only=[1, 2], timeout_s=600)
    for rank in (1, 2):
        assert str(outcomes[rank]).startswith("save '/ckpt': rank 0 did not arrive within 600 s")
        assert outcomes[rank].ranks == (0,)
    clock.is_over = lambda: False
    assert type(run_session(server, 3, lambda comm: None, only=[0])[0]) is PeerError


def test_a_rank_that_stops_in_the_middle_is_named(server: Server, clock: Clock):
    clock.is_over = arrived(server, 2, 2)
    over = threading.Event()

    def body(comm: StoreComm) -> None:
        comm.gather(b"")
        if comm.rank == 1:
            assert over.wait(600)
        try:
            comm.gather(b"")
        finally:
            over.set()

    for error in run_session(server, 3, body, timeout_s=600):
        assert str(error).startswith("save '/ckpt': rank 1 did not arrive within 600 s")
        assert error.ranks == (1,)


@pytest.mark.parametrize("call", ["broadcast", "scatter"])
def test_a_rank_0_that_does_not_answer_is_named(server: Server, clock: Clock, call: str):
    waiting, over = threading.Event(), threading.Event()
    clock.is_over = waiting.is_set

    def body(comm: StoreComm) -> None:
        if comm.rank == 0:
            assert over.wait(600)
        waiting.set()
        try:
            getattr(comm, call)(b"  " if call == "broadcast" else [b""] * 3)
        finally:
            over.set()

    for error in run_session(server, 3, body, timeout_s=600):
        assert str(error).startswith("save '/ckpt': rank 0 did not answer within 600 s")
        assert error.ranks == (0,)


def test_a_rank_0_that_does_not_answer_after_all_have_arrived_is_named(server: Server, clock: Clock):
    clock.is_over = arrived(server, 1, 2)
    over = threading.Event()

    class Slow:
        """Rank 0 is slow to read the inbox of the step after the first."""

        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def get(self, key: str) -> bytes:
            if key == "1/in":
                assert over.wait(600)
            return self.store.get(key)

    def body(comm: StoreComm) -> None:
        try:
            comm.gather(b"")
        finally:
            over.set()

    outcomes = run_session(server, 2, body, timeout_s=600, wrap=lambda store, rank: Slow(store) if rank == 0 else store)
    for error in outcomes:
        assert str(error).startswith("save '/ckpt': rank 0 did not answer within 600 s")


def test_a_lost_store_is_an_error_that_names_its_likely_host():
    server = Server("tcp")
    hosts = [server.store]
    server.store = dist.TCPStore("127.0.0.1", hosts[0].port, is_master=False, wait_for_workers=False)
    gathered = threading.Barrier(2, action=hosts.clear)  # the host's end is the end of its server

    def body(comm: StoreComm) -> None:
        comm.gather(b"")
        gathered.wait()
        comm.gather(b"")

    for error in run_session(server, 2, body):
        assert type(error) is PeerError
        assert str(error).startswith("save '/ckpt': the job's key-value store does not answer any more")
        assert error.ranks == (0,)


@needs_clone
def test_a_leader_that_was_lost_is_named_to_all_ranks_also_in_later_sessions(server: Server):
    nodes = joined(server, [(0,), (1, 2)])

    def lose(comm: Any) -> None:
        if comm.rank == 2:
            with suppress(dist.DistError):
                comm._near.on_worker(mock.Mock(side_effect=dist.DistError("Connection reset by peer")))
        comm.gather(b"")

    for name, body in (("loses", lose), ("later", lambda comm: comm.gather(b"")), ("last", lambda comm: comm.gather(b""))):
        for error in run_session(server, 3, body, name=name, nodes=nodes):
            assert isinstance(error, PeerError), repr(error)
            assert "rank 1, which speaks for the ranks of its machine, does not answer any more" in str(error)
            assert error.ranks == (1,)


# --- ranks that do different things ---


def test_ranks_that_call_different_things_are_told_apart(server: Server):
    calls = [("save", "/a"), ("save", "/a"), ("load", "/a"), ("save", "/b"), ("save", "/a")]
    errors = run_session(server, 5, lambda comm: None, call=lambda rank: calls[rank])
    for error in errors:
        assert type(error) is PeerError
        assert error.ranks == (2, 3)
        assert str(error) == (
            "ranks called different things: ranks 0-1, 4: save '/a'; rank 2: load '/a'; rank 3: save '/b'; "
            "every rank must make the same calls in the same order"
        )


def test_of_two_ranks_that_differ_rank_0_is_right(server: Server):
    errors = run_session(server, 2, lambda comm: None, call=lambda rank: ("save", f"/{rank}"))
    assert [error.ranks for error in errors] == [(1,), (1,)]


def test_a_rank_at_another_step_than_rank_0_is_an_error_on_all(server: Server):
    def body(comm: StoreComm) -> None:
        if comm.rank == 1:
            comm.gather(b"")
        else:
            comm.broadcast(b"" if comm.rank == 0 else None)

    first, wrong, last = run_session(server, 3, body)
    message = "this rank is at a gather while rank 0 is at a broadcast"
    assert message in str(wrong)
    for error in (first, last):
        assert message in str(error)
        assert str(error).startswith("rank 1: ")
        assert error.ranks == (1,)


def test_refusals_survive_the_wire():
    refusal = Refusal("MismatchError", "ß\n", (1, 2), ("a", "b"), (3,))
    assert Refusal.decode(refusal.encode()) == refusal


@pytest.mark.parametrize("kind", ["Unheard", "Sequence", "annotations", "CheckpointErrorr", "__name__"])
def test_an_error_class_that_this_rank_does_not_know_is_a_peer_error(kind: str):
    error = Refusal(kind, "text", (1,)).error()
    assert type(error) is PeerError
    assert error.ranks == (1,)


@pytest.mark.parametrize("refused", [(), (1,), (1, 2)])
@pytest.mark.parametrize("has_led", [False, True])
def test_the_last_rank_of_a_machine_tells_its_leader_or_deletes_the_keys_of_one_that_has_left(
    refused: tuple[int, ...], has_led: bool
) -> None:
    """Also if ranks before it, which have a refusal, have counted themselves in rank 0's store."""
    store, deleted = dist.HashStore(), []
    store.add("left", node_module._LED * has_led)
    for rank in (1, 2):
        comm = mock.Mock(_others=(1, 2), _refusal=1 if rank in refused else None, _delete_near=deleted.append)
        assert NodeComm._leave_machine(comm, store) == has_led
        assert store.check(["gone"]) == (rank == 2)
    assert deleted == [store] * has_led
