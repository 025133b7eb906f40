"""Control traffic of a save: hundreds of real ranks on one key-value store, with the requests of each and the CPU of the server.

``python -m benchmarks.control --ranks 256 --write-s 2 --json bench_out/control.json``

Each rank is a forked process that calls `checkpoint.save`. It writes a few bytes, and its write takes `--write-s` seconds. The
process group only gives each rank its number, so the backend is torch's fake one; the stores are real.

1. *Requests*: the messages that torch sends to rank 0's store in a save: two for a ``get``, which first waits for its key.
   The mean of the ranks above 0: with ``--node 8``, each 8 ranks are as on a machine, whose first rank speaks for them.
2. *Polls*: the requests among them that only ask whether a key is there.
3. *Server CPU*: CPU seconds of the thread that serves the store, which runs in rank 0's process.

The first save also meets and plans. The figures are of the saves after it; ``--polls`` shows them without waits in the server, as
before torch 2.8.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import node, peers
from reshard_ckpt.comm.bounded import BoundedStore, PollingWait, StoreConnection
from reshard_ckpt.storage.local import LocalWriter

from .ranks import cpu_s, end_with

FOLDER = "/dev/shm"
MESSAGES = {"get": 2}
"""Messages to the server in a call, where it is not one."""
POLLS = ("check",)
SERVER_THREAD = "pt_tcpstore_uv"


def server_cpu_s() -> float:
    """Return the CPU seconds of the threads of this process that serve a store."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == SERVER_THREAD]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def count_requests() -> Counter[str]:
    """Count from now on the calls of this process to stores, by method."""
    counted: Counter[str] = Counter()
    on_worker = BoundedStore.on_worker

    class Counting:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, method: str) -> Any:
            counted[method] += 1
            return getattr(self._store, method)

    of_machines: list[Any] = []

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            of_machines.append(make(*args))
            return of_machines[-1]

        return made

    node._serve, node._connect = noting(node._serve), noting(node._connect)

    def is_of_machine(store: BoundedStore) -> bool:
        return any(store._client is one for one in of_machines)

    def counting(self: BoundedStore, requests: Callable[[Any], Any]) -> Any:
        return on_worker(self, requests if is_of_machine(self) else lambda store: requests(Counting(store)))

    begin_get = BoundedStore.begin_get

    def waiting(self: BoundedStore, key: str, timeout_s: float, num_asking: int = 1) -> Any:
        begun = begin_get(self, key, timeout_s, num_asking)
        counted["get"] += not isinstance(begun, PollingWait) and not is_of_machine(self)
        return begun

    BoundedStore.on_worker, BoundedStore.begin_get = counting, waiting  # type: ignore[method-assign]
    return counted


def be_rank(rank: int, port: int, folder: Path, pipes: tuple[int, int], options: argparse.Namespace) -> None:
    """Save again and again, each time after a byte has come, and answer with the figures of the save."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(hours=1))
    dist.init_process_group("fake", store=store, rank=rank, world_size=options.ranks)
    write = LocalWriter.write

    def slow(self: LocalWriter, data: Any) -> None:
        if self._key.endswith(".safetensors") and self._written == 0:
            time.sleep(options.write_s)
        write(self, data)

    LocalWriter.write = slow  # type: ignore[method-assign]
    if options.polls:
        StoreConnection.free_client = lambda self, client, timeout_s: None  # type: ignore[method-assign]
    machine = peers._machine()
    peers._machine = lambda: f"{machine} {rank // (options.node or options.ranks)}"
    counted = count_requests()
    state = {"w": LocalShard(torch.full((64,), float(rank)), (64 * options.ranks,), (64 * rank,))}
    while os.read(pipes[0], 1):
        counted.clear()
        began, server, cpu = time.perf_counter(), server_cpu_s(), cpu_s()
        checkpoint.save(folder / "ckpt", state, timeout_s=options.timeout_s)
        figures = {"calls": counted, "server_cpu_s": server_cpu_s() - server, "cpu_s": cpu_s() - cpu}
        os.write(pipes[1], json.dumps({**figures, "wall_s": time.perf_counter() - began}).encode() + b"\n")


def start(rank: int, port: int, folder: Path, options: argparse.Namespace) -> tuple[int, Any]:
    """Fork a rank; return the pipe on which it is told to save, and the file of its answers."""
    told, answers, parent = os.pipe(), os.pipe(), os.getpid()
    if os.fork() == 0:
        end_with(parent)
        os.close(told[1])
        try:
            be_rank(rank, port, folder, (told[0], answers[1]), options)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(told[0])
    os.close(answers[1])
    return told[1], os.fdopen(answers[0])


def save_once(ranks: list[tuple[int, Any]]) -> list[dict[str, Any]]:
    """Have all ranks save together; return the figures of each."""
    for told, _ in ranks:
        os.write(told, b".")
    answers = [answer.readline() for _, answer in ranks]
    if not all(answers):
        raise SystemExit("a rank failed; see above")
    return [json.loads(answer) for answer in answers]


def messages(figures: dict[str, Any], *, of: tuple[str, ...] | None = None) -> int:
    return sum(MESSAGES.get(name, 1) * number for name, number in figures["calls"].items() if of is None or name in of)


def summary(saves: list[list[dict[str, Any]]], num_ranks: int) -> dict[str, Any]:
    """Return the medians of the saves; of requests the mean of the ranks above 0, and those of rank 0."""
    requests = [statistics.mean(messages(rank) for rank in save[1:]) for save in saves]
    polls = [statistics.mean(messages(rank, of=POLLS) for rank in save[1:]) for save in saves]
    server = statistics.median(save[0]["server_cpu_s"] for save in saves)
    return {
        "requests": statistics.median(requests),
        "polls": statistics.median(polls),
        "requests_rank0": statistics.median(messages(save[0]) for save in saves),
        "server_cpu_s": server,
        "server_cpu_ms_per_rank": 1000 * server / num_ranks,
        "rank0_cpu_s": statistics.median(save[0]["cpu_s"] for save in saves),
        "wall_s": statistics.median(max(rank["wall_s"] for rank in save) for save in saves),
        "calls": saves[-1][-1]["calls"],
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure `options.saves` saves after a first one."""
    # Torch asks for the name of each address that connects, and says on stderr if nobody knows it.
    os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1"}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = Path(tempfile.mkdtemp(dir=FOLDER, prefix="reshard_ckpt_control_"))
    reading, writing = os.pipe()
    if os.fork() == 0:  # the job's own store, which no rank serves
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, b"%d" % store.port)
        os.close(writing)
        end_with(os.getppid())
        time.sleep(options.timeout_s * (options.saves + 2))
        os._exit(0)
    os.close(writing)
    port = int(os.read(reading, 99))
    ranks = [start(rank, port, folder, options) for rank in range(options.ranks)]
    try:
        first = save_once(ranks)
        saves = [save_once(ranks) for _ in range(options.saves)]
    finally:
        shutil.rmtree(folder)
    return {"first": summary([first], options.ranks), "later": summary(saves, options.ranks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--node", type=int, default=0, help="ranks of a machine, as if there were several")
    parser.add_argument("--write-s", type=float, default=2.0)
    parser.add_argument("--polls", action="store_true", help="without waits in the server, as before torch 2.8")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options)
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    result = {
        "ranks": options.ranks,
        "node": options.node or options.ranks,
        "write_s": options.write_s,
        "polls": options.polls,
        "machine": machine,
        **found,
    }
    print(f"{options.ranks} ranks, a write of {options.write_s:g} s, {machine}")
    print(f"{'':>14} {'requests':>9} {'polls':>7} {'of rank 0':>9} {'server ms/rank':>14} {'server s':>9} {'wall s':>7}")
    for name in ("first", "later"):
        s = result[name]
        figures = f"{s['requests']:>9.1f} {s['polls']:>7.1f} {s['requests_rank0']:>9.0f} {s['server_cpu_ms_per_rank']:>14.2f}"
        print(f"{name + ' save':>14} {figures} {s['server_cpu_s']:>9.3f} {s['wall_s']:>7.2f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    sys.stdout.flush()
    os._exit(0)  # the children end with this process


if __name__ == "__main__":
    main()
