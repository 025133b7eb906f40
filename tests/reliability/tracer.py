"""The calls that a process makes as the kernel sees them, and a process that is killed after the n-th change.

`Traced` runs a function in a forked child and follows all of its threads by ptrace(2), as strace does: it sees each system call
that changes something below a folder, counts those that succeed, and sends SIGKILL as soon as the n-th has. No Python code of the
child takes part, so nothing can escape it.

A filter of seccomp(2), where the system permits one, stops the child at the calls that can change a file alone: threads that wait
and wake make many times as many, and each stop takes two switches to this process and back.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import platform
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tests.reliability.calls import Call

_TRACEME, _CONT, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 7, 24, 0x4200, 0x420E
# Mark syscall stops; follow fork, vfork and clone; stop where the filter says so; die with the tracer.
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x80 | 0x100000
_SECCOMP_EVENT = 7
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_RET_TRACE, _RET_ALLOW = 0x7FF00000, 0x7FFF0000
_WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_ENTRY, _EXIT, _SECCOMP = 1, 2, 3
_AT_FDCWD, _AT_REMOVEDIR = -100, 0x200
_MAX_PATH = 4096

_FD, _PATH, _AT_PATH = "fd", "path", "at"
_KINDS = {
    # How a call says what it is about, and which of its arguments that are.
    "write": (_FD, 0), "pwrite64": (_FD, 0), "writev": (_FD, 0), "pwritev": (_FD, 0), "pwritev2": (_FD, 0), "sendfile": (_FD, 0),
    "copy_file_range": (_FD, 2), "fsync": (_FD, 0), "fdatasync": (_FD, 0), "ftruncate": (_FD, 0), "fallocate": (_FD, 0),
    "open": (_PATH, 0), "creat": (_PATH, 0), "truncate": (_PATH, 0), "rename": (_PATH, 0), "mkdir": (_PATH, 0),
    "rmdir": (_PATH, 0), "unlink": (_PATH, 0), "link": (_PATH, 1), "symlink": (_PATH, 1),
    "openat": (_AT_PATH, 0), "openat2": (_AT_PATH, 0), "renameat": (_AT_PATH, 0), "renameat2": (_AT_PATH, 0),
    "mkdirat": (_AT_PATH, 0), "unlinkat": (_AT_PATH, 0), "linkat": (_AT_PATH, 2), "symlinkat": (_AT_PATH, 1),
}  # fmt: skip
_NUMBERS = {
    "x86_64": {
        "write": 1, "open": 2, "pwrite64": 18, "writev": 20, "sendfile": 40, "fsync": 74, "fdatasync": 75, "truncate": 76,
        "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
        "openat": 257,
        "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "fallocate": 285, "pwritev": 296,
        "renameat2": 316, "copy_file_range": 326, "pwritev2": 328, "openat2": 437,
    },
    "aarch64": {
        "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "truncate": 45, "ftruncate": 46,
        "fallocate": 47,
        "openat": 56, "write": 64, "pwrite64": 68, "writev": 66, "pwritev": 70, "sendfile": 71, "fsync": 82, "fdatasync": 83,
        "renameat2": 276, "copy_file_range": 285, "pwritev2": 287, "openat2": 437,
    },
}  # fmt: skip
_NAMES = {number: name for name, number in _NUMBERS.get(platform.machine(), {}).items()}


class CannotTrace(Exception):
    """This system lets no process follow its own child."""


def _ptrace(request: int, pid: int, address: int = 0, data: int | ctypes.Array[ctypes.c_char] = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    pointer = ctypes.addressof(data) if isinstance(data, ctypes.Array) else data
    out: int = libc.ptrace(request, pid, address, pointer)
    if out < 0:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x}): {os.strerror(ctypes.get_errno())}")
    return out


def _filter() -> bool:
    """Have this thread, and those that it starts, stop at calls of `_NAMES` alone; whether that is permitted."""
    load, allow, trace = ((_LOAD, 0, 0, 0), (_RETURN, 0, 0, _RET_ALLOW), (_RETURN, 0, 0, _RET_TRACE))
    jumps = [(_JUMP_IF_EQUAL, len(_NAMES) - i, 0, number) for i, number in enumerate(_NAMES)]
    program = b"".join(struct.pack("=HBBI", *step) for step in (load, *jumps, allow, trace))
    steps = ctypes.create_string_buffer(program, len(program))
    table = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(steps)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *(ctypes.c_ulong,) * 4]
    return prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 == prctl(_SET_SECCOMP, _FILTER, ctypes.addressof(table), 0, 0)


def fork(main: Callable[[], None], *, traced: bool = False, timeout_s: float = 600) -> int:
    """Run `main` in a child of its own; 0 is its exit status if it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        if traced:
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP if _filter() else signal.SIGTSTP)  # the tracer sees which it was
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


@dataclass
class Traced:
    """A child that is followed; it is killed after `kill_after` changes below `base`."""

    base: str
    kill_after: int | None = None
    calls: list[Call] = field(default_factory=list)
    killed: bool = False
    status: int | None = None
    others: dict[int, int] = field(default_factory=dict)
    """Exit statuses of children that are not followed."""
    timeout_s: float = 600
    """After so many seconds the child prints its stack and ends: it hangs."""

    def start(self, main: Callable[[], None]) -> None:
        if not _NAMES or sys.platform != "linux":
            raise CannotTrace(f"system calls of {sys.platform} on {platform.machine()} are not known here")
        self.pid = fork(main, traced=True, timeout_s=self.timeout_s)
        _, status = os.waitpid(self.pid, 0)
        try:
            if not os.WIFSTOPPED(status):
                raise OSError("the child was not stopped")
            _ptrace(_SETOPTIONS, self.pid, 0, _OPTIONS)
        except OSError as error:
            raise CannotTrace(str(error)) from error
        self._entered: dict[int, Call | None] = {}
        self._threads = {self.pid}
        self._is_filtered = os.WSTOPSIG(status) == signal.SIGSTOP
        self._go_on(self.pid)

    def _go_on(self, pid: int, deliver: int = 0) -> None:
        """Let a thread run to the end of the call that is followed, or to the next that may be."""
        _ptrace(_CONT if self._is_filtered and not self._entered.get(pid) else _SYSCALL, pid, 0, deliver)

    def finish(self, *, when_killed: Callable[[], None] = lambda: None) -> None:
        """Follow the child to its end, and wait for all other children."""
        while True:
            try:
                pid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return
            if os.WIFSTOPPED(status):
                self._stopped(pid, os.WSTOPSIG(status), status >> 16, when_killed)
            elif pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif pid not in self._threads:
                self.others[pid] = os.waitstatus_to_exitcode(status)

    def _stopped(self, pid: int, number: int, event: int, when_killed: Callable[[], None]) -> None:
        deliver = 0
        if number == _SYSCALL_STOP or event == _SECCOMP_EVENT:
            with suppress(OSError, ValueError):  # killed meanwhile, with its threads
                self._syscall(pid)
            if self.kill_after is not None and len(self.calls) >= self.kill_after and not self.killed:
                self.killed = True
                os.kill(self.pid, signal.SIGKILL)
                when_killed()
        elif pid not in self._threads:
            self._threads.add(pid)  # a new thread begins stopped
        elif not event and number != signal.SIGTRAP:
            deliver = number
        with suppress(OSError):  # dead by now
            self._go_on(pid, deliver)

    def _syscall(self, pid: int) -> None:
        info = ctypes.create_string_buffer(88)
        _ptrace(_GET_SYSCALL_INFO, pid, len(info), info)
        if info.raw[0] in (_ENTRY, _SECCOMP):
            number, *args = struct.unpack_from("<Q6q", info.raw, 24)
            name = _NAMES.get(number)
            self._entered[pid] = self._read(pid, name, args) if name else None
        elif info.raw[0] == _EXIT:
            call, (result,) = self._entered.pop(pid, None), struct.unpack_from("<q", info.raw, 24)
            if call is not None and result >= 0 and (self.kill_after is None or len(self.calls) < self.kill_after):
                self.calls.append(replace(call, size=result if call.name == "write" else 0))

    def _read(self, pid: int, name: str, args: list[int]) -> Call | None:
        """What a call is about to do, if that is a change below the folder."""
        kind, at = _KINDS[name]
        if name in ("open", "openat") and not args[at + (1 if kind == _PATH else 2)] & os.O_CREAT:
            return None
        paths = [self._path(pid, kind, args[at:])]
        if name in ("rename", "renameat", "renameat2"):
            paths.append(self._path(pid, kind, args[at + (1 if kind == _PATH else 2) :]))
        if not any(path.startswith(self.base) for path in paths):
            return None
        relative = [os.path.relpath(path, self.base) for path in paths]
        removes_folder = name == "unlinkat" and args[2] & _AT_REMOVEDIR
        plain = "rmdir" if removes_folder else _PLAIN.get(name, name)
        return Call(plain, relative[0], target=relative[1] if len(paths) > 1 else "")

    def _path(self, pid: int, kind: str, args: list[int]) -> str:
        if kind == _FD:
            return os.readlink(f"/proc/{pid}/fd/{args[0]}")
        text = _text(pid, args[0 if kind == _PATH else 1])
        fd = _AT_FDCWD if kind == _PATH else ctypes.c_int(args[0]).value
        return os.path.join(os.readlink(f"/proc/{pid}/cwd" if fd == _AT_FDCWD else f"/proc/{pid}/fd/{fd}"), text)


_PLAIN = {
    "open": "create", "openat": "create", "openat2": "create", "creat": "create", "mkdirat": "mkdir", "unlinkat": "unlink",
    "renameat": "rename", "renameat2": "rename",
}  # fmt: skip


def _text(pid: int, address: int) -> str:
    """The text at an address of another process."""
    out = b""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        while b"\0" not in out and len(out) < _MAX_PATH:
            memory.seek(address + len(out))
            # Up to the end of a page: the next one may not be there.
            out += memory.read(4096 - (address + len(out)) % 4096)
    return os.fsdecode(out.split(b"\0", 1)[0])
