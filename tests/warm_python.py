"""A ``python`` whose imports are done: each start of it is a fork, in a tenth of the time that importing torch takes.

``warm_python()`` returns the path of a command that takes what ``python`` takes: a script, ``-m module`` or ``-c program``, with
its arguments. Beside it lies ``reshard-ckpt``.

1. A fork of this process's server of ranks (`tests.fork_server`) listens on a socket, until the process that asked for it ends.
2. The command is a client of that socket, which imports nothing. It hands over its streams, environment and folder, and passes on
   the signals that it gets. It ends as the program ends: with its exit code, or by the same signal.
3. For each client the listener forks a keeper, and the keeper the program. A program whose client is killed is killed.
4. The program runs as ``__main__``, and ends as programs do: threads are joined, and ``atexit`` runs. Then it leaves.
   The interpreter would take its modules apart, and so copy each page that it shares with the listener. It still does that in a
   program whose environment has `WHOLE_END`.

``sys.executable`` is the command itself, so that what a program starts is warm too, such as the ranks of torchrun. What it is not
good for: tests of what is imported when, variables that Python or torch read at their start, and other inherited files.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fork_server import Request, at_most
from tests.launch import ROOT, _environment, _run, _server

WHOLE_END = "RESHARD_CKPT_WHOLE_END"
"""Set for a program whose end is tested: modules and the libraries of torch are taken apart too."""

WORKER = "worker"
"""Name of a command that lies beside the warm one: its programs have the real Python as ``sys.executable``."""

_EXIT = struct.Struct("i")
_SIGNALS = [int(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
"""What is passed on; a program ignores from the start what its client was told to ignore."""

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, struct, sys
conn = socket.socket(socket.AF_UNIX)
conn.connect({address!r})
ignored = [number for number in {signals} if signal.getsignal(number) == signal.SIG_IGN]
for number in {signals}:
    signal.signal(number, lambda number, frame: conn.send(bytes([number])))
umask = os.umask(0o77)
os.umask(umask)
request = {{"python": {command!r}, "argv": {first} + sys.argv[1:], "ignored": ignored}}
request |= {{"env": dict(os.environ), "folder": os.getcwd(), "umask": umask}}
socket.send_fds(conn, [b"f"], [0, 1, 2])
conn.sendall(json.dumps(request).encode() + b"\\n")
answer = conn.recv({size}, socket.MSG_WAITALL)
if len(answer) < {size}:
    sys.exit("the server of warm processes ended")
(code,) = struct.unpack("i", answer)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""

_codes: list[int] = []
"""The exit code of a program that ends, if this is one."""

_commands: dict[int, tuple[str, tempfile.TemporaryDirectory[str], socket.socket]] = {}
"""By the process that asked: the command, its folder, and a connection whose end is the listener's."""


def warm_python() -> str:
    """Return the path of a ``python`` that has imported torch and this package already."""
    if not hasattr(os, "pidfd_open"):  # not on macOS
        return sys.executable
    if os.getpid() not in _commands:
        folder = tempfile.TemporaryDirectory(prefix="warm-")
        address = f"{folder.name}/socket"
        output = Path(folder.name, "output")
        output.touch()
        request = Request("tests.warm_python", "listen", (address,), _environment(), str(ROOT), 0o077, str(output))
        if _server().run(request, at_most(600)):
            raise RuntimeError(output.read_text())
        command = _write_client(Path(folder.name, "python"), address, [])
        _write_client(Path(folder.name, WORKER), address, [], sys.executable)
        _write_client(Path(folder.name, "reshard-ckpt"), address, ["-m", "reshard_ckpt"])
        control = socket.socket(socket.AF_UNIX)
        control.connect(address)
        _commands[os.getpid()] = (command, folder, control)
    return _commands[os.getpid()][0]


def run_torchrun(script: str | Path, nproc: int, args: Sequence[str] = (), *, cold: bool = False) -> str:
    """Run a script under ``torchrun``; its output (stdout and stderr together). The agent is warm; the ranks may start cold."""
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script), *args]
    return _run(command, f"{script} on {nproc} ranks", at_most(600), {"PYTHON_EXEC": sys.executable} if cold else None)


def _write_client(path: Path, address: str, first: list[str], command: str = "") -> str:
    command = command or str(path.with_name("python"))
    path.write_text(
        CLIENT.format(python=sys.executable, address=address, command=command, first=first, signals=_SIGNALS, size=_EXIT.size)
    )
    path.chmod(0o700)
    return str(path)


def listen(address: str) -> None:
    """Leave a process behind that forks programs; return once it listens."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ready, mark = os.pipe()
    if os.fork():
        os.close(mark)
        os.read(ready, 1)  # it has a session of its own: this one's processes are killed when this function returns
        return
    os.setsid()
    os.close(mark)
    os.close(ready)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    control, _ = listener.accept()
    while control not in select.select([listener, control], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            control.close()
            _keep(client)
        client.close()
    os._exit(0)


def _keep(client: socket.socket) -> None:
    """Fork a program for a client, pass signals on to it, and answer with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile("rb", buffering=0) as lines:
        request = json.loads(lines.readline())
    pid = os.fork()
    if not pid:
        client.close()
        _become(request, streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    while ended not in select.select([client, ended], [], [])[0]:
        told = client.recv(1)
        with contextlib.suppress(ProcessLookupError):
            if told:
                os.kill(pid, told[0])
            else:
                os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)  # where it has no session yet
                break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(_EXIT.pack(code))
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be what a new process of the client would be, run the program, and end as the interpreter does."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = request["python"]
    for number in _SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    code = 0
    try:
        _run_program(request["argv"])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _codes.append(code)
    ctypes.pythonapi.Py_Exit(code)


def _leave() -> None:
    """Leave the process before the interpreter takes modules apart, which copies each page that they lie in."""
    if _codes and WHOLE_END not in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(_codes[0])


atexit.register(_leave)  # the server imports this first, so that it comes after all others


def _run_program(argv: list[str]) -> None:
    """Run what Python's own arguments name, as ``__main__``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    unbuffered = argv[0] == "-u"
    argv = argv[unbuffered:]
    if unbuffered or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if argv[0] == "-c":
        source, sys.argv, first = argv[1], ["-c", *argv[2:]], ""
        code = compile(source, "<string>", "exec")
    elif argv[0] == "-m":
        first = os.getcwd()
    elif argv[0].startswith("-"):
        raise ValueError(f"{argv[0]}: an option that a warm Python does not know")
    else:
        sys.argv, first = argv, str(Path(argv[0]).resolve().parent)
        main.__file__ = argv[0]
        code = compile(Path(argv[0]).read_bytes(), argv[0], "exec")
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *(path for path in paths if path not in sys.path[1:]), *sys.path[1:]]
    if argv[0] == "-m":
        code = _code_of_module(argv[1], main)
        sys.argv = [str(main.__file__), *argv[2:]]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _code_of_module(name: str, main: types.ModuleType) -> types.CodeType:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}")
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    code: types.CodeType = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    return code
