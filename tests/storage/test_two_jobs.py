"""Two processes on one path of an object store: one is refused by name, and nothing that was committed is lost.

The first process is held at one of its requests by its proxy until the second has ended. ``python -m tests.storage.test_two_jobs
NAME URL`` is one of the processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.cli import main as command
from reshard_ckpt.storage import object_lease
from reshard_ckpt.storage.object_store import ObjectStorage
from tests.launch import ROOT
from tests.reliability.states import NEW, NEXT, OLD, plain
from tests.storage.fault_proxy import fault_proxy
from tests.storage.kills import manage, number_at, unreferred
from tests.storage.object_servers import KEYS, make_bucket
from tests.warm_python import warm_python


def renew_often() -> None:
    """Renew leases all the time, and look at those of others often, so that no process waits for the third of a minute."""

    def renew(lease: object_lease.ObjectLease) -> None:
        while not lease._ended.wait(0.05):
            lease._renew()

    object_lease.ObjectLease._renew_on_time = renew  # type: ignore[method-assign]
    object_lease._sleep = lambda seconds: threading.Event().wait(0.1)


def lose_lease() -> None:
    """Take short leases, and never renew them, as a process that is paused."""
    assert ObjectStorage.lease.__kwdefaults__
    ObjectStorage.lease.__kwdefaults__["ttl_s"] = 0.5
    object_lease.ObjectLease._renew_on_time = lambda lease: None  # type: ignore[method-assign]
    warnings.simplefilter("error")  # a lost lease in a prune is a warning, as the save is done


def reshard(url: str) -> None:
    checkpoint.reshard(f"{url}/source", f"{url}/made", mesh={"dp": 2})


def compact(url: str) -> None:
    sys.argv = ["reshard-ckpt", "compact", f"{url}/step_2"]
    command()


def delete(url: str) -> None:
    with checkpoint.Manager(url) as manager:
        manager.delete(2)


JOBS: dict[str, Callable[[str], object]] = {
    "save new": lambda url: checkpoint.save(f"{url}/step_1", plain(NEW)),
    "save next": lambda url: checkpoint.save(f"{url}/step_1", plain(NEXT)),
    "manage": lambda url: manage(url, 3, keep_last=1, grace=0),
    "manage others": lambda url: manage(url, 4, keep_last=9, grace=0),
    "pause": lambda url: (lose_lease(), manage(url, 3, keep_last=1, grace=0)),
    "reshard": reshard,
    "compact": compact,
    "delete": delete,
}


@dataclass(frozen=True)
class Case:
    """Two jobs.

    Attributes
    ----------
    before
        Makes what the store holds before.
    first, held_at
        A job, and the method and a part of the path of the request at which it is held until the other has ended.
    errors
        The error of each job; "" for none.
    holds
        The number of the state at each path afterwards.
    """

    label: str
    before: Callable[[str], object]
    first: str
    held_at: tuple[str, str]
    second: str
    errors: tuple[str, str]
    holds: dict[str, int | None]


def two_steps(url: str) -> None:
    """Save two steps, the second of which refers to the files of the first."""
    manage(url, 1, 2, keep_last=9, grace=0)


CONFLICT = "PublishConflict: .*: {} during this save; two jobs write to one path"
CASES = [
    *(
        Case(f"saves, {where}", before, "save new", at, "save next", (CONFLICT.format(how), ""), {"step_1": NEXT})
        for before, how in (
            (lambda url: None, "appeared"),
            (lambda url: checkpoint.save(f"{url}/step_1", plain(OLD)), "changed"),
        )
        for where, at in {
            f"one about to write, {how}": ("PUT", "rank00000-0.safetensors"),
            f"one written, {how}": ("GET", "step_1%2F2"),
            f"one about to commit, {how}": ("PUT", "catalog.msgpack"),
        }.items()
        if how == "appeared" or where.startswith("one about to commit")
    ),
    Case(
        "managers", two_steps, "manage", ("PUT", "step_3/"), "manage others",
        ("", "UsageError: .*process .* manages the checkpoints there"), {"step_3": 3, "step_2": None},
    ),
    Case(
        "managers, the first paused", two_steps, "pause", ("PUT", "step_3/catalog.msgpack"), "manage others",
        ("StorageError: .*another job deleted files of this save", ""), {"step_1": 1, "step_2": 2, "step_3": None, "step_4": 4},
    ),
    Case(
        "managers, the first paused before it prunes", two_steps, "pause", ("GET", "step_2/catalog.msgpack"), "manage others",
        ("another may have taken it: nothing was deleted", ""), {"step_1": 1, "step_2": 2, "step_3": 3, "step_4": 4},
    ),
    Case(
        "reshards, one writing", lambda url: checkpoint.save(f"{url}/source", plain(NEW)), "reshard",
        ("PUT", "rank00000-0.safetensors"), "reshard", ("", "StorageError: .*the same reshard is under way there"), {"made": NEW},
    ),
    Case(
        "reshards, one done before the other begins", lambda url: checkpoint.save(f"{url}/source", plain(NEW)), "reshard",
        ("PUT", "reshard.lock"), "reshard", (CONFLICT.format("appeared"), ""), {"made": NEW},
    ),
    Case(
        "a prune, and compact", two_steps, "manage", ("POST", "delete"), "compact", ("", ""), {"step_3": 3, "step_1": None},
    ),
    Case(
        "compact, and a deletion", two_steps, "compact", ("PUT", "catalog.msgpack"), "delete",
        ("catalog.msgpack: disappeared during this save", ""), {"step_1": 1, "step_2": None},
    ),
]  # fmt: skip


def start(name: str, url: str, endpoint: str) -> subprocess.Popen[str]:
    env = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": endpoint, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", "tests.storage.test_two_jobs", name, url]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_of_two_jobs_on_one_path_one_is_refused_and_nothing_is_lost(endpoint: str, case: Case) -> None:
    url = f"{make_bucket(endpoint)}/run"
    case.before(url)
    arrived, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> str:
        if method == case.held_at[0] and case.held_at[1] in path and not arrived.is_set():
            arrived.set()
            go_on.wait()
        return ""

    with fault_proxy(endpoint) as proxy:
        proxy.fault = hold
        with start(case.first, url, proxy.endpoint) as first:
            try:
                while not arrived.wait(0.05):
                    assert first.poll() is None, first.communicate()[0]
                with start(case.second, url, endpoint) as second:
                    said_second = second.communicate()[0]
            finally:
                go_on.set()
            said_first = first.communicate()[0]
    for said, wanted, job in ((said_first, case.errors[0], first), (said_second, case.errors[1], second)):
        assert (job.returncode == 0) == (wanted == ""), said
        assert wanted == "" or re.search(wanted, said), said
    assert {path: number_at(f"{url}/{path}") for path in case.holds} == case.holds
    with checkpoint.Manager(url, grace=1e-9):  # noted
        pass
    with checkpoint.Manager(url, grace=1e-9):  # swept
        pass
    assert not {key for key in unreferred(url) if key.startswith("step_")}


if __name__ == "__main__":
    if sys.argv[1] != "pause":
        renew_often()
    JOBS[sys.argv[1]](sys.argv[2])
