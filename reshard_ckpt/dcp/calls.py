"""How each of the calls is called, as torch's are: a store as second argument, and torch's error beside this library's."""

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
    """A call that takes `second` as its second argument too, with torch's warning, and whose errors are torch's as well."""

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
