"""Code on several ranks: real torchrun processes on gloo.

`run_ranks(function, nproc, *args)` runs a module-level function on every rank and returns what each returned, in rank order.
A test below ``@on_ranks(nproc)`` is itself such a function: prefer it where each rank can assert on its own results.

1. A warm server (`tests.fork_server`), one for each pytest process, has imported torch, or is a fork of one that has. It forks a
   launcher for each job, which imports the test's module.
2. In the launcher runs the elastic agent that is behind the ``torchrun`` command. It holds the store and forks the ranks: each is
   a real process with the environment that torchrun gives it, and starts in a tenth of a second instead of three seconds.
3. Once in some thousand launches the start itself hangs, in torch's ``init_process_group`` or in a fork of the agent, which has
   threads. A job whose ranks did not all come as far as the test's function is started again.
4. A job's time begins when all its ranks have come to the test's function: a busy machine may take long to start them. A rank
   that hangs dumps its stack shortly before its time is over; then all its processes are killed.

What is about a process's own start or end uses `tests.warm_python.run_torchrun`: the interpreter's exit, an example's imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.fork_server import LOOK_EVERY_S, ForkServer, Request

ROOT = Path(__file__).resolve().parent.parent


def project_table() -> dict[str, Any]:
    """What pyproject.toml says of the package."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


SHARED = "RESHARD_CKPT_SHARED_PYTHON"
"""Variable with the warm command of the process that started the workers of the tests."""

_RESULTS = "results"
_START_S = 240
"""How long all ranks of a job may take to come to the test's function, which takes a second or two."""
_STACK_S = 60
"""How long the ranks of a job whose time is over may take to print where they are, which takes a moment."""
_INIT_S = 100
"""How long a rank waits for the others in ``init_process_group``, which takes a second."""
_TRIES = 3
_SHOWN = 300
"""How many characters of each value are shown where an assertion fails on a rank."""


class RanksFailed(AssertionError):
    """A rank failed, or the time was over; the message holds what all of them printed."""


def run_ranks(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = 600,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    imports: str = "",
) -> list[Any]:
    """Run ``function(*args)`` on `nproc` ranks; what each returned, by rank.

    Arguments and results are pickled; `function` must be a module-level one of an importable module. A rank that raises makes
    torchrun kill the others: to see how each of them fails, catch the error inside and return it.

    Parameters
    ----------
    timeout_s
        How long the function may take, from when the last rank has begun it.
    init
        Whether to call ``init_process_group("gloo")`` before and ``destroy_process_group`` after.
    env
        Variables to add. They may be such as torch reads when it is imported, so that the launcher is then a new process.
    imports
        Import statements that the launcher runs before it forks the ranks: of what takes seconds on each rank otherwise.
    """
    name = function.__qualname__
    if "<" in name:
        raise ValueError(f"{name} is not a module-level function, so another process cannot find it")
    for last in (False,) * (_TRIES - 1) + (True,):
        try:
            return _run_once(function.__module__, name, nproc, args, timeout_s, init, env, imports)
        except _NoGroup:
            if last:
                raise
    raise AssertionError


def on_ranks(nproc: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with its fixtures on each of `nproc` ranks. It fails if an assertion fails on one of them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_ranks(test, nproc, *(fixtures[name] for name in inspect.signature(test).parameters), **options)

        run.on_each_rank = test  # type: ignore[attr-defined]
        return run

    return decorate


class _TimeOver(RanksFailed):
    """The job was not done in its time."""


class _NoGroup(RanksFailed):
    """The time was over before every rank had come as far as the function."""


def _run_once(
    module: str,
    name: str,
    nproc: int,
    args: tuple[Any, ...],
    timeout_s: float,
    init: bool,
    env: Mapping[str, str] | None,
    imports: str,
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        job, results, output = Path(folder, "job"), Path(folder, _RESULTS), Path(folder, "output")
        server = None if env else _server()  # before the clock starts: it may have to import torch
        begun = time.time()
        job.write_bytes(pickle.dumps((module, name, nproc, init, timeout_s, args, folder, imports)))

        def started() -> list[Path]:
            return list(Path(folder).glob("started-*"))

        def seconds_left() -> float:
            marks = started()
            end = begun + _START_S if len(marks) < nproc else max(mark.stat().st_mtime for mark in marks) + timeout_s
            left = end - time.time()
            return LOOK_EVERY_S if -_STACK_S < left <= 0 and output.exists() and not _shows_stacks(output, len(marks)) else left

        try:
            what = f"{name} on {nproc} ranks"
            if server:
                _run_warm(server, job, what, seconds_left)
            else:
                _run([sys.executable, "-m", "tests.launch", str(job)], what, seconds_left, env)
        except RanksFailed as error:
            if any(Path(folder).glob("stuck-*")) or (isinstance(error, _TimeOver) and len(started()) < nproc):
                raise _NoGroup(str(error)) from None
            # What each rank raised, the first one first: torchrun itself shows one of them, often a victim.
            tracebacks = [
                path.read_text() for path in sorted(Path(folder).glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            ]
            raise RanksFailed("\n".join([str(error).partition("\n")[0], *tracebacks]) if tracebacks else str(error)) from None
        by_rank: dict[int, Any] = pickle.loads(results.read_bytes())
    return [by_rank[rank] for rank in range(nproc)]


def _shows_stacks(output: Path, num: int) -> bool:
    """Whether so many processes have printed their stacks."""
    text = output.read_text(errors="replace")
    return text.count("Timeout (") >= num and text.endswith("\n")


def _environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **(added or {})}


def _run(command: Sequence[str], what: str, seconds_left: Callable[[], float], env: Mapping[str, str] | None) -> str:
    """Run a command in a process group of its own, so that none of its children outlives it."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output: str | None = None
    try:
        while output is None and seconds_left() > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=LOOK_EVERY_S)
        if output is None:
            os.killpg(process.pid, signal.SIGKILL)
            try:
                output, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired as error:  # a rank, which has a session of its own, holds it open
                output = (error.output or b"").decode(errors="replace")
            raise _TimeOver(f"{what}: not done in its time\n{output}")
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        raise RanksFailed(f"{what}: exit status {process.returncode}\n{output}")
    return output


def _run_warm(server: ForkServer, job: Path, what: str, seconds_left: Callable[[], float]) -> None:
    """Run the launcher of a job as a fork of this process's server."""
    output = job.with_name("output")
    output.touch()
    umask = os.umask(0o77)
    os.umask(umask)
    request = Request("tests.launch", "launch", (str(job),), _environment(), str(ROOT), umask, str(output))
    try:
        code = server.run(request, seconds_left)
    except subprocess.TimeoutExpired:
        raise _TimeOver(f"{what}: not done in its time\n{output.read_text()}") from None
    except BaseException:
        stop_server()  # it may be in the middle of an answer
        raise
    if code:
        raise RanksFailed(f"{what}: exit status {code}\n{output.read_text()}")


_servers: dict[int, ForkServer] = {}
"""By the process that started it: one that a fork inherits is its parent's."""


def _server() -> ForkServer:
    if os.getpid() not in _servers:
        _servers[os.getpid()] = ForkServer(ROOT, _environment(), os.environ.get(SHARED, sys.executable))
    return _servers[os.getpid()]


def stop_server() -> None:
    """End the server of this process, if there is one."""
    server = _servers.pop(os.getpid(), None)
    if server:
        server.close()


_dump_at = 0.0


def _arm_dump() -> None:
    # Ranks print into one file: neighbours begin 20 ms apart, or their lines would mix.
    faulthandler.dump_traceback_later(max(_dump_at - time.time(), 0.5) + os.getpid() % 16 * 0.02)


def _dump_stacks_after(seconds: float) -> None:
    """Have this process and its forks print their stacks, unless they end before or are given another time."""
    global _dump_at
    if not _dump_at:
        # A fork would wait for ever for the watching thread, which is the parent's: so there is none while it forks.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=_arm_dump, after_in_child=_arm_dump)
    _dump_at = time.time() + seconds
    _arm_dump()


class _Gate:
    """Holds ranks back until all are forked, or a lock that the launcher's store holds for one stays locked in the next.

    The store's thread asks the system for the name of who connects; a fork in this moment never connects to anything.
    """

    def __init__(self, nproc: int) -> None:
        self._read, self._write = os.pipe()
        self._forks, self._left = os.getpid(), nproc
        os.register_at_fork(after_in_parent=self._forked)

    def _forked(self) -> None:
        if os.getpid() == self._forks:
            self._left -= 1
            if self._left == 0:
                os.close(self._write)

    def wait(self) -> None:
        """Return when the last rank is forked."""
        os.close(self._write)
        os.read(self._read, 1)  # the end of the pipe: nobody has its other end any more
        os.close(self._read)


def _init_group(stuck: Path) -> None:
    """Come together with the other ranks, or leave a mark and this process."""
    import torch.distributed as dist

    def leave() -> None:
        stuck.touch()
        os._exit(1)

    timer = threading.Timer(_INIT_S, leave)
    timer.start()
    try:
        dist.init_process_group("gloo")
        dist.barrier()  # or one that is done at once closes connections that another still makes
    except Exception:
        traceback.print_exc()
        leave()
    timer.cancel()


def _rank_main(gate: _Gate, module: str, name: str, init: bool, timeout_s: float, args: tuple[Any, ...], folder: str) -> Any:
    """What one rank does."""
    import torch.distributed as dist

    gate.wait()
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    function = getattr(function, "on_each_rank", function)
    try:
        if init:
            _init_group(Path(folder, f"stuck-{os.environ['RANK']}"))
        _dump_stacks_after(max(timeout_s - 10, timeout_s / 2))
        Path(folder, f"started-{os.environ['RANK']}").touch()
        result = function(*args)
    except BaseException as error:
        shown = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
        for frame in shown.stack:  # the values that an assertion compares are among those of its own function
            own = frame.locals if frame is shown.stack[-1] else None
            frame.locals = own and {name: value[:_SHOWN] for name, value in own.items()}
        rank = os.environ["RANK"]
        Path(folder, f"error-{rank}").write_text(f"--- rank {rank} ---\n{''.join(shown.format())}")
        raise
    # In torch 2.6 it holds the interpreter's lock and waits for gloo's thread, which may wait for that lock to free a tensor.
    if dist.is_initialized() and hasattr(dist.Store, "clone"):
        dist.destroy_process_group()
    return result  # its stack may still be dumped: the end of a process may hang too


def launch(job: str) -> None:
    """Do what the launcher process does: import the test's module, fork the ranks, keep what they return."""
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tests.rendezvous import register  # not above: pytest's own process needs none of this

    module, name, nproc, init, timeout_s, args, folder, imports = pickle.loads(Path(job).read_bytes())
    # A rank that ignores SIGTERM, to see how another one ended, is killed after half a minute otherwise.
    close = PContext.close
    PContext.close = lambda self, death_sig=None, timeout=0: close(self, death_sig, 600)  # type: ignore[method-assign]
    _dump_stacks_after(_START_S - 10)
    importlib.import_module(module)
    exec(imports, {})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="tests",
        rdzv_backend=register(),
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.05,
    )
    by_rank = elastic_launch(config, _rank_main)(_Gate(nproc), module, name, init, timeout_s, args, folder)
    Path(folder, _RESULTS).write_bytes(pickle.dumps(by_rank))


if __name__ == "__main__":
    launch(sys.argv[1])
