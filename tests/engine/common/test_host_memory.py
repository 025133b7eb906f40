"""Memory that was never touched is filled in large pages, and so is a file on tmpfs; memory in use keeps its pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.memory.mapping import map_file, reserve_file

needs_large_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no large pages"
)


def mapping_at(address: int) -> dict[str, list[str]]:
    """Return what the kernel says in smaps of the mapping that holds an address."""
    here, says = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(at, 16) for at in first.split("-"))
            here = low <= address < high
        elif here:
            says[first] = rest
    return says


def is_advised(tensor: torch.Tensor) -> bool:
    """Tell by the flags of its mapping whether the middle of a tensor is to be filled in large pages."""
    return "hg" in mapping_at(tensor.data_ptr() + tensor.nbytes // 2)["VmFlags:"]


@needs_large_pages
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


def linux() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


@needs_large_pages
@pytest.mark.skipif(linux() < (6, 1), reason="older kernels do not move a file into large pages")
def test_a_file_on_tmpfs_is_reserved_in_large_pages_and_keeps_its_bytes(shm: Path):
    size, data = (7 << 20) + 5, torch.arange(3 << 20).to(torch.uint8)
    (shm / "file").write_bytes(memoryview(data.numpy()))
    with open(shm / "file", "r+b") as file:
        reserve_file(file.fileno(), size)
        assert os.fstat(file.fileno()).st_size == size
        assert os.fstat(file.fileno()).st_blocks * 512 >= size
        view = map_file(file.fileno(), size, is_private=True)
        assert view == bytes(data.numpy()) + bytes(size - len(data))
        # One is enough: the kernel may find no free memory for the others.
        assert int(mapping_at(ctypes.addressof(ctypes.c_char.from_buffer(view)))["ShmemPmdMapped:"][0]) >= 2048


def test_a_file_that_finds_too_little_memory_says_so(shm: Path):
    with open(shm / "file", "w+b") as file, pytest.raises(OSError, match="No space left"):
        reserve_file(file.fileno(), shutil.disk_usage(shm).free + (64 << 20))
