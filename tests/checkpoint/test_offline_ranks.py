"""`convert`, `compact`, `verify` and `diff` on several ranks: the result of one process, also after kills and in a store."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.resharding import reshard
from reshard_ckpt.errors import CorruptError, UsageError
from reshard_ckpt.formats import safetensors
from reshard_ckpt.formats.dcp import write as dcp_write
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.local import LocalWriter
from tests.launch import RanksFailed, run_ranks
from tests.reliability.ranks import LOCAL, jobs
from tests.storage.object_servers import make_bucket

SMALL_FILES = 600_000


def state_of(rows: int = 300) -> dict[str, Any]:
    """Names are those of a model of Megatron; some tensors are tied, empty, or large for a window."""
    model = {
        f"decoder.layers.{i}.mlp.linear_fc1.weight": torch.arange(rows * 300, dtype=torch.float32).reshape(rows, 300) + i
        for i in range(4)
    }
    model["decoder.final_layernorm.weight"] = torch.zeros(0)
    model["embedding.word_embeddings.weight"] = model["output_layer.weight"] = torch.ones(40, 300, dtype=torch.bfloat16)
    return {"model": model, "step": 7, "note": "x" * 70_000, "table": checkpoint.Value({"t": torch.arange(5)})}


def options_of(to: str) -> dict[str, Any]:
    options: dict[str, Any] = {"to": to}
    if to == "safetensors":
        options["max_shard_size"] = SMALL_FILES
    if to == "megatron":
        options["exclude"] = ["table"]
    return options


def files_of(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def same(one: Path, two: Path) -> bool:
    """Compare files; DCP's metadata has the path of the folder."""
    a, b = files_of(one), files_of(two)
    return {key: data.replace(one.name.encode(), two.name.encode()) for key, data in a.items()} == b


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Cut the work into many parts."""
    with (
        patch.object(safetensors, "PART_BYTES", 50_000),
        patch.object(reshard, "WINDOW_BYTES", 100_000),
        patch.object(dcp_write, "FILE_BYTES", SMALL_FILES),
    ):
        yield


FORMATS = ["safetensors", "torch", "dcp", "reshard", "megatron"]


@pytest.mark.parametrize("to", FORMATS)
def test_ranks_write_the_files_of_one_process(tmp_path: Path, to: str) -> None:
    checkpoint.save(tmp_path / "src", state_of())
    alone = checkpoint.convert(tmp_path / "src", tmp_path / "one", **options_of(to))
    told: list[tuple[int, int, int]] = []
    wrote: Counter[int] = Counter()
    write = LocalWriter.write

    def noting(self: LocalWriter, data: Any) -> None:
        wrote[getattr(LOCAL, "rank", -1)] += memoryview(data).nbytes
        write(self, data)

    with jobs() as job, patch.object(LocalWriter, "write", noting):
        ranks = job(3)

        def convert(rank: int) -> checkpoint.ConvertReport:
            def report(step: str, done: int, total: int) -> None:
                told.append((rank, done, total))

            return checkpoint.convert(tmp_path / "src", tmp_path / "two", **options_of(to), progress=report, process_group=None)

        reports = ranks.run(convert)
        assert ranks.num_keys() == 0
    assert [one.files for one in reports] == [tuple(name.replace("one", "two") for name in alone.files)] * 3
    assert same(tmp_path / "one", tmp_path / "two")
    if to != "reshard":  # whose threads write for the ranks
        assert min(wrote[rank] for rank in range(3)) > sum(wrote.values()) / 10, wrote
    assert {rank for rank, _, _ in told} == {0}
    assert told[-1][1] == told[-1][2] > 0
    assert sorted(os.listdir(tmp_path)) == ["one", "src", "two"]


def download(url: str, folder: Path) -> Path:
    with open_storage(url) as storage:
        for key, size in storage.list():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(storage.read(key, size))
    return folder


@pytest.mark.parametrize("to", FORMATS)
def test_ranks_write_the_files_of_one_process_into_a_store(endpoint: str, tmp_path: Path, to: str) -> None:
    url = make_bucket(endpoint)
    checkpoint.save(f"{url}/src", state_of(60))
    alone = checkpoint.convert(f"{url}/src", f"{url}/one/own", **options_of(to))
    with jobs() as job:
        reports = job(3).run(
            lambda rank: checkpoint.convert(f"{url}/src", f"{url}/two/own", **options_of(to), process_group=None)
        )
    assert [one.files for one in reports] == [tuple(name.replace("/one/", "/two/") for name in alone.files)] * 3
    assert same(download(f"{url}/one", tmp_path / "one"), download(f"{url}/two", tmp_path / "two"))


def make_steps(run: str | Path) -> dict[str, Any]:
    """Save three steps, of which each refers to files of the others, and return the state of the last."""
    state = {f"w{i}": torch.arange(70_000) + i for i in range(3)}
    for step, base in ((1, None), (2, 1), (3, 2)):
        state[f"w{step - 2}"] = state.get(f"w{step - 2}", torch.zeros(1)) + 1
        checkpoint.save(f"{run}/step_{step}", state, base=f"{run}/step_{base}" if base else None)
    return state


def is_whole(path: str | Path, state: dict[str, Any]) -> bool:
    read = checkpoint.read(path)
    return checkpoint.verify(path).ok and all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("in_store", [False, True])
def test_ranks_copy_the_files_of_a_checkpoint_that_refers_to_others(endpoint: str, tmp_path: Path, in_store: bool) -> None:
    run = make_bucket(endpoint) if in_store else str(tmp_path)
    state = make_steps(run)
    with jobs() as job:
        reports = job(2).run(lambda rank: checkpoint.compact(f"{run}/step_3", process_group=None))
    assert reports[0] == reports[1]
    assert reports[0].num_files == 2
    with open_storage(run) as storage:
        storage.delete([key for key, _ in storage.list() if not key.startswith("step_3/")])
    assert is_whole(f"{run}/step_3", state)


def die_at_write(victim: int, at: int) -> Any:
    """Patch the writes of a rank, so that it kills itself at one of them."""
    count, write, rank = 0, LocalWriter.write, int(os.environ["RANK"])

    def deadly(self: LocalWriter, data: Any) -> None:
        nonlocal count
        count += 1
        if rank == victim and count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, data)

    return patch.object(LocalWriter, "write", deadly)


def compact_and_die(path: str, victim: int, at: int) -> None:
    with die_at_write(victim, at):
        checkpoint.compact(path, process_group=None, timeout_s=30)


@pytest.mark.parametrize(("victim", "at"), [(0, 1), (1, 2), (0, 3)])
def test_a_compaction_that_was_killed_leaves_the_checkpoint_and_is_done_again(tmp_path: Path, victim: int, at: int) -> None:
    state = make_steps(tmp_path)
    with pytest.raises(RanksFailed):
        run_ranks(compact_and_die, 2, str(tmp_path / "step_3"), victim, at)
    assert is_whole(tmp_path / "step_3", state)
    with jobs() as job:
        [first, _] = job(2).run(lambda rank: checkpoint.compact(tmp_path / "step_3", process_group=None))
    assert first.num_files == 2
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"step_{step}")
    assert is_whole(tmp_path / "step_3", state)
    assert len([name for name in os.listdir(tmp_path / "step_3") if not name.startswith(".")]) == 3, os.listdir(
        tmp_path / "step_3"
    )


def test_rank_0_reports_the_bytes_that_all_ranks_verified_or_compared(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state_of())
    num_bytes = checkpoint.catalog(tmp_path / "a").file_bytes
    told: dict[str, list[tuple[int, int, int]]] = {}

    def both(rank: int) -> None:
        def report(step: str, done: int, total: int) -> None:
            told.setdefault(step, []).append((rank, done, total))

        assert checkpoint.verify(tmp_path / "a", progress=report, process_group=None).ok
        assert checkpoint.diff(tmp_path / "a", tmp_path / "a", values=True, progress=report, process_group=None).equal

    with jobs() as job:
        ranks = job(3)
        assert ranks.run(both) == [None] * 3
        assert ranks.num_keys() == 0
    assert {rank for steps in told.values() for rank, _, _ in steps} == {0}
    assert told["verify"][-1] == (0, num_bytes, num_bytes)
    assert told["compare"][-1][1] == told["compare"][-1][2] > 0.9 * num_bytes


def test_ranks_with_other_options_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "src", state_of(3))
    with jobs() as job:
        outcomes = job(2).run(
            lambda rank: checkpoint.convert(
                tmp_path / "src", tmp_path / "dst", to="dcp" if rank else "safetensors", process_group=None
            )
        )
    assert all(isinstance(error, UsageError) and "were given different options" in str(error) for error in outcomes)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_an_error_of_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path: Path, to: str) -> None:
    checkpoint.save(tmp_path / "src", state_of())
    path = next((tmp_path / "src").rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-200_000] ^= 1
    path.write_bytes(data)
    with jobs() as job:
        outcomes = job(3).run(
            lambda rank: checkpoint.convert(tmp_path / "src", tmp_path / "dst", **options_of(to), process_group=None)
        )
    assert all(isinstance(error, CorruptError) and "is damaged" in str(error) for error in outcomes)
    assert "dst" not in os.listdir(tmp_path)


def convert_and_die(src: str, dst: str, to: str, victim: int, at: int) -> None:
    with die_at_write(victim, at), patch.object(safetensors, "PART_BYTES", 50_000):
        checkpoint.convert(src, dst, **options_of(to), process_group=None, timeout_s=30)


@pytest.mark.parametrize(("to", "victim", "at"), [("safetensors", 0, 2), ("safetensors", 1, 1), ("dcp", 1, 1), ("reshard", 0, 1)])
def test_a_conversion_that_was_killed_goes_on(tmp_path: Path, to: str, victim: int, at: int) -> None:
    checkpoint.save(tmp_path / "src", state_of())
    with pytest.raises(RanksFailed):
        run_ranks(convert_and_die, 2, str(tmp_path / "src"), str(tmp_path / "two"), to, victim, at)
    assert not (tmp_path / "two").exists()
    checkpoint.convert(tmp_path / "src", tmp_path / "one", **options_of(to))
    with jobs() as job:
        reports = job(2).run(
            lambda rank: checkpoint.convert(tmp_path / "src", tmp_path / "two", **options_of(to), process_group=None)
        )
    assert len({report.bytes_kept for report in reports}) == 1
    if (to, victim) == ("safetensors", 0):
        assert reports[0].bytes_kept > 0
    assert same(tmp_path / "one", tmp_path / "two")
    assert sorted(os.listdir(tmp_path)) == ["one", "src", "two"]
