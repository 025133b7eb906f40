"""A store that loses answers, answers 500 after success, refuses in bursts or cuts bodies, at each request of an operation.

``make test-stores`` tries each fault with each operation."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from reshard_ckpt import checkpoint
from tests.reliability.states import NEW, OLD, plain
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.kills import manage, manage_one_more, number_at, prepare_reshard, reshard
from tests.storage.object_servers import make_bucket, moto_server, set_endpoint


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, FaultProxy]]:
    with moto_server() as endpoint, fault_proxy(endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        set_endpoint(patch, proxy.endpoint)
        yield endpoint, proxy


def load(url: str) -> None:
    into = plain(0)
    checkpoint.load(f"{url}/step_1", into)
    assert into["extra"]["step"] == OLD
    assert number_at(f"{url}/step_1") == OLD


Job = Callable[[str], object]
JOBS: dict[str, tuple[Job, Job, dict[str, int]]] = {
    "save": (
        lambda url: checkpoint.save(f"{url}/step_1", plain(OLD)),
        lambda url: checkpoint.save(f"{url}/step_1", plain(NEW)),
        {"step_1": NEW},
    ),
    "load": (lambda url: checkpoint.save(f"{url}/step_1", plain(OLD)), load, {"step_1": OLD}),
    "reshard": (prepare_reshard, reshard, {"source": NEW, "run/step_1": NEW}),
    "manager": (lambda url: manage(url, 1, 2, 3, keep_last=3, grace=0), partial(manage_one_more, grace=0), {"step_4": 4}),
}


SAMPLE = [("save", "drop"), ("save", "cut"), ("load", "cut"), ("reshard", "503"), ("manager", "500")]
ALL = [(name, fate) for name in JOBS for fate in ("drop", "500", "503", "cut")]


@pytest.mark.parametrize(("name", "fate"), ALL if "ALL_FAULTS" in os.environ else SAMPLE)
def test_a_fault_at_each_request_loses_nothing(servers: tuple[str, FaultProxy], name: str, fate: str) -> None:
    endpoint, proxy = servers
    prepare, job, holds = JOBS[name]
    url = f"{make_bucket(endpoint)}/a"
    prepare(url)
    met: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()

    def fault(method: str, path: str) -> str:
        place = re.sub(r"\d{8}T\d{6}Z-[0-9a-f]{8}", "ID", path)
        with lock:
            met[method, place] += 1
            return fate if met[method, place] <= (2 if fate == "503" else 1) else ""

    proxy.fault = fault
    try:
        job(url)  # each request is sent again
    finally:
        proxy.fault = lambda method, path: ""
    assert sum(met.values()) > 4
    assert {path: number_at(f"{url}/{path}") for path in holds} == holds
