"""A warm process that forks the launchers of jobs, so that a job does not pay for the imports of torch.

1. The server imports once what ranks use. It never starts a thread and never touches autograd or a process group: after a fork
   only the thread that forked is left, and a lock that another one held would stay locked. Its memory then moves into large
   pages, where the kernel has `MADV_COLLAPSE` (Linux 6.1): a fork copies an entry for each page, and its end frees them.
2. For each request it forks one launcher, in a session of its own, that has the state of a new process: the environment, folder
   and umask of the caller, the output in the caller's file, Python's own signal handlers.
3. While the launcher runs, the server waits for two things: that it ends, or that the caller is gone; then the job is killed.
4. When the caller closes its end of the pipe, which is the server's standard input, or dies, the server ends.

The command that starts a server may be the `tests.warm_python` of another process: then it is a fork of that process's server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

PRELOADED = (
    "tests.warm_python",
    "hypothesis",
    "numpy.ma",
    "pytest",
    "reshard_ckpt.checkpoint.live",
    "reshard_ckpt.checkpoint.recovering",
    "reshard_ckpt.dcp",
    "reshard_ckpt.families.bytecheckpoint.open",
    "reshard_ckpt.families.deepspeed.open",
    "reshard_ckpt.families.megatron.open",
    "reshard_ckpt.families.vescale.open",
    "reshard_ckpt.formats.dcp.read",
    "reshard_ckpt.formats.rank_files",
    "reshard_ckpt.formats.torch_checkpointing",
    "reshard_ckpt.formats.torch_file",
    "reshard_ckpt.manager.manager",
    "reshard_ckpt.storage.object_store",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
"""What most jobs import. None of it may start a thread."""

LARGE = (
    "peft",
    "torch.utils.serialization",  # of torch 2.7
    "torchdata.stateful_dataloader",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
"""Imported where it is installed. Few jobs need it, but each would take more than a second for it."""

COLLECT_EVERY = 5000
"""New objects between two collections of garbage; Python's own 700 takes three in a hundred CPU seconds of the tests."""

LOOK_EVERY_S = 0.5
"""How often a job that runs is asked whether its time is over."""
_END_S = 60
"""How long the server has to end."""
_LARGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # of Linux; Python 3.11 does not name it


@dataclass(frozen=True)
class Request:
    """One launcher: ``module.function(*args)`` in a new session, with the state that a new process would have."""

    module: str
    function: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    umask: int
    output: str


def at_most(seconds: float) -> Callable[[], float]:
    """Return a clock that says how many of the seconds from now on are left."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


class ServerDied(RuntimeError):
    """The server ended by itself; the message holds what it printed."""


class ForkServer:
    """The caller's end: starts the server by the command `python`, and runs one launcher at a time.

    Raises
    ------
    ServerDied
        The server could not start.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], python: str) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [python, __file__],
                cwd=folder,
                env=dict(env),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._receive()  # it is ready

    def run(self, request: Request, seconds_left: Callable[[], float]) -> int:
        """Run a launcher; returns its exit code, negative for a signal.

        Raises
        ------
        subprocess.TimeoutExpired
            No seconds are left; the launcher and its children are killed.
        ServerDied
            The server ended by itself.
        """
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._pipe.send(request)
        begun = time.monotonic()
        while not self._pipe.poll(LOOK_EVERY_S if seconds_left() > 0 else 0):
            if seconds_left() <= 0:
                self._pipe.send(None)
                self._receive()
                raise subprocess.TimeoutExpired(request.function, time.monotonic() - begun)
        return self._receive()

    def close(self) -> None:
        """End the server, and wait until it has ended."""
        self._pipe.close()
        with self._process:  # closes its output, and waits
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # a fork that a test has left behind holds the pipe open
                self._process.kill()

    def _receive(self) -> int:
        try:
            number: int = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            printed = self._process.stdout.read().decode()
            self.close()
            raise ServerDied(f"the server of ranks ended:\n{printed}") from None
        return number


def _serve(pipe: Connection) -> None:
    """Answer each request with the exit code of its launcher; None ends the one that runs."""
    child_ended, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the signal writes to the pipe
    signal.set_wakeup_fd(write_end)
    while True:
        try:
            request: Request | None = pipe.recv()
        except EOFError:
            return
        if request is None:
            continue  # its launcher had ended before
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            pipe.close()
            os.close(child_ended)
            os.close(write_end)
            _become_launcher(request)
        code = _wait_for(pid, child_ended, pipe)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the launcher left behind must not outlive the job
        pipe.send(code)


def _wait_for(pid: int, child_ended: int, pipe: Connection) -> int:
    """Wait until a launcher has ended, or kill it when the caller asks for that or is gone; its exit code."""
    while wait([child_ended, pipe]) == [child_ended]:
        os.read(child_ended, 4096)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
    with contextlib.suppress(EOFError):
        pipe.recv()
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it has no session of its own yet
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become_launcher(request: Request) -> None:
    """Be what a new process of the caller would be, run the function, and leave without the server's clean-up."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(request.folder)
        os.umask(request.umask)
        os.environ.clear()
        os.environ.update(request.env)
        output = os.open(request.output, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        function: Callable[..., Any] = getattr(importlib.import_module(request.module), request.function)
        function(*request.args)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def num_threads() -> int:
    """Count the threads of this process, those that Python does not know too. That of PyArrow's jemalloc is made for forks."""
    tasks = Path("/proc/self/task")
    return sum(task.read_text() != "jemalloc_bg_thd\n" for task in tasks.glob("*/comm")) if tasks.exists() else 1


def use_large_pages() -> None:
    """Move all private memory of this process into large pages; kernels that know no such call refuse, and nothing changes."""
    maps = Path("/proc/self/maps")
    madvise = ctypes.CDLL(None).madvise if maps.exists() else None
    for line in maps.read_text().splitlines() if madvise else ():
        place, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and name in ([], ["[heap]"]):
            low, high = (int(end, 16) for end in place.split("-"))
            low = -(-low // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
            for page in range(low, high - _LARGE_PAGE_BYTES + 1, _LARGE_PAGE_BYTES):  # each alone: a refusal ends a call
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(_LARGE_PAGE_BYTES), _MADV_COLLAPSE)


def _main() -> None:
    is_fork = PRELOADED[0] in sys.modules  # of another server, whose memory is in large pages already
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    for module in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if num_threads() != 1:
        raise RuntimeError(f"the server of ranks has {num_threads()} threads after its imports; it may have one")
    gc.collect()
    gc.freeze()  # or each collection of a rank would copy the pages of all that is imported
    gc.set_threshold(COLLECT_EVERY)
    gc.enable()
    if not is_fork:
        use_large_pages()
    pipe = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the standard input of all jobs
    os.close(nothing)
    pipe.send(os.getpid())
    _serve(pipe)


if __name__ == "__main__":
    # A script: torch's agent walks the stack for each event, and looks at every module for a frame of runpy, which has no file.
    sys.path[0] = os.getcwd()
    _main()
