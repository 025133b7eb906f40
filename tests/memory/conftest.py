"""A folder on tmpfs for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs, which is gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="reshard-ckpt-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)
