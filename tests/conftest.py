"""What every test shares: one thread a process, and Hypothesis without deadlines."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: tests start up to 8 processes on 2 cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch asks for the name of each address that connects; where nobody knows it, each connection of a store took 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A save waits for the disk several times, and the disk takes ms each time. A process that is killed loses nothing of what it
# has written to either; a power cut is simulated. PYTEST_DEBUG_TEMPROOT=/tmp runs the tests on a disk all the same.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free >= 8 << 30:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = "/dev/shm"
# A print is two writes where output is unbuffered, so that lines of ranks mix.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.fork_server import COLLECT_EVERY
from tests.launch import SHARED, stop_server
from tests.tries import PROFILE, USUAL, times
from tests.warm_python import WORKER, warm_python

_CALM = (HealthCheck.too_slow, HealthCheck.data_too_large)

# "fixed" draws the same examples on every machine and in every run, so `make test` does the same in a fresh clone as where a
# change is accepted. "random" draws new ones: `make test-random`.
_USUAL: dict[str, Any] = {"deadline": None, "suppress_health_check": _CALM, "max_examples": times(USUAL)}
settings.register_profile("fixed", **_USUAL, derandomize=True, print_blob=True)
settings.register_profile("random", **_USUAL, print_blob=True)
settings.register_profile("long", **_USUAL)
settings.load_profile(PROFILE)

# Hypothesis also draws constants that it finds in the modules imported so far. These depend on the tests that this worker ran
# before, so fixed examples must not use them. There is no public switch; if this name is gone, the examples vary a little.
if PROFILE == "fixed" and hasattr(providers, "_get_local_constants"):
    _NO_CONSTANTS = providers.Constants()
    providers._get_local_constants = lambda: _NO_CONSTANTS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return two workers more than there are processors: a worker waits a third of its time, for processes and time limits."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Let the workers, and their servers of ranks, be forks of one process that has imported torch."""
    os.environ[SHARED] = python = warm_python()
    for spec in specs:
        if spec.popen and python != sys.executable:
            spec.python = str(Path(python).with_name(WORKER))


def pytest_configure() -> None:
    """Take away the variables that some services set, so that commands draw for a terminal where there is none."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests and torch are imported, and never look at what was imported again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_EVERY)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin slow tests first, so that at the end no worker waits long for the others."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Let a save that the test left under way come to its end before its folder is removed."""
    yield tmp_path
    if handle := sys.modules.get("reshard_ckpt.engine.saving.handle"):
        for save in handle.SAVES.begun:
            save.running.wait()


def pytest_unconfigure() -> None:
    """End the server that forks the ranks of this pytest process."""
    stop_server()


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs, which is gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="reshard-ckpt-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def memory() -> Iterator[str]:
    """A root in the memory of this process, which is empty after the test."""
    from reshard_ckpt.storage import open_storage

    url = f"memory://{uuid.uuid4().hex}"
    yield url
    with open_storage(url) as storage:
        storage.delete([key for key, _ in storage.list()])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server of object stores, at which this process looks for its own."""
    from tests.storage.object_servers import moto_server, set_endpoint

    with moto_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        set_endpoint(patch, endpoint)
        yield endpoint


@pytest.fixture
def job() -> Iterator[Any]:
    """Four ranks, as threads of this process."""
    from tests.reliability.ranks import jobs

    with jobs() as make:
        yield make(4)
