"""The table of all that waits for another rank, and jobs of a few processes of which one is killed or stopped there.

A job is forked for each row: its ranks join a process group whose store rank 0 hosts, so that rank 0 takes the job's store with
it, as it does outside of torchrun. The row's victim sends itself the signal. The others say what they got.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import (
    ALONE,
    bounded,
    exchange,
    group,
    home,
    node,
    open_session,
    open_turn,
    peers,
    sessions,
    shared_store,
    values_of_all,
)
from reshard_ckpt.comm import links as links_of
from reshard_ckpt.comm.links import Links, Serving
from reshard_ckpt.comm.node import NodeComm
from reshard_ckpt.errors import CheckpointError
from reshard_ckpt.manager.stopping import open_stop
from reshard_ckpt.memory.node import run_folder, run_path
from reshard_ckpt.memory.options import Memory
from reshard_ckpt.memory.pool import SlotPool
from reshard_ckpt.storage.local import LocalWriter
from reshard_ckpt.storage.posix import lock_file
from tests.tries import is_long

SOON, LONG = 1.0, 600.0
"""The time of rows in which it has to pass; and of those in which the others learn at once that a process has ended."""

LATER_S = 5.0
"""The seconds after its time limit in which a call ends at the latest, or after a process is known to have ended."""

AT_ONCE = 16
"""How many jobs run at a time: most of them wait."""

Die = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One place that waits.

    Attributes
    ----------
    call
        Made by both ranks, with the rank, the time, a folder, and what the victim calls to die; the other's does nothing.
    victims
        The ranks that are waited for there.
    says
        What the other's error says; "" where the wait ends without one.
    killed_s, stopped_s
        The time of the wait where the victim is killed, and where it is stopped.
    names
        The victims that the error names as its rank: not where torch's own collectives fail, nor where the job's store is gone.
    meets
        Whether the ranks have met in a session before.
    joins
        Whether they have joined a process group.
    machines
        The machine of each rank; ranks of one machine know each other's processes.
    stops
        Whether the victim is also stopped there, not only killed.
    """

    call: Callable[[int, float, Path, Die], object]
    victims: tuple[int, ...] = (0, 1)
    says: str = ""
    killed_s: float = LONG
    stopped_s: float = SOON
    names: tuple[int, ...] = (0, 1)
    meets: bool = True
    joins: bool = True
    machines: tuple[int, ...] = (0, 0)
    stops: bool = True


def session(body: Callable[[Any, Die], object]) -> Callable[[int, float, Path, Die], None]:
    def call(rank: int, seconds: float, folder: Path, die: Die) -> None:
        with open_session("test", "/x", timeout_s=seconds) as comm:
            body(comm, die)

    return call


def come(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    with open_session("test", "/x", timeout_s=seconds):
        pass


def gather(comm: Any, die: Die) -> None:
    die()
    comm.gather(b"x" * 100_000)


def broadcast(comm: Any, die: Die) -> None:
    die()
    comm.broadcast(b"all")


def broadcast_near(comm: Any, die: Die) -> None:
    assert comm.neighbours() == (0, 1)
    die()
    comm.broadcast_near(b"of this machine")


def scatter(comm: Any, die: Die) -> None:
    die()
    comm.scatter([b"a", b"b"])


def leave(rank: int, seconds: float, folder: Path, die: Die) -> None:
    with open_session("test", "/x") as comm:
        comm._timeout_s = seconds
        comm.leave = lambda leave=comm.leave: (die(), leave())


def values(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    values_of_all("test", "/x", rank, timeout_s=seconds)


def turn(rank: int, seconds: float, folder: Path, die: Die) -> None:
    turn = open_turn("test", "/x", timeout_s=seconds)
    die()
    turn.meet(0, None)


def stop(rank: int, seconds: float, folder: Path, die: Die) -> None:
    with open_stop("stop", lambda: rank == 1 or bool(die()), timeout_s=seconds) as stop:
        while not stop():
            pass


def links(rank: int, seconds: float) -> Links:
    """Open links in whatever time that takes; what is done with them has those seconds."""
    both = Links(*shared_store("links"), rank, 2, timeout_s=LONG)
    both.timeout_s, both._timeout = seconds, timedelta(seconds=seconds)
    return both


def open_links(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    Links(*shared_store("links"), rank, 2, timeout_s=seconds)


def meet_links(rank: int, seconds: float, folder: Path, die: Die) -> None:
    meet = links_of._meet
    with mock.patch.object(links_of, "_meet", lambda *args: (die(), meet(*args))[1]):
        Links(*shared_store("links"), rank, 2, timeout_s=seconds)


def swap(rank: int, seconds: float, folder: Path, die: Die) -> None:
    both = links(rank, seconds)
    dist.barrier()
    die()
    data = [torch.zeros(1 << 25, dtype=torch.uint8) for _ in range(2)]
    both.swap({1 - rank: data[0]}, {1 - rank: data[1]}, time.monotonic() + seconds)


def read(rank: int, seconds: float, folder: Path, die: Die) -> None:
    def lend(key: str, offset: int, num_bytes: int) -> Any:
        die()

    with Serving(links(rank, seconds), ["file"], lend) as server:
        if rank == 1:
            server.read(0, "file", 0, [memoryview(bytearray(8))])


def finish(rank: int, seconds: float, folder: Path, die: Die) -> None:
    with Serving(links(rank, seconds), ["file"], lambda *_: None):
        dist.barrier()
        die()


def exchanged(rank: int, seconds: float, folder: Path, die: Die) -> None:
    both = exchange.open_exchange(None, timeout_s=seconds)
    assert both is not None
    die()
    both.swap([b"x" * (1 << 20)] * 2)


def host_group(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    with mock.patch.object(exchange, "carries", return_value=False):
        exchange.open_exchange(None, timeout_s=seconds)


def own_store(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    with mock.patch.object(group, "_default_store", return_value=None):
        sessions.current_group(None, seconds)


def named_store(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    while True:  # until rank 0 is gone
        group._GROUPS.clear()
        group._CONNECTIONS.clear()
        met = sessions.current_group(None, seconds)
        met.named("a name", seconds)


def join(rank: int, seconds: float, folder: Path, die: Die) -> None:
    die()
    with sessions.launched_group(seconds):
        pass


def save(rank: int, seconds: float, folder: Path, die: Die, *, in_background: bool = False) -> None:
    write = LocalWriter.write

    def dying(self: LocalWriter, data: Any) -> None:
        die()
        write(self, data)

    state = {"w": LocalShard(torch.full((4,), float(rank)), (8,), (4 * rank,))}
    with mock.patch.object(LocalWriter, "write", dying):
        if in_background:
            checkpoint.async_save(folder / "ckpt", state, timeout_s=seconds).result()
        else:
            checkpoint.save(folder / "ckpt", state, timeout_s=seconds)


PHASES = (
    *(("save", call, number) for call, number in (("gather", 1), ("broadcast", 1), ("write", 1), ("gather", 2), ("gather", 3))),
    *(("load", "broadcast", 1), ("load", "near", 1), ("load", "gather", 1), ("load", "broadcast", 2), ("load", "gather", 2)),
    ("load", "gather", 3),
)
"""The n-th time that a rank makes a call in a save after the first of a layout, or in a load, once the session is open."""


def at_phase(what: str, phase: str, number: int) -> Callable[[int, float, Path, Die], None]:
    """Save or load as three ranks on two machines, and die at a phase of it."""

    def call(rank: int, seconds: float, folder: Path, die: Die) -> None:
        state = {"w": LocalShard(torch.full((4,), float(rank)), (12,), (4 * rank,))}
        checkpoint.save(folder / "ckpt", state)
        owner, name = {"write": (LocalWriter, "write"), "near": (NodeComm, "broadcast_near")}.get(phase, (NodeComm, phase))
        made, times = getattr(owner, name), count(1)

        def counted(*args: Any, **options: Any) -> Any:
            if next(times) == number:
                if phase != "near":  # rank 0, alone on its machine, does not call that
                    dist.barrier()  # so that no message of the step before is still with a leader
                die()
            return made(*args, **options)

        with mock.patch.object(owner, name, counted):
            getattr(checkpoint, what)(folder / "ckpt", state, timeout_s=seconds)

    return call


def join_machine(rank: int, seconds: float, folder: Path, die: Die) -> None:
    serve = node._serve

    def dying() -> Any:
        die()
        return serve()

    with mock.patch.object(node, "_serve", dying), open_session("test", "/x", timeout_s=seconds):
        pass


def locked(path: Callable[[Path], Path], wait: Callable[[Path, float], object]) -> Callable[[int, float, Path, Die], None]:
    """Make the victim, rank 1, die with the lock of a path, for which rank 0 waits in `wait`."""

    def call(rank: int, seconds: float, folder: Path, die: Die) -> None:
        if rank == 1:
            at = path(folder)
            lock = lock_file(os.open(at, os.O_RDONLY), str(at), shared=False)
            assert lock is not None
        dist.barrier()
        die()
        wait(folder, seconds)

    return call


def made(path: Path) -> Path:
    path.mkdir()
    return path


def save_alone(folder: Path, seconds: float) -> None:
    handle = checkpoint.async_save(folder / "ckpt", {"step": 1}, timeout_s=seconds, process_group=ALONE)
    handle.result()


def pool(folder: Path, seconds: float) -> SlotPool:
    return SlotPool(Memory(folder=str(folder)), run_path(str(folder), "/x"), timeout_s=seconds)


def run_folder_with(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (path := run_folder(str(folder), "/x") / name).touch()
        return path

    return make


GONE = "store does not answer|store, which the launcher or rank 0 hosts, did not answer|ended before this was done"
LOCKED = f"another process has had its lock for {SOON:g} s"
SAYS = f"{GONE}|did not arrive|did not answer"

TABLE = {
    "the first session": Row(come, says=SAYS, killed_s=SOON, names=(), meets=False),
    "a session": Row(come, says=SAYS),
    "gather": Row(session(gather), says=SAYS),
    "broadcast": Row(session(broadcast), (0,), says=SAYS),
    "broadcast on a machine": Row(session(broadcast_near), (0,), says=SAYS),
    "scatter": Row(session(scatter), (0,), says=SAYS),
    "leave": Row(leave, (1,), killed_s=SOON),
    "values of all": Row(values, says=SAYS),
    "a turn": Row(turn, says=f"{SAYS}|ended before this began"),
    "a stop": Row(stop, (0,), says="key-value store does not answer|did not report within", killed_s=SOON),
    "the job's store": Row(
        named_store, (0,), says="did not reach the job's|did not answer", killed_s=SOON, names=(), meets=False
    ),
    "opening links": Row(open_links, says="did not meet", names=(1,)),
    "links that met half": Row(meet_links, says="did not meet", names=()),
    "links": Row(swap, says="copying to or from the memory of rank"),
    "a read over links": Row(read, (0,), says="rank 0 did not hand on"),
    "the end of links": Row(finish, killed_s=SOON),
    "an exchange": Row(exchanged, says="the exchange over the process group failed", names=()),
    "a group for an exchange": Row(host_group, says="did not come together", names=(), killed_s=SOON),
    "an own store": Row(own_store, (0,), says="did not spread|did not meet", names=(), meets=False),
    "joining": Row(join, says="did not meet", names=(), meets=False, joins=False, killed_s=SOON),
    "save": Row(save, says=SAYS),
    "async_save": Row(partial(save, in_background=True), (0,), says=SAYS),
    "a lock of a checkpoint": Row(locked(lambda folder: made(folder / "ckpt"), save_alone), (1,), says=LOCKED, names=()),
    "a lock of a run in memory": Row(
        locked(run_folder_with("alive"), lambda folder, seconds: pool(folder, seconds).enter("/x")), (1,), says=LOCKED, names=()
    ),
    "a lock of a node": Row(
        locked(run_folder_with("lock"), lambda folder, seconds: pool(folder, seconds).take(0, 1, "id")),
        (1,),
        says=LOCKED,
        names=(),
    ),
}


# Rank 1 speaks for the second machine.
TABLE["joining a machine"] = Row(join_machine, (1,), says=SAYS, stopped_s=8 * SOON, meets=False, machines=(0, 1, 1))
TABLE |= {
    f"{what} on machines, {phase} {number}": Row(
        at_phase(what, phase, number),
        (1, 2) if phase == "near" else (0, 1, 2) if is_long() else (0, 1 + i % 2),
        says=f"{SAYS}|does not answer any more",
        # A rank must name its leader before the time of the others is over: a busy machine needs a wide margin for that.
        stopped_s=24 * SOON,
        machines=(0, 1, 1),
        stops=phase in ("write", "near"),
    )
    for i, (what, phase, number) in enumerate(PHASES)  # rank 0 at each, the leader and the rank that it leads in turn
}


def nothing() -> None:
    pass


def die_by(number: signal.Signals, rank: int, victim: int, folder: Path) -> Die:
    def die() -> None:
        (folder / "died").write_text(f"{time.monotonic()}")  # a clock of the whole machine
        os.kill(os.getpid(), number)
        threading.Event().wait()  # the signal may reach another thread first

    return die if rank == victim else nothing


def be_rank(name: str, how: str, victim: int, rank: int, ports: tuple[int, int], folder: Path) -> None:
    """Be one rank of a job, and leave what was raised in a file; never returns."""
    row = TABLE[name]
    size = len(row.machines)
    machine = peers._machine
    peers._machine = lambda: f"{machine()} {row.machines[rank]}"
    said: list[Any] = ["", "", []]
    try:
        # A wait of the store itself, or for one, would be longer than this test.
        # Rank 0 gets replies from its own process; the wait is for the other rank, however slow the machine.
        if rank == 0:
            bounded._Limit.left = lambda self: LONG  # type: ignore[method-assign]
            home.bounded = lambda call, timeout_s, what: bounded.bounded(call, LONG, what)  # it only starts its own store there
        home.REPLY_S = home._PROBE_S = group.REPLY_S = 1e5
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(days=1))
            os.write(ports[1], b"%9d" % store.port * (size - 1))
            port = store.port
        else:
            port = int(os.read(ports[0], 9))
        if rank and row.joins:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(days=1))
        if row.joins:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
            dist.barrier()
        else:
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.environ.update(env, WORLD_SIZE=str(size), RANK=str(rank))
        if row.meets:
            with open_session("test", "/before"):
                pass
            dist.barrier()
        seconds = row.killed_s if how == "killed" else row.stopped_s
        row.call(rank, seconds, folder, die_by(signal.SIGKILL if how == "killed" else signal.SIGSTOP, rank, victim, folder))
    except BaseException as error:
        said = [[base.__name__ for base in type(error).__mro__], str(error), list(getattr(error, "ranks", []))]
        if not isinstance(error, CheckpointError):
            said[1] += traceback.format_exc()
    said.append(time.monotonic())
    (folder / f"saying-{rank}").write_text(json.dumps(said))
    (folder / f"saying-{rank}").rename(folder / f"said-{rank}")
    os._exit(0)


def begin_job(name: str, how: str, victim: int, at: Path) -> list[int]:
    """Fork all ranks; their process numbers."""
    ports = os.pipe()
    children = []
    for rank in range(len(TABLE[name].machines)):
        child = os.fork()
        if not child:
            be_rank(name, how, victim, rank, ports, at)
        children.append(child)
    for end in ports:
        os.close(end)
    return children


def seconds_of(name: str, how: str) -> float:
    """Return the seconds in which the others have to be done after the victim died."""
    seconds = TABLE[name].killed_s if how == "killed" else TABLE[name].stopped_s
    return LATER_S + (0 if seconds == LONG else seconds)


def run_jobs(jobs: list[tuple[str, str, int]], folder: str, at_once: int) -> list[list[Any]]:
    """Return by job, for each rank but the victim, what it raised, and how many seconds after the victim died it was done.

    Of what it raised: the names of classes, the message and the ranks.
    """
    # Torch asks for the name of each address that connects; where nobody knows it, that took 5 s now and then.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    left, running, said = list(enumerate(jobs)), {}, {}
    try:
        while left or running:
            while left and len(running) < at_once:
                number, job = left.pop()
                at = Path(folder, str(number))
                at.mkdir()
                running[number] = begin_job(*job, at), at
            child, _ = os.wait()
            for number, (children, at) in list(running.items()):
                victim = jobs[number][2]
                if child not in children or child == children[victim]:
                    continue
                others = [rank for rank in range(len(children)) if rank != victim]
                if all((at / f"said-{rank}").exists() for rank in others):
                    del running[number]
                    with suppress(ProcessLookupError):
                        os.kill(children[victim], signal.SIGKILL)
                    lives = at / f"said-{victim}"
                    assert not lives.exists(), (jobs[number], lives.read_text())
                    died = float((at / "died").read_text())
                    told = (json.loads((at / f"said-{rank}").read_text()) for rank in others)
                    said[number] = [(*one, ended - died) for *one, ended in told]
    finally:
        for children, _ in running.values():
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    return [said[number] for number in range(len(jobs))]
