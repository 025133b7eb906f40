"""Make `tests/data/deepspeed`: small folders that DeepSpeed wrote, and the digests of what is in them, told by others than
this library.

Run ``python -m tests.families.deepspeed.make_data`` in an environment that has DeepSpeed; `make compat-deepspeed` makes one. With
the names of folders it makes these alone. Each folder is packed, as most of torch's files is padding. Digests come from
DeepSpeed's converters; where they cannot read a folder, or read it wrongly, from the live optimizer, or from a run that differs
in nothing but the layout.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.families.deepspeed import expert_jobs, jobs
from tests.launch import run_ranks

FOLDERS = (
    "z0-bf16-plain", "z0-fp16-groups", "z0-fp32-tied", "z1-bf16-plain", "z1-fp32-elastic", "z2-fp32-aligned", "z2-fp32-robin",
    "z2-bf16-frozen", "z2-fp16-groups", "z3-bf16-subgroups", "z3-bf16-frozen", "z3-fp32-tied", "p1-bf16-tied", "p0-bf16-plain",
    "p0-fp16-plain", "t1-bf16-tp", "t3-fp32-tp",
)  # fmt: skip
SAME_AS = {"z2-fp32-robin": "z2-fp32-groups", "z1-fp32-elastic": "z1-fp32-plain"}
"""Runs that are the same but for their layout, and which the converters read."""

EXPERTS = ("experts-2-fp16",)
"""A job of MoE, whose module is in the digests too."""

UNIVERSAL = ("z1-bf16-plain", "z3-bf16-subgroups")
DATA = Path(__file__).resolve().parents[2] / "data" / "deepspeed"


def on_rank(out: str, wanted: list[str]) -> dict[str, dict[str, str]]:
    """Save folders; return the digests of each."""
    truth: dict[str, dict[str, str]] = {}
    for case in (case for case in EXPERTS if case in wanted):
        engine = expert_jobs.engine_of(case.removeprefix("experts-"))
        jobs.train(engine, jobs.STEPS)
        engine.save_checkpoint(f"{out}/{case}", client_state=jobs.CLIENT)
        truth[case] = expert_jobs.live(engine)
    # Model parallelism last: what DeepSpeed sets up for it stays for the process.
    others = {*FOLDERS, *SAME_AS.values()} & {*wanted, *(SAME_AS.get(case, case) for case in wanted)}
    for case in sorted(others, key=lambda case: ("zpt".index(case[0]), case)):
        engine = jobs.engine_of(case)
        jobs.train(engine, jobs.STEPS)
        engine.save_checkpoint(f"{out}/{case}", client_state=jobs.CLIENT)
        live = {} if case[1] != "0" else jobs.unpartitioned(engine)
        if dist.get_rank() == 0:
            truth[case] = live or jobs.converted(f"{out}/{case}", f"{out}/{case}-universal")
        dist.barrier()
    return truth


def pack(folder: Path, to: Path) -> None:
    """Pack a folder, the same bytes each time."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return None if info.name.endswith(".py") else info

    with tarfile.open(to, "w:xz", preset=9) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=plain)


def main() -> None:
    from tests.families.deepspeed.make_data import on_rank  # ranks look it up by the name of the module, which is not __main__

    wanted = sys.argv[1:] or [*FOLDERS, *EXPERTS]
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as out:
        truth: dict[str, Any] = run_ranks(on_rank, 2, out, wanted, timeout_s=900)[0]
        for case, other in ((case, other) for case, other in SAME_AS.items() if case in wanted):
            truth[case] = truth[other] | truth[case]
            truth[case] = {name: truth[other].get(name, value) for name, value in truth[case].items()}
        for case in wanted:
            pack(Path(out, case), DATA / f"{case}.tar.xz")
        for case in (case for case in UNIVERSAL if case in wanted):
            pack(Path(out, f"{case}-universal"), DATA / f"{case}-universal.tar.xz")
            truth[f"{case}-universal"] = truth[case]
    digests = DATA / "digests.json"
    known = json.loads(digests.read_text()) if digests.exists() else {}
    made = {case: truth[case] for case in truth if case in wanted or "universal" in case}
    jobs.write_json(digests, dict(sorted((known | made).items())))
    print(f"{len(list(DATA.iterdir()))} files, {sum(p.stat().st_size for p in DATA.iterdir())} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
