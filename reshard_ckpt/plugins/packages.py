"""Replacing functions of other packages, importing a package when it is needed, and finding the newest folder of a Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UsageError

__all__ = ["Replaced", "needed", "newest_step", "trainer_steps"]


@contextmanager
def needed(package: str, requirement: str) -> Iterator[None]:
    """Raise a `UsageError` that names the package and the requirement to install, if the ``with`` block cannot import it.

    An `AttributeError` in the block counts too: the installed release lacks a function.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{package} cannot be used here ({error}); pip install '{requirement}'") from error


class Replaced:
    """The functions of another package that functions of this library replace, from `install` to `uninstall`.

    Parameters
    ----------
    owners
        Returns the modules and classes that have the functions as attributes. The first of them has all.

    Attributes
    ----------
    stock
        The package's own functions by name, while they are replaced; empty otherwise.
    """

    def __init__(self, owners: Callable[[], Sequence[Any]]) -> None:
        self._owners = owners
        self.stock: dict[str, Any] = {}

    def install(self, functions: Mapping[str, Any]) -> None:
        """Bind these functions in the place of the package's own; a second call does nothing."""
        if not self.stock:
            self.stock = {name: getattr(self._owners()[0], name) for name in functions}
            self._bind(functions)

    def uninstall(self) -> None:
        """Undo `install`: bind the package's own functions again."""
        if self.stock:
            self._bind(self.stock)
            self.stock = {}

    def _bind(self, functions: Mapping[str, Any]) -> None:
        for owner in self._owners():
            for name, function in functions.items():
                if hasattr(owner, name):
                    setattr(owner, name, function)


def trainer_steps(folder: str | Path) -> dict[int, Path]:
    """Map steps to the folders ``checkpoint-<step>`` that the Trainer of transformers wrote below a folder."""
    found = {re.fullmatch(r"checkpoint-(\d+)", path.name): path for path in Path(folder).iterdir() if path.is_dir()}
    return {int(match[1]): path for match, path in found.items() if match}


def newest_step(folder: str | Path, is_whole: Callable[[Path], bool]) -> str | None:
    """Return the newest folder of `trainer_steps` that is whole, as ``get_last_checkpoint`` does; None if no folder is whole."""
    whole = {step: path for step, path in trainer_steps(folder).items() if is_whole(path)}
    return str(whole[max(whole)]) if whole else None
