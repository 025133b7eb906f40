"""A decorator that makes a call behave as torch's: the same positional arguments, and torch's `CheckpointException` for errors.

torch's `CheckpointException` is not a subclass of `Exception`, and handlers of either class must see the error. Its `failures`
has the rank that failed, if it is known.
"""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError, PeerError, rebuilt

_OF_RANK = re.compile(r"rank (\d+): ")
"""Matches the beginning of the message of an error that another rank raised."""


P = ParamSpec("P")
R = TypeVar("R")


def torch_compatible(second: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a call so that its errors are also torch's `CheckpointException`.

    If `second` names an option, it may also be passed as the second positional argument, with torch's warning.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if len(args) == 2 and second is not None and second not in options:
                warnings.warn(f"{function.__name__}: pass {second} by its name, as torch's newer releases ask for", stacklevel=2)
                return call(args[0], **{**options, second: args[1]})  # type: ignore[arg-type]
            try:
                return function(*args, **options)
            except CheckpointError as error:
                raise as_torch_error(error) from error.__cause__

        return call

    return decorate


def as_torch_error(error: CheckpointError) -> CheckpointError:
    """Convert an error to one that is also torch's `CheckpointException`; return an error that is one already as it is."""
    if isinstance(error, CheckpointException):
        return error
    new = rebuilt(type(error), (CheckpointException,), error.args, {**vars(error), "_failures": _failures(error)})
    new.__cause__, new.__suppress_context__ = error.__cause__, error.__suppress_context__
    return new.with_traceback(error.__traceback__)


def rank_prefix(error: CheckpointError) -> str:
    """Return the prefix ``rank N: `` of an error that another rank raised; for this rank's own error, an empty string."""
    found = _OF_RANK.match(str(error))
    return found[0] if found else ""


def _failures(error: CheckpointError) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
    # Rebuilt without code objects, which newer Pythons put there, and which cannot be pickled.
    frames = [(f.filename, f.lineno or 0, f.name, f.line) for f in traceback.extract_tb(error.__traceback__)]
    ranks: tuple[int, ...]
    if found := _OF_RANK.match(str(error)):
        ranks = (int(found[1]),)
    elif isinstance(error, PeerError) and error.ranks:
        ranks = error.ranks
    else:
        ranks = (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
    return dict.fromkeys(ranks, (error, traceback.StackSummary.from_list(frames)))
