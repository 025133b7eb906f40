"""Jobs of two ranks, each with a simulated device of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import on_ranks
from tests.launch import run_ranks

pytestmark = pytest.mark.usefixtures("compiler")


def test_dtensors_on_a_mesh_of_devices_are_saved_and_loaded(tmp_path: Path) -> None:
    for rank, (wrong, devices) in enumerate(run_ranks(on_ranks.dtensors, 2, tmp_path)):
        assert wrong == []
        assert devices <= {rank}


def test_replicas_on_devices_that_differ_are_found(tmp_path: Path) -> None:
    assert all("s.t" in said and "PerRank" in said for said in run_ranks(on_ranks.replicas_that_differ, 2, tmp_path))


def test_lazy_save_and_step_of_replicas_wait_for_nothing_and_copy_their_fingerprints_together(tmp_path: Path) -> None:
    for wrong, counted in run_ranks(on_ranks.lazily_saved_replicas, 2, tmp_path):
        assert wrong == []
        # Six of twelve tensors, the numbers of steps in one or two packs, the fingerprints, and two looks at what is copied.
        assert counted.pop("copies") <= 11
        assert counted == {"host waits": 0, "held": 1, "pageable": 0}


def test_read_once_comes_after_what_the_callers_stream_has_queued(tmp_path: Path) -> None:
    assert run_ranks(on_ranks.read_once, 2, tmp_path) == [True, True]


@pytest.mark.parametrize("own_is_current", [True, False])
def test_live_reshard_stays_on_the_devices_and_in_the_order_of_the_callers_stream(own_is_current: bool) -> None:
    for rank, (wrong, devices, carried) in enumerate(run_ranks(on_ranks.reshard_live, 2, own_is_current)):
        assert wrong == []
        assert devices <= {rank}
        assert carried == {rank}
