"""The work of a call grows with the number of names or pieces, and not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import LocalShard, checkpoint


def num_calls(call: Callable[[], Any]) -> int:
    """Count the Python functions that a call enters; a generator counts each time it goes on."""
    events = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal events
        events += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return events


@pytest.mark.parametrize("call", ["read", "read by name", "convert"])
def test_four_times_the_names_are_four_times_the_work(call: str, request: pytest.FixtureRequest, tmp_path: Any):
    def work(num: int) -> int:
        path, names = f"memory://{request.node.name}/{num}", [f"v.k{i}" for i in range(num)]
        state = {"v": {f"k{i}": torch.full((2,), i) if i % 2 else i for i in range(num)}}
        checkpoint.save(path, state)
        return num_calls(
            {
                "read": lambda: checkpoint.read(path),
                "read by name": lambda: checkpoint.read(path, names),
                "convert": lambda: checkpoint.convert(path, tmp_path / f"{num}.pt"),
            }[call]
        )

    work(100)  # imports
    assert work(800) < 6 * work(200)


def test_pieces_are_compared_with_few_others(monkeypatch: pytest.MonkeyPatch):
    num, real, looked_at = 1000, np.flatnonzero, 0

    def flatnonzero(array: Any) -> Any:
        nonlocal looked_at
        looked_at += np.size(array)
        return real(array)

    monkeypatch.setattr(np, "flatnonzero", flatnonzero)
    LocalShard(torch.zeros(num, 3), (2 * num, 3), pieces=[((i, 0), (2 * i, 0), (1, 3)) for i in range(num)])
    assert looked_at < 10 * num
