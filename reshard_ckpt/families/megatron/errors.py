"""Errors that callers of Megatron's functions catch: each is an error of this library, and of Megatron and torch as well.

Megatron's own functions raise ``CheckpointingException``. Its strategies for ``torch_dist`` raise torch's
``CheckpointException``, which does not derive from `Exception`. Programs catch either of them, so an error here is both.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from ...plugins.errors import CheckpointError
from ...plugins.states import group_of
from .versions import warn_if_untested

P = ParamSpec("P")
R = TypeVar("R")

_CORE = "megatron.core.dist_checkpointing.core"


def megatron_compatible(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call so that its errors are also Megatron's, if the program has imported Megatron."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        warn_if_untested()
        try:
            return function(*args, **options)
        except CheckpointError as error:
            theirs = getattr(sys.modules.get(_CORE), "CheckpointingException", None)
            if theirs is None or isinstance(error, theirs):
                raise
            new = _combined(type(error), theirs)(*error.args)
            failures = {group_of(None).rank: (error, traceback.extract_tb(error.__traceback__))}
            vars(new).update(vars(error), _failures=failures)
            raise new.with_traceback(error.__traceback__) from error.__cause__

    return call


def _combined(kind: type[CheckpointError], theirs: type[Exception]) -> type[CheckpointError]:
    """Return a subclass of `kind`, `theirs` and torch's exception. It is cached: ``except`` needs the same class each time."""
    if (kind, theirs) not in _MADE:
        members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__str__": Exception.__str__}  # torch's has no message
        _MADE[kind, theirs] = type(kind.__name__, (kind, theirs, CheckpointException), members)
    return _MADE[kind, theirs]


_MADE: dict[tuple[type, type], type[CheckpointError]] = {}
