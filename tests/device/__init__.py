"""A simulated asynchronous accelerator for tests: device ``sim``, built from `sim_device.cpp` the first time it is asked for.

The library is kept outside of the tree, under a name made of its source, the version of torch and the command that builds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard_ckpt.engine.common.host_memory import REGISTRARS, Registrar

SOURCE = Path(__file__).with_name("sim_device.cpp")
DEVICE = "sim"


def compiler() -> str | None:
    """The C++ compiler, where there is one; CXX names another."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    try:
        folder = Path(base, "reshard-ckpt-tests")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home that can be written to
        folder = Path(tempfile.gettempdir(), f"reshard-ckpt-tests-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def build() -> Path:
    """Return the library, which is compiled unless it is there; of several processes that ask, one compiles.

    Raises
    ------
    RuntimeError
        There is no compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("there is no C++ compiler (c++, or what CXX names)")
    # As torch.utils.cpp_extension has them, which imports setuptools. Not optimized: most of the time goes to torch's headers,
    # and nothing in there runs long but copies.
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += ["-lc10", "-ltorch_cpu", "-ltorch"]
    # Not by where torch lies, whose libraries are loaded before this one: environments with the same torch share a library.
    known = "\0".join([torch.__version__, f"{torch.version.git_version}", platform.machine(), command, *flags]).encode()
    known += SOURCE.read_bytes()
    flags += [f"-isystem{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    folder = _cache()
    library = folder / f"sim_device-{hashlib.sha256(known).hexdigest()[:20]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            done = subprocess.run([command, str(SOURCE), *flags, "-o", str(part)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-4000:]}")
            part.replace(library)
    return library


@dataclass(frozen=True)
class Counters:
    """What was counted since `reset`; reserved and pinned bytes are those of now."""

    d2h: int
    h2d: int
    pageable: int
    blocking: int
    stream_waits: int
    temporaries: int
    largest_temporary: int
    reserved: int
    pinned: int
    link_bytes: int
    kernels: int


def counters() -> Counters:
    return Counters(*torch.ops.simulated.counters())


def synchronizations() -> dict[int, int]:
    """How often each thread, by its native id, has waited for the device."""
    flat = torch.ops.simulated.synchronizations()
    return dict(zip(flat[::2], flat[1::2], strict=True))


def host_waits() -> int:
    """How often this thread has waited for the device."""
    return synchronizations().get(threading.get_native_id(), 0)


def reset() -> None:
    """Count anew."""
    torch.ops.simulated.reset()


def hold_stream() -> Callable[[], bool]:
    """Hold the current stream until what this returns is called; that tells whether it was still held."""
    gate = torch.ops.simulated.hold_stream()
    return lambda: bool(torch.ops.simulated.open_gate(gate))


def hold_link() -> Callable[[], bool]:
    """Hold all copies between host and devices, likewise; those that are queued by now come to their end first."""
    torch.ops.simulated.hold_link()
    return lambda: bool(torch.ops.simulated.open_gate(0))


def let_run(stream: torch.Stream) -> None:
    """Give what a stream has queued time to run, if nothing holds it: so that what should be held, and is not, shows."""
    end = stream.record_event()
    for _ in range(100):
        if end.query():
            return
        time.sleep(0.005)


def set_speed(*, kernel_us: int = 0, link_bytes_per_s: int = 0) -> None:
    """Have each kernel take longer, and the link (0: as fast as the host copies)."""
    torch.ops.simulated.set_speed(kernel_us, link_bytes_per_s)


def devices_set() -> set[int]:
    """The devices that any thread has made its current one."""
    return set(torch.ops.simulated.devices_set()[1::2])


def is_loaded() -> bool:
    """Whether ``sim`` is a device of this process."""
    return hasattr(torch, DEVICE)


def load() -> None:
    """Make ``sim`` a device of this process; for good, as torch has no way back. Before autograd is first used."""
    if is_loaded():
        return
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.ops.simulated.init()
    torch._register_device_module(DEVICE, _module())
    # Torch prints a tensor by kernels whose results have a size that depends on the data, which this device lacks.
    shown = torch.Tensor.__repr__
    torch.Tensor.__repr__ = lambda t, **options: shown(t.cpu() if t.device.type == DEVICE else t, **options)  # type: ignore[method-assign]
    REGISTRARS[DEVICE] = Registrar(torch.ops.simulated.pin, torch.ops.simulated.unpin)


def _module() -> Any:
    """What torch asks of ``torch.<device>``."""
    ops = torch.ops.simulated
    module = types.ModuleType(f"torch.{DEVICE}")

    def set_device(device: Any) -> None:
        ops.set_device(device if isinstance(device, int) else torch.device(device).index)

    @contextlib.contextmanager
    def on_device(index: int) -> Iterator[None]:
        before = ops.current_device()
        set_device(index)
        try:
            yield
        finally:
            ops.go_back(before)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: ops.current_device(),
        "set_device": set_device,
        "device": on_device,
        "synchronize": lambda device=None: ops.synchronize(),
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
