"""Recovery after failures: from the survivors, then from the checkpoint of their step; else all go back to the newest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.storage.local import LocalStorage
from tests.distributed.cases import Case
from tests.distributed.net import STEP, Layout, blank
from tests.distributed.outcomes import Outcome, outcome
from tests.distributed.test_live import Held, held_by
from tests.helpers import position_values
from tests.launch import run_ranks

SIZE = 4
NODES = {"one dead": (3,), "a node dead": (2, 3), "two that are no replicas dead": (1, 2), "two replicas dead": (0, 2)}


class Networks:
    """A model and its optimizer on one of the layouts of the matrix."""

    def __init__(self, layout: Layout) -> None:
        self._case = Case(layout)

    def whole(self) -> dict[str, Any]:
        return {**self._case.saved_state(), "step": int(STEP)}

    def empty(self) -> tuple[dict[str, Any], Callable[[], list[str]]]:
        """A state as a new process makes it, and a function that says what is wrong in it."""
        case = self._case
        blank(case.target)
        optimizers = case.optimizers(case.target, full=False)

        def wrong() -> list[str]:
            return [*case.wrong_model(), *(case.wrong_flat if case.layout.flat else case.wrong_adam)(optimizers)]

        return {"model": case.place.model(case.target), "optimizer": optimizers, "step": 0}, wrong


class Experts:
    """Experts on two ranks each, and a router on all."""

    SHAPE = (6, 5)

    def whole(self) -> dict[str, Any]:
        state, _ = self.empty()
        state["experts"].tensor.copy_(position_values(self.SHAPE).chunk(2)[dist.get_rank() // 2])
        state["router"].copy_(position_values((4, 6), salt=1))
        return {**state, "step": int(STEP)}

    def empty(self) -> tuple[dict[str, Any], Callable[[], list[str]]]:
        half = dist.get_rank() // 2
        experts = LocalShard(torch.full((3, 5), -1.0), self.SHAPE, (3 * half, 0))
        state = {"experts": experts, "router": torch.full((4, 6), -1.0), "step": 0}

        def wrong() -> list[str]:
            wanted = {"experts": position_values(self.SHAPE).chunk(2)[half], "router": position_values((4, 6), salt=1)}
            got = {"experts": experts.tensor, "router": state["router"]}
            return [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)]

        return state, wrong


KINDS: dict[str, Callable[[], Networks | Experts]] = {
    "DDP": lambda: Networks(Layout("dp", dp=4, data="ddp")),
    "HSDP": lambda: Networks(Layout("hsdp", rep=2, dp=2)),
    "TP × DP": lambda: Networks(Layout("dp×tp", dp=2, tp=2, data="copies")),
    "PP × DP": lambda: Networks(Layout("dp×pp", pp=2, dp=2, data="copies")),
    "ZeRO-1": lambda: Networks(Layout("flat", dp=4, flat=True, data="copies")),
    "EP": Experts,
}


def expected_bytes(held: list[Held], dead: tuple[int, ...]) -> dict[str, int]:
    """Where the bytes of all ranks must come from, by the plainest means."""
    of_ranks: list[dict[str, Held]] = [{} for _ in range(SIZE)]
    dist.all_gather_object(of_ranks, {one.name: one for one in held})

    def is_apart(one: Held, ranks: Iterable[int]) -> bool:
        """Whether a tensor has bytes of its own: it is not tied on this rank, or not on all of these ranks that have it."""
        others = [of_ranks[rank][one.name] for rank in ranks if one.name in of_ranks[rank]]
        return one.alias_of is None or not all(other.alias_of is not None for other in others)

    alive = [rank for rank in range(SIZE) if rank not in dead]
    total = dict.fromkeys(("self", "rank", "memory", "peer", "store"), 0)
    for rank, own in enumerate(of_ranks):
        for name, one in own.items():
            live = np.logical_or.reduce(
                [np.zeros_like(one.mask), *(of_ranks[r][name].mask for r in alive if name in of_ranks[r])]
            )
            if is_apart(one, alive):
                total["rank" if rank in dead else "self"] += one.item_bytes * int((one.mask & live).sum())
            if is_apart(one, range(SIZE)):
                total["store"] += one.item_bytes * int((one.mask & ~live).sum())
    return total


@contextmanager
def no_reads() -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("storage was read")

    with mock.patch.object(LocalStorage, "read_into", refuse), mock.patch.object(LocalStorage, "read", refuse):
        yield


@dataclass(frozen=True)
class Answer:
    kind: str
    deaths: str
    wanted: dict[str, int]
    got: dict[str, int]
    wrong: list[str]
    went_back: str
    step: int | None
    without: Outcome = field(default_factory=Outcome)
    """What a recovery without any checkpoint ends with."""


def cases_job(folder: str, kinds: tuple[str, ...]) -> list[Answer]:
    rank, answers = dist.get_rank(), []
    for kind in kinds:
        job = KINDS[kind]()
        whole, path = job.whole(), Path(folder, kind)
        checkpoint.save(path, whole)
        held = held_by(whole)
        for deaths, dead in NODES.items():
            state, wrong = (whole, list) if rank not in dead else job.empty()
            wanted = expected_bytes(held, dead)
            without = Outcome()
            if wanted["store"]:
                without = outcome(lambda: checkpoint.recover(state, alive=rank not in dead))  # noqa: B023
                report = checkpoint.recover(state, alive=rank not in dead, path=path)
            else:
                with no_reads():
                    report = checkpoint.recover(state, alive=rank not in dead, path=path)
            is_step = [] if state["step"] == STEP else [f"step {state['step']}"]
            got = dict(report.bytes_from)
            answers.append(Answer(kind, deaths, wanted, got, wrong() + is_step, report.went_back, report.step, without))
    return answers


def check_cases(folder: Path, kinds: tuple[str, ...]) -> dict[tuple[str, str], Answer]:
    by_rank = run_ranks(cases_job, SIZE, str(folder), kinds)
    for answers in by_rank:
        for one in answers:
            assert not one.wrong, one
            assert (one.got, one.went_back, one.step) == (one.wanted, "", STEP), one
            assert one.without.error == ("CheckpointNotFound" if one.wanted["store"] else ""), one
    return {(one.kind, one.deaths): one for one in by_rank[0]}


def test_every_byte_comes_from_its_nearest_holder(tmp_path: Path):
    answers = check_cases(tmp_path, tuple(KINDS))
    read = {case for case, one in answers.items() if one.wanted["store"]}
    assert read == {
        *(("ZeRO-1", deaths) for deaths in NODES),
        ("PP × DP", "a node dead"),
        ("EP", "a node dead"),
        ("HSDP", "two replicas dead"),
        ("TP × DP", "two replicas dead"),
    }
