"""A decorator for calls that are made as torch's are: with a store as second argument, and with torch's error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import CheckpointError
from .torch_errors import as_torch_error

P = ParamSpec("P")
R = TypeVar("R")


def torch_compatible(second: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a call so that it accepts `second` as second argument, with torch's warning, and raises torch's errors."""

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
