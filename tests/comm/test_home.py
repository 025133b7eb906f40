"""Where sessions are held: what a dead attempt left in the job's store is not taken for it, and ended processes are known."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import DistError

from reshard_ckpt.comm import StoreComm
from reshard_ckpt.comm import peers as peers_module
from reshard_ckpt.comm.bounded import StoreConnection
from reshard_ckpt.comm.calls import call_of
from reshard_ckpt.comm.group import SessionCounter
from reshard_ckpt.comm.home import Home
from reshard_ckpt.comm.peers import Machine
from reshard_ckpt.comm.sessions import Place
from reshard_ckpt.comm.wire import Refusal, decode_frames
from reshard_ckpt.errors import PeerError

NONCE = "0123456789abcdef"


def tcp_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def line(store: Any) -> StoreConnection:
    return StoreConnection(lambda _: store)


class Meeting:
    """The job's store, which says when somebody has looked at what it holds, and looks again."""

    def __init__(self, store: Any) -> None:
        self._store, self.looked, self._times = store, threading.Event(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        self._times += 1
        if self._times > 2:
            self.looked.set()
        return bool(self._store.check(keys))


@pytest.fixture
def other() -> Any:
    """The store of another group, which a dead attempt's port has been given to."""
    return tcp_store()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


LEFT: dict[str, Callable[[Any], bytes]] = {
    "nothing": lambda other: b"",
    "no text": lambda other: b"\xff\xfe\0",
    "another message": lambda other: b'["PeerError", "rank 1 is gone", [1], [], []]',
    "no port": lambda other: f"{NONCE} port ".encode(),
    "a port that none is": lambda other: f"{NONCE} 99999999 ".encode(),
    "a dead store": lambda other: f"{NONCE} {closed_port()} ".encode(),
    "a dead store elsewhere": lambda other: f"{NONCE} {closed_port()} 127.0.0.2".encode(),
    "another group's": lambda other: f"{NONCE} {other.port} 127.0.0.1".encode(),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_a_dead_attempt_left_is_passed_over(other: Any, left: str):
    job = tcp_store()
    job.set("home", LEFT[left](other))
    meeting = Meeting(job)
    homes = [Home(line(meeting if rank else job), "home", rank, 2, "127.0.0.1") for rank in range(2)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(homes[1].session("3", title="save '/a'", timeout_s=600)[0]))
    thread.start()
    assert meeting.looked.wait(600)
    assert found == []
    mine = homes[0].session("3", title="save '/a'", timeout_s=600)[0]
    thread.join()
    mine.set("word", b"of rank 0")
    assert found[0].get("word") == b"of rank 0"
    assert not job.check(["home"])  # the last one to come in has removed it
    assert not other.check([f"{NONCE}/here"])


@pytest.mark.parametrize("reason", ["rank 0 did not arrive within 0.05 s", "KeyboardInterrupt"])
def test_a_rank_0_that_comes_too_late_is_told_and_in_step_again(monkeypatch: pytest.MonkeyPatch, reason: str):
    """Rank 1 has given up before there was any store; its next call tells rank 0, which still waits in the first session."""
    job = tcp_store()
    homes = [Home(line(job), "home", rank, 2, "127.0.0.1") for rank in range(2)]
    counters = [SessionCounter(), SessionCounter()]

    def call(rank: int, subject: str, timeout_s: float = 600) -> str:
        def comm_of(number: int) -> StoreComm:
            store, near = homes[rank].session(f"{number}", title=f"save '{subject}'", timeout_s=timeout_s)
            return StoreComm(store, rank, 2, title=f"save '{subject}'", timeout_s=timeout_s, ended=near.ended)

        try:
            with Place(comm_of, counters[rank], call_of("save", subject)).session() as comm:
                return comm.broadcast(b"together" if rank == 0 else None).decode()
        except PeerError as error:
            return f"{error.ranks} {error}"
        except KeyboardInterrupt:
            return "KeyboardInterrupt"

    with monkeypatch.context() as patch:
        if reason == "KeyboardInterrupt":
            patch.setattr(Home, "_find", mock.Mock(side_effect=KeyboardInterrupt))
        assert reason in call(1, "/a", timeout_s=0.05)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend([call(0, "/a"), call(0, "/b")]))
    thread.start()
    assert call(1, "/b") == "together"
    thread.join()
    assert reason in said[0]
    assert said[1] == "together"


class Late:
    """A store that does one call, but whose reply to it is lost."""

    def __init__(self, store: Any, method: str) -> None:
        self._store, self._method = store, method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _call(self, name: str, *args: Any) -> Any:
        done = getattr(self._store, name)(*args)
        if name == self._method:
            self._method = ""
            raise DistError("the reply was lost")
        return done

    def add(self, *args: Any) -> Any:
        return self._call("add", *args)

    def set(self, *args: Any) -> Any:
        return self._call("set", *args)


def test_a_rank_whose_reply_was_lost_counts_once(monkeypatch: pytest.MonkeyPatch):
    job, prefixed = tcp_store(), dist.PrefixStore
    homes = [Home(line(job), "home", rank, 3, "127.0.0.1") for rank in range(3)]
    homes[0].session("0", title="save", timeout_s=600)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "PrefixStore", lambda name, store: Late(prefixed(name, store), "add"))
        with pytest.raises(PeerError, match="the reply was lost"):
            homes[1].session("0", title="save", timeout_s=600)
    homes[1].session("1", title="save", timeout_s=600)
    assert job.check(["home"])  # rank 2 needs it still
    homes[2].session("1", title="save", timeout_s=600)
    assert not job.check(["home"])


def test_rank_0_whose_reply_was_lost_stays_at_the_address_that_others_may_have_read():
    job = tcp_store()
    late = Home(line(Late(job, "set")), "home", 0, 2, "127.0.0.1")
    with pytest.raises(PeerError, match="the reply was lost"):
        late.session("0", title="save", timeout_s=600)
    other = Home(line(job), "home", 1, 2, "127.0.0.1").session("1", title="save", timeout_s=600)[0]
    late.session("1", title="save", timeout_s=600)[0].set("word", b"of rank 0")
    assert other.check(["word"])


def test_a_network_that_comes_back_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    job, errors = tcp_store(), [OSError(errno.EHOSTUNREACH, "No route to host"), TimeoutError("timed out")]
    homes = [Home(line(job), "home", rank, 2, "127.0.0.1") for rank in range(2)]
    mine, kept = (home.session("0", title="save", timeout_s=600)[0] for home in homes)
    mine.set("word", b"of rank 0")
    lost, connect = kept._client, socket.create_connection
    kept._connection.mark_lost(lost)
    monkeypatch.setattr(socket, "create_connection", lambda *args: throw(errors.pop(0)) if errors else connect(*args))
    again = homes[1].session("0", title="save", timeout_s=600)[0]
    assert (again.get("word"), errors) == (b"of rank 0", [])
    assert again._client is not lost


def throw(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("left", ["a dead store", "another group's"])
def test_rank_0_that_has_ended_is_not_tried_again(other: Any, left: str):
    job = tcp_store()
    homes = [Home(line(job), "home", rank, 2, "127.0.0.1") for rank in range(2)]
    kept = [home.session("0", title="save", timeout_s=600)[0] for home in homes][1]
    kept._connection.mark_lost(kept._client)
    homes[1]._record = LEFT[left](other)
    with pytest.raises(PeerError, match="save '/a': .*rank 0's machine answers that no process has it any more"):
        homes[1].session("1", title="save '/a'", timeout_s=600)


def test_a_store_of_the_job_that_is_gone_is_a_named_error():
    job = tcp_store()
    client = dist.TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
    del job
    with pytest.raises(PeerError, match="save '/a': the job's key-value store does not answer"):
        Home(line(client), "home", 1, 2, "127.0.0.1").session("0", title="save '/a'", timeout_s=600)


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"{}", b"[1, 2]", b"null", b"7", b'["PeerError", "x", 1, [], []]', b"gather \0"]
)
def test_a_foreign_message_is_a_named_error(data: bytes):
    with pytest.raises(PeerError, match="a message that is not of this session"):
        Refusal.decode(data)
    if data:
        with pytest.raises(PeerError, match="a message that is not of this session"):
            list(decode_frames(data))


def test_a_process_that_was_killed_has_ended_also_before_anybody_has_asked_for_it():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        store = dist.HashStore()
        peers = Machine(0, 3)
        peers.arrive(store)
        began = peers_module._began(process.pid)
        store.append(peers._key, f"1:{process.pid}:{began} 2:{process.pid}:1 ".encode())
        assert peers.ended(store) == {2}  # its number is another process's by now
        with mock.patch.object(Path, "read_text", side_effect=OSError(errno.EMFILE, "Too many open files")):
            assert peers.ended(store) == set()  # nothing can be known
        process.kill()
        while peers_module._began(process.pid):  # the signal is under way
            pass
        assert process.returncode is None
        assert peers.ended(store) == {1, 2}
    assert peers.ended(store) == {1, 2}
