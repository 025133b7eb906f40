"""The devices that these tests run on: CUDA where there is a GPU, and the simulated device of `tests.device`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests import device as simulated
from tests.gpu.process import INNER, SimulatedProcess

_PROCESS = SimulatedProcess()


def _need_compiler() -> None:
    if simulated.compiler() is None:
        reason = "no C++ compiler to build the simulated device with (c++, or what CXX names)"
        if os.environ.get("NEED_COMPILER"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def compiler() -> None:
    """The simulated device, built for tests that start processes which use it: here, as these have a time limit."""
    _need_compiler()
    simulated.build()


@pytest.fixture(params=["cuda", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    """The type of a device."""
    if request.param == "sim":
        _need_compiler()
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False here")
    return str(request.param)


@pytest.fixture
def sim() -> Iterator[None]:
    """The simulated device at full speed, device 0 current, and its counters at zero."""
    _need_compiler()
    if INNER not in os.environ:
        yield
        return
    torch.accelerator.set_stream(torch.accelerator.current_stream("sim:0"))
    torch.accelerator.synchronize()
    simulated.reset()
    yield
    simulated.set_speed()
    torch.accelerator.synchronize()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have a test of the simulated device run where that is."""
    params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    if INNER in os.environ or not ("sim" in pyfuncitem.fixturenames or params.get("device") == "sim"):
        return None
    failure = _PROCESS.run(pyfuncitem.nodeid)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True


def pytest_unconfigure() -> None:
    """End the process of the simulated device."""
    _PROCESS.stop()
