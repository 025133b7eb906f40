"""A Llama as the hub has it goes to tensor- and data-parallel ranks, and back again."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tries import is_long

HUB_JOB: Any = SimpleNamespace(__module__="tests.distributed.hub", __qualname__="hub_job")
"""By its name: the module, whose import takes seconds, is imported once, by the launcher of the ranks."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_llama_goes_to_any_layout_and_comes_back_with_the_same_logits(tmp_path: Path):
    for rank in run_ranks(HUB_JOB, 4, str(tmp_path)):
        assert rank == [([], (), True)] * len(rank)
        assert len(rank) == (18 if is_long() else 6)
