"""Ctrl-C on one rank at any line of an exchange: the others are told at once, and the process group goes on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import live_job
from reshard_ckpt.comm import exchange, turns
from reshard_ckpt.engine.common import mover, rounds
from reshard_ckpt.engine.loading import read_once
from reshard_ckpt.engine.saving import touched
from reshard_ckpt.errors import PeerError
from tests.helpers import position_values
from tests.launch import on_ranks

FILES = {str(module.__file__) for module in (live_job, exchange, mover, rounds, read_once)}
MEETING = {str(turns.__file__)}
MERGING = {str(exchange.__file__), str(touched.__file__)}
STRIDE = 41


def part(whole: torch.Tensor, dim: int) -> LocalShard:
    """This rank's own rows or columns of a tensor."""
    own, offsets = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone(), [0, 0]
    offsets[dim] = dist.get_rank() * own.shape[dim]
    return LocalShard(own, tuple(whole.shape), tuple(offsets))


def interrupted_at(point: int, files: set[str], call: Callable[[], object]) -> bool:
    """Call with Ctrl-C before the line of these files with this number; return whether the call has that many."""
    reached = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and reached <= point:
            reached += 1
            if reached == point + 1:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return reached > point


def try_every_point(files: set[str], call: Callable[[], object], check: Callable[[], None], stride: int = STRIDE) -> int:
    """Interrupt one rank after the other at one line after the other. Return the number of calls that an interrupt ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork of the elastic agent has the agent's
    rank, size, ended = dist.get_rank(), dist.get_world_size(), 0
    for number in count():
        chosen, has_come = number % size, torch.ones(1)
        error: BaseException | None = None
        try:
            if rank == chosen:
                has_come[0] = interrupted_at(number * stride, files, call)
            else:
                call()
        except (KeyboardInterrupt, PeerError) as raised:
            error = raised
        ended += isinstance(error, KeyboardInterrupt)
        assert isinstance(error, (KeyboardInterrupt if rank == chosen else PeerError) | None), (number, error)
        assert rank == chosen or error is None or "KeyboardInterrupt" in str(error) or "was interrupted" in str(error), error
        dist.broadcast(has_come, chosen)  # the group works
        call()
        check()
        if not has_come:
            return ended


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["load", "one-shot", "kept", "delta", "compared"])
@on_ranks(3)
def test_ctrl_c_at_any_line_leaves_no_message_in_the_process_group(operation: str, tmp_path: Path):
    whole = position_values((96, 30))
    rows, into = part(whole, 0), part(torch.full_like(whole, -1), 1)
    call: Callable[[], object]
    if operation == "load":
        checkpoint.save(tmp_path, {"w": rows})
        call = lambda: checkpoint.load(tmp_path, {"w": into}, read_once=True, timeout_s=300)  # noqa: E731
    elif operation == "one-shot":
        call = lambda: checkpoint.reshard_live({"w": rows}, {"w": into}, timeout_s=300)  # noqa: E731
    elif operation == "compared":
        call = lambda: checkpoint.LiveReshard({"w": rows}, {"w": into}, replicas="verify", timeout_s=300).run()  # noqa: E731
    else:
        call = checkpoint.LiveReshard({"w": rows}, {"w": into}, delta=operation == "delta", timeout_s=300).run

    def check() -> None:
        assert torch.equal(into.tensor, part(whole, 1).tensor)
        into.tensor.fill_(-1)

    # A one-shot call is told apart from no call only once its session is open.
    files = FILES | MEETING if operation in ("kept", "delta") else FILES
    assert try_every_point(files, call, check) > 3


@pytest.mark.slow
@on_ranks(3)
def test_ctrl_c_while_ranks_merge_their_rows_leaves_no_message_in_the_process_group(tmp_path: Path):
    table, numbers = torch.nn.Embedding(96, 30), count()
    rows = checkpoint.TouchedRows(table)
    path = tmp_path

    def call() -> None:
        nonlocal path
        path = tmp_path / str(next(numbers))
        checkpoint.save(path, {"table": table}, rows=rows, timeout_s=300)
        rows.mark(table.weight, torch.tensor([dist.get_rank()]))
        base, path = path, tmp_path / str(next(numbers))
        checkpoint.save(path, {"table": table}, rows=rows, base=base, timeout_s=300)

    def check() -> None:
        assert torch.equal(checkpoint.read(path)["table.weight"], table.weight)

    assert try_every_point(MERGING, call, check, stride=7) > 3
