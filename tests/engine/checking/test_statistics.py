"""Statistics and differences are what numpy says of the whole tensors, whatever the layout, dtype and windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.comm import SoloComm
from reshard_ckpt.core.catalog.specs import CODES
from reshard_ckpt.engine.checking import statistics as numbers
from reshard_ckpt.engine.checking.compare import Side, compare
from reshard_ckpt.engine.checking.statistics import statistics
from reshard_ckpt.engine.common.progress import silent
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.formats.source import open_source
from reshard_ckpt.storage.memory import MemoryStorage
from tests.jobs import save_job
from tests.layouts import filled, layouts, shapes, spec_of, values_of
from tests.tries import examples

SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.5, -2.0]
FLOATS = [code for code in CODES if TORCH_DTYPES[code].is_floating_point]


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numbers, "WINDOW_BYTES", 64)


def wide(tensor: torch.Tensor) -> np.ndarray:
    """Every number as numpy has it, exactly."""
    if tensor.dtype.is_complex:
        return tensor.abs().numpy()
    return tensor.double().numpy() if tensor.dtype.is_floating_point else tensor.numpy().astype(object)


@examples(100)
@given(st.sampled_from(CODES), st.data())
def test_statistics_are_those_of_the_whole_tensor(code: str, data: st.DataObject):
    layout = data.draw(layouts(data.draw(shapes()), data.draw(st.integers(1, 4))))
    whole = values_of(layout.shape, code, 3)
    for _ in range(data.draw(st.integers(0, 3)) if code in FLOATS and whole.numel() else 0):
        at = data.draw(st.integers(0, whole.numel() - 1))
        whole.view(-1)[at] = torch.tensor(data.draw(st.sampled_from(SPECIAL))).to(whole.dtype)
    storage = MemoryStorage("stats")
    ranks = [[(spec_of(layout, r, "w", code), filled(layout, r, whole))] for r in range(len(layout.pieces))]
    catalog = save_job(storage, ranks)
    (found,) = statistics(storage, catalog, [catalog.index("w")])
    flat = wide(whole).reshape(-1)
    floats = flat.astype(np.float64)
    finite = flat[np.isfinite(floats)]
    assert (found.num_nan, found.num_inf) == (np.isnan(floats).sum(), np.isinf(floats).sum())
    assert found.num_elements == whole.numel()
    if len(finite):
        assert (found.min, found.max) == (finite.min(), finite.max())
        with np.errstate(over="ignore"):
            assert found.mean == pytest.approx(float(finite.astype(np.float64).mean()), rel=1e-6, abs=1e-30)
    else:
        assert (found.min, found.max, found.mean) == (None, None, None)


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
    for name, state in (("a", a), ("b", b)):
        checkpoint.save(f"memory://compare-{name}", state)
    with open_source("memory://compare-a") as left, open_source("memory://compare-b") as right:
        names = left.catalog.names
        sides = [Side(s.storage, s.catalog, [s.catalog.index(name) for name in names]) for s in (left, right)]
        return {d.name: d for d in compare(names, *sides, silent, SoloComm())}


@given(st.lists(st.tuples(st.sampled_from([*SPECIAL, 1e300]), st.sampled_from([*SPECIAL, -1e300])), min_size=1, max_size=40))
def test_differences_of_floats_are_what_a_loop_finds(pairs: list[tuple[float, float]]):
    a, b = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in (0, 1))
    found = differences({"w": a}, {"w": b}).get("w")
    differ = [(x, y) for x, y in pairs if np.float64(x).tobytes() != np.float64(y).tobytes()]
    assert (found is not None) == bool(differ)
    if found is None:
        return
    both = [(x, y) for x, y in differ if x == x and y == y]
    apart = [abs(x - y) for x, y in both]
    relative = [
        0.0 if d == 0 else float("inf") if d == float("inf") else d / max(abs(x), abs(y))
        for d, (x, y) in zip(apart, both, strict=True)
    ]
    assert found.num_different == len(differ)
    assert found.num_nan == sum((x != x) != (y != y) for x, y in differ)
    assert (found.max_abs, found.max_rel) == (max(apart, default=0.0), max(relative, default=0.0))


def test_integers_are_compared_exactly():
    low, high = -(2**63), 2**63 - 1
    a = {"far": torch.tensor([low, 5, 7]), "near": torch.tensor([2**62, 0]), "bool": torch.tensor([True, False])}
    b = {"far": torch.tensor([high, 5, 7]), "near": torch.tensor([2**62 + 1, 0]), "bool": torch.tensor([True, True])}
    found = differences(a, b)
    assert (found["far"].max_abs, found["far"].num_different) == (float(2**64 - 1), 1)
    assert (found["near"].max_abs, found["near"].num_different) == (1.0, 1)
    assert (found["bool"].max_abs, found["bool"].max_rel) == (1.0, 1.0)


@pytest.mark.parametrize("code", CODES)
def test_one_changed_element_is_found_in_every_dtype_and_equal_ones_are_not(code: str):
    whole = values_of((50, 3), code, 1)
    other = whole.clone()
    raw = other.view(-1).view(torch.uint8)
    raw[-1] = raw[-1] ^ 1
    found = differences({"w": whole, "same": whole}, {"w": other, "same": whole.clone()})
    assert [(name, of.num_different, of.num_elements) for name, of in found.items()] == [("w", 1, 150)]


@pytest.mark.parametrize(
    ("a", "b"), [("BF16", "F32"), ("F16", "BF16"), ("F8_E4M3", "F8_E5M2"), ("I8", "I64"), ("U16", "F32"), ("BOOL", "I32")]
)
def test_other_dtypes_are_compared_as_one_that_holds_both(a: str, b: str):
    numbers_ = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    assert not differences({"w": numbers_.to(TORCH_DTYPES[a])}, {"w": numbers_.to(TORCH_DTYPES[b])})
    numbers_[3] = 1.0
    found = differences({"w": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).to(TORCH_DTYPES[a])}, {"w": numbers_.to(TORCH_DTYPES[b])})
    assert (found["w"].num_different, found["w"].max_abs, found["w"].max_rel) == (1, 1.0, 1.0)


def test_tied_names_are_compared_under_each_name():
    shared = torch.arange(30.0)
    found = differences({"a": shared, "b": shared}, {"a": shared + 1, "b": shared + 2})
    assert (found["a"].max_abs, found["b"].max_abs) == (1.0, 2.0)
