"""The identity of resumable work: which values it takes, and which of them it tells apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reshard_ckpt.engine.common.resuming import identity

SCALARS = [np.int64(3), np.int32(3), np.uint64(3), np.float32(3), np.bool_(True), np.complex64(3), np.datetime64(3, "s")]


def test_scalars_of_numpy_are_told_apart_by_value_and_dtype():
    more: list[Any] = [np.int64(4), np.float32("nan"), np.float32(-0.0), np.float32(0.0), np.bool_(False)]
    found = [identity({"option": value}) for value in (*SCALARS, *more)]
    assert len(set(found)) == len(found)
    assert found == [identity({"option": value}) for value in (*SCALARS, *more)]


@pytest.mark.parametrize("value", [print, object(), np.array([object()])])
def test_what_has_no_spelling_is_refused(value: Any):
    with pytest.raises(TypeError):
        identity(value)
