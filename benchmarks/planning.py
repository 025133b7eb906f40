"""The time in which rank 0 plans a save of a million shards, and in which a rank plans its load.

``python -m benchmarks.planning --ranks 16384 --shards 1000000 --json planning.json``

One process plays rank 0, and encodes beforehand what all other ranks would send. Times are CPU seconds, the least of several
rounds; nothing is written or read but in memory. The limit printed beside each is one copy, in memory, of the bytes that it takes
in and gives out.

1. *Save plan*: all that rank 0 does between the first message and the last: decode, merge, plan, check the tiling, encode.
2. *Unchanged layout*: the same for the next save, whose values have changed.
3. *Catalog*: build and encode it, decode it again.
4. *Load plan* of one rank of pp 8 × tp 16: match, plan, check that what is saved tiles, plan the reads.
5. *Timeline*: merge the records of all ranks, 8 steps and 4 messages of each, into the file that is kept.
6. *Groups* of a load that reads once: each of 128 ranks needs the same 135 files.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgpack
import numpy as np
import torch

from reshard_ckpt.core.catalog.model import Catalog, FileEntry
from reshard_ckpt.core.catalog.specs import item_bytes_of
from reshard_ckpt.core.geometry.runs import I64
from reshard_ckpt.core.planning.read_plan import plan_reads
from reshard_ckpt.core.planning.save_plan import SavePlan, build_catalog
from reshard_ckpt.core.timeline import STEP_NAMES
from reshard_ckpt.engine.common.progress import CommCall, Recorder, merged
from reshard_ckpt.engine.common.rounds import pack_table
from reshard_ckpt.engine.loading.load import LoadOptions, resolve
from reshard_ckpt.engine.loading.read_once import groups_of
from reshard_ckpt.engine.saving.agreement import Leader, PlanCache
from reshard_ckpt.engine.saving.messages import encode_metadata
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.format.files import BLOCK_BYTES, digest128

from .planning_dcp import largest_within
from .planning_job import Job, sized_job

ROUNDS = 3
HEADER_BYTES = 16384
DCP_LIMIT_S = 60.0

Result = TypeVar("Result")


class Ranks:
    """All ranks of a job, as far as rank 0 can tell."""

    def __init__(self, job: Job) -> None:
        self.job = job
        job_metadata = [encode_metadata(job.local_metadata(rank, 1)) for rank in range(job.mesh.size)]
        # Alike parts are one object: 16,384 processes would not share memory, but nor would they be here.
        known: dict[bytes, bytes] = {}
        self.parts = [[known.setdefault(p, p) for p in (*of_rank, b"")] for of_rank in job_metadata]
        self.plan_id = bytes(16)

    def change_values(self, step: int) -> None:
        """Return what a step of training changes: the values, which depend on the stage alone."""
        stage_size = self.job.mesh.size // self.job.pp
        for stage in range(self.job.pp):
            *_, values = encode_metadata(self.job.local_metadata(stage * stage_size, step))
            for rank in range(stage * stage_size, (stage + 1) * stage_size):
                self.parts[rank][2] = values

    def states(self) -> list[bytes]:
        """Return the first message of each rank."""
        digest = {part: digest128(part) for parts in self.parts for part in parts}
        return [b"".join((*(digest[part] for part in parts), self.plan_id)) for parts in self.parts]

    def messages(self, leader: Leader) -> list[bytes]:
        """Return the second message of each rank: what rank 0 asked for."""
        asked = leader.answer.asked.T.tolist()
        return [
            msgpack.packb([p if a else None for p, a in zip(parts, row, strict=True)])
            for parts, row in zip(self.parts, asked, strict=True)
        ]


def agreement(ranks: Ranks, cache: PlanCache) -> tuple[float, Leader, int]:
    """Run one agreement: CPU seconds of rank 0, what it knows then, and the bytes that passed through it."""
    states = ranks.states()
    gc.collect()
    begin = time.process_time()
    leader = Leader(states, cache)
    answer = leader.answer.encode()
    used_s = time.process_time() - begin
    sent = ranks.messages(leader) if leader.answer.asked.any() else None
    begin = time.process_time()
    leader.take_parts(ranks.parts[0], sent)
    assignments = leader.assignments() if leader.answer.assigns else []
    used_s += time.process_time() - begin
    ranks.plan_id = leader.answer.plan_id
    return used_s, leader, sum(map(len, [*states, answer, *(sent or ()), *assignments]))


def fastest(call: Callable[[], Result], rounds: int = ROUNDS) -> tuple[float, Result]:
    """Return the least CPU time of some rounds: the others met the machine's other work."""
    times = []
    for _ in range(rounds):
        gc.collect()
        begin = time.process_time()
        result = call()
        times.append(time.process_time() - begin)
    return min(times), result


def copy_s(num_bytes: int) -> float:
    """Return the physical limit: one copy of so many bytes."""
    source = np.ones(num_bytes, np.uint8)
    return fastest(source.copy, 5)[0]


def carried_out(plan: SavePlan) -> tuple[I64, list[FileEntry]]:
    """Return the offset of each item, and the files, as if every rank had written its items one after the other."""
    num_bytes = plan.part_count * item_bytes_of(plan.tables.dtype)[plan.tensor]
    ends = np.cumsum(num_bytes)
    first = np.searchsorted(plan.rank, np.arange(plan.num_ranks + 1))
    total = np.append(0, ends)
    offset = HEADER_BYTES + ends - num_bytes - total[first][plan.rank]
    sizes = (HEADER_BYTES + total[first[1:]] - total[first[:-1]]).tolist()
    save_id = "20260101T000000Z-00000000"
    stems = [f"{save_id}/rank{rank:05d}-0" for rank in range(plan.num_ranks)]
    files = [
        FileEntry(f"{stem}.safetensors", size, f"{stem}.digests", digest128(stem.encode()), save_id, rank)
        for rank, (stem, size) in enumerate(zip(stems, sizes, strict=True))
    ]
    return offset, files


def to_catalog(leader: Leader) -> Catalog:
    plan = leader.plan
    offset, files = carried_out(plan)
    return build_catalog(
        plan, plan.rank, offset, files=files, values=leader.values, save_id=files[0].save_id, created_s=0.0, metadata=b"\xc0"
    )


def load_plan(catalog: Catalog, job: Job, rank: int) -> Callable[[], int]:
    """Return what a rank does between opening the catalog and its first read; gives the bytes that it would read."""
    wanted = [(spec, torch.empty(0)) for spec in job.specs(rank)]
    block_bytes, sizes = np.full(len(catalog.files), BLOCK_BYTES), np.array([file.size for file in catalog.files], np.int64)

    def run() -> int:
        resolved = resolve(catalog, wanted, LoadOptions())
        assert not any(resolved.problems.values()), resolved.problems
        return plan_reads(resolved.plan, block_bytes, sizes, np.ones(len(wanted), bool)).num_bytes

    return run


def timeline_of() -> Recorder:
    """Return the recorder of a rank after a save: 8 steps and 4 messages."""
    recorder = Recorder()
    began = recorder.began
    for i, name in enumerate(STEP_NAMES[:8]):
        recorder._steps.append((name, "caller", began + 0.3 * i, began + 0.3 * i + 0.29, 1 << 30 if name == "write" else 0))
    recorder.calls = [CommCall(i != 1, began + 0.6 * i, began + 0.6 * i + 0.1) for i in range(4)]
    return recorder


def merge_timeline(num_ranks: int) -> Callable[[], bytes]:
    """Return what rank 0 does with the records that came with the receipts of all ranks."""
    recorder = timeline_of()
    records = [recorder.encoded()] * num_ranks
    return lambda: merged(recorder, records, recorder.now(), save_id="s", mesh=None)


def find_groups(num_ranks: int) -> Callable[[], I64]:
    """Return what rank 0 does to divide the ranks of a load that reads once into groups."""
    files = [pack_table(np.arange(135 * group, 135 * group + 135)[:, None]) for group in range(-(-num_ranks // 128))]
    packed = [files[rank % len(files)] for rank in range(num_ranks)]
    return lambda: groups_of(packed)


def measure(num_ranks: int, num_shards: int) -> dict[str, float]:
    """Return all figures of this library."""
    job = sized_job(num_ranks, num_shards)
    print(
        f"pp {job.pp} × dp {job.dp} × tp {job.tp}, buckets of {job.bucket / 1e6:.0f} M elements; encoding all offers …",
        flush=True,
    )
    ranks = Ranks(job)
    print(f"{len({p[0] for p in ranks.parts})} distinct lists of tensors, {len({p[2] for p in ranks.parts})} of values")
    rounds = []
    for _ in range(ROUNDS):
        cache, ranks.plan_id = PlanCache(), bytes(16)
        rounds.append(agreement(ranks, cache))
    save_s, first, through = min(rounds, key=lambda one: one[0])
    rounds.clear()
    again = []
    for step in range(2, 2 + ROUNDS + 2):
        ranks.change_values(step)
        used_s, leader, _ = agreement(ranks, cache)
        assert not leader.answer.assigns, "the layout is the same, so no rank is sent an assignment"
        again.append(used_s)
    catalog_s, catalog = fastest(lambda: to_catalog(first))
    encode_s, data = fastest(lambda: encode_catalog(catalog))
    open_s, opened = fastest(lambda: decode_catalog(data))
    target = Job(8, num_ranks // 128, 16, job.bucket)
    load_s, num_bytes = fastest(load_plan(opened, target, target.mesh.size // 2 + 5))
    timeline_s, timeline = fastest(merge_timeline(num_ranks))
    groups_s, _ = fastest(find_groups(num_ranks))
    spread = first.plan.bytes_by_rank()
    return {
        "ranks": num_ranks,
        "shards": len(catalog.rows.box),
        "tensors": len(catalog.names),
        "save_plan_s": save_s,
        "save_plan_bytes": through,
        "save_replan_s": min(again),
        "catalog_build_s": catalog_s,
        "catalog_encode_s": encode_s,
        "catalog_open_s": open_s,
        "catalog_bytes": len(data),
        "catalog_bytes_per_shard": len(data) / len(catalog.rows.box),
        "load_plan_s": load_s,
        "load_bytes_planned": num_bytes,
        "timeline_merge_s": timeline_s,
        "timeline_bytes_per_rank": len(timeline) / num_ranks,
        "read_once_groups_s": groups_s,
        "balance_max_over_mean": float(spread.max() / spread.mean()),
        "copy_of_save_plan_bytes_s": copy_s(through),
        "copy_of_catalog_bytes_s": copy_s(len(data)),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure_dcp(num_ranks: int, num_shards: int) -> dict[str, float]:
    items, used_s = largest_within(sized_job(num_ranks, num_shards), DCP_LIMIT_S, num_ranks)
    return {"dcp_items": items, "dcp_save_plan_s": used_s, "dcp_s_per_million": used_s / items * 1e6}


def show(figures: dict[str, float], bars: Sequence[tuple[str, str, float]]) -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    for name, value in figures.items():
        bar = next((f"   at most {limit:g}" for key, _, limit in bars if key == name), "")
        print(f"  {name:28} {value:,.4g}{bar}" if isinstance(value, float) else f"  {name:28} {value:,}{bar}")


BARS = (
    ("save_plan_s", "s", 3.0),
    ("save_replan_s", "s", 0.05),
    ("load_plan_s", "s", 0.3),
    ("catalog_open_s", "s", 0.5),
    ("catalog_bytes_per_shard", "bytes", 40.0),
    ("timeline_merge_s", "s", 0.2),
    ("timeline_bytes_per_rank", "bytes", 110.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-dcp", action="store_true", help="leave out torch's planner, which takes minutes")
    options = parser.parse_args()
    figures = measure(options.ranks, options.shards)
    if not options.no_dcp:
        figures |= measure_dcp(options.ranks, options.shards)
    show(figures, BARS)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
