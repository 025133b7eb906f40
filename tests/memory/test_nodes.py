"""Nodes that are lost with their memory: what is left restores every bit, on other ranks and in another layout."""

from __future__ import annotations

import ast
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.comm import links as links_module
from reshard_ckpt.comm import shared_store
from reshard_ckpt.comm.links import Links, Serving
from reshard_ckpt.errors import CheckpointError, CorruptError, PeerError, StorageError
from reshard_ckpt.memory import tier
from reshard_ckpt.memory.generations import NodeImages
from reshard_ckpt.memory.node import node_id, run_path
from reshard_ckpt.memory.slots import HEADER_BYTES, ReadSlot
from reshard_ckpt.memory.tier import MemoryTarget, Tier
from tests.cli.running import run
from tests.launch import RanksFailed, on_ranks, run_ranks
from tests.layouts import values_of
from tests.memory.namespaces import NETWORK, Nodes
from tests.memory.nodes import SHAPE, are_rows, restore, rows, save_and_be_killed


@pytest.mark.slow
def test_all_ranks_killed_and_a_node_lost(tmp_path: Path, shm: Path):
    """Four ranks on two nodes; then the other node alone with two ranks, or with an empty one and four ranks."""
    root, before = tmp_path / "run", tmp_path / "before"
    with Nodes(tmp_path, shm) as nodes:
        nodes.start("A", "B")
        with pytest.raises(RanksFailed):
            nodes.run("AABB", save_and_be_killed, root, "fsdp", 5, str(tmp_path))
        for rank in range(4):
            copies, stored, steps = ast.literal_eval((tmp_path / f"rank{rank}").read_text())
            assert copies == [1] * 5
            assert stored == [False, True, False, True, None]
            assert {4, 5} <= set(steps)
        shutil.rmtree(root / "step_4")  # the store's newest is older
        nodes.lose("A")
        shutil.copytree(root, before / "root")
        shutil.copytree(nodes.memory("B"), before / "B", symlinks=True)
        nodes.start("C")

        for names, layout, tier in (("BB", "dp", "memory"), ("BBCC", "hsdp", "peer")):
            shutil.rmtree(root)
            shutil.copytree(before / "root", root)
            nodes.lose("B")
            nodes.start("B")
            shutil.copytree(before / "B", nodes.memory("B"), symlinks=True, dirs_exist_ok=True)
            for found in nodes.run(names, restore, root, layout):
                assert (found.step, found.tier, found.is_right, found.passed_over) == (5, tier, True, ())
                assert found.copies == (1 if tier == "peer" else 0)
                assert {5, 6} <= set(found.steps)
            # What was loaded from memory went on to the store, and a clean close sent the newest.
            assert checkpoint.verify(root / "step_5").ok
            assert checkpoint.read(root / "step_6")["extra.step"] == 6
    if nodes.kind != NETWORK:
        pytest.skip(f"passed, but on {nodes.kind}: this system permits no network namespaces (unshare, ip and nsenter, as root)")


def lose_nodes(root: str, folders: Sequence[str]) -> None:
    """For one copy and for two: save, leave without closing cleanly, lose as many nodes, and restore on the others.

    Without a copy, a node keeps its own part.
    """
    rank = dist.get_rank()
    manager = Manager(f"{root}/0", memory=Memory(folder=f"{folders[rank]}/0", copies=0), persist_every=1000)
    manager.async_save(7, rows(7, rank, 3)).result()
    manager.__exit__(RuntimeError, RuntimeError(), None)
    groups = {1: dist.new_group([1, 2]), 2: dist.new_group([2])}
    for copies in (1, 2):
        run, folder = f"{root}/{copies}", f"{folders[rank]}/{copies}"
        manager = Manager(run, memory=Memory(folder=folder, copies=copies), persist_every=1000)
        for step in (1, 2, 3):
            handle = manager.async_save(step, rows(step, rank, 3))
            handle.result()
        manager.__exit__(RuntimeError, RuntimeError(), None)  # nothing goes to the store
        dist.barrier()
        if rank < copies:
            shutil.rmtree(folder)
        dist.barrier()
        if rank >= copies:
            group, place, size = groups[copies], rank - copies, 3 - copies
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                with Manager(run, memory=Memory(folder=folder, copies=copies), process_group=group) as again:
                    state = rows(0, place, size)
                    loaded = again.load_latest(state)
            assert (handle.copies, loaded.step, loaded.tier) == (copies, 3, "peer" if copies == 1 else "memory")
            assert are_rows(state, 3, place, size)
            assert again.steps() == [2, 3]
        dist.barrier()


def test_three_nodes_with_one_copy_and_with_two(tmp_path: Path, shm: Path):
    run_ranks(lose_nodes, 3, str(tmp_path), [str(shm / name) for name in "ABC"])
    # Each node by itself writes what it has; the last one publishes.
    for place, name in enumerate("ABC"):
        ran = run("memory", "persist", tmp_path / "0", "--folder", shm / name / "0", "--json")
        missing = [node_id(str(shm / other / "0")) for other in "ABC"[place + 1 :]]
        assert (ran.code, ran.json["is_published"], ran.json["missing"]) == (int(bool(missing)), not missing, sorted(missing))
    read = checkpoint.read(tmp_path / "0" / "step_7")
    assert read["w"].view(torch.int32).equal(values_of(SHAPE, "F32", 7).view(torch.int32))


@on_ranks(2)
def test_a_save_that_one_node_cannot_note_is_undone_on_all(tmp_path: Path, shm: Path):
    rank = dist.get_rank()
    memory = Memory(folder=str(shm / str(rank)))

    def refused(*_: Any) -> None:
        raise StorageError("no room for the note")

    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(1, rows(1, rank, 2)).result()
    with mock.patch.object(tier, "keep_generation", refused if rank else tier.keep_generation):
        handle = manager.async_save(2, rows(2, rank, 2))
        with pytest.raises(CheckpointError, match="no room for the note"):
            handle.result()
    assert manager.steps() == [1]
    manager.__exit__(RuntimeError, RuntimeError(), None)
    manager, state = Manager(tmp_path, memory=memory, persist_every=1000), rows(0, rank, 2)
    found = manager.load_latest(state)
    assert (found.step, found.tier, found.passed_over) == (1, "memory", ())
    assert are_rows(state, 1, rank, 2)
    manager.__exit__(RuntimeError, RuntimeError(), None)


@on_ranks(2)
def test_no_damaged_copy_is_loaded_and_none_that_is_late_holds_up_training(tmp_path: Path, shm: Path):
    """Two nodes with a copy each: bits turned over in memory, and on the way; and a copy that comes too late."""
    rank, root, folder = dist.get_rank(), str(tmp_path), str(shm / str(dist.get_rank()))
    memory = Memory(folder=folder)

    def saved(manager: Manager, step: int) -> Any:
        handle = manager.async_save(step, rows(step, rank, 2))
        handle.result()
        return handle

    def reloaded(place: int = 1 - rank) -> tuple[Any, ...]:
        """Load what is in memory alone: by default what the other rank saved."""
        if rank == 0:
            for step in (5, 6):
                shutil.rmtree(Path(root, f"step_{step}"), ignore_errors=True)
        dist.barrier()
        manager = Manager(root, memory=memory, persist_every=1000)
        state = rows(0, place, 2)
        try:
            found = manager.load_latest(state)
            return found.step, found.tier, are_rows(state, found.step, place, 2), found.passed_over
        finally:
            manager.__exit__(RuntimeError, RuntimeError(), None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = Manager(root, memory=memory, persist_every=1000)
        manager.save(1, rows(1, rank, 2))
        handles = {2: saved(manager, 2)}
        if rank:
            manager._memory._tier._links = None  # type: ignore[union-attr]  # lost by this rank alone: both make new ones
        handles[3] = saved(manager, 3)
        assert [handle.copies for handle in handles.values()] == [1, 1]
        swap = Links.swap
        ends: set[float] = set()

        def damaged(links: Links, outgoing: Any, incoming: Any, by: float) -> None:
            ends.add(by)
            swap(links, outgoing, incoming, by)
            for data in incoming.values():
                if len(data) > HEADER_BYTES and rank == 1:
                    data[17] ^= 4

        Links.swap = damaged  # type: ignore[method-assign]
        handles[4] = saved(manager, 4)
        Links.swap = swap  # type: ignore[method-assign]
        assert len(ends) == 1  # headers and bodies together have one time
        assert handles[4].copies == 0
        assert len([w for w in caught if "damaged on its way" in str(w.message)]) == rank

        def late(*_: Any) -> None:
            raise PeerError("too late")

        Links.swap = late if rank == 0 else swap  # type: ignore[method-assign]
        handed = manager._memory._tier._timeout_s  # type: ignore[union-attr]
        manager._memory._tier._timeout_s = 2  # type: ignore[union-attr]
        handles[5] = saved(manager, 5)
        Links.swap = swap  # type: ignore[method-assign]
        manager._memory._tier._timeout_s = handed  # type: ignore[union-attr]
        handles[6] = saved(manager, 6)
        assert (handles[5].copies, handles[6].copies) == (0, 1)  # the next save has its copy again
        manager.__exit__(RuntimeError, RuntimeError(), None)
        dist.barrier()

        here = run_path(folder, root)

        def flip_in_memory(step: int, of: int) -> None:
            for path in here.glob("*.slot"):
                slot = ReadSlot(str(path))
                if slot.table and slot.table.save_id == handles[step].running.save_id and slot.table.rank == of:
                    with open(path, "r+b") as file:
                        file.seek(HEADER_BYTES + 21)
                        byte = file.read(1)[0]
                        file.seek(HEADER_BYTES + 21)
                        file.write(bytes([byte ^ 1]))
                slot.close()

        if rank == 0:
            flip_in_memory(6, 0)  # rank 1's node has a copy
        dist.barrier()
        assert reloaded(rank) == (6, "peer", True, ())
        if rank == 1:
            flip_in_memory(6, 0)
        dist.barrier()
        *found, passed_over = reloaded()
        assert found == [5, "peer", True]
        assert "step 6 in memory: damaged in every copy that is left" in passed_over[0]

        lend = NodeImages.lend

        @contextmanager
        def wrong(images: NodeImages, key: str, offset: int, num_bytes: int) -> Iterator[memoryview]:
            with lend(images, key, offset, num_bytes) as data:
                damaged = bytearray(data)
                damaged[8] ^= 1
                yield memoryview(damaged)

        NodeImages.lend = wrong  # type: ignore[method-assign]
        *found, passed_over = reloaded()
        assert found == [1, "store", True]
        assert [line[:16] for line in passed_over] == ["step 6 in memory", "step 5 in memory"]
        NodeImages.lend = lend  # type: ignore[method-assign]
    dist.barrier()


@contextmanager
def left_by_an_error(root: Path, memory: Memory, **options: Any) -> Iterator[Manager]:
    """Leave a manager as a job that fails: nothing more goes to the store."""
    manager = Manager(root, memory=memory, **{"persist_every": 1000, **options})
    yield manager
    manager.__exit__(RuntimeError, RuntimeError(), None)


@on_ranks(2)
def test_a_rank_that_left_by_an_error_is_named_when_another_closes(tmp_path: Path, shm: Path):
    """Rank 1 goes on with something else; rank 0 must not wait for it for ever."""
    rank = dist.get_rank()
    manager = Manager(tmp_path, memory=Memory(folder=str(shm / str(rank))), persist_every=1000)
    manager.async_save(1, rows(1, rank, 2)).result()
    if rank == 1:
        manager.__exit__(RuntimeError, RuntimeError(), None)
    with pytest.raises(CheckpointError, match="ranks called different things"):
        Manager(tmp_path / "other") if rank else manager.close()  # for rank 1, its next call of all ranks
    assert manager.steps() == [1]  # it stays in memory


@on_ranks(2)
def test_ranks_that_save_to_memory_and_to_the_store_are_told(tmp_path: Path, shm: Path):
    rank = dist.get_rank()
    with left_by_an_error(tmp_path, Memory(folder=str(shm / str(rank)))) as manager:
        save = manager.save if rank else manager.async_save
        with pytest.raises(CheckpointError, match="ranks called different things: rank 0: save to memory"):
            save(1, rows(1, rank, 2)).result()


def attempt(manager: Manager, step: int) -> str:
    """Save to memory; return the error, if any."""
    try:
        manager.async_save(step, rows(step, dist.get_rank(), 2)).result()
    except CheckpointError as error:
        return str(error)
    return ""


@on_ranks(2)
def test_a_save_that_fails_before_its_copy_holds_up_no_other_rank(tmp_path: Path, shm: Path):
    rank, fails = dist.get_rank(), mock.patch.object(MemoryTarget, "_sealed", side_effect=ZeroDivisionError)
    with left_by_an_error(tmp_path, Memory(folder=str(shm / str(rank)))) as manager:
        with fails if rank else nullcontext(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert "ZeroDivisionError" in attempt(manager, 1)
        assert not caught  # rank 0 did not begin to wait for a copy
        assert attempt(manager, 2) == ""
        assert manager.steps() == [2]


@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_a_whole_generation(tmp_path: Path, shm: Path):
    """One node has two ranks and one generation."""
    rank, memory = dist.get_rank(), Memory(folder=str(shm), copies=0, generations=1)
    acknowledge = Tier.acknowledge

    def cut_off(self: Tier, comm: Any, generation: Any, *, pin: bool) -> None:
        acknowledge(self, CutOff(comm), generation, pin=pin)

    with left_by_an_error(tmp_path / "one", memory) as manager:
        assert attempt(manager, 1) == ""
        with mock.patch.object(tier, "keep_generation", side_effect=StorageError("no space")):  # before all have it
            assert "no space" in attempt(manager, 2)
        assert manager.steps() == [1]
        # Once rank 0 may have let the older one go:
        with mock.patch.object(Tier, "acknowledge", cut_off) if rank else nullcontext():
            assert "the store does not answer" in attempt(manager, 3)
    dist.barrier()
    with left_by_an_error(tmp_path / "one", memory) as manager:
        state = rows(0, rank, 2)
        assert manager.load_latest(state).step == 3
        assert are_rows(state, 3, rank, 2)
    with left_by_an_error(tmp_path / "behind", memory, persist_every=1) as manager:  # rank 1 leaves a save out
        saved = [step for step in range(1, 7) if not (step == 2 and rank) and not attempt(manager, step)]
        assert saved[-3:] == [4, 5, 6]  # the ranks are in step again


class NotingGroup:
    """A gloo group that notes how long its user waits for a message from any rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.waits: list[timedelta] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        work = self._group.recv_anysource(tensors, tag)
        return SimpleNamespace(wait=lambda limit: (self.waits.append(limit), work.wait(limit)))


@on_ranks(2)
def test_a_rank_reads_a_file_of_another_which_waits_for_requests_without_a_deadline():
    """Others may ask late."""
    rank, data = dist.get_rank(), bytearray(15)
    chunk, links_module.CHUNK_BYTES, ahead, links_module.AHEAD = links_module.CHUNK_BYTES, 2, links_module.AHEAD, 3
    links = Links(*shared_store("read"), rank, 2, timeout_s=600)
    links._group = group = NotingGroup(links._group)

    @contextmanager
    def lend(key: str, offset: int, num_bytes: int) -> Iterator[memoryview]:
        if offset > 100:
            raise CorruptError("no such bytes")
        yield memoryview(bytearray(range(offset + 100 * rank, offset + 100 * rank + num_bytes)))
        if offset == 9:
            raise CorruptError("the slot was filled anew")

    with Serving(links, ["file"], lend) as server:
        for refused in (9, 101):
            with pytest.raises(CorruptError, match=f"rank {1 - rank} could not read file in the memory of its node"):
                server.read(1 - rank, "file", refused, [memoryview(bytearray(5))])
        server.read(1 - rank, "file", 7, [memoryview(data)])
        parts = bytearray(9), bytearray(6)
        server.read(1 - rank, "file", 7, [memoryview(part) for part in parts])
        assert b"".join(parts) == data
    assert min(group.waits) > timedelta(days=300)
    swapped = torch.zeros(15, dtype=torch.uint8)
    own = Links(*shared_store("swap"), rank, 2, timeout_s=600)
    own.swap({1 - rank: torch.arange(15, dtype=torch.uint8) + 100 * rank + 7}, {1 - rank: swapped}, time.monotonic() + 600)
    assert bytes(swapped.tolist()) == data
    links_module.CHUNK_BYTES, links_module.AHEAD = chunk, ahead
    # A rank that leaves by an error waits only shortly for the others' word that they are done.
    links, finish, waits = Links(*shared_store("leave"), rank, 2, timeout_s=600), Serving.finish, []
    Serving.finish = lambda server, wait_s: (waits.append(wait_s), finish(server, 600))  # type: ignore[assignment,method-assign]
    with suppress(PeerError), Serving(links, ["file"], lend):
        raise PeerError("another rank failed")
    Serving.finish = finish  # type: ignore[method-assign]
    assert waits == [links_module._FAREWELL_S]
    assert bytes(data) == bytes(range(107 - 100 * rank, 122 - 100 * rank))


class CutOff:
    """A session of which this rank does not learn any more how a gather ended, as when the process of rank 0 was killed."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def undo_unless_gathered(self, undo: Any) -> None:
        self._comm.undo_unless_gathered(undo)

    def gather(self, payload: bytes) -> None:
        self._comm.gather(payload)
        raise PeerError("the store does not answer")
