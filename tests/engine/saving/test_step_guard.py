"""When may an optimizer step again? Not before its guard has looked whether one step slipped past."""

from __future__ import annotations

import threading

import pytest
import torch

from reshard_ckpt.engine.saving import step_guard
from reshard_ckpt.engine.saving.step_guard import StepGuard
from reshard_ckpt.errors import UsageError


def stepped() -> torch.optim.AdamW:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    return optimizer


def test_step_that_comes_while_the_guard_looks_is_held_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, held, copied = stepped(), threading.Event(), threading.Event()
    training = threading.Thread(target=lambda: (optimizer.step(), held.set()))

    def wait() -> None:
        held.set()
        copied.wait(20)

    guard = StepGuard([optimizer], wait)
    count = step_guard._steps_of

    def count_late(of: torch.optim.Optimizer) -> tuple[float, ...]:
        training.start()
        held.wait(20)  # until the step is held back, or made
        return count(of)

    monkeypatch.setattr(step_guard, "_steps_of", count_late)
    guard.close()
    assert count(optimizer) == (1.0,)
    copied.set()
    training.join()
    assert count(optimizer) == (2.0,)


def test_step_that_slipped_past_is_found_and_the_hook_goes_all_the_same() -> None:
    optimizer = stepped()
    calls: list[int] = []
    guard = StepGuard([optimizer], lambda: calls.append(1))
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] += 1
    with pytest.raises(UsageError, match="AdamW made a step"):
        guard.close()
    optimizer.step()
    assert calls == []
