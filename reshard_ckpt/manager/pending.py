"""The background saves of a manager that are under way, or whose errors nobody has seen. Several threads may begin saves."""

from __future__ import annotations

import threading

from ..engine.saving.handle import SaveHandle, joint_error


class PendingSaves:
    """The background saves of one manager. A save stays until the next one begins, or longer if nobody has seen its error."""

    def __init__(self) -> None:
        self._settled: dict[SaveHandle, threading.Event] = {}

    def add(self, save: SaveHandle) -> threading.Event:
        """Add a save that has begun; returns an event to set once the pruning after it is over as well."""
        for other, settled in list(self._settled.items()):
            if settled.is_set() and not other.running.has_unseen_error:
                self._settled.pop(other, None)
        settled = self._settled[save] = threading.Event()
        return settled

    def wait(self) -> None:
        """Wait for all saves, and for the pruning after each."""
        for settled in list(self._settled.values()):
            settled.wait()

    def done(self) -> bool:
        """Whether each save has been committed or has failed."""
        return all(save.done() for save in list(self._settled))

    def failed(self) -> bool:
        """Whether a save has failed."""
        return any(save.failed() for save in list(self._settled))

    def raise_errors(self) -> None:
        """Raise the errors that nobody has seen, several as one."""
        errors = [error for save in list(self._settled) if (error := save.running.take_error()) is not None]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise joint_error(errors) from errors[0]
