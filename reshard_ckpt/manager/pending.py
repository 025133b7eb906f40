"""The background saves of a manager: those under way, and failures that no caller has seen. Several threads may begin saves."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from ..comm import Comm
from ..comm.protocol import merge_of_all
from ..core.report import check_choice, check_count
from ..engine.saving.handle import SaveHandle, joint_error
from ..errors import CheckpointError, UsageError


class PendingSaves:
    """The background saves of one manager. A finished save is dropped when the next begins; one with an unseen error stays."""

    def __init__(self) -> None:
        self._settled: dict[SaveHandle, threading.Event] = {}

    def add(self, save: SaveHandle) -> threading.Event:
        """Add a save that has begun, and return an event.

        The caller sets the event once the save is over and, if it was committed, old checkpoints have been removed.
        """
        for other, settled in list(self._settled.items()):
            if settled.is_set() and not other.running.has_unseen_error:
                self._settled.pop(other, None)
        settled = self._settled[save] = threading.Event()
        return settled

    def wait(self) -> None:
        """Wait until all saves are over, and old checkpoints have been removed after each."""
        for settled in list(self._settled.values()):
            settled.wait()

    def done(self) -> bool:
        """Return whether no save is running any more."""
        return all(save.done() for save in list(self._settled))

    def failed(self) -> bool:
        """Return whether any of the saves has failed."""
        return any(save.failed() for save in list(self._settled))

    def raise_errors(self) -> None:
        """Raise the error of a failed save that no caller has seen; the errors of several saves are joined into one."""
        errors = [error for save in list(self._settled) if (error := save.running.take_error()) is not None]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise joint_error(errors) from errors[0]


class ToleratedFailures:
    """The failed background saves of a manager with ``on_failure="warn"``, counted alike on all ranks.

    Ranks compare their saves when the next one begins (`compare`): a save has failed if it failed on any rank.

    Attributes
    ----------
    in_a_row
        A line for each save that failed since the last one that was committed.
    """

    def __init__(self, on_failure: str, max_failures: int | None) -> None:
        check_choice("on_failure", on_failure, ("raise", "warn"))
        if max_failures is not None and on_failure == "raise":
            raise UsageError(
                f"max_failures={max_failures!r}: is for on_failure='warn', and not for on_failure='raise', which raises each "
                "failure; pass on_failure='warn', or leave max_failures= out"
            )
        self.are_tolerated, self._max = on_failure == "warn", 3 if max_failures is None else max_failures
        check_count("max_failures", self._max, 1)
        self.in_a_row: list[str] = []
        self._over: list[tuple[int, str]] = []
        """The step of each save that is over and not yet compared, with its error; empty text for a committed one."""

    def add(self, save: SaveHandle) -> None:
        """Take over the error of a save that has begun, so that the next save does not raise it."""
        if self.are_tolerated:
            save.running.failed_before = len(self.in_a_row)
            save.running.take_error()

    def note(self, step: int, error: BaseException | None) -> None:
        """Record that the save of a step is over, and its error, until ranks compare their saves."""
        if self.are_tolerated:
            self._over.append((step, "" if error is None else f"{type(error).__name__}: {error}"))

    def compare(self, comm: Comm) -> None:
        """Warn on all ranks alike about the saves that failed on any rank. Collective: a gather and a broadcast.

        Raises
        ------
        CheckpointError
            As many saves in a row have failed as the manager allows.
        """

        def merge(of_ranks: list[Any]) -> list[Any]:
            known = zip(*of_ranks, strict=False)  # a save that is under way on one rank is compared the next time
            return [[saves[0][0], next((text for _, text in saves if text), "")] for saves in known]

        merged = merge_of_all(comm, self._over, merge)
        self._over = self._over[len(merged) :]
        self._count(merged)

    def close(self) -> None:
        """Warn about the saves that failed since the last comparison, on this rank alone; raise as `compare` does."""
        over, self._over = self._over, []
        self._count(over)

    def _count(self, over: list[tuple[int, str]]) -> None:
        for step, error in over:
            if not error:
                self.in_a_row.clear()
                continue
            self.in_a_row.append(f"step {step}: {error}")
            count = f"{len(self.in_a_row)} of at most {self._max - 1} in a row"
            warnings.warn(f"the save failed in the background ({count}), and training goes on: {self.in_a_row[-1]}", stacklevel=5)
        if len(self.in_a_row) >= self._max:
            failed, self.in_a_row = self.in_a_row, []
            raise CheckpointError(
                f"{len(failed)} saves in a row failed in the background, and max_failures={self._max}: {'; '.join(failed)}"
            )
