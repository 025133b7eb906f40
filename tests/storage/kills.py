"""Kill real processes at each request to an object store, one after the other, and look at what they leave.

``python -m tests.storage.kills --out FILE`` tries every request of every operation, ``--every N`` every N-th. It forks each job
from this process, so that torch is imported once; moto and the proxy that kills run in a fork of their own.

1. A job runs one operation of `OPERATIONS`. It is killed by SIGKILL at one of its requests: before the store does it, and after.
2. Everything committed must then load, bit for bit: the state from before the operation, or the one that it makes.
3. The next job must succeed, and its sweep must leave nothing that no catalog refers to. ``inspect`` shows no unfinished step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import posixpath
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint.listing import list_run
from reshard_ckpt.errors import CheckpointNotFound, CorruptError
from reshard_ckpt.format.files import CATALOG_KEY, CONVERT_LOCK, RUN_LOCK_KEY, manifest_key, timeline_key
from reshard_ckpt.storage import open_storage
from tests.reliability.points import main, sweep
from tests.reliability.states import NEW, NEXT, OLD, expected, is_state, plain
from tests.reliability.tracer import fork
from tests.storage.fault_proxy import fault_proxy
from tests.storage.object_servers import make_bucket, moto_server, set_endpoint

SWEEP_S = 1e-9
"""A grace that is over at once."""

KEPT = torch.arange(70_000)
"""A tensor that no step changes, so that an incremental save refers to the steps before."""


@dataclass(frozen=True)
class Operation:
    """One kind of job, each function with the URL of an empty prefix.

    Attributes
    ----------
    prepare
        Makes the state of the store before the job.
    run
        The job that is killed.
    check
        The next job: looks at what is left, goes on, and returns what it found.
    """

    label: str
    prepare: Callable[[str], object]
    run: Callable[[str], object]
    check: Callable[[str], str]


def number_at(path: str) -> int | None:
    """Return the number of the one whole state at a path; None if there is none."""
    try:
        found = checkpoint.read(path)
    except CheckpointNotFound:
        return None
    assert checkpoint.verify(path).ok
    assert found.pop("kept", KEPT).equal(KEPT)
    [number] = [number for number in range(10) if is_state(found, number)]
    return number


def unreferred(url: str) -> set[str]:
    """List the keys below the root of a run that no checkpoint and no manager needs."""
    with open_storage(url) as root:
        keys = {key for key, _ in root.list()}
    for key in [key for key in keys if posixpath.basename(key) == CATALOG_KEY]:
        folder = posixpath.dirname(key)
        catalog = checkpoint.catalog(posixpath.join(url, folder))
        needed = [timeline_key(catalog.save_id), manifest_key(catalog.save_id)]
        needed += [key for file in catalog.files for key in (file.key, file.digests_key)]
        keys -= {key, *(posixpath.normpath(posixpath.join(folder, one)) for one in needed)}
    return keys - {RUN_LOCK_KEY, ".reshard_ckpt.lineage", ".reshard_ckpt.attempts", ".reshard_ckpt.names"}


def go_on(url: str, step: int) -> None:
    """Go on with a run: a new manager sweeps, loads the newest step and saves one more."""
    wanted = {line.step: number_at(line.path) for line in list_run(url) if line.problem is None}
    with checkpoint.Manager(url, keep_last=2, grace=SWEEP_S) as manager:
        into = plain(0)
        found = manager.load_latest(into)
        assert (found and found.step) == max(wanted, default=None), (found, wanted)
        assert found is None or into["extra"]["step"] == wanted[found.step]
        manager.save(step, plain(step))
        manager.save(step + 1, plain(step + 1))
    with checkpoint.Manager(url, grace=SWEEP_S):
        pass
    lines = list_run(url)
    assert [(line.step, line.problem) for line in lines] == [(step, None), (step + 1, None)], lines
    assert [number_at(line.path) for line in lines] == [step, step + 1]
    assert not unreferred(url), unreferred(url)


# --- saves ---


def check_save(url: str) -> str:
    found = number_at(f"{url}/step_1")
    checkpoint.save(f"{url}/step_1", plain(NEXT))
    assert number_at(f"{url}/step_1") == NEXT
    go_on(url, 5)
    return str(found)


# --- offline reshards ---


def prepare_reshard(url: str) -> None:
    checkpoint.save(f"{url}/source", plain(NEW))
    checkpoint.save(f"{url}/run/step_1", plain(OLD))


def reshard(url: str) -> None:
    checkpoint.reshard(f"{url}/source", f"{url}/run/step_1", mesh={"dp": 2})


def check_reshard(url: str, *, again: bool) -> str:
    found = number_at(f"{url}/run/step_1")
    if again:
        reshard(url)
        assert number_at(f"{url}/run/step_1") == NEW
    assert number_at(f"{url}/source") == NEW
    assert not unreferred(f"{url}/source")
    go_on(f"{url}/run", 5)
    return str(found)


# --- runs ---


def manage(url: str, *steps: int, keep_last: int, grace: float) -> None:
    with checkpoint.Manager(url, keep_last=keep_last, grace=grace, incremental=True) as manager:
        for step in steps:
            manager.save(step, {**plain(step), "kept": KEPT})


def manage_one_more(url: str, grace: float) -> None:
    manage(url, 4, keep_last=1, grace=grace)


def check_prune(url: str) -> str:
    found = [line.step for line in list_run(url) if line.problem is None]
    assert found[-1] in (3, 4)
    assert found == [*range(found[0], found[-1] + 1)], found
    go_on(url, 7)
    return ",".join(map(str, found))


# --- conversions ---


def convert(url: str, to: str, overwrite: bool = False) -> None:
    options: dict[str, Any] = {"root": "t", "max_shard_size": 100} if to == "safetensors" else {}
    checkpoint.convert(f"{url}/own", f"{url}/made", to=to, overwrite=overwrite, **options)


def prepare_overwrite(url: str, to: str) -> None:
    checkpoint.save(f"{url}/own", plain(OLD))
    convert(url, to)
    checkpoint.save(f"{url}/own", plain(NEW))


def converted(state: int, to: str) -> dict[str, Any]:
    wanted = expected(state)
    if to == "safetensors":
        wanted = {f"model.{name[2:]}": value for name, value in wanted.items() if name.startswith("t.")}
    return wanted


def as_bytes(found: dict[str, Any]) -> dict[str, Any]:
    """Tensors as their bytes: some are not a number."""
    return {name: value.numpy().tobytes() if torch.is_tensor(value) else value for name, value in found.items()}


def check_conversion(url: str, to: str, over: bool = False) -> str:
    def found() -> int:
        """Return the state that is there, which is whole; 0 if there is no checkpoint."""
        try:
            read = checkpoint.read(f"{url}/made")
        except (CheckpointNotFound, CorruptError):  # some files of several, by name
            return 0
        same = [state for state in ((OLD, NEW) if over else (OLD,)) if as_bytes(read) == as_bytes(converted(state, to))]
        assert same, read.keys()
        return same[0]

    last, left = NEW if over else OLD, found()
    with open_storage(url) as root:
        if left != last or root.size(f"made/{CONVERT_LOCK}") is not None or root.list(".made.partial"):
            convert(url, to, overwrite=over)
        assert found() == last
        keys = [key for key, _ in root.list() if key.startswith(("made", ".made"))]
        assert len(keys) == {"safetensors": 3, "dcp": 2, "torch": 1, "reshard": 3}[to], keys
    return str(left)


OPERATIONS = [
    Operation("first save", lambda url: None, lambda url: checkpoint.save(f"{url}/step_1", plain(NEW)), check_save),
    Operation(
        "save in place",
        lambda url: checkpoint.save(f"{url}/step_1", plain(OLD)),
        lambda url: checkpoint.save(f"{url}/step_1", plain(NEW)),
        check_save,
    ),
    *(
        Operation(f"reshard, then {then}", prepare_reshard, reshard, partial(check_reshard, again=again))
        for then, again in (("again", True), ("the run goes on", False))
    ),
    *(
        Operation(
            f"prune, grace {grace:g} s",
            lambda url: manage(url, 1, 2, 3, keep_last=3, grace=0),
            partial(manage_one_more, grace=grace),
            check_prune,
        )
        for grace in (0.0, 3600.0)
    ),
    *(
        Operation(
            f"convert to {to}",
            lambda url: checkpoint.save(f"{url}/own", plain(OLD)),
            partial(convert, to=to),
            partial(check_conversion, to=to),
        )
        for to in ("safetensors", "dcp", "torch", "reshard")
    ),
    *(
        Operation(
            f"convert to {to} in place",
            partial(prepare_overwrite, to=to),
            partial(convert, to=to, overwrite=True),
            partial(check_conversion, to=to, over=True),
        )
        for to in ("safetensors", "torch", "reshard")
    ),
]


SAMPLE = [
    one
    for one in OPERATIONS
    if one.label in ("save in place", "reshard, then the run goes on", "prune, grace 3600 s", "convert to safetensors")
]

# --- the driver ---


def serve(pipe: Connection) -> None:
    """Run the store and the proxy, and arm the proxy to kill as the driver asks."""
    with moto_server() as endpoint, fault_proxy(endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        set_endpoint(patch, proxy.endpoint)
        pipe.send((endpoint, proxy.endpoint, make_bucket(endpoint)))
        while (asked := pipe.recv()) is not None:
            if asked == "seen":
                proxy.fault = lambda method, path: ""
                proxy.settle()
                pipe.send([f"{method} {path}" for method, path in proxy.seen])
                continue
            victim, point, fate = asked
            proxy.forget()

            def fault(method: str, path: str, victim: int = victim, point: int = point, fate: str = fate) -> str:
                if len(proxy.seen) == point:
                    os.kill(victim, signal.SIGKILL)
                    return fate
                return ""

            proxy.fault = fault
            pipe.send("armed")


class Driver:
    """Runs jobs in children of this process, against the server in another."""

    def __init__(self, folder: Path) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._server = fork(lambda: serve(theirs), timeout_s=86_400)
        theirs.close()
        self._endpoint, self._proxy, self._bucket = self._pipe.recv()
        self._found = folder / "found"
        self._count = 0

    def close(self) -> None:
        self._pipe.send(None)
        os.waitpid(self._server, 0)

    def url(self) -> str:
        self._count += 1
        return f"{self._bucket}/{self._count}"

    def start(self, job: Callable[[], object], ready: int | None = None) -> int:
        """Fork a job: one that may be killed waits until it is `ready`, and sends its requests through the proxy."""

        def run() -> None:
            if ready is not None:
                os.read(ready, 1)
            with pytest.MonkeyPatch.context() as patch:
                set_endpoint(patch, self._endpoint if ready is None else self._proxy)
                self._found.write_text(str(job()))

        return fork(run)

    def finish(self, job: Callable[[], object]) -> Any:
        """Run a job to its end, and return its result."""
        pid = self.start(job)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, "a job failed; its traceback is above"
        return self._found.read_text()

    def attempt(self, operation: Operation, url: str, point: int, fate: str) -> list[str]:
        """Run an operation, and kill it at a request, if `point` is not 0; return its requests."""
        self.finish(lambda: operation.prepare(url))
        ready, go = os.pipe()
        pid = self.start(lambda: operation.run(url), ready)
        self._pipe.send((pid, point, fate))
        self._pipe.recv()
        os.write(go, b"g")
        os.close(go)
        os.close(ready)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), "the job failed; its traceback is above"
        self._pipe.send("seen")
        seen: list[str] = self._pipe.recv()
        return seen


def swept(driver: Driver, operation: Operation, every: int, first: int) -> dict[str, Any]:
    """Kill at every request, or at some; return the figures of one operation."""
    # "lose": killed before the store does the request; "drop": after.
    requests = driver.attempt(operation, driver.url(), 0, "")
    points = [(fate, request) for request in requests for fate in ("lose", "drop")]

    def attempt(n: int) -> str:
        url = driver.url()
        driver.attempt(operation, url, (n + 1) // 2, points[n - 1][0])
        return driver.finish(lambda: operation.check(url))

    left = sweep(points, attempt, every, first)
    return {"requests": len(requests), "tried": len(left), "left": dict(Counter(left))}


def run(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    driver = Driver(folder)
    try:
        for i, operation in enumerate(SAMPLE if args.sample else OPERATIONS):
            if args.only in operation.label:
                yield operation.label, swept(driver, operation, args.every, 1 + i % args.every)
    finally:
        driver.close()


if __name__ == "__main__":
    only = {"default": "", "help": "only operations whose label has this text"}
    sample = {"action": "store_true", "help": "some operations alone"}
    sys.exit(main(__doc__, run, only=only, sample=sample))
