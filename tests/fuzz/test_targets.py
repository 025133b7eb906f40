"""No decoder raises anything but a named error, whatever bytes it is given: chance alone, and real files that were changed."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard_ckpt.errors import CheckpointError
from tests.fuzz.targets import TARGETS
from tests.reliability.hostile import mutated_bytes
from tests.tries import examples

pytestmark = pytest.mark.parametrize("name", TARGETS)


@cache
def seeds(name: str) -> list[bytes]:
    return list(TARGETS[name].seeds())


def test_each_seed_is_accepted(name: str) -> None:
    for seed in seeds(name):
        TARGETS[name].run(seed)


@examples(20)
@example(b"")
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_by_name(name: str, data: bytes) -> None:
    seeds(name)  # some make the files beside
    with suppress(CheckpointError):
        TARGETS[name].run(data)


@examples(30)
@given(seed=st.integers(0, 2**64 - 1))
def test_a_changed_file_is_read_or_refused_by_name(name: str, seed: int) -> None:
    target, chance = TARGETS[name], random.Random(seed)
    data = chance.choice(seeds(name))
    if target.mutate is None or chance.random() < 0.4:
        data = mutated_bytes(data, chance)
        data = data[: chance.randrange(len(data) + 1)] if chance.random() < 0.3 else data
    else:
        data = target.mutate(data, chance)
    with suppress(CheckpointError):
        target.run(data)
