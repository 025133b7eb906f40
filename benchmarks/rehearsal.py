"""A rehearsal of a save and a load of thousands of ranks in one process: real plans, real messages, a store that counts.

``python -m benchmarks.rehearsal --ranks 16384 --json bench_out/rehearsal.json``

The job is Llama 3.1 405B on pp 16 × tp 8 × dp, as `benchmarks.planning_job` makes it, on machines of 8 ranks. Each rank has a
`NodeComm`. One thread does in turn what ranks do at a time: all ranks of a step send, then rank 0 takes, then all receive.

1. *Save*: the first and a later one, whose layout is known: agree, receipts, catalog, timeline. Nothing is written: a rank's
   receipt names the file that its assignment would fill, and rank 0 sees these files in a store of names and sizes.
2. *Load* in the same layout with ``read_once``: catalog, vote and groups of all ranks. The ranks of one replica group, midway in
   the pipeline, plan their reads and divide them; their requests, times the number of replica groups, stand for all.
3. *Store*: every request to rank 0's store is noted, and afterwards made once more to a real `TCPStore`. `store_cpu_s` is the CPU
   time of its thread. Rank 0's own times are CPU seconds of this process while it plays rank 0, with the noting.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from reshard_ckpt.comm import bounded
from reshard_ckpt.comm.bounded import BoundedStore, StoreConnection
from reshard_ckpt.comm.calls import call_of
from reshard_ckpt.comm.node import Neighbours, NodeComm
from reshard_ckpt.comm.peers import Machine
from reshard_ckpt.comm.wire import decode_frames
from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.specs import TensorSpec
from reshard_ckpt.core.planning.load_plan import LoadPlan
from reshard_ckpt.core.planning.read_plan import ReadPlan, plan_reads
from reshard_ckpt.core.planning.shared_reads import Wants, divide_reads
from reshard_ckpt.engine.common.progress import merged
from reshard_ckpt.engine.common.rounds import pack_table
from reshard_ckpt.engine.loading.load import LoadOptions, resolve
from reshard_ckpt.engine.loading.read_once import ROUND_BYTES, groups_of, joining_files, wants_of
from reshard_ckpt.engine.loading.vote import _collective_options, _merge
from reshard_ckpt.engine.saving.agreement import Leader, PlanCache
from reshard_ckpt.engine.saving.commit import _check_files_visible, catalog_of
from reshard_ckpt.engine.saving.messages import Receipt, WrittenFile, decode_receipts, encode_receipt
from reshard_ckpt.engine.saving.options import SaveContents
from reshard_ckpt.engine.saving.replicas import compare_replicas
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.format.files import BLOCK_BYTES, digest128

from .control import MESSAGES, server_cpu_s
from .planning import Ranks, carried_out, timeline_of
from .planning_job import Job, sized_job

NODE = 8
ROWS = 73
"""Rows of the catalog for each rank: 1.2 million at 16,384 ranks."""
WINDOW_BYTES = 16 << 20


class Store:
    """A key-value store in memory. With a trace, it notes each request with its values."""

    def __init__(self, trace: list[tuple[str, tuple[Any, ...]]] | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.trace, self.most_keys = trace, 0

    def below(self, prefix: str) -> Any:
        return Below(self, prefix)

    def clone(self) -> Store:
        return self

    def make(self, method: str, *args: Any) -> Any:
        if self.trace is not None:
            self.trace.append((method, args))
            self.most_keys = max(self.most_keys, len(self.values))
        return getattr(self, f"_{method}")(*args)

    def _append(self, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def _add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % total
        return total

    def _set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def _get(self, key: str) -> bytes:
        return self.values[key]

    def _check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self.values.setdefault(key, desired)

    def _multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def _delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class Below:
    """The keys of a store below a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def __getattr__(self, method: str) -> Any:
        if method == "set_timeout":
            return lambda limit: None
        return lambda key, *rest: self._store.make(method, self._keys(key), *rest)

    def _keys(self, key: Any) -> Any:
        return [f"{self._prefix}/{one}" for one in key] if isinstance(key, list) else f"{self._prefix}/{key}"


class LastingMachine(Machine):
    """The ranks of one machine, which do not end."""

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self.is_known = True
        self._ranks = tuple(range(first, min(first + NODE, size)))

    def ranks(self, store: Any) -> tuple[int, ...]:
        return self._ranks

    def ended(self, store: Any) -> frozenset[int]:
        return frozenset()


class Job0:
    """All ranks of a job, one session at a time, and the CPU seconds of rank 0 by step."""

    def __init__(self, size: int) -> None:
        self.size, self.trace = size, list[tuple[str, tuple[Any, ...]]]()
        self.store, self.rank0_s = Store(self.trace), Counter[str]()
        self.nodes = [LastingMachine(first, size) for first in range(0, size, NODE)]
        for node in self.nodes[1:]:
            node.store = BoundedStore.of(Store(), 0)

    @contextmanager
    def rank0(self, step: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.rank0_s[step] += time.process_time() - began

    def open(self, name: str) -> None:
        line = StoreConnection(lambda _: None, self.store)
        self.comms = []
        for rank in range(self.size):
            root = line.open(600)
            near = Neighbours(self.nodes[rank // NODE], root)
            self.comms.append(
                NodeComm(cast(Any, root.below(name)), rank, self.size, title=name, timeout_s=600, near=near, name=name)
            )
        call = call_of("save", name)
        self._sent([call] * self.size, shown=True)
        with self.rank0("session"):
            self.comms[0].open(call)
        self._received("gather")

    def gather(self, payloads: Sequence[bytes], step: str) -> list[bytes]:
        self._sent(payloads)
        with self.rank0(step):
            messages = self.comms[0].gather(payloads[0])
        self._received("gather")
        assert messages is not None
        return messages

    def broadcast(self, payload: bytes, step: str) -> None:
        with self.rank0(step):
            self.comms[0].broadcast(payload)
        for comm in self.comms[1:]:
            comm.broadcast(None)

    def scatter(self, payloads: Sequence[bytes], step: str) -> None:
        with self.rank0(step):
            self.comms[0].scatter(payloads)
        for comm in self.comms[1:]:
            comm.scatter(None)

    def close(self) -> None:
        self.gather([b""] * self.size, "session")
        for comm in reversed(self.comms):  # leaders after the others of their machine, rank 0 last
            comm.leave()

    def _sent(self, payloads: Sequence[bytes], *, shown: bool = False) -> None:
        for comm, payload in zip(self.comms[1:], payloads[1:], strict=True):
            comm._arrive(payload, shown=shown)
        for comm in self.comms[NODE::NODE]:
            assert comm._near is not None
            comm._send_for(list(decode_frames(comm._near.get(comm._key("in")))))

    def _received(self, call: str) -> None:
        for comm in self.comms[1:]:
            comm._await_decision(call)


class Seen:
    """Stands for a storage in which rank 0 sees the files of a save; counts its calls."""

    url = "rehearsal"

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes, self.calls = sizes, Counter[str]()

    def list(self, folder: str = "") -> Iterator[tuple[str, int]]:
        self.calls["list"] += 1
        return iter(self._sizes.items())


def agree(job: Job0, ranks: Ranks, cache: PlanCache) -> Leader:
    """Run the agreement of a save, as `engine.saving.agreement.agree` does on all ranks."""
    states = job.gather(ranks.states(), "agree")
    with job.rank0("agree"):
        leader = Leader(states, cache)
        answer = leader.answer.encode()
    job.broadcast(answer, "agree")
    sent = job.gather(ranks.messages(leader), "agree") if leader.answer.asked.any() else None
    with job.rank0("agree"):
        leader.take_parts(ranks.parts[0], sent)
    if leader.answer.assigns:
        job.scatter(leader.assignments(), "agree")
    ranks.plan_id = leader.answer.plan_id
    return leader


def receipts_of(leader: Leader, record: bytes) -> tuple[list[bytes], dict[str, int]]:
    """Return the receipt of each rank, and the sizes of all files, as if each rank had written its items end to end."""
    plan = leader.plan
    offset, files = carried_out(plan)
    first = np.searchsorted(plan.rank, np.arange(plan.num_ranks + 1)).tolist()
    checks = np.bincount(plan.checks.rank, minlength=plan.num_ranks).tolist()
    receipts = []
    for rank, entry in enumerate(files):
        items = slice(first[rank], first[rank + 1])
        file = WrittenFile(entry.key, entry.size, entry.digest)
        none = np.zeros(items.stop - items.start, np.int64)
        receipts.append(encode_receipt(Receipt((file,), none, offset[items], np.zeros(checks[rank], np.uint64), record)))
    return receipts, {key: size for entry in files for key, size in ((entry.key, entry.size), (entry.digests_key, 0))}


def save(job: Job0, ranks: Ranks, cache: PlanCache, name: str) -> Catalog:
    """Save once; return the catalog."""
    job.open(name)
    leader = agree(job, ranks, cache)
    recorder = timeline_of()
    encoded, sizes = receipts_of(leader, recorder.encoded())
    gathered = job.gather(encoded, "receipts")
    with job.rank0("receipts"):
        receipts = decode_receipts(gathered)
        compare_replicas(leader.plan.checks, leader.plan.tables.names, receipts.fingerprints)
        _check_files_visible(cast(Any, Seen(sizes)), receipts, None)
    with job.rank0("catalog"):
        contents = SaveContents(leader.plan, leader.values, receipts.folders[0])
        catalog = catalog_of(contents, receipts)
        encode_catalog(catalog)
    with job.rank0("timeline"):
        merged(recorder, receipts.records, recorder.now(), save_id="s", mesh=None)
    job.close()
    return catalog


def plan_of_rank(catalog: Catalog, specs: Sequence[TensorSpec]) -> LoadPlan:
    """Plan the load of a rank that wants these tensors."""
    wanted = [(spec, torch.empty(0)) for spec in specs]
    resolved = resolve(catalog, wanted, LoadOptions(read_once=True), window_bytes=WINDOW_BYTES)
    assert not any(resolved.problems.values()), resolved.problems
    return resolved.plan


def reads_of_plan(catalog: Catalog, plan: LoadPlan) -> ReadPlan:
    """Plan the requests for all items of a plan, in whole blocks."""
    block_bytes, sizes = np.full(len(catalog.files), BLOCK_BYTES), np.array([file.size for file in catalog.files], np.int64)
    return plan_reads(plan, block_bytes, sizes, np.ones(int(plan.dest.max(initial=-1)) + 1, bool))


def wants_of_rank(catalog: Catalog, specs: Sequence[TensorSpec]) -> Wants:
    """Return what a rank reads that wants these tensors."""
    plan = plan_of_rank(catalog, specs)
    return wants_of(reads_of_plan(catalog, plan), plan)


def files_of_ranks(catalog: Catalog, layout: Job) -> list[bytes]:
    """Return the files that join each rank to others, packed: those of its weights, as its replicas', and its own file."""
    weights = {}
    for stage, tp in product(range(layout.pp), range(layout.tp)):
        specs = [spec for spec in layout.specs(stage * layout.dp * layout.tp + tp) if spec.link is None]
        weights[stage, tp] = joining_files(wants_of_rank(catalog, specs))
    files = []
    for rank in range(layout.mesh.size):
        stage, _, tp = layout.mesh.coordinates(rank)
        files.append(pack_table(np.union1d(weights[stage, tp], [rank])[:, None]))
    return files


def votes_of(catalog: Catalog, layout: Job) -> list[bytes]:
    """Return the vote of each rank, without problems."""
    kinds = ("missing", "shape", "dtype", "uncovered", "values", "kept")
    empty = {"problems": {kind: [] for kind in kinds}, "refused": [], "has_ties": False, "verifies_first": False, "unused": []}
    same = {**empty, "prefixes": ["model", "optimizer"], "options": _collective_options(LoadOptions(read_once=True))}
    votes = []
    for rank in range(0, layout.mesh.size, layout.tp):  # ranks that differ in tp alone want the same names
        named = sorted(catalog.index(spec.name) for spec in layout.specs(rank))
        votes += [msgpack.packb({**same, "named": named})] * layout.tp
    return votes


def load(job: Job0, catalog: Catalog, data: bytes, votes: list[bytes], files: list[bytes]) -> dict[str, float]:
    """Load once, as far as ranks speak with each other."""
    job.open("load")
    with job.rank0("catalog"):
        opened = decode_catalog(data)
    job.broadcast(msgpack.packb((digest128(data), bytes(100))), "session")
    readers = [comm.rank for comm in job.comms if comm.neighbours()[0] == comm.rank]
    for comm in job.comms:
        if comm.neighbours()[0]:  # on rank 0's machine, the broadcast says how to borrow the catalog
            comm.broadcast_near(bytes(100))
    gathered = job.gather(votes, "vote")
    with job.rank0("vote"):
        decoded = {vote: msgpack.unpackb(vote) for vote in dict.fromkeys(gathered)}  # as `merge_of_all`
        verdict = msgpack.packb(_merge(opened, [decoded[vote] for vote in gathered]))
    job.broadcast(verdict, "vote")
    packed = job.gather(files, "groups")
    with job.rank0("groups"):
        groups = groups_of(packed)
    job.broadcast(pack_table(groups[:, None]), "groups")
    job.gather([b""] * job.size, "session")
    job.close()
    return {"groups": len(np.unique(groups)), "catalog_reads_per_node": len(readers) / len(job.nodes)}


def reads_of_replicas(catalog: Catalog, layout: Job) -> dict[str, float]:
    """Return what one replica group, in the middle of the pipeline, reads with ``read_once`` and without."""
    began, first = time.process_time(), layout.pp // 2 * layout.dp * layout.tp
    plans = [plan_of_rank(catalog, layout.specs(first + dp * layout.tp)) for dp in range(layout.dp)]
    reads = [reads_of_plan(catalog, plan) for plan in plans]
    wants = [wants_of(*pair) for pair in zip(reads, plans, strict=True)]
    plan_s, began = time.process_time() - began, time.process_time()
    messages = divide_reads(wants, ROUND_BYTES)
    schedule_s = time.process_time() - began
    # Owners together read the extents of all items of the group: plan them as one load.
    names = [field.name for field in fields(LoadPlan)]
    together = LoadPlan(*(np.concatenate([getattr(plan, name) for plan in plans]) for name in names))
    once = reads_of_plan(catalog, together)
    saved = sum(catalog.files[first + dp * layout.tp].size for dp in range(layout.dp))
    groups = layout.pp * layout.tp
    return {
        "read_over_saved": once.num_bytes / saved,
        "requests": len(once.low) * groups,
        "request_mean_bytes": once.num_bytes / len(once.low),
        "rounds": messages.num_rounds,
        "read_over_saved_by_each_rank": sum(each.num_bytes for each in reads) / saved,
        "requests_by_each_rank": sum(len(each.low) for each in reads) * groups,
        "plan_s_of_a_rank": plan_s / layout.dp,
        "schedule_s_of_a_rank": schedule_s,
    }


def replayed_s(trace: Sequence[tuple[str, tuple[Any, ...]]]) -> float:
    """Make the requests once more, to a real store; return the CPU seconds of the thread that serves it."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = server_cpu_s()
    for method, args in trace:
        getattr(store, method)(*args)
    return server_cpu_s() - before


def measured(job: Job0, call: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Make a call; return the figures of rank 0 and its store in it, and what it returned."""
    job.trace.clear()
    job.rank0_s.clear()
    began, of_rank0 = time.process_time(), job.rank0_s
    result = call()
    used = time.process_time() - began
    requests = Counter(method for method, _ in job.trace)
    messages = sum(MESSAGES.get(method, 1) * number for method, number in requests.items())
    carried = sum(len(part) for _, args in job.trace for part in flat(args))
    figures = {
        "store_requests": messages,
        "store_requests_per_rank": messages / job.size,
        "store_bytes_in": carried,
        "store_most_keys": job.store.most_keys,
        "store_cpu_s": replayed_s(job.trace),
        "rank0_cpu_s": sum(of_rank0.values()),
        "rank0_steps_s": dict(of_rank0),
        "other_rank_cpu_ms": 1000 * (used - sum(of_rank0.values())) / (job.size - 1),
    }
    return figures, result


def at_once(call: Callable[[], Any]) -> Any:
    """Make a call in this thread, in place of `bounded._begin`: a store in memory does not wait."""
    made = bounded._Call(call)
    made.make()
    made.end()
    return made


def flat(args: Sequence[Any]) -> Iterator[bytes]:
    for arg in args:
        if isinstance(arg, list):
            yield from flat(arg)
        elif isinstance(arg, bytes):
            yield arg


def rehearse(num_ranks: int) -> dict[str, Any]:
    layout = sized_job(num_ranks, ROWS * num_ranks)
    ranks, cache, job = Ranks(layout), PlanCache(), Job0(num_ranks)
    first, _ = measured(job, lambda: save(job, ranks, cache, "first"))
    ranks.change_values(2)
    later, catalog = measured(job, lambda: save(job, ranks, cache, "later"))
    data = encode_catalog(catalog)
    votes, files = votes_of(catalog, layout), files_of_ranks(catalog, layout)
    loading, loaded = measured(job, lambda: load(job, catalog, data, votes, files))
    reads = reads_of_replicas(catalog, layout)
    steps = later["rank0_steps_s"]
    sum_s = steps["receipts"] + steps["catalog"] + steps["timeline"] + loading["rank0_steps_s"]["vote"]
    return {
        "ranks": num_ranks,
        "rows": len(catalog.rows.box),
        "catalog_bytes": len(data),
        "store_cpu_s": later["store_cpu_s"],
        "rank0_cpu_s": sum_s,
        "catalog_reads_per_node": loaded["catalog_reads_per_node"],
        "read_over_saved": reads["read_over_saved"],
        "first_save": first,
        "later_save": later,
        "load": {**loading, **loaded, **reads},
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "machine": f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=16384, help="a multiple of 128, from 256 on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.ranks % 128 or options.ranks < 256:
        parser.error(f"--ranks {options.ranks}: pp 16 × tp 8 needs a multiple of 128, and two replicas at least")
    gc.disable()  # a collection would count to whatever step it falls into
    BoundedStore._part_of = lambda self, client: client.below(self._prefix)  # type: ignore[method-assign]
    bounded.bounded, bounded._begin = (lambda call, *_: call()), at_once  # type: ignore[assignment]
    found = rehearse(options.ranks)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
