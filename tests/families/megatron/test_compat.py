"""The installed megatron-core: what it saves opens here, and what is converted here it loads itself; `make compat-megatron`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.families.megatron.compat import CASES
from tests.families.megatron.folders import expected, unpack

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="make compat-megatron installs it")


def run(what: str, folder: Path) -> Any:
    """Run jobs of megatron-core in a process of their own; return what they print last."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.families.megatron.compat", what, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("megatron")
    (made / "version").write_text(run("save", made)["version"])
    return made


@pytest.mark.parametrize("case", CASES)
def test_what_it_saves_opens_with_every_element_in_its_place(folder: Path, case: str) -> None:
    path, name = folder / "saved" / case, f"{(folder / 'version').read_text()}-{case}"
    catalog, read = checkpoint.catalog(path), checkpoint.read(path)
    assert not catalog.unreadable
    assert checkpoint.verify(path).ok
    for tensor in catalog.names:
        assert torch.equal(read[tensor], expected(tensor, name, read[tensor])), tensor


def test_its_jobs_load_what_is_converted_and_what_older_versions_saved(folder: Path, tmp_path: Path) -> None:
    """Its own checkpoints through this library's format, and those of 0.13, by its calls; older folders by this library's."""
    converted = folder / "converted"
    for case in ("dense", "moe"):
        checkpoint.convert(folder / "saved" / case, tmp_path / case, to="reshard")
        checkpoint.convert(tmp_path / case, converted / case, to="megatron")
    checkpoint.convert(unpack("0.13.0-dense", tmp_path), converted / "0.13.0-dense", to="megatron")
    for name in ("0.13.0-dense", "0.15.3-dense", "0.15.3-moe"):
        unpack(name, folder / "old")
    wrong = run("load", folder)
    assert not any(wrong.values()), wrong
