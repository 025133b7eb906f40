"""Errors as callers of Megatron catch them: an error of this library that is also Megatron's ``CheckpointingException``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import CheckpointError

P = ParamSpec("P")
R = TypeVar("R")

_CORE = "megatron.core.dist_checkpointing.core"


def megatron_compatible(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call so that its errors are Megatron's too, in a program that has imported Megatron."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except CheckpointError as error:
            theirs = getattr(sys.modules.get(_CORE), "CheckpointingException", None)
            if theirs is None or isinstance(error, theirs):
                raise
            new = _both(type(error), theirs)(*error.args)
            vars(new).update(vars(error))
            raise new.with_traceback(error.__traceback__) from error.__cause__

    return call


def _both(kind: type[CheckpointError], theirs: type[Exception]) -> type[CheckpointError]:
    """Return a class that is both, made once, so that errors of one kind are of one class."""
    if (kind, theirs) not in _MADE:
        _MADE[kind, theirs] = type(kind.__name__, (kind, theirs), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return _MADE[kind, theirs]


_MADE: dict[tuple[type, type], type[CheckpointError]] = {}
