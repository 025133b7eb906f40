"""Make the committed folders of a version of megatron-core, each as a small archive; run once for each version.

``python -m tests.families.megatron.make 0.16.1 tests/families/megatron/data``,
and for a version that is not the installed one, after these, the
folder that holds its ``megatron`` package.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.families.megatron import cpu_shim

FULL, DP = "fully_reshardable", "dp_reshardable"
RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (4, {"tp": 2, "pp": 2}),
    "moe": (4, {"tp": 2, "ep": 2, "experts": 4}),
    "plain": (2, {"tp": 2, "distributed": False}),
    "uneven": (4, {"tp": 2, "pp": 2, "layers": 3, "first_stage": 1, "tied": True}),
    "virtual": (4, {"tp": 2, "pp": 2, "layers": 4, "vpp": 2}),
}
"""Folders of a file for each rank, of 0.16.1."""
OTHER_RANKS = {"bert": (4, 2, 2), "t5": (2, 2, 1)}
"""Those of other models: how many ranks, TP, PP."""


def cases(version: str) -> dict[str, tuple[int, dict[str, Any], dict[str, Any]]]:
    """Return the folders of a version: the number of ranks, the job, and options of its save."""
    old = tuple(map(int, version.split(".")[:2])) < (0, 16)
    sharding: dict[str, Any] = {} if old else {"sharding": FULL}
    found: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
        "dense": (4, {"tp": 2, "pp": 2, **sharding}, {}),
        "moe": (4, {"tp": 1, "pp": 2, "ep": 2, "experts": 4, **sharding}, {}),
    }
    if version in ("0.13.0", "0.20.0"):
        found["uneven"] = (4, {"tp": 2, "pp": 2, "layers": 3, "first_stage": 1, "tied": True, **sharding}, {})
    if version == "0.16.1":
        found["buckets"] = (4, {"tp": 2, "sharding": DP}, {"proof": True})
        found["plain"] = (2, {"tp": 2, "distributed": False}, {})
        found["separate"] = (4, {"tp": 2, "pp": 2, "metadata": {"non_homogeneous_layers": True}, **sharding}, {})
        found["virtual"] = (4, {"tp": 2, "pp": 2, "layers": 4, "vpp": 2, **sharding}, {})
    if version == "0.20.0":
        found["integrity"] = (1, {**sharding}, {"verify_integrity": True})
    return found


def main(version: str, out: str, *packages: str) -> None:
    cpu_shim.install(*packages)
    from tests.families.megatron import jobs

    for name, (nproc, layout, options) in cases(version).items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name, "iter_0000007")
            cpu_shim.run_forked(_save, nproc, jobs.Case(**layout), str(path), options)
            pack(path.parent, Path(out, f"{version}-{name}.tar.xz"))
    if version == "0.16.1":
        make_ranks(version, out)


def make_ranks(version: str, out: str) -> None:
    """Make the folders of a file for each rank."""
    from tests.families.megatron import jobs, rank_jobs

    with tempfile.TemporaryDirectory() as folder:
        for name, (nproc, layout) in RANKS.items():
            cpu_shim.run_forked(rank_jobs.save, nproc, jobs.Case(**layout), f"{folder}/{name}/iter_0000007")
        for name, (nproc, tp, pp) in OTHER_RANKS.items():
            cpu_shim.run_forked(rank_jobs.save_other, nproc, name, f"{folder}/{name}/iter_0000007", tp, pp)
        for name in (*RANKS, *OTHER_RANKS):
            pack(Path(folder, name), Path(out, f"{version}-ranks-{name}.tar.xz"))


def pack(root: Path, to: Path) -> None:
    """Make a small archive of the root of a run."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w:xz") as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.add(file, str(file.relative_to(root)), filter=_anonymous)


def _save(case: Any, path: str, options: dict[str, Any]) -> None:
    from tests.families.megatron import jobs

    jobs.save(case, path, **options)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(*sys.argv[1:])
