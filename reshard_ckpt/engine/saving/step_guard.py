"""Holding an optimizer's steps back until what they change is copied, and proof that none came through.

1. One check stands in the way of every step, and does nothing while no guard holds the optimizer. It stands in two places:
   first of all hooks that torch runs in any optimizer's step, and in front of whatever ``optimizer.step`` is when a guard takes
   that optimizer. The one meets a step that was bound earlier, the other a step that runs no hooks, or changes something before
   it does. Both stay for good: to remove a hook while torch iterates over them, in the thread that trains, would raise there.
2. Not all code that changes parameters is a step that can be met: compiled code, a replayed graph, a user's own line. So a
   guard compares version counters and some of the values with those of its beginning, and gives the save up if they differ. What
   was copied is compared whole with what is there at the end (`staged_copy.SecondLook`).
3. Of a device, all may be queued long before it is copied. Then a step goes on at once, but on its device behind the copies; what
   the guard compares is looked at just before the first such step, in the thread that steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import UsageError
from ..common.copy_streams import Mark, has_streams

_HELD: dict[int, StepGuard] = {}
"""Guards by the `id` of the optimizers that they hold, and keep alive."""

MAX_SAMPLED = 64
"""Tensors of one optimizer whose values are compared; a step changes nearly all of them."""

MAX_SCALARS = 1024
"""Tensors without dims, such as the numbers of steps, that are compared: all of them, but where there are very many."""

SAMPLE_ELEMENTS = 16

WHOLE_BYTES = 4 << 20
"""Tensors of no more bytes together are compared whole."""


@dataclass(frozen=True, slots=True)
class GuardedState:
    """Optimizers whose steps can be held back, and the local tensors that nothing but those steps changes."""

    optimizers: Sequence[Optimizer] = ()
    tensors: Sequence[torch.Tensor] = ()


class StepGuard:
    """Holds every step of some optimizers back until what they change is copied.

    Parameters
    ----------
    detector
        Of changes to what these optimizers own, made in the thread that makes this.
    wait
        Waits until it is copied, or `let_through` was called.
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
        """All is copied, or queued to be: a step need only come after that on its device, which `follow` sees to."""
        with self._lock:
            self._follow = follow

    def hold_back(self) -> None:
        """Wait, in the thread that steps, until it may."""
        self.wait()
        with self._lock:
            if self._follow is not None:
                self._follow()
                self._seen = self._seen or self._detector.look()

    def release(self) -> None:
        """Let every step through."""
        for optimizer in self._optimizers:
            if _HELD.get(id(optimizer)) is self:
                del _HELD[id(optimizer)]

    def close(self, *, has_changed: bool = False) -> None:
        """All is copied: let go, and make sure that no step came through.

        Parameters
        ----------
        has_changed
            What the optimizers own is known to have changed while it was copied.

        Raises
        ------
        UsageError
            What the optimizers own has changed, so what was copied may be a mixture.
        """
        try:
            # Held until this is known: a step that comes now must still wait, or it would count as one that came through.
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
                f"what {names} owns was changed while it was copied, past the guard that holds steps back (by a compiled or "
                "captured step, or by other code between async_save and the next step); this save is given up, use "
                "staging='eager', or wait for staged() before such code"
            )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a detector sees at one moment: version counters, and samples, which a device may still have to take."""

    versions: list[int]
    samples: list[torch.Tensor]
    taken: list[Mark]


class ChangeDetector:
    """Tells whether tensors have changed since it was made: by version counters of all, and some values of some, or all of few.

    Version counters alone do not show it: fused kernels, what goes through ``.data``, and kernels outside of torch leave them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        sizeable = [tensor for tensor in self._tensors if tensor.ndim and tensor.numel()]
        self._is_whole = sum(tensor.nbytes for tensor in sizeable) <= WHOLE_BYTES
        scalars = [tensor for tensor in self._tensors if not tensor.ndim]
        # Numbers of steps lie on the device where the optimizer is fused; a step may change nothing else that is sampled.
        self._sampled = [*_spread(sizeable, len(sizeable) if self._is_whole else MAX_SAMPLED), *_spread(scalars, MAX_SCALARS)]
        self._before = self.look()

    def look(self) -> Snapshot:
        """Take a snapshot; on a device it is queued, behind what the current streams of this thread have."""
        versions = [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]
        samples = self._sample()
        devices = {sample.device for sample in samples}
        taken = [Mark(torch.accelerator.current_stream(device)) for device in devices if has_streams(device)]
        return Snapshot(versions, samples, taken)

    def has_changed(self, seen: Snapshot | None = None) -> bool:
        """Whether one of the tensors has been written to, by now or by when `seen` was taken."""
        now = seen or self.look()
        if self._before.versions != now.versions:
            return True
        for mark in now.taken:
            mark.synchronize()
        return any(not torch.equal(before, after) for before, after in zip(self._before.samples, now.samples, strict=True))

    def _sample(self) -> list[torch.Tensor]:
        """Elements from the middle of each sampled tensor, or all of it, as bytes, together by device and dtype."""
        parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with torch.no_grad():
            for tensor in self._sampled:
                *outer, last = tensor.shape or (1,)
                low = max((last - SAMPLE_ELEMENTS) // 2, 0)
                where: tuple[int | slice, ...] = (*(size // 2 for size in outer), slice(low, low + SAMPLE_ELEMENTS))
                part = tensor.detach() if tensor.ndim else tensor.detach().reshape(1)
                part = part.reshape(-1) if self._is_whole else part[where]
                parts.setdefault((tensor.device, tensor.dtype), []).append(part.contiguous().view(torch.uint8))
            return [torch.cat(of_kind) for of_kind in parts.values()]


def _spread(tensors: Sequence[torch.Tensor], most: int) -> Sequence[torch.Tensor]:
    """Choose at most so many, spread over all."""
    return tensors[:: max(-(-len(tensors) // max(most, 1)), 1)]


class GuardedStep:
    """An optimizer's ``step`` with the check in front of it.

    It looks like the step that it stands for: `LRScheduler` wraps it in turn, `GradScaler` asks for its signature.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        self._optimizer = ref(optimizer)
        # To keep the bound method would keep the optimizer alive, which has this in its `__dict__`.
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
        """Copied and pickled as the step of the optimizer's copy."""
        return _rebuild, (self._optimizer(), self._step, self._is_bound)


def _rebuild(optimizer: Optimizer, step: Callable[..., Any], is_bound: bool) -> GuardedStep:
    return GuardedStep(optimizer, step.__get__(optimizer) if is_bound else step)


def _put_in_front(optimizer: Optimizer) -> None:
    """Have the check stand before what ``optimizer.step`` is now; in `vars`, as a class may have its own ideas of attributes."""
    step = vars(optimizer).get("step", optimizer.step)
    if not isinstance(step, GuardedStep):
        vars(optimizer)["step"] = GuardedStep(optimizer, step)


def _hold_back(optimizer: object, *_: object) -> None:
    """The check: wait, where a guard holds this optimizer."""
    if torch.compiler.is_compiling():  # what is traced is no step; whether the compiled one was met, the detector shows
        return
    guard = _HELD.get(id(optimizer))
    if guard is not None:
        guard.hold_back()


def _stand_first() -> None:
    """Put the check before all hooks that torch runs in steps; those of users come after it, whenever they are registered."""
    handle = register_optimizer_step_pre_hook(_hold_back)
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        hooks.move_to_end(handle.id, last=False)


# In a forked child no thread copies anything, so nothing is waited for.
os.register_at_fork(after_in_child=_HELD.clear)
_stand_first()
