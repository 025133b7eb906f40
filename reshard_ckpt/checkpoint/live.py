"""`reshard_live` and `LiveReshard`: move a state from one layout to another within a job, from memory to memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..comm import Turn, open_turn
from ..core.report import LoadReport
from ..engine.common.inference import outside_inference_mode
from ..engine.loading.load import LoadOptions
from .live_job import Job, Options, State
from .loading import Patterns

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

    All ranks of the process group call it together. Each gets just the bytes that its own part of `dst` needs and its part of
    `src` does not hold; of several ranks that hold them, one on the same machine sends them. To do it again and again, keep a
    `LiveReshard`.

    Parameters
    ----------
    src, dst
        What to read, and what to fill in place: everything that `save` and `load` take as state. A rank may have one of both
        (None, or an empty dict, for the other), or none.
    process_group
        The ranks that take part; all, by default.
    cast, rename, strict, allow_missing, ignore
        As for `load`, `src` being what was saved.
    replicas
        ``"verify"`` compares all that several ranks hold of `src` as the same before anything is moved; ``"trust"`` does not, so
        that of ranks that have drifted apart a mixture may come. The same on all ranks.
    staged
        Change no tensor before every byte has arrived on every rank: all or nothing. What a rank gets from others is then held in
        memory as a whole.
    memory_bytes
        Upper bound of the memory for messages on this rank, at least 1 MiB, without what `staged` holds; the same on all ranks.
    timeout_s
        How long to wait for another rank before giving up, in seconds.

    Returns
    -------
    LoadReport
        As of `load`; ``bytes_read`` are the bytes that came from other ranks.

    Raises
    ------
    MismatchError
        Source and destination disagree; nothing was changed.
    LayoutError
        Ranks hold different values of the same part of `src`; nothing was changed.
    UsageError
        A state is none, a part of `dst` lies in the memory of `src`, or the parts of `src` do not make whole tensors; nothing was
        changed.
    PeerError
        Another rank failed or did not arrive; the message lists what had been overwritten, on any rank.
    """
    options = Options(
        LoadOptions(strict, cast=cast or False, allow_missing=allow_missing, ignore=ignore),
        rename,
        staged,
        memory_bytes,
        replicas,
    )
    with outside_inference_mode(), _turn(process_group, timeout_s, replicas).opened() as comm:
        return Job(src, dst, options, process_group, timeout_s).begin(comm).first(comm)


class LiveReshard:
    """A `reshard_live` that is done again and again, as to push weights to inference every few steps.

    What does not change is worked out once: names, the plan of who sends what to whom, and the memory of messages. Making one
    is collective, as `run` is.

    Parameters
    ----------
    src, dst, process_group, cast, rename, staged, strict, allow_missing, ignore, memory_bytes, timeout_s
        As for `reshard_live`. Both states are looked at anew by each `run`, so that they may hold other tensors of the same
        layout; nothing is changed before.
    replicas
        As for `reshard_live`, in each `run`; ``"trust"`` unless said otherwise, since comparing takes a session of its own.

    Raises
    ------
    MismatchError, UsageError, PeerError
        As `reshard_live`.
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
        memory_bytes: int = MEMORY_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        load = LoadOptions(strict, cast=cast or False, allow_missing=allow_missing, ignore=ignore)
        options = Options(load, rename, staged, memory_bytes, replicas)
        self._turn = partial(_turn, process_group, timeout_s, replicas)
        with outside_inference_mode(), self._turn().opened() as comm:
            self._job = Job(src, dst, options, process_group, timeout_s).begin(comm)

    def run(self) -> LoadReport:
        """Move what `src` holds now into `dst`. Collective.

        Raises
        ------
        UsageError
            A layout is another one than when this was made, on any rank; nothing was changed. Make a new `LiveReshard`.
        MismatchError, PeerError
            As `reshard_live`.
        """
        with outside_inference_mode():
            return self._job.again(self._turn())


def _turn(process_group: Any, timeout_s: float, replicas: str) -> Turn:
    call = "reshard_live" if replicas == "trust" else f"reshard_live(replicas={replicas!r})"  # ranks that differ are told so
    return open_turn(call, "", process_group=process_group, timeout_s=timeout_s)
