"""CPU seconds of the steps of a load, on one rank: ``python -m benchmarks.compare --parts load --profile``.

A step's seconds are its thread's, without the steps that it calls. What no step has is the rest: the reading loop, and Python
between the steps.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args
from unittest.mock import patch

import xxhash

from reshard_ckpt.checkpoint import loading
from reshard_ckpt.comm.node import NodeComm
from reshard_ckpt.engine.loading import load, read
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.formats import source

from .ranks import cpu_s

STEPS: dict[str, Sequence[tuple[Any, str]]] = {
    "opening": ((source, "_open"), (load, "open_files"), (loading, "open_values")),
    "describing": ((loading, "target_of"), (loading, "wanted_names")),
    "planning": ((loading, "resolve"), (read, "reads_of"), (read.Reader, "__init__")),
    "agreement": tuple((NodeComm, name) for name in ("open", "gather", "broadcast", "broadcast_near", "leave")),
    "kernel copy": ((os, "preadv"),),
    "hash": ((read, "wrong_blocks"),),
    "placing": tuple((kind, "fill") for kind in get_args(read._Fill)),
}
"""The functions of each step, where they are looked up."""


class Steps:
    """CPU seconds by step of one load in `measured`, and the number of page faults."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._local = threading.local()

    def _timed(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner = self._local.__dict__.setdefault("inner", [])
            inner.append(0.0)
            began = time.thread_time()
            try:
                result = call(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                self.seconds[step] += spent - inner.pop()
                if inner:
                    inner[-1] += spent
            # `target_of` returns the function that does the work.
            return self._timed(step, result) if call is _TARGET_OF else result

        return timed

    @contextmanager
    def measured(self) -> Iterator[None]:
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, cpu_s()
        with ExitStack() as stack:
            for step, functions in STEPS.items():
                for owner, name in functions:
                    stack.enter_context(patch.object(owner, name, self._timed(step, getattr(owner, name))))
            yield
        whole = cpu_s() - began
        self.seconds["rest"] = whole - sum(self.seconds.values())
        self.seconds["total"] = whole
        self.seconds["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


_TARGET_OF = loading.target_of


def hash_blocks(view: memoryview) -> None:
    """Hash each block of a part of a file, as a load does with what it has just read."""
    for low in range(0, len(view), BLOCK_BYTES):
        xxhash.xxh3_64_intdigest(view[low : low + BLOCK_BYTES])


def text_of(what: str, steps: Sequence[Mapping[str, float]], raw_s: float, floor_s: float) -> str:
    """Describe the steps of a load, of all ranks together, in units of the raw read."""
    names = dict.fromkeys(name for of_rank in steps for name in of_rank)
    total = {name: sum(of_rank.get(name, 0.0) for of_rank in steps) for name in names}
    faults, whole = int(total.pop("faults")), total.pop("total")
    parts = [f"{name} {seconds / raw_s:.2f}" for name, seconds in sorted(total.items(), key=lambda item: -item[1])]
    return (
        f"{what}: CPU seconds ÷ raw read's {raw_s:.3f}: read and hash alone {floor_s / raw_s:.2f}; "
        f"load {whole / raw_s:.2f} = {' + '.join(parts)}; {faults:,} page faults"
    )
