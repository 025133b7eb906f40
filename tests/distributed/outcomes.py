"""What a call ends with, as something that a rank can send back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The class and message of the error that a call ended with ("" for none), and the warnings that it gave."""

    error: str = ""
    message: str = ""
    problems: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    warned: tuple[str, ...] = ()


def outcome(call: Callable[[], Any]) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of garbage that happens to be collected now
        try:
            call()
        except Exception as error:
            problems, ranks = (tuple(getattr(error, name, ())) for name in ("problems", "ranks"))
            return Outcome(type(error).__name__, str(error), problems, ranks)
    return Outcome(warned=tuple(str(w.message) for w in caught))
