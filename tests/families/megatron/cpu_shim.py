"""megatron-core on the CPU: what it asks of CUDA and nccl is answered by the CPU and gloo, for tests in processes of their own.

1. `install` patches `torch.cuda` and the backends of process groups, and enters a `TorchFunctionMode` in which every device is
   the CPU. Call it before megatron is imported.
2. `run_forked` runs a function on several ranks: forks of this process, which has imported megatron already.

A process that has called `install` is good for nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
import torch._dynamo  # it lists the functions of torch.cuda, which must still be distinct
import torch.distributed as dist
import torch.multiprocessing
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_FORK = multiprocessing.get_context("fork")


class _Stream:
    """A stream, a context of one, or an event: all is done when it is asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.device = CPU

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *args, **options: 0.0) if name == "elapsed_time" else (lambda *args, **options: None)


class _Properties:
    major, minor, total_memory, multi_processor_count, name = 9, 0, 80 << 30, 132, "none"


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.random.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.random.default_generator.set_state(state)


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _zero(*args: Any, **options: Any) -> int:
    return 0


CUDA: Mapping[str, Any] = {
    **dict.fromkeys(
        ("current_device", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _zero
    ),
    **dict.fromkeys(("synchronize", "set_device", "empty_cache", "ipc_collect", "set_stream", "init", "_lazy_init"), _nothing),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda seed: torch.random.default_generator.manual_seed(seed) and None),
    **dict.fromkeys(("stream", "Stream", "Event", "current_stream", "default_stream"), _Stream),
    "_lazy_call": lambda call, **options: call(),
    "default_generators": (torch.random.default_generator,),
    "device": _Stream,
    "device_count": lambda: 1,
    "get_device_capability": lambda *args: (9, 0),
    "get_device_name": lambda *args: "none",
    "get_device_properties": lambda *args: _Properties(),
    "get_rng_state": _get_rng_state,
    "is_available": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "memory_stats": lambda *args: {},
    "set_rng_state": _set_rng_state,
}


class _Kernels(types.ModuleType):
    """A module of a compiler of kernels that is not installed: decorators change nothing, and anything else is a name."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _uncompiled


def _uncompiled(function: Any = None, **options: Any) -> Any:
    return function if callable(function) else lambda wrapped: wrapped


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu", "meta"))


def _on_cpu(value: Any) -> Any:
    """Return the device to use where a device is asked for; meta stays meta."""
    return value if value is None or str(value) == "meta" else CPU


class EverythingOnCpu(TorchFunctionMode):
    """Turns devices into the CPU, and says of tensors' types that they are CUDA's."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if "device" in options:
            options["device"] = _on_cpu(options["device"])
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], CPU, *args[2:])
        elif func in (torch.Tensor.to, torch.empty_like, torch.zeros_like):
            args = tuple(_on_cpu(arg) if _is_device(arg) else arg for arg in args)
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.device and args and type(args[0]) is int:
            return CPU
        return func(*args, **options)


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if "nccl" in str(options.get("backend")):
            options["backend"] = "gloo"
        options.pop("pg_options", None)
        options.pop("device_id", None)
        options.pop("device_ids", None)
        return function(*args, **options)

    return call


class _OnOneDevice(dist.ProcessGroupGloo):
    """A gloo group on the one device of its process: each device has a thread that wakes up a hundred times a second."""

    devices: ClassVar[dict[int, Any]] = {}

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        if os.getpid() not in self.devices:  # a fork has none of its parent's threads
            self.devices[os.getpid()] = dist.ProcessGroupGloo.create_default_device()
        options._devices = [self.devices[os.getpid()]]
        options._timeout, options._threads = timeout, 2
        super().__init__(store, rank, size, options)


def _keep_groups() -> None:
    """Have all groups of the same ranks be one, and all of a process share a device: Megatron makes dozens for every layout."""
    dist.distributed_c10d.ProcessGroupGloo = _OnOneDevice
    groups: dict[tuple[int, ...] | None, Any] = {}
    new_group, destroy = dist.new_group, dist.destroy_process_group

    def made(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        key = None if ranks is None else tuple(ranks)
        if key not in groups:
            groups[key] = new_group(ranks, *args, **options)
        return groups[key]

    def destroyed(group: Any = None) -> None:
        if group is None:  # one alone may be in use under other names
            groups.clear()
            destroy()

    dist.new_group = dist.distributed_c10d.new_group = made  # type: ignore[assignment]
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroyed


def install(*paths: str | Path) -> None:
    """Make this process one in which megatron-core runs on the CPU.

    Parameters
    ----------
    paths
        Folders that hold another ``megatron`` package than the installed one.
    """
    sys.path[:0] = [str(path) for path in paths]
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = _get_rng_state, _set_rng_state
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing
    for name in ("init_process_group", "new_group", "barrier"):
        setattr(dist, name, _with_gloo(getattr(dist, name)))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    _keep_groups()
    dist.get_backend = dist.distributed_c10d.get_backend = lambda *args: "gloo"  # type: ignore[assignment]
    if importlib.util.find_spec("triton") is None:  # newer versions import it, and use it on a GPU alone
        for name in ("triton", "triton.language"):
            sys.modules[name] = _Kernels(name)
        sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # type: ignore[attr-defined] # the old name, which versions up to 0.13 use
    # Megatron's writers would start their helpers anew, and import everything again.
    multiprocessing.get_context = torch.multiprocessing.get_context = lambda method=None: _FORK  # type: ignore[assignment]
    torch.compile = _uncompiled  # type: ignore[assignment]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    EverythingOnCpu().__enter__()


def run_forked(function: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
    """Run ``function(*args)`` on `nproc` ranks of a gloo group, each a fork of this process; return what each returned.

    Raises
    ------
    RuntimeError
        A rank failed; the message has the tracebacks of all that did.
    """
    gc.freeze()  # Megatron collects garbage at every tree of an optimizer; what was imported need not be searched for it
    with tempfile.TemporaryDirectory(prefix="megatron") as folder:
        pids = [_fork(function, args, rank, nproc, Path(folder)) for rank in range(nproc)]
        failed = [rank for rank, status in enumerate(_wait(pids, Path(folder))) if status]
        if failed:
            texts = [path.read_text() for rank in failed if (path := Path(folder, f"error-{rank}")).exists()]
            raise RuntimeError(f"{function.__name__} failed on ranks {failed}\n" + "\n".join(texts))
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(nproc)]


def _fork(function: Callable[..., Any], args: Sequence[Any], rank: int, nproc: int, folder: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=nproc)
        result = function(*args)
        dist.barrier()
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: Sequence[int], folder: Path) -> list[int]:
    """Wait for all ranks; when one fails, end the others, which may wait for it."""
    left = {pid: rank for rank, pid in enumerate(pids)}
    codes = [0] * len(pids)
    while left:
        pid, status = os.wait()
        rank = left.pop(pid, None)
        if rank is None:
            continue
        codes[rank] = status
        _kill_group(pid)  # the helpers that Megatron's writers started, and do not end
        if status:
            for other in left:
                _kill_group(other)
    return codes


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
