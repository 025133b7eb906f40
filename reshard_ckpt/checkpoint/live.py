"""`reshard_live` and `LiveReshard`: move a state from one layout to another within a job, from memory to memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..comm import Turn, interrupts_held, open_turn
from ..core.report import LoadReport
from ..engine.common.tensor_bytes import public_call
from ..engine.loading.load import LoadOptions
from .live_job import Job
from .live_states import Options, State
from .loading import Patterns

CURES = ("allow_missing", "ignore", "cast", "strict")
"""Options of `load`, and of `reshard_live`, that let a call go on in spite of a mismatch. Errors advise them."""

SIDES = ("src", "dst")
"""The names of both states in messages, in place of those of a checkpoint and a state."""

MEMORY_BYTES = 256 << 20


def reshard_live(
    src: State,
    dst: State,
    *,
    process_group: Any = None,
    cast: Patterns | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    staged: bool = False,
    strict: bool = True,
    allow_missing: Patterns = False,
    ignore: Sequence[str] = (),
    replicas: str = "verify",
    memory_bytes: int = MEMORY_BYTES,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Move a state from one layout, mesh or model of a job to another, from memory to memory; no storage is involved.

    All ranks of the process group call it together. Each rank receives only the bytes that its own part of `dst` needs and its
    part of `src` does not hold. If several ranks hold them, a rank on the same machine sends them. To do this again and again,
    keep a `LiveReshard`.

    Parameters
    ----------
    src, dst
        The state to read, and the state to fill in place: everything that `save` and `load` take as state. A rank may have only
        one of them (None, or an empty dict, for the other), or neither.
    process_group
        The ranks that take part; by default all.
    cast, rename, strict, allow_missing, ignore
        As for `load`, with `src` as the checkpoint.
    replicas
        ``"verify"``: before anything is moved, compare the parts of `src` that several ranks hold. ``"trust"``: do not compare.
        `dst` may then get a mixture of the values of ranks that have drifted apart. The same on all ranks.
    staged
        Change no tensor before every byte has arrived on every rank: all or nothing. Until then, a rank keeps everything that it
        receives in memory of its own.
    memory_bytes
        Upper bound of the memory for messages on this rank, at least 1 MiB, in addition to the memory of `staged`; the same on
        all ranks. The next call with the same process group uses this memory again if it fits, and the plan too, unless it is
        large or `rename` is a function: both are kept until the group is destroyed.
    timeout_s
        Seconds to wait for another rank before giving up.

    Returns
    -------
    LoadReport
        As from `load`; ``bytes_read`` counts the bytes that came from other ranks.

    Raises
    ------
    MismatchError
        Source and destination disagree; nothing was changed.
    LayoutError
        Ranks hold different values of the same part of `src`; nothing was changed.
    UsageError
        An argument is not a state, a part of `dst` lies in the memory of `src`, or the parts of `src` do not make whole tensors;
        nothing was changed.
    PeerError
        Another rank failed or did not arrive; the message lists the tensors that had been overwritten, on any rank.
    """
    turn = _turn(process_group, timeout_s, replicas)
    with turn.argument_check():
        load = LoadOptions(strict, cast=cast or False, allow_missing=allow_missing, ignore=ignore, offered=CURES, sides=SIDES)
        options = Options(load, rename, staged, memory_bytes, replicas)
    with public_call(), turn.opened() as comm:
        return Job(src, dst, options, process_group, timeout_s).reshard_once(comm)


class LiveReshard:
    """A prepared `reshard_live` that can run again and again, for example to push weights to inference every few steps.

    The constructor does once everything that stays the same: it matches names, plans the parts that each rank sends to each other
    rank, and allocates the memory of messages. It is collective, as `run` is.

    Parameters
    ----------
    src, dst, process_group, cast, rename, staged, strict, allow_missing, ignore, memory_bytes, timeout_s
        As for `reshard_live`. Each `run` opens both states again, so that they may hold other tensors of the same layout. The
        constructor changes nothing.
    replicas
        As for `reshard_live`, in each `run`. The default is ``"trust"``, because comparing takes messages among all ranks.

    delta
        Send only the elements that changed since the last `run`; the same on all ranks. A sender keeps a copy of the elements
        that it sent last, in host memory, and all bytes pass through host memory. The first `run` sends everything. Before each
        `run`, receivers send checksums of their tensors: a receiver whose tensors differ from the last `run` gets everything.

    Raises
    ------
    MismatchError, UsageError, PeerError
        As for `reshard_live`.
    """

    def __init__(
        self,
        src: State,
        dst: State,
        *,
        process_group: Any = None,
        cast: Patterns | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        staged: bool = False,
        strict: bool = True,
        allow_missing: Patterns = False,
        ignore: Sequence[str] = (),
        replicas: str = "trust",
        delta: bool = False,
        memory_bytes: int = MEMORY_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        self._turn = partial(_turn, process_group, timeout_s, replicas, delta=delta)
        turn = self._turn()
        with turn.argument_check():
            load = LoadOptions(strict, cast=cast or False, allow_missing=allow_missing, ignore=ignore, offered=CURES, sides=SIDES)
            options = Options(load, rename, staged, memory_bytes, replicas, delta)
        with public_call(), turn.opened() as comm:
            self._job = Job(src, dst, options, process_group, timeout_s).begin(comm)

    def run(self) -> LoadReport:
        """Move the present content of `src` into `dst`. Collective.

        Returns
        -------
        LoadReport

        Raises
        ------
        UsageError
            On some rank, a layout has changed since this object was made; nothing was changed. Make a new `LiveReshard`.
        MismatchError, PeerError
            As for `reshard_live`.
        """
        with public_call(), interrupts_held():
            return self._job.move_again(self._turn())


def _turn(process_group: Any, timeout_s: float, replicas: str, *, delta: bool = False) -> Turn:
    # The name of the call contains these options, so ranks that differ in one get an error that says so.
    shown = [*([] if replicas == "trust" else [f"replicas={replicas!r}"]), *(["delta=True"] if delta else [])]
    call = f"reshard_live({', '.join(shown)})" if shown else "reshard_live"
    return open_turn(call, "", process_group=process_group, timeout_s=timeout_s)
