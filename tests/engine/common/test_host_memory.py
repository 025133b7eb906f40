"""Memory that was never touched is filled in large pages; memory in use keeps its pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint


def is_advised(tensor: torch.Tensor) -> bool:
    """Tell by the flags of its mapping (``hg`` in smaps) whether the middle of a tensor is to be filled in large pages."""
    middle, here = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(at, 16) for at in first.split("-"))
            here = low <= middle < high
        elif here and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no large pages")
def test_a_load_fills_untouched_memory_in_large_pages_and_leaves_other_memory_alone(tmp_path: Path):
    saved = {name: torch.arange(10 << 20).to(torch.uint8) for name in ("fresh", "used")}
    checkpoint.save(tmp_path / "a", saved)
    # Mapped anew, as the memory that an allocator returns may have been touched before; apart, as flags are those of a mapping.
    wanted = {"fresh": mapped(10 << 20), "between": mapped(1), "used": mapped(10 << 20).fill_(7)}
    checkpoint.load(tmp_path / "a", {name: wanted[name] for name in saved})
    assert all(torch.equal(wanted[name], saved[name]) for name in saved)
    assert is_advised(wanted["fresh"])
    assert not is_advised(wanted["used"])


def mapped(num_bytes: int) -> torch.Tensor:
    """Return a tensor in a new mapping."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
