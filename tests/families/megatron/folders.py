"""The committed folders of megatron-core, unpacked, and what they should hold."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import torch

from tests.families.megatron import values

DATA = Path(__file__).parent / "data"
VERSIONS = ("0.13.0", "0.15.3", "0.16.1", "0.19.1", "0.20.0")
FSDP = "0.16.1-fsdp"
"""Of Megatron-FSDP, whose folders are not those of torch_dist."""
_ALL = sorted({path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz")} - {FSDP})
NAMES, RANKS = ([name for name in _ALL if ("-ranks-" in name) is of_ranks] for of_ranks in (False, True))
"""Folders of torch_dist, and those that have a file of each rank."""


def unpack(name: str, to: Path) -> Path:
    """Unpack a folder; return the root of its run."""
    root = to / name
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        for member in archive.getmembers():
            path = root / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = archive.extractfile(member)
            path.write_bytes(file.read())
    return root


def is_old(name: str) -> bool:
    """Whether the optimizer's master weights are called ``fp32_param``, as up to 0.15 and where it is not distributed."""
    return name.startswith(("0.13", "0.15")) or name.endswith("plain")


def saved_key(name: str, folder: str) -> str:
    """The key that a tensor of this name has in a committed folder."""
    match = re.fullmatch(r"optimizer\.state\.(.+)\.(\w+)", name)
    if match is None:
        return name.removeprefix("model.")
    fqn, key = match.groups()
    chained = ""
    if is_old(folder) and folder.endswith("moe"):  # the dense parameters have an optimizer of their own, and the experts one
        chained = f"chained_{1 if '.experts.' in fqn else 0}."
    return f"{chained}optimizer.state.{'fp32_param' if key == 'param' and is_old(folder) else key}.{fqn}"


def expected(name: str, folder: str, like: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, given its shape and dtype."""
    return values.whole(saved_key(name, folder), tuple(like.shape), like.dtype)
