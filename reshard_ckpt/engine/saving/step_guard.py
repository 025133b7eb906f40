"""Holding an optimizer's steps back until the tensors that they change are copied, and checking that no step came through.

1. `_hold_back` runs before every step. It returns at once if no guard holds the optimizer. It is called from two places: the
   first of the hooks that torch runs in every optimizer's step, and a wrapper around ``optimizer.step`` (`GuardedStep`), put
   there when a guard takes that optimizer. The hook catches a step that was bound before the wrapper. The wrapper catches a step
   that runs no hooks, or changes something before it runs them. Neither is removed later: the training thread may be iterating
   over torch's hooks, and removing one then would raise there.
2. Some code changes parameters without a step that can be caught: compiled code, a replayed graph, a user's own line. So a guard
   compares version counters and sampled values with those from when it was made, and gives the save up if they differ. The
   copied bytes are compared as a whole with the tensors at the end (`staged_copy.SecondLook`).
3. On a device, all copies may be queued long before they run. Then a step goes on at once, but its device runs it after the
   copies. The guard takes the snapshot that it compares just before the first such step, in the thread that steps.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import UsageError
from ..common.tensor_bytes import Mark, has_streams, region

_HELD: dict[int, StepGuard] = {}
"""``_HELD[id(optimizer)]``: the guard that holds this optimizer. A guard keeps its optimizers alive, so no `id` is reused."""

MAX_SAMPLED = 64
"""The most tensors whose values are sampled and compared. A step changes nearly all tensors, so a sample shows it."""

MAX_SCALARS = 1024
"""The most 0-dim tensors, such as step counters, that are compared; nearly always these are all."""

SAMPLE_ELEMENTS = 16
"""Number of elements of each sampled tensor that are compared."""

WHOLE_BYTES = 4 << 20
"""If all tensors together have at most this many bytes, all their elements are compared."""


class GuardedState(NamedTuple):
    """The optimizers whose steps a save can hold back, and the local tensors that only those steps change."""

    optimizers: Sequence[Optimizer] = ()
    tensors: Sequence[torch.Tensor] = ()


class StepGuard:
    """Holds back the steps of some optimizers until the tensors that they change are copied.

    Parameters
    ----------
    detector
        Detects changes of the optimizers' tensors. It must have been made in the thread that makes the guard.
    wait
        Returns once the tensors are copied, or `let_through` was called.
    """

    def __init__(self, optimizers: Sequence[Optimizer], detector: ChangeDetector, wait: Callable[[], None]) -> None:
        self.wait = wait
        self._optimizers, self._detector = optimizers, detector
        self._lock = threading.Lock()
        self._follow: Callable[[], None] | None = None
        self._seen: Snapshot | None = None
        for optimizer in optimizers:
            _put_in_front(optimizer)
            _HELD[id(optimizer)] = self

    def let_through(self, follow: Callable[[], None]) -> None:
        """Stop holding steps back, because all copies are made or queued.

        Each step calls `follow`, which queues it behind the copies.
        """
        with self._lock:
            self._follow = follow

    def hold_back(self) -> None:
        """Block the thread that is about to step until the step may run."""
        self.wait()
        with self._lock:
            if self._follow is not None:
                self._follow()
                # Before the first step only: later steps change the tensors, and may.
                self._seen = self._seen or self._detector.take_snapshot()

    def release(self) -> None:
        """Take this guard off its optimizers, so that every later step runs at once."""
        for optimizer in self._optimizers:
            if _HELD.get(id(optimizer)) is self:
                del _HELD[id(optimizer)]

    def close(self, *, has_changed: bool = False) -> None:
        """Release the optimizers once all is copied, and raise an error if their tensors changed meanwhile.

        Raise `UsageError` if a tensor of the optimizers changed, so the copy may mix values from before and after a step.

        Parameters
        ----------
        has_changed
            The caller already knows that a tensor of the optimizers changed while it was copied.
        """
        try:
            # Release only after the comparison: it would take the changes of a step that begins now for changes during the copy.
            with self._lock:
                has_changed |= self._seen is None and self._detector.has_changed()
                seen, self._follow = self._seen, None
            if seen is not None:
                has_changed |= self._detector.has_changed(seen)
        finally:
            self.release()
        if has_changed:
            names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self._optimizers))
            raise UsageError(
                f"parameters or state of {names} changed while they were copied, past the guard that holds steps back (by a "
                "compiled or captured step, or by other code between async_save and the next step); this save is given up, use "
                "staging='eager', or wait for staged() before such code"
            )


class Snapshot(NamedTuple):
    """Version counters and sampled values of tensors at one moment. Samples on a device are valid once `taken` has passed."""

    versions: list[int]
    samples: list[torch.Tensor]
    taken: list[Mark]


class ChangeDetector:
    """Tells whether tensors have changed since it was made: compares the version counters of all tensors, and sampled values.

    If the tensors are small together (`WHOLE_BYTES`), all their values are compared. Version counters alone do not suffice:
    fused kernels, writes through ``.data``, and kernels outside of torch do not advance them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        # Step counters are always among the samples: a step may change no other sampled value.
        self._scalars = _spread([tensor for tensor in self._tensors if not tensor.ndim], MAX_SCALARS)
        sizeable = [tensor for tensor in self._tensors if tensor.ndim and tensor.numel()]
        self._is_whole = sum(tensor.nbytes for tensor in sizeable) <= WHOLE_BYTES
        self._sampled = sizeable if self._is_whole else _spread(sizeable, MAX_SAMPLED)
        self._before = self.take_snapshot()

    def take_snapshot(self) -> Snapshot:
        """Take a snapshot of version counters and sampled values. On a device it is queued on this thread's current stream."""
        versions = [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]
        samples = self._sample()
        devices = {sample.device for sample in samples}
        taken = [Mark(torch.accelerator.current_stream(device)) for device in devices if has_streams(device)]
        return Snapshot(versions, samples, taken)

    def has_changed(self, seen: Snapshot | None = None) -> bool:
        """Whether a tensor changed after this detector was made and before the snapshot `seen`, or before now if that is None."""
        now = seen or self.take_snapshot()
        if self._before.versions != now.versions:
            return True
        for mark in now.taken:
            mark.synchronize()
        return any(not torch.equal(before, after) for before, after in zip(self._before.samples, now.samples, strict=True))

    def _sample(self) -> list[torch.Tensor]:
        """Return sampled values as bytes: the middle `SAMPLE_ELEMENTS` of each sampled tensor.

        If the tensors are small together (`WHOLE_BYTES`), these are all their values.

        There is one tensor of bytes for each device and dtype, and one more for the 0-dim tensors of each.
        """
        scalars: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        parts: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        with torch.no_grad():
            for tensor in self._scalars:
                scalars[tensor.device, tensor.dtype].append(tensor)
            for tensor in self._sampled:
                parts[tensor.device, tensor.dtype].append(tensor.reshape(-1) if self._is_whole else _middle(tensor))
            # One call for all of a kind. It copies: torch cannot view a part of one element as bytes if its stride is not 1.
            copies = [*map(torch.stack, scalars.values()), *map(torch.cat, parts.values())]
            return [copied.view(torch.uint8) for copied in copies]


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the middle elements of the middle row (along the last dim) of a tensor."""
    *outer, last = tensor.shape
    low = max((last - SAMPLE_ELEMENTS) // 2, 0)
    *strides, step = tensor.stride()
    base = low * step + sum([size // 2 * stride for size, stride in zip(outer, strides, strict=True)])
    return region(tensor, base, (min(SAMPLE_ELEMENTS, last),), (step,))


def _spread(tensors: Sequence[torch.Tensor], most: int) -> Sequence[torch.Tensor]:
    """Choose at most `most` of the tensors, at even distances in the list."""
    return tensors[:: max(-(-len(tensors) // max(most, 1)), 1)]


class GuardedStep:
    """Wrapper of an optimizer's ``step`` that calls `_hold_back` first.

    It has the attributes and the signature of the wrapped step, because `LRScheduler` wraps it in turn, and `GradScaler` inspects
    its signature.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        self._optimizer = ref(optimizer)
        # Keep the function, not the bound method: that would refer to the optimizer, whose `__dict__` has this wrapper.
        self._is_bound = getattr(step, "__self__", None) is optimizer
        self._step: Callable[..., Any] = step.__func__ if self._is_bound else step  # type: ignore[attr-defined]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        optimizer = self._optimizer()
        return self._step.__get__(optimizer, type(optimizer)) if self._is_bound else self._step

    @property
    def __func__(self) -> Callable[..., Any]:
        original = self.__wrapped__

        @wraps(getattr(original, "__func__", original))
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _hold_back(self._optimizer())
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle this wrapper so that the copy wraps the step of the optimizer's copy."""
        return _rebuild, (self._optimizer(), self._step, self._is_bound)


def _rebuild(optimizer: Optimizer, step: Callable[..., Any], is_bound: bool) -> GuardedStep:
    return GuardedStep(optimizer, step.__get__(optimizer) if is_bound else step)


def _put_in_front(optimizer: Optimizer) -> None:
    """Wrap the current ``optimizer.step`` in a `GuardedStep`, set in `vars` because a class may override ``__setattr__``."""
    step = vars(optimizer).get("step", optimizer.step)
    if not isinstance(step, GuardedStep):
        vars(optimizer)["step"] = GuardedStep(optimizer, step)


def _hold_back(optimizer: object, *_: object) -> None:
    """Wait if a guard holds this optimizer back. Called before every step of every optimizer."""
    if torch.compiler.is_compiling():  # tracing runs no step; a compiled step that comes through is found by the detector
        return
    guard = _HELD.get(id(optimizer))
    if guard is not None:
        guard.hold_back()


def _stand_first() -> None:
    """Register `_hold_back` as the first of the hooks that torch runs before each step; hooks of users run after it."""
    handle = register_optimizer_step_pre_hook(_hold_back)
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        hooks.move_to_end(handle.id, last=False)


# In a forked child no thread copies anything, so no step may wait.
os.register_at_fork(after_in_child=_HELD.clear)
_stand_first()
